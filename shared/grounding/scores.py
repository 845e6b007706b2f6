"""The score of one answer: how many of the image's ground-truth objects it finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.grounding.matching import match_objects
from shared.grounding.objects import ParsedObject
from shared.records import POINT_TOLERANCE, GroundTruthObject


@dataclass(frozen=True, slots=True)
class Criterion:
    """The rule that decides whether a predicted object finds a ground-truth object."""

    iou: float
    """Least mask IoU of the two objects."""
    by_name: bool
    """Whether the two objects must have equal names."""
    point_tolerance: float = POINT_TOLERANCE
    """Distance between two points, in bins, that counts as a mask IoU of 0.5."""


def num_found(
    predictions: Sequence[ParsedObject], truth: Sequence[GroundTruthObject], criterion: Criterion
) -> int:
    """Return the number of ground-truth objects that are found, each by a different prediction."""
    total = 0
    for name in {one.desc for one in truth} if criterion.by_name else {None}:
        named = [one for one in predictions if name in (None, one.desc)]
        wanted = [one for one in truth if name in (None, one.desc)]
        result = match_objects(
            named,
            wanted,
            maskiou_gate=criterion.iou,
            point_tolerance=criterion.point_tolerance,
        )
        total += len(result.pairs)
    return total


def f1(num_matched: int, num_predictions: int, num_ground_truth: int) -> float:
    """Return the F1 score: the harmonic mean of precision and recall.

    It is 1 if there are neither predictions nor ground-truth objects.

    Example:
        >>> f1(1, 2, 2)
        0.5
    """
    total = num_predictions + num_ground_truth
    return 2 * num_matched / total if total else 1.0
