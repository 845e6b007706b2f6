"""`token_ce`: cross-entropy over non-coord text tokens (DESIGN 8). The token weights are the target's (`learner/targets.py`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from learner.objectives.coord_math import token_cross_entropy
from learner.objectives.interface import CoordSupervision, ObjectiveLoss, TextSupervision


@dataclass(frozen=True, slots=True)
class TokenCE:
    weight: float
    term_names: tuple[str, ...] = ("token_ce",)

    def __call__(self, logits_NV: torch.Tensor, text: TextSupervision, coord: CoordSupervision) -> ObjectiveLoss:
        ce = (text.weight * token_cross_entropy(logits_NV[text.at], text.labels)).sum()
        return ObjectiveLoss(self.weight * ce, (ce.detach(),))
