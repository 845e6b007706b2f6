"""`token_ce`: cross-entropy over non-coord text tokens (decision 37)."""

from __future__ import annotations

from typing import ClassVar

from learner.objectives.base import LogitNeeds, ObjectiveLoss, RowValues, Supervision
from shared.config.pipeline import TokenCEConfig


class TokenCE:
    """The loss `token_ce`: weighted cross-entropy of text tokens.

    The weights are those of the target (`learner.targets.TextWeights`).
    """

    term_names: ClassVar[tuple[str, ...]] = ("token_ce",)
    needs: ClassVar[LogitNeeds] = LogitNeeds(text_ce=True)

    def __init__(self, weight: float, config: TokenCEConfig) -> None:  # noqa: ARG002 - see targets
        self._weight = weight

    def __call__(self, values: RowValues, supervision: Supervision) -> ObjectiveLoss:
        assert values.text_ce_X is not None
        # A sum instead of a mean: the weights already contain the mean within each segment.
        ce = (supervision.text.weight * values.text_ce_X).sum()
        return ObjectiveLoss(self._weight * ce, (ce.detach(),))
