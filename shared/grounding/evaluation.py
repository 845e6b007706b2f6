"""How well a model finds the objects of held-out samples: precision, recall and F1.

A scene is a sample with the objects that the model found in it.

IoU is computed only here, not in training metrics (spec: training-time counters). Boxes overlap by
their exact areas: in pixels of the annotations if the sample has them, else in norm1000. Polygons
overlap by the mask IoU of the matching, on its default canvas. Points overlap only with points, by
their distance (`point_overlap`), which counts as an IoU here. An unpaired prediction inside a
region to ignore is neither right nor wrong.

Shape legend: P predictions, G ground truths, R regions to ignore.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from shared.data.annotations import IgnoredRegion
from shared.grounding.coco import ScoredObject
from shared.grounding.formats import COORD_TOKENS_FORMAT
from shared.grounding.geometry import Shape, aabb, box_iou, mask_iou, point_overlap
from shared.grounding.objects import DropReason
from shared.grounding.serialize import AnswerFormat
from shared.records import POINT_TOLERANCE, GeometryKind, Sample
from shared.rollouts import FinishReason


@dataclass(frozen=True, slots=True)
class Scene:
    """One held-out sample and the objects that the model found in it."""

    position: int
    """Index of the sample in the held-out data."""
    sample: Sample
    """The sample, with the paths of its images but not their bytes."""
    objects: tuple[ScoredObject, ...]
    """Valid objects of the model's answer, in order of appearance."""
    dropped: tuple[DropReason, ...]
    """Why complete entries of the answer are not valid objects, in order of appearance."""
    truncated: bool
    """Whether the answer's JSON object or list was not closed, or never opened."""
    text: str = ""
    """The answer without its stop token; bytes that are not UTF-8 are U+FFFD."""
    finish_reason: FinishReason = FinishReason.STOP
    answer_format: AnswerFormat = COORD_TOKENS_FORMAT
    """The answer format that the prompt asks for."""
    num_behind: int = 0
    """Number of objects that the answer has after the end of its JSON object or list.

    Such objects, for example in a second list, are not read.
    """

    @property
    def never_opened(self) -> bool:
        """True if the answer does not begin with a JSON object or list: it is prose or empty."""
        return self.truncated and not self.answer_format.opens(self.text)


class Outcome(Protocol):
    """The model's result on one held-out sample: a `Scene`, or a rollout of an environment."""

    @property
    def position(self) -> int:
        """Index of the sample in the held-out data."""
        ...


OutcomeT = TypeVar("OutcomeT", bound=Outcome, covariant=True)


@dataclass(frozen=True, slots=True)
class Evaluation(Generic[OutcomeT]):
    """The results of one evaluation: greedy rollouts on all held-out samples."""

    step: int | None
    """Number of optimizer steps before the evaluation; None if unknown."""
    weight_version: int
    """Version of the engines' weights; 0 is the checkpoint that they loaded."""
    outcomes: tuple[OutcomeT, ...]
    """The result on each held-out sample, in order of position."""
    wall_s: float
    """Seconds that generation and scoring took."""


class NamedShape(Shape, Protocol):
    """A ground-truth or predicted object: a shape with a name."""

    @property
    def desc(self) -> str: ...


class Pair(NamedTuple):
    """A predicted and a ground-truth object, by their indices, and the overlap of the two."""

    prediction: int
    ground_truth: int
    iou: float


