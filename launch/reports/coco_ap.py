"""COCO average precision of an evaluation, by pycocotools.

The figures differ from COCO's own in one thing: objects of every size count together. At most 100
predictions per image and class take part, the surest first; of equal scores the one that was
written first. Points, which are neither boxes nor masks, are left out.

Shape legend: T IoU thresholds .50, .55, ..., .95; R recall levels; K classes.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from shared.grounding.coco import (
    ImagePredictions,
    number_categories,
    predictions_to_coco,
    samples_to_coco,
)
from shared.grounding.evaluation import NamedShape, Scene
from shared.records import GeometryKind

MAX_PREDICTIONS = 100


class IouType(StrEnum):
    """The kind of overlap, by its name in pycocotools."""

    BBOX = "bbox"
    """Boxes; around polygons, their bounding boxes."""
    SEGM = "segm"
    """Masks; boxes are filled."""


@dataclass(frozen=True, slots=True)
class CocoAP:
    """Average precision and recall, 0..1; None where there is no ground truth."""

    ap: float | None
    """Mean over IoU thresholds .50 to .95, recall levels and classes."""
    ap50: float | None
    ap75: float | None
    ar: float | None
    """Mean over IoU thresholds and classes of the recall of those predictions."""


@dataclass(frozen=True, slots=True)
class CocoScores:
    """The scores of an evaluation, by the kind of overlap."""

    by_class: Mapping[IouType, CocoAP]
    """Boxes always, masks where the data hold polygons."""
    any_class: Mapping[IouType, CocoAP]
    """The same with all objects in one class."""
    class_ap: Mapping[str, float | None]
    """AP of boxes for each name, in alphabetical order; None where no ground truth has it."""
    num_points: int = 0
    """Points among ground truths and predictions, which were left out."""


def coco_scores(scenes: Sequence[Scene]) -> CocoScores:
    """Return the scores of scenes, whose predictions are ranked by `ScoredObject.score`."""
    shapes: list[NamedShape] = []
    for scene in scenes:
        shapes += [*scene.sample.objects, *scene.objects]
    kinds = [IouType.BBOX]
    if any(shape.kind is GeometryKind.POLY for shape in shapes):
        kinds.append(IouType.SEGM)
    categories = number_categories(shape.desc for shape in shapes)
    by_class = _data_sets(scenes, categories)
    any_class = _data_sets(scenes, dict.fromkeys(categories, 1))
    results = {kind: _evaluate(*by_class, kind) for kind in kinds}
    _, precision_TRK = results[IouType.BBOX]
    return CocoScores(
        by_class={kind: scores for kind, (scores, _) in results.items()},
        any_class={kind: _evaluate(*any_class, kind)[0] for kind in kinds},
        class_ap={name: _mean(precision_TRK[:, :, k]) for k, name in enumerate(categories)},
        num_points=sum(shape.kind is GeometryKind.POINT for shape in shapes),
    )


def _data_sets(scenes: Sequence[Scene], categories: Mapping[str, int]) -> tuple[COCO, COCO]:
    """Return ground truth and predictions; `categories` maps every name to the id of its class."""
    samples = [scene.sample for scene in scenes]
    image_ids = range(1, len(scenes) + 1)
    truth = samples_to_coco(samples, image_ids, categories)
    images = [
        ImagePredictions(image_id, scene.sample.width, scene.sample.height, scene.objects)
        for image_id, scene in zip(image_ids, scenes, strict=True)
    ]
    results = predictions_to_coco(images, categories).results
    # What COCO.loadRes would add; it cannot read an empty list.
    annotations = [
        {**result, "id": number, "area": result["bbox"][2] * result["bbox"][3], "iscrowd": 0}
        for number, result in enumerate(results, 1)
    ]
    return _indexed(truth), _indexed({**truth, "annotations": annotations})


def _indexed(dataset: dict[str, Any]) -> COCO:
    coco = COCO()
    coco.dataset = dataset
    with _quiet():
        coco.createIndex()
    return coco


def _evaluate(truth: COCO, found: COCO, iou_type: IouType) -> tuple[CocoAP, np.ndarray]:
    """Return the scores, and precision [T, R, K], -1 for a class without ground truth."""
    evaluator = COCOeval(truth, found, iou_type)
    # One area range, of objects of any size.
    evaluator.params.areaRng = [[0.0, 1e10]]
    evaluator.params.areaRngLbl = ["all"]
    evaluator.params.maxDets = [MAX_PREDICTIONS]
    with _quiet():
        evaluator.evaluate()
        evaluator.accumulate()
    precision_TRK = evaluator.eval["precision"][..., 0, 0]
    recall_TK = evaluator.eval["recall"][..., 0, 0]
    ap50 = _mean(precision_TRK[0])
    ap75 = _mean(precision_TRK[5])
    return CocoAP(_mean(precision_TRK), ap50, ap75, _mean(recall_TK)), precision_TRK


def _mean(values: np.ndarray) -> float | None:
    valid = values[values > -1]
    return float(valid.mean()) if valid.size else None


def _quiet() -> contextlib.AbstractContextManager[object]:
    """Hide what pycocotools prints of its progress."""
    return contextlib.redirect_stdout(io.StringIO())
