"""How well objects are found on held-out scenes: pairs, counts, tables. IoU belongs here and to no
training-time number (spec: training-time counters).

Two shapes overlap by the exact areas of their boxes in norm1000 or, where one of them is a polygon,
by the mask IoU of the matching, on its default canvas.

Shape legend: P predictions, G ground truths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from shared.grounding.coco import ScoredObject
from shared.grounding.geometry import Shape, aabb, box_iou, mask_iou
from shared.grounding.objects import DropReason
from shared.records import GeometryKind, Sample
from shared.rollouts import FinishReason


@dataclass(frozen=True, slots=True)
class Scene:
    """One held-out sample, and what the model found on it."""

    position: int
    """The sample's place in the validation data."""
    sample: Sample
    """Its images by path, without their bytes."""
    objects: tuple[ScoredObject, ...]
    """Valid objects, in order of appearance."""
    dropped: tuple[DropReason, ...]
    """One per complete entry that was no valid object, in order of appearance."""
    truncated: bool
    """No container closed: the response ended before, or it never opened one."""
    text: str = ""
    """The whole response, without its stop token; bytes that are not UTF-8 appear as U+FFFD."""
    finish_reason: FinishReason = FinishReason.STOP

    @property
    def never_opened(self) -> bool:
        """The response is prose or empty: it does not begin with `{`."""
        return self.truncated and not self.text.lstrip(" \t\n\r").startswith("{")


class Outcome(Protocol):
    """What became of one held-out sample: a `Scene`, or a rollout of an environment
    (`shared.trajectory`).
    """

    @property
    def position(self) -> int:
        """The sample's place in the held-out data."""
        ...


OutcomeT = TypeVar("OutcomeT", bound=Outcome, covariant=True)


@dataclass(frozen=True, slots=True)
class Evaluation(Generic[OutcomeT]):
    """Greedy rollouts on all held-out samples, by one set of weights."""

    step: int | None
    """Optimizer updates done before it; None where nobody knows."""
    weight_version: int
    """Of the engines; 0 is the checkpoint that they loaded."""
    outcomes: tuple[OutcomeT, ...]
    """By position."""
    wall_s: float
    """Generation and scoring."""


class NamedShape(Shape, Protocol):
    """A ground-truth or predicted object."""

    @property
    def desc(self) -> str: ...


class Pair(NamedTuple):
    prediction: int
    ground_truth: int
    iou: float


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


@dataclass(frozen=True, slots=True)
class ThresholdCounts:
    """The same scenes, paired in two ways at one threshold."""

    iou_threshold: float
    any_class: DetectionCounts
    """A pair may have different names."""
    same_class: DetectionCounts
    """Only objects of equal names can be a pair."""


@dataclass(frozen=True, slots=True)
class DetectionSummary:
    """What the scenes of an evaluation come to."""

    thresholds: tuple[ThresholdCounts, ...]
    """In rising order, at least one."""
    classes: Mapping[str, DetectionCounts]
    """By name, in alphabetical order: pairs of equal names at the first threshold. Dropped entries
    have no class.
    """
    dropped: Mapping[DropReason, int]
    """Reasons that occurred, the most frequent first."""
    num_truncated: int
    """Responses whose container did not close, those that never opened one included."""
    num_never_opened: int
    num_length_limited: int
    """Responses that ended at `max_new_tokens`."""
    scene_f1: tuple[float, ...]
    """One per scene: F1 at the first threshold whatever the class; 1 where there is nothing to find
    and nothing was found.
    """


def summarise(scenes: Sequence[Scene], iou_thresholds: Sequence[float]) -> DetectionSummary:
    """The summary at these thresholds, which rise; at least one."""
    any_class = [_Overlaps.of(scene) for scene in scenes]
    same_class = [overlaps.of_equal_names() for overlaps in any_class]
    first = iou_thresholds[0]
    f1 = [
        (
            overlaps.counts(first).f1
            if overlaps.scene.objects or overlaps.scene.sample.objects
            else 1.0
        )
        for overlaps in any_class
    ]
    dropped = Counter(reason for scene in scenes for reason in scene.dropped)
    return DetectionSummary(
        thresholds=tuple(
            ThresholdCounts(threshold, _total(any_class, threshold), _total(same_class, threshold))
            for threshold in iou_thresholds
        ),
        classes=_class_table(same_class, first),
        dropped=dict(sorted(dropped.items(), key=lambda item: (-item[1], item[0]))),
        num_truncated=sum(scene.truncated for scene in scenes),
        num_never_opened=sum(scene.never_opened for scene in scenes),
        num_length_limited=sum(scene.finish_reason is FinishReason.LENGTH for scene in scenes),
        scene_f1=tuple(f1),
    )


