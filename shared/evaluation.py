"""How well boxes are found: the counts behind the held-out report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.grounding.geometry import aabb, box_iou
from shared.grounding.objects import ParsedObject
from shared.records import GroundTruthObject


@dataclass(frozen=True, slots=True)
class DetectionCounts:
    """Counts over any number of scenes: add those of single ones. A ratio over nothing is 0."""

    num_predictions: int = 0
    """Valid objects."""
    num_dropped: int = 0
    """Complete entries that were no valid objects."""
    num_ground_truth: int = 0
    num_matched: int = 0
    num_class_correct: int = 0
    """Matched pairs with equal `desc`."""

    def __add__(self, other: DetectionCounts) -> DetectionCounts:
        return DetectionCounts(
            self.num_predictions + other.num_predictions,
            self.num_dropped + other.num_dropped,
            self.num_ground_truth + other.num_ground_truth,
            self.num_matched + other.num_matched,
            self.num_class_correct + other.num_class_correct,
        )

    @property
    def valid_rate(self) -> float:
        """Valid objects among all complete entries."""
        return _ratio(self.num_predictions, self.num_predictions + self.num_dropped)

    @property
    def precision(self) -> float:
        return _ratio(self.num_matched, self.num_predictions)

    @property
    def recall(self) -> float:
        return _ratio(self.num_matched, self.num_ground_truth)

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall."""
        return _ratio(2 * self.num_matched, self.num_predictions + self.num_ground_truth)

    @property
    def class_accuracy(self) -> float:
        """Equal names among matched pairs."""
        return _ratio(self.num_class_correct, self.num_matched)


def score_detections(
    predictions: Sequence[ParsedObject], ground_truth: Sequence[GroundTruthObject], *, iou_threshold: float = 0.5, num_dropped: int = 0
) -> DetectionCounts:
    """The counts of one scene. `num_dropped` is the number of its dropped entries, which only `valid_rate` needs.

    Pairs are taken greedily, whatever their class: in order of falling IoU, ties by prediction and then by ground truth, each pair of
    at least `iou_threshold` whose prediction and ground truth are both still free. The IoU is that of continuous areas in norm1000, of
    the enclosing boxes where a shape is a polygon.
    """
    pairs = _greedy_pairs(predictions, ground_truth, iou_threshold)
    return DetectionCounts(
        num_predictions=len(predictions),
        num_dropped=num_dropped,
        num_ground_truth=len(ground_truth),
        num_matched=len(pairs),
        num_class_correct=sum(predictions[i].desc == ground_truth[j].desc for i, j in pairs),
    )


def _greedy_pairs(predictions: Sequence[ParsedObject], ground_truth: Sequence[GroundTruthObject], iou_threshold: float) -> list[tuple[int, int]]:
    if not predictions or not ground_truth:
        return []
    iou_PG = box_iou(np.array([aabb(shape) for shape in predictions]), np.array([aabb(shape) for shape in ground_truth]))
    free_predictions, free_ground_truth = set(range(len(predictions))), set(range(len(ground_truth)))
    pairs: list[tuple[int, int]] = []
    for _, i, j in sorted((-iou, i, j) for (i, j), iou in np.ndenumerate(iou_PG) if iou >= iou_threshold):
        if i in free_predictions and j in free_ground_truth:
            pairs.append((i, j))
            free_predictions.remove(i)
            free_ground_truth.remove(j)
    return pairs


def _ratio(numerator: int, denominator: int) -> float:
    return numerator / denominator if denominator else 0.0