@dataclass(frozen=True, slots=True)
class DetectionCounts:
    """Counts of objects in any number of scenes, and the precision, recall and F1 of the counts.

    Counts can be added. A ratio whose denominator is 0 is 0.

    Example: 4 predictions with 3 matches and 5 ground truths: precision 0.75, recall 0.6.
    """

    num_predictions: int = 0
    """Number of valid predicted objects."""
    num_dropped: int = 0
    """Number of complete entries in answers that are not valid objects."""
    num_ground_truth: int = 0
    num_matched: int = 0
    num_class_correct: int = 0
    """Number of matched pairs with equal names (`desc`)."""
    num_ignored: int = 0
    """Number of unpaired predictions in regions to ignore. Precision does not count them."""

    def __add__(self, other: DetectionCounts) -> DetectionCounts:
        counts = zip(astuple(self), astuple(other), strict=True)
        return DetectionCounts(*(mine + theirs for mine, theirs in counts))

    @property
    def valid_rate(self) -> float:
        """Share of valid objects among all complete entries of the answers."""
        return _ratio(self.num_predictions, self.num_predictions + self.num_dropped)

    @property
    def precision(self) -> float:
        return _ratio(self.num_matched, self.num_judged)

    @property
    def num_judged(self) -> int:
        """Number of predictions that count as right or wrong: all that are not ignored."""
        return self.num_predictions - self.num_ignored

    @property
    def recall(self) -> float:
        return _ratio(self.num_matched, self.num_ground_truth)

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall."""
        return _ratio(2 * self.num_matched, self.num_judged + self.num_ground_truth)

    @property
    def class_accuracy(self) -> float:
        """Share of pairs with equal names among all matched pairs."""
        return _ratio(self.num_class_correct, self.num_matched)


@dataclass(frozen=True, slots=True)
class ThresholdCounts:
    """Counts at one IoU threshold, with predictions paired in two ways with the ground truth."""

    iou_threshold: float
    any_class: DetectionCounts
    """Counts if the objects of a pair may have different names."""
    same_class: DetectionCounts
    """Counts if the objects of a pair must have equal names."""


@dataclass(frozen=True, slots=True)
class DetectionSummary:
    """The detection quality of an evaluation: counts over all scenes, by threshold and by class."""

    thresholds: tuple[ThresholdCounts, ...]
    """Counts at each IoU threshold, at least one, in ascending order of thresholds."""
    classes: Mapping[str, DetectionCounts]
    """Counts of each class at the first threshold, by name in alphabetical order.

    For these counts, the objects of a pair must have equal names.
    """
    dropped: Mapping[DropReason, int]
    """Number of invalid entries of answers by reason, the most frequent first."""
    num_truncated: int
    """Number of answers whose JSON object or list was not closed, or never opened."""
    num_never_opened: int
    num_length_limited: int
    """Number of answers that ended at `max_new_tokens`."""
    num_behind: int
    """Number of objects, in all answers, after the end of the JSON object or list. They are not
    read."""
    scene_f1: tuple[float, ...]
    """F1 of each scene at the first threshold. The objects of a pair may have different names.

    It is 1 for a scene without ground-truth objects and without predictions to judge.
    """


def summarise(
    scenes: Sequence[Scene],
    iou_thresholds: Sequence[float],
    *,
    point_tolerance: float = POINT_TOLERANCE,
) -> DetectionSummary:
    """Pair predictions with ground truth in each scene, and count the pairs over all scenes.

    Args:
        iou_thresholds: least IoU of a pair, at least one, in ascending order.
        point_tolerance: the distance of two points, in bins, that counts as an IoU of 0.5.
    """
    any_class = [_Overlaps.of(scene, point_tolerance) for scene in scenes]
    same_class = [overlaps.of_equal_names() for overlaps in any_class]
    first = iou_thresholds[0]
    f1 = []
    for overlaps in any_class:
        counts = overlaps.counts(first)
        is_empty = not counts.num_judged and not counts.num_ground_truth
        f1.append(1.0 if is_empty else counts.f1)
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
    """Return the indices of the `count` scenes with the lowest F1, lowest first.

    Scenes with an F1 of 1 are left out, so there may be fewer than `count`.
    """
    ranked = sorted(range(len(summary.scene_f1)), key=summary.scene_f1.__getitem__)
    return [index for index in ranked[:count] if summary.scene_f1[index] < 1.0]


def pair_objects(
    predictions: Sequence[Shape],
    ground_truth: Sequence[Shape],
    *,
    iou_threshold: float,
    point_tolerance: float = POINT_TOLERANCE,
) -> list[Pair]:
    """Pair predictions with ground-truth objects by IoU, whatever their names.

    Each object is in at most one pair. Pairs are chosen in order of falling IoU; of equal IoUs the
    first prediction, then the first ground truth. A pair has an IoU of at least `iou_threshold`,
    which must be above 0.
    """
    return _greedy_pairs(_iou(predictions, ground_truth, point_tolerance), iou_threshold)


def pair_scene(
    scene: Scene, *, iou_threshold: float, point_tolerance: float = POINT_TOLERANCE
) -> list[Pair]:
    """Pair the predictions of a scene with its ground truth as `summarise` does.

    The objects of a pair may have different names. Two points overlap by 0.5 at a distance of
    `point_tolerance` bins.
    """
    return _Overlaps.of(scene, point_tolerance).pairs(iou_threshold)


@dataclass(frozen=True, slots=True)
class _Overlaps:
    """A scene with the overlaps of its objects, to pair them at several thresholds."""

    scene: Scene
    iou_PG: np.ndarray
    inside_PR: np.ndarray
    """float64 [P, R], 0..1: how far each prediction is inside each region to ignore."""

    @classmethod
    def of(cls, scene: Scene, point_tolerance: float) -> _Overlaps:
        """Measure how far predictions overlap with ground truth and ignored regions of any name."""
        sample = scene.sample
        iou_PG = _iou(scene.objects, sample.objects, point_tolerance)
        size = (sample.width, sample.height)
        boxes_P4 = np.zeros((len(scene.objects), 4))
        if sample.annotated or sample.ignore:
            pixels = [found.pixels_in(*size) for found in scene.objects]
            corners = [(min(xy[::2]), min(xy[1::2]), max(xy[::2]), max(xy[1::2])) for xy in pixels]
            boxes_P4 = np.array(corners).reshape(-1, 4)
        if sample.annotated and scene.objects:
            annotated_G4 = np.array([one.corners for one in sample.annotated])
            is_box_P, is_box_G = (
                np.array([shape.kind is GeometryKind.BBOX for shape in shapes])
                for shapes in (scene.objects, sample.objects)
            )
            both_PG = is_box_P[:, None] & is_box_G[None]
            iou_PG = np.where(both_PG, box_iou(boxes_P4, annotated_G4), iou_PG)
        return cls(scene, iou_PG, _inside(boxes_P4, sample.ignore))

    def of_equal_names(self) -> _Overlaps:
        """Return the same overlaps, set to 0 for pairs with different names."""
        found, truth, ignored = (
            np.array([one.desc for one in shapes], dtype=object)
            for shapes in (self.scene.objects, self.scene.sample.objects, self.scene.sample.ignore)
        )
        return _Overlaps(
            self.scene,
            np.where(found[:, None] == truth[None], self.iou_PG, 0.0),
            np.where(found[:, None] == ignored[None], self.inside_PR, 0.0),
        )

    def pairs(self, iou_threshold: float) -> list[Pair]:
        return _greedy_pairs(self.iou_PG, iou_threshold)

    def ignored(self, iou_threshold: float, pairs: Sequence[Pair]) -> list[int]:
        """List the unpaired predictions that are in a region to ignore."""
        paired = {pair.prediction for pair in pairs}
        inside = np.flatnonzero((self.inside_PR >= iou_threshold).any(axis=1)).tolist()
        return [index for index in inside if index not in paired]

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
            num_ignored=len(self.ignored(iou_threshold, pairs)),
        )


def _inside(boxes_P4: np.ndarray, regions: Sequence[IgnoredRegion]) -> np.ndarray:
    """Return how far boxes x1, y1, x2, y2 are inside regions: float64 [P, R].

    For a crowd: the share of the box's own area, as COCO defines it; for other regions: the IoU.
    """
    if not len(boxes_P4) or not regions:
        return np.zeros((len(boxes_P4), len(regions)))
    regions_R4 = np.array([region.annotation.corners for region in regions])
    low_PR2 = np.maximum(boxes_P4[:, None, :2], regions_R4[None, :, :2])
    high_PR2 = np.minimum(boxes_P4[:, None, 2:], regions_R4[None, :, 2:])
    common_PR = np.maximum(high_PR2 - low_PR2, 0.0).prod(axis=-1)
    area_P1 = (boxes_P4[:, 2:] - boxes_P4[:, :2]).prod(axis=-1)[:, None]
    share_PR = np.divide(common_PR, area_P1, out=np.zeros_like(common_PR), where=area_P1 > 0)
    is_crowd_R = np.array([region.is_crowd for region in regions])
    return np.where(is_crowd_R, share_PR, box_iou(boxes_P4, regions_R4))


def _total(scenes: Sequence[_Overlaps], iou_threshold: float) -> DetectionCounts:
    return sum((overlaps.counts(iou_threshold) for overlaps in scenes), DetectionCounts())


def _class_table(
    same_class: Sequence[_Overlaps], iou_threshold: float
) -> dict[str, DetectionCounts]:
    predicted: Counter[str] = Counter()
    known: Counter[str] = Counter()
    matched: Counter[str] = Counter()
    ignored: Counter[str] = Counter()
    for overlaps in same_class:
        objects = overlaps.scene.objects
        pairs = overlaps.pairs(iou_threshold)
        predicted.update(found.desc for found in objects)
        known.update(truth.desc for truth in overlaps.scene.sample.objects)
        matched.update(objects[pair.prediction].desc for pair in pairs)
        ignored.update(objects[index].desc for index in overlaps.ignored(iou_threshold, pairs))
    return {
        name: DetectionCounts(
            num_predictions=predicted[name],
            num_ground_truth=known[name],
            num_matched=matched[name],
            num_class_correct=matched[name],
            num_ignored=ignored[name],
        )
        for name in sorted(predicted | known)
    }


def _iou(
    predictions: Sequence[Shape], ground_truth: Sequence[Shape], point_tolerance: float
) -> np.ndarray:
    """Return the overlap of each prediction with each ground truth: float64 [P, G]."""
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
