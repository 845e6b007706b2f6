"""The quality of detection on held-out scenes: pairs, counts, tables.

IoU belongs here and to no training-time number (spec: training-time counters). Boxes overlap by
their exact areas in norm1000, polygons by the mask IoU of the matching on its default canvas.
Points overlap with points alone, by their distance (`point_overlap`), which is an IoU here.

Shape legend: P predictions, G ground truths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from shared.grounding.coco import ScoredObject
from shared.grounding.formats import COORD_TOKENS_FORMAT, AnswerFormat
from shared.grounding.geometry import Shape, aabb, box_iou, mask_iou, point_overlap
from shared.grounding.objects import DropReason
from shared.records import POINT_TOLERANCE, GeometryKind, Sample
from shared.rollouts import FinishReason


@dataclass(frozen=True, slots=True)
class Scene:
    """One held-out sample, and the objects that the model found on it."""

    position: int
    """Index of the sample in the validation data."""
    sample: Sample
    """The sample, its images by path alone."""
    objects: tuple[ScoredObject, ...]
    """Valid objects, in order of appearance."""
    dropped: tuple[DropReason, ...]
    """Reasons of the complete entries that were no valid objects, in order of appearance."""
    truncated: bool
    """No container closed: the response ended before, or it never opened one."""
    text: str = ""
    """The response without its stop token; bytes that are not UTF-8 are U+FFFD."""
    finish_reason: FinishReason = FinishReason.STOP
    answer_format: AnswerFormat = COORD_TOKENS_FORMAT
    """The format that the model was asked for."""
    num_behind: int = 0
    """Objects after the container's close, as in a second list: not read."""

    @property
    def never_opened(self) -> bool:
        """The response is prose or empty: it does not begin with a container."""
        return self.truncated and not self.answer_format.opens(self.text)


class Outcome(Protocol):
    """The outcome of one held-out sample: a `Scene`, or a rollout of an environment."""

    @property
    def position(self) -> int:
        """Index of the sample in the held-out data."""
        ...


OutcomeT = TypeVar("OutcomeT", bound=Outcome, covariant=True)


@dataclass(frozen=True, slots=True)
class Evaluation(Generic[OutcomeT]):
    """Greedy rollouts on all held-out samples, by one set of weights."""

    step: int | None
    """Optimizer updates done before it; None where unknown."""
    weight_version: int
    """Version of the engines' weights; 0 is the checkpoint that they loaded."""
    outcomes: tuple[OutcomeT, ...]
    """By position."""
    wall_s: float
    """Seconds of generation and scoring."""


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
    """Counts over any number of scenes; they can be added. A ratio over nothing is 0.

    Example: 4 predictions of which 3 match, 5 ground truths: precision 0.75, recall 0.6.
    """

    num_predictions: int = 0
    """Valid objects."""
    num_dropped: int = 0
    """Complete entries that were no valid objects."""
    num_ground_truth: int = 0
    num_matched: int = 0
    num_class_correct: int = 0
    """Matched pairs with equal `desc`."""

    def __add__(self, other: DetectionCounts) -> DetectionCounts:
        counts = zip(astuple(self), astuple(other), strict=True)
        return DetectionCounts(*(mine + theirs for mine, theirs in counts))

    @property
    def valid_rate(self) -> float:
        """Share of valid objects among all complete entries."""
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
        """Share of equal names among matched pairs."""
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
    """The summary of an evaluation's scenes."""

    thresholds: tuple[ThresholdCounts, ...]
    """In rising order, at least one."""
    classes: Mapping[str, DetectionCounts]
    """Pairs of equal names at the first threshold, by name in alphabetical order."""
    dropped: Mapping[DropReason, int]
    """Reasons that occurred, the most frequent first."""
    num_truncated: int
    """Responses whose container did not close, or never opened."""
    num_never_opened: int
    num_length_limited: int
    """Responses that ended at `max_new_tokens`."""
    num_behind: int
    """Objects after the close of their answers' containers, which are not read."""
    scene_f1: tuple[float, ...]
    """F1 of each scene at the first threshold, of any class; 1 for nothing found of nothing."""


def summarise(
    scenes: Sequence[Scene],
    iou_thresholds: Sequence[float],
    *,
    point_tolerance: float = POINT_TOLERANCE,
) -> DetectionSummary:
    """Summarise the scenes at these thresholds, which rise; at least one.

    `point_tolerance`: the distance of two points, in bins, that is an overlap of 0.5.
    """
    any_class = [
        _Overlaps(scene, _iou(scene.objects, scene.sample.objects, point_tolerance))
        for scene in scenes
    ]
    same_class = [overlaps.of_equal_names() for overlaps in any_class]
    first = iou_thresholds[0]
    f1 = []
    for overlaps in any_class:
        is_empty = not overlaps.scene.objects and not overlaps.scene.sample.objects
        f1.append(1.0 if is_empty else overlaps.counts(first).f1)
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
        num_behind=sum(scene.num_behind for scene in scenes),
        scene_f1=tuple(f1),
    )


