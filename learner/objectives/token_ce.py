"""`token_ce`: cross-entropy over non-coord text tokens (DESIGN 8). The token weights are the target's (`learner/targets.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from learner.objectives.interface import LogitNeeds, ObjectiveLoss, RowValues, Supervision


@dataclass(frozen=True, slots=True)
class TokenCE:
    weight: float
    term_names: tuple[str, ...] = ("token_ce",)

    @property
    def needs(self) -> LogitNeeds:
        return LogitNeeds(text_ce=True)

    def __call__(self, values: RowValues, supervision: Supervision) -> ObjectiveLoss:
        assert values.text_ce_X is not None
        ce = (supervision.text.weight * values.text_ce_X).sum()
        return ObjectiveLoss(self.weight * ce, (ce.detach(),))
