"""What an objective sees and what it answers.

Every term is a weighted sum over positions. The weights already hold the mean within a segment (DESIGN 5, decision 6), so a term of a row, or of a
chunk of a row, adds to the others, and packing cannot change the step's loss: that sum over its segments, divided once at the step's end.

Shape legend: N positions whose logits are there, X of them text, S of them coord slots, V the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch


class TextSupervision(NamedTuple):
    """Supervised text tokens, a column per field."""

    at: torch.Tensor
    """int64 [X], into the N positions, ascending."""
    labels: torch.Tensor
    """int64 [X]"""
    weight: torch.Tensor
    """float32 [X]: token weight / the segment's sum of token weights."""
    gate_weight: torch.Tensor
    """float32 [X]: the same over the segment's text tokens without closing brace and EOS, where it is 0."""


class CoordSupervision(NamedTuple):
    """Supervised coord slots, a column per field."""

    at: torch.Tensor
    """int64 [S], into the N positions, ascending."""
    targets: torch.Tensor
    """float32 [S], 0..999: the bin to point at; a fraction where optimal transport says so."""
    weight: torch.Tensor
    """float32 [S]: 1 / slots of the segment."""


class BoxSupervision(NamedTuple):
    """Supervised boxes, a column per field."""

    slots: torch.Tensor
    """int64 [B, 4], into the S coord slots of the row: those of x1, y1, x2, y2."""
    weight: torch.Tensor
    """float32 [B]: 1 / boxes of the segment."""


class ObjectiveLoss(NamedTuple):
    loss: torch.Tensor
    """Scalar, the module's own weight included."""
    terms: tuple[torch.Tensor, ...]
    """Unweighted terms, detached scalars, in the order of the objective's `term_names`."""


class Objective(Protocol):
    @property
    def term_names(self) -> tuple[str, ...]:
        """`module.term`, with the terms' names of DESIGN section 8."""
        ...

    def __call__(self, logits_NV: torch.Tensor, text: TextSupervision, coord: CoordSupervision) -> ObjectiveLoss: ...
