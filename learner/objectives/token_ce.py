"""`token_ce`: cross-entropy over non-coord text tokens (DESIGN 8). The token weights are the
target's (`learner/targets.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from learner.objectives.base import LogitNeeds, ObjectiveLoss, RowValues, Supervision


@dataclass(frozen=True, slots=True)
class TokenCE:
    term_names: ClassVar[tuple[str, ...]] = ("token_ce",)
    needs: ClassVar[LogitNeeds] = LogitNeeds(text_ce=True)

    weight: float

    def __call__(self, values: RowValues, supervision: Supervision) -> ObjectiveLoss:
        assert values.text_ce_X is not None
        ce = (supervision.text.weight * values.text_ce_X).sum()
        return ObjectiveLoss(self.weight * ce, (ce.detach(),))