def worst_scenes(summary: DetectionSummary, count: int) -> list[int]:
    """The indices of the `count` scenes with the lowest F1, lowest first, ties in their order; none
    for a scene without a mistake.
    """
    ranked = sorted(
        range(len(summary.scene_f1)), key=lambda index: (summary.scene_f1[index], index)
    )
    return [index for index in ranked[:count] if summary.scene_f1[index] < 1.0]


def pair_objects(
    predictions: Sequence[Shape], ground_truth: Sequence[Shape], *, iou_threshold: float
) -> list[Pair]:
    """Which prediction found which ground truth, whatever their class: greedily, in order of
    falling IoU, ties by prediction and then by ground truth.

    A pair has at least `iou_threshold`, which must be above 0, and both of its objects were free
    before it.
    """
    return _greedy_pairs(_iou(predictions, ground_truth), iou_threshold)


@dataclass(frozen=True, slots=True)
class _Overlaps:
    """A scene with the overlaps of its objects, to be paired at several thresholds."""

    scene: Scene
    iou_PG: np.ndarray

    @classmethod
    def of(cls, scene: Scene) -> _Overlaps:
        return cls(scene, _iou(scene.objects, scene.sample.objects))

    def of_equal_names(self) -> _Overlaps:
        """The same where names are equal, and 0 elsewhere."""
        truth = [one.desc for one in self.scene.sample.objects]
        same_PG = np.array(
            [[found.desc == desc for desc in truth] for found in self.scene.objects], dtype=bool
        ).reshape(self.iou_PG.shape)
        return _Overlaps(self.scene, np.where(same_PG, self.iou_PG, 0.0))

    def pairs(self, iou_threshold: float) -> list[Pair]:
        return _greedy_pairs(self.iou_PG, iou_threshold)

    def counts(self, iou_threshold: float) -> DetectionCounts:
        predictions, ground_truth, pairs = (
            self.scene.objects,
            self.scene.sample.objects,
            self.pairs(iou_threshold),
        )
        return DetectionCounts(
            num_predictions=len(predictions),
            num_dropped=len(self.scene.dropped),
            num_ground_truth=len(ground_truth),
            num_matched=len(pairs),
            num_class_correct=sum(
                predictions[pair.prediction].desc == ground_truth[pair.ground_truth].desc
                for pair in pairs
            ),
        )


def _total(scenes: Sequence[_Overlaps], iou_threshold: float) -> DetectionCounts:
    return sum((overlaps.counts(iou_threshold) for overlaps in scenes), DetectionCounts())


def _class_table(
    same_class: Sequence[_Overlaps], iou_threshold: float
) -> dict[str, DetectionCounts]:
    predicted = Counter(found.desc for overlaps in same_class for found in overlaps.scene.objects)
    there = Counter(
        truth.desc for overlaps in same_class for truth in overlaps.scene.sample.objects
    )
    matched = Counter(
        overlaps.scene.objects[pair.prediction].desc
        for overlaps in same_class
        for pair in overlaps.pairs(iou_threshold)
    )
    return {
        name: DetectionCounts(
            num_predictions=predicted[name],
            num_ground_truth=there[name],
            num_matched=matched[name],
            num_class_correct=matched[name],
        )
        for name in sorted(predicted | there)
    }


def _iou(predictions: Sequence[Shape], ground_truth: Sequence[Shape]) -> np.ndarray:
    """float64 [P, G]."""
    if not predictions or not ground_truth:
        return np.zeros((len(predictions), len(ground_truth)))
    iou_PG = box_iou(
        np.array([aabb(shape) for shape in predictions]),
        np.array([aabb(shape) for shape in ground_truth]),
    )
    for i, j in np.argwhere(iou_PG > 0).tolist():
        if GeometryKind.POLY in (predictions[i].kind, ground_truth[j].kind):
            iou_PG[i, j] = mask_iou(predictions[i], ground_truth[j])
    return iou_PG


def _greedy_pairs(iou_PG: np.ndarray, iou_threshold: float) -> list[Pair]:
    candidates = [(i, j) for i, j in np.argwhere(iou_PG >= iou_threshold).tolist()]
    taken_predictions: set[int] = set()
    taken_ground_truth: set[int] = set()
    pairs: list[Pair] = []
    for i, j in sorted(candidates, key=lambda place: (-iou_PG[place], *place)):
        if i not in taken_predictions and j not in taken_ground_truth:
            pairs.append(Pair(i, j, float(iou_PG[i, j])))
            taken_predictions.add(i)
            taken_ground_truth.add(j)
    return pairs


def _ratio(numerator: int, denominator: int) -> float:
    return numerator / denominator if denominator else 0.0
