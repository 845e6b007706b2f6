"""An objective: focal cross-entropy over text tokens (Lin et al., 2017, arXiv 1708.02002)."""

import torch
from pydantic import Field

from learner.objectives.base import LogitNeeds, ObjectiveLoss, RowValues, Supervision
from shared.config.base import Section


class FocalText:
    """`(1 - p)^gamma * -log p`, the mean over each segment's supervised text."""

    class Config(Section):
        # Below 1 the gradient of the power is infinite where p is 1.
        gamma: float = Field(ge=1.0)
        """How fast a token's weight falls with its probability."""

    term_names = ("focal_text",)
    needs = LogitNeeds(text_ce=True)

    def __init__(self, weight: float, config: Config) -> None:
        self._weight = weight
        self._gamma = config.gamma

    def __call__(self, values: RowValues, supervision: Supervision) -> ObjectiveLoss:
        assert values.text_ce_X is not None
        # expm1 keeps 1 - p exact where p is nearly 1.
        missing_X = -torch.expm1(-values.text_ce_X)
        focal_X = missing_X**self._gamma * values.text_ce_X
        loss = (supervision.text.weight * focal_X).sum()
        return ObjectiveLoss(self._weight * loss, (loss.detach(),))
