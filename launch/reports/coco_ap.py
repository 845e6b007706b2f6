"""COCO average precision of an evaluation, by pycocotools.

Answers in pixels are compared with the original annotations. The figures are therefore the figures
of pycocotools on the original file, with two exceptions. Objects of all sizes count together.
Predictions of equal score are ranked by their position in the answer, with equal positions tied.
pycocotools ranks them by image order instead, so that AP would depend on that order if all scores
are equal (`evaluation.score: constant`). At most 100 predictions per image and class count, those
with the highest scores. Points are left out: they are neither boxes nor masks.

Shape legend: T IoU thresholds .50, .55, ..., .95; R recall levels; K classes; P predictions.
"""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from shared.grounding.coco import (
    ImagePredictions,
    ScoredObject,
    number_categories,
    predictions_to_coco,
    samples_to_coco,
)
from shared.grounding.evaluation import NamedShape, Scene
from shared.records import GeometryKind

MAX_PREDICTIONS = 100


class IouType(StrEnum):
    """How the overlap of two objects is computed, with its name in pycocotools."""

    BBOX = "bbox"
    """Boxes. A polygon counts as its bounding box."""
    SEGM = "segm"
    """Masks. A box counts as a filled rectangle."""


@dataclass(frozen=True, slots=True)
class CocoAP:
    """COCO's average precision and recall, 0..1; None without ground truth."""

    ap: float | None
    """Mean over IoU thresholds .50 to .95, recall levels and classes."""
    ap50: float | None
    ap75: float | None
    ar: float | None
    """Average recall: mean over thresholds and classes, with at most `MAX_PREDICTIONS` predictions
    per image and class."""


@dataclass(frozen=True, slots=True)
class CocoScores:
    """The COCO scores of an evaluation, for boxes and for masks."""

    by_class: Mapping[IouType, CocoAP]
    """Means over classes, for boxes and, if there is any polygon, for masks."""
    any_class: Mapping[IouType, CocoAP]
    """The same as `by_class`, but with all objects in one class."""
    class_ap: Mapping[str, float | None]
    """AP of boxes by class name, in alphabetical order; None for a class without ground truth."""
    num_points: int = 0
    """Number of points in ground truth and predictions, which are left out."""
    num_crowded: int = 0
    """Number of images with over `MAX_PREDICTIONS` predictions or true objects of one class."""


def coco_scores(scenes: Sequence[Scene]) -> CocoScores:
    """Return the COCO scores of answered samples. `ScoredObject.score` ranks predictions."""
    shapes: list[NamedShape] = []
    for scene in scenes:
        shapes += [*scene.sample.objects, *scene.objects]
    kinds = [IouType.BBOX]
    if any(shape.kind is GeometryKind.POLY for shape in shapes):
        kinds.append(IouType.SEGM)
    names = {shape.desc for shape in shapes}
    regions = {region.desc for scene in scenes for region in scene.sample.ignore}
    categories = number_categories(names | regions)
    by_class = _data_sets(scenes, categories)
    any_class = _data_sets(scenes, dict.fromkeys(categories, 1))
    results = {kind: _evaluate(*by_class, kind) for kind in kinds}
    _, precision_TRK = results[IouType.BBOX]
    return CocoScores(
        by_class={kind: scores for kind, (scores, _) in results.items()},
        any_class={kind: _evaluate(*any_class, kind)[0] for kind in kinds},
        class_ap={
            name: _mean(precision_TRK[:, :, k])
            for k, name in enumerate(categories)
            if name in names
        },
        num_points=sum(shape.kind is GeometryKind.POINT for shape in shapes),
        num_crowded=sum(
            max(_most_of_a_class(scene.objects), _most_of_a_class(scene.sample.objects))
            > MAX_PREDICTIONS
            for scene in scenes
        ),
    )


def _most_of_a_class(shapes: Sequence[NamedShape]) -> int:
    return max(Counter(shape.desc for shape in shapes).values(), default=0)


