"""`token_ce`: cross-entropy over non-coord text tokens (DESIGN 8). The token weights are the target's (`learner/targets.py`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from learner.objectives.coord_math import token_cross_entropy
from learner.objectives.interface import ObjectiveLoss, Supervision


@dataclass(frozen=True, slots=True)
class TokenCE:
    weight: float
    name: str = "token_ce"

    def __call__(self, logits_NV: torch.Tensor, supervision: Supervision) -> ObjectiveLoss:
        nll_T = token_cross_entropy(logits_NV[supervision.text_index_T], supervision.text_labels_T)
        ce = (supervision.text_weight_T * nll_T).sum()
        return ObjectiveLoss(self.weight * ce, {"token_ce": ce.detach()})