def worst_scenes(summary: DetectionSummary, count: int) -> list[int]:
    """Return the `count` scenes with the lowest F1, lowest first; none without a mistake."""
    ranked = sorted(range(len(summary.scene_f1)), key=summary.scene_f1.__getitem__)
    return [index for index in ranked[:count] if summary.scene_f1[index] < 1.0]


def pair_objects(
    predictions: Sequence[Shape],
    ground_truth: Sequence[Shape],
    *,
    iou_threshold: float,
    point_tolerance: float = POINT_TOLERANCE,
) -> list[Pair]:
    """Pair predictions with ground truth, whatever their class.

    Greedily, in order of falling IoU, ties by prediction and then by ground truth. A pair has at
    least `iou_threshold`, which must be above 0, and both of its objects were free before it.
    """
    return _greedy_pairs(_iou(predictions, ground_truth, point_tolerance), iou_threshold)


@dataclass(frozen=True, slots=True)
class _Overlaps:
    """A scene with the overlaps of its objects, to be paired at several thresholds."""

    scene: Scene
    iou_PG: np.ndarray

    def of_equal_names(self) -> _Overlaps:
        """Return the overlaps where names are equal, and 0 elsewhere."""
        found = np.array([found.desc for found in self.scene.objects], dtype=object)
        truth = np.array([truth.desc for truth in self.scene.sample.objects], dtype=object)
        same_PG = found[:, None] == truth[None]
        return _Overlaps(self.scene, np.where(same_PG, self.iou_PG, 0.0))

    def pairs(self, iou_threshold: float) -> list[Pair]:
        return _greedy_pairs(self.iou_PG, iou_threshold)

    def counts(self, iou_threshold: float) -> DetectionCounts:
        predictions = self.scene.objects
        ground_truth = self.scene.sample.objects
        pairs = self.pairs(iou_threshold)
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
    predicted: Counter[str] = Counter()
    known: Counter[str] = Counter()
    matched: Counter[str] = Counter()
    for overlaps in same_class:
        objects = overlaps.scene.objects
        predicted.update(found.desc for found in objects)
        known.update(truth.desc for truth in overlaps.scene.sample.objects)
        matched.update(objects[pair.prediction].desc for pair in overlaps.pairs(iou_threshold))
    return {
        name: DetectionCounts(
            num_predictions=predicted[name],
            num_ground_truth=known[name],
            num_matched=matched[name],
            num_class_correct=matched[name],
        )
        for name in sorted(predicted | known)
    }


def _iou(
    predictions: Sequence[Shape], ground_truth: Sequence[Shape], point_tolerance: float
) -> np.ndarray:
    """Return the overlap of every pair: float64 [P, G]."""
    if not predictions or not ground_truth:
        return np.zeros((len(predictions), len(ground_truth)))
    iou_PG = box_iou(
        np.array([aabb(shape) for shape in predictions]),
        np.array([aabb(shape) for shape in ground_truth]),
    )
    for i, j in np.argwhere(iou_PG > 0).tolist():
        if GeometryKind.POLY in (predictions[i].kind, ground_truth[j].kind):
            iou_PG[i, j] = mask_iou(predictions[i], ground_truth[j])
    found, truth = (
        [i for i, shape in enumerate(shapes) if shape.kind is GeometryKind.POINT]
        for shapes in (predictions, ground_truth)
    )
    iou_PG[found] = 0.0
    iou_PG[:, truth] = 0.0
    if found and truth:
        iou_PG[np.ix_(found, truth)] = point_overlap(
            np.array([predictions[i].bins for i in found]),
            np.array([ground_truth[j].bins for j in truth]),
            point_tolerance,
        )
    return iou_PG


def _greedy_pairs(iou_PG: np.ndarray, iou_threshold: float) -> list[Pair]:
    candidates = [(-iou_PG[i, j], i, j) for i, j in np.argwhere(iou_PG >= iou_threshold).tolist()]
    taken_predictions: set[int] = set()
    taken_ground_truth: set[int] = set()
    pairs: list[Pair] = []
    for _, i, j in sorted(candidates):
        if i not in taken_predictions and j not in taken_ground_truth:
            pairs.append(Pair(i, j, float(iou_PG[i, j])))
            taken_predictions.add(i)
            taken_ground_truth.add(j)
    return pairs


def _ratio(numerator: int, denominator: int) -> float:
    return numerator / denominator if denominator else 0.0
