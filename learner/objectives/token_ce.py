"""`token_ce`: cross-entropy over non-coord text tokens (decision 37)."""

from __future__ import annotations

from typing import ClassVar

import torch

from learner.objectives.base import LogitNeeds, ObjectiveLoss, RowValues, Supervision
from shared.config.pipeline import TokenCEConfig


class TokenCE:
    """The loss `token_ce`: weighted cross-entropy of text tokens.

    The weights are those of the target (`learner.targets.TextWeights`). With `label_smoothing` e
    the target is `1 - e` for the token, and `e / V` for each of the V tokens of the vocabulary
    (Szegedy et al. 2016).
    """

    term_names: ClassVar[tuple[str, ...]] = ("token_ce",)

    def __init__(self, weight: float, config: TokenCEConfig) -> None:
        self._weight = weight
        self._smoothing = config.label_smoothing
        self.needs = LogitNeeds(text_ce=True, text_uniform_ce=config.label_smoothing > 0)

    def __call__(self, values: RowValues, supervision: Supervision) -> ObjectiveLoss:
        text_ce_X = values.text_ce_X
        assert text_ce_X is not None
        if self._smoothing:
            assert values.text_uniform_ce_X is not None
            text_ce_X = torch.lerp(text_ce_X, values.text_uniform_ce_X, self._smoothing)
        # A sum instead of a mean: the weights already contain the mean within each segment.
        ce = (supervision.text.weight * text_ce_X).sum()
        return ObjectiveLoss(self._weight * ce, (ce.detach(),))
