"""What an objective sees and what it answers.

Every term is a weighted sum over positions. The weights already hold the means within a segment and over the samples of the step
(DESIGN 5, decision 6), so a term of a row, or of a chunk of a row, adds to the others and packing cannot change the step's loss.

Shape legend: N positions of one chunk, T of them text, S of them coord slots, V the vocabulary, C the 1,000 coord bins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class Supervision:
    """What supervises the positions of a chunk; each `*_index` is into the chunk's positions."""

    text_index_T: torch.Tensor
    text_labels_T: torch.Tensor
    text_weight_T: torch.Tensor
    """Token weight / (segment's sum of token weights) / samples of the step."""
    gate_weight_T: torch.Tensor
    """The same over the segment's text tokens without closing brace and EOS, where it is 0."""
    coord_index_S: torch.Tensor
    coord_bins_S: torch.Tensor
    coord_weight_S: torch.Tensor
    """1 / slots of the segment / samples of the step."""
    coord_ids_C: torch.Tensor
    """Token id of each bin."""


@dataclass(frozen=True, slots=True)
class ObjectiveLoss:
    loss: torch.Tensor
    """Scalar, the module's own weight included."""
    terms: dict[str, torch.Tensor]
    """Unweighted terms, detached scalars, under their names in DESIGN section 8."""


class Objective(Protocol):
    @property
    def name(self) -> str: ...

    def __call__(self, logits_NV: torch.Tensor, supervision: Supervision) -> ObjectiveLoss: ...