def _data_sets(scenes: Sequence[Scene], categories: Mapping[str, int]) -> tuple[COCO, COCO]:
    """Return ground truth and predictions; `categories` maps each name to a class id."""
    samples = [scene.sample for scene in scenes]
    image_ids = range(1, len(scenes) + 1)
    truth = samples_to_coco(samples, image_ids, categories)
    images = [
        ImagePredictions(image_id, scene.sample.width, scene.sample.height, _compared(scene))
        for image_id, scene in zip(image_ids, scenes, strict=True)
    ]
    results = predictions_to_coco(images, categories).results
    # COCO.loadRes would add these fields, but it cannot read an empty list.
    annotations = [
        {**result, "id": number, "area": result["bbox"][2] * result["bbox"][3], "iscrowd": 0}
        for number, result in enumerate(results, 1)
    ]
    return _indexed(truth), _indexed({**truth, "annotations": annotations})


def _compared(scene: Scene) -> tuple[ScoredObject, ...]:
    """Return predictions in the units of the ground truth: pixels or bins."""
    if scene.sample.annotated or scene.sample.ignore:
        return scene.objects
    return tuple(replace(found, pixels=None) for found in scene.objects)


def _indexed(dataset: dict[str, object]) -> COCO:
    coco = COCO()
    coco.dataset = dataset
    with _quiet():
        coco.createIndex()
    return coco


def _evaluate(truth: COCO, found: COCO, iou_type: IouType) -> tuple[CocoAP, np.ndarray]:
    """Return the scores and the precision [T, R, K], -1 for classes without ground truth."""
    evaluator = COCOeval(truth, found, iou_type)
    # One area range: objects of all sizes.
    evaluator.params.areaRng = [[0.0, 1e10]]
    evaluator.params.areaRngLbl = ["all"]
    evaluator.params.maxDets = [MAX_PREDICTIONS]
    with _quiet():
        evaluator.evaluate()
    precision_TRK, recall_TK = _accumulate(evaluator)
    ap50 = _mean(precision_TRK[0])
    ap75 = _mean(precision_TRK[5])
    return CocoAP(_mean(precision_TRK), ap50, ap75, _mean(recall_TK)), precision_TRK


def _accumulate(evaluator: COCOeval) -> tuple[np.ndarray, np.ndarray]:
    """Return precision [T, R, K] and recall [T, K], like `COCOeval.accumulate`.

    Classes without ground truth have -1. Predictions of equal score and equal position in their
    answers form one point of the curve, so the order of the images has no effect.
    """
    params = evaluator.params
    num_images = len(params.imgIds)
    num_thresholds, num_classes = len(params.iouThrs), len(params.catIds)
    precision_TRK = -np.ones((num_thresholds, len(params.recThrs), num_classes))
    recall_TK = -np.ones((num_thresholds, num_classes))
    for k in range(num_classes):
        # evalImgs is ordered by class, then by image, as there is one area range.
        of_class = evaluator.evalImgs[k * num_images : (k + 1) * num_images]
        images = [image for image in of_class if image is not None]
        num_true = sum(int(np.count_nonzero(image["gtIgnore"] == 0)) for image in images)
        if not num_true:
            continue
        scores = np.concatenate([image["dtScores"] for image in images])
        place = np.concatenate([np.arange(len(image["dtScores"])) for image in images])
        order = np.lexsort((place, -scores))
        is_last = np.ones(len(order), dtype=bool)
        is_last[:-1] = (np.diff(scores[order]) != 0) | (np.diff(place[order]) != 0)
        matched_TP, ignored_TP = (
            np.concatenate([image[key] for image in images], axis=1)[:, order].astype(bool)
            for key in ("dtMatches", "dtIgnore")
        )
        right_TP = np.cumsum(matched_TP & ~ignored_TP, axis=1, dtype=float)[:, is_last]
        wrong_TP = np.cumsum(~matched_TP & ~ignored_TP, axis=1, dtype=float)[:, is_last]
        for t, (right, wrong) in enumerate(zip(right_TP, wrong_TP, strict=True)):
            recall = right / num_true
            precision = right / (right + wrong + np.spacing(1))
            envelope = np.maximum.accumulate(precision[::-1])[::-1]
            reached = np.searchsorted(recall, params.recThrs, side="left")
            # After the last point no predictions are left: precision 0.
            precision_TRK[t, :, k] = np.append(envelope, 0.0)[reached]
            recall_TK[t, k] = recall[-1] if len(recall) else 0.0
    return precision_TRK, recall_TK


def _mean(values: np.ndarray) -> float | None:
    valid = values[values > -1]
    return float(valid.mean()) if valid.size else None


def _quiet() -> contextlib.AbstractContextManager[object]:
    """Hide the progress lines of pycocotools."""
    return contextlib.redirect_stdout(io.StringIO())
