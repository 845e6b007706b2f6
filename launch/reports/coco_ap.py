"""COCO average precision of an evaluation, by pycocotools.

As COCO's own figures, but for one thing: objects of every size count together. At most 100
predictions per image and class take part, the surest first; of equal scores the one that was
written first.

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
_ANY_SIZE = [[0.0, 1e10]]


class IouType(StrEnum):
    """pycocotools' names."""

    BBOX = "bbox"
    """Boxes; of polygons the boxes around them."""
    SEGM = "segm"
    """Masks; boxes are filled."""


@dataclass(frozen=True, slots=True)
class CocoAP:
    """Each 0..1; None where there is no ground truth."""

    ap: float | None
    """Mean over IoU thresholds .50 to .95, recall levels and classes."""
    ap50: float | None
    ap75: float | None
    ar: float | None
    """Mean over thresholds and classes of the recall of at most 100 predictions per image and
    class.
    """


@dataclass(frozen=True, slots=True)
class CocoScores:
    by_class: Mapping[IouType, CocoAP]
    """Boxes always, masks where the data hold polygons."""
    any_class: Mapping[IouType, CocoAP]
    """The same with all objects in one class."""
    class_ap: Mapping[str, float | None]
    """Boxes' AP of each name, in alphabetical order; None for names that no ground truth has."""


def coco_scores(scenes: Sequence[Scene]) -> CocoScores:
    """The scores of these scenes, whose predictions are ranked by `ScoredObject.score`."""
    shapes: list[NamedShape] = []
    for scene in scenes:
        shapes += [*scene.sample.objects, *scene.objects]
    types = [
        IouType.BBOX,
        *([IouType.SEGM] if any(shape.kind is GeometryKind.POLY for shape in shapes) else []),
    ]
    categories = number_categories(shape.desc for shape in shapes)
    by_class, any_class = (
        _data_sets(scenes, categories),
        _data_sets(scenes, dict.fromkeys(categories, 1)),
    )
    runs = {type_: _run(*by_class, type_) for type_ in types}
    return CocoScores(
        by_class={type_: run.summary() for type_, run in runs.items()},
        any_class={type_: _run(*any_class, type_).summary() for type_ in types},
        class_ap={
            name: _mean(runs[IouType.BBOX].precision_TRK[:, :, index])
            for index, name in enumerate(categories)
        },
    )


def _data_sets(scenes: Sequence[Scene], categories: Mapping[str, int]) -> tuple[COCO, COCO]:
    """Ground truth and predictions. `categories` maps every name to the id of its class."""
    samples, image_ids = [scene.sample for scene in scenes], range(1, len(scenes) + 1)
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


@dataclass(frozen=True, slots=True)
class _Run:
    precision_TRK: np.ndarray
    """-1 for a class without ground truth."""
    recall_TK: np.ndarray

    def summary(self) -> CocoAP:
        return CocoAP(
            _mean(self.precision_TRK),
            _mean(self.precision_TRK[0]),
            _mean(self.precision_TRK[5]),
            _mean(self.recall_TK),
        )


def _run(truth: COCO, found: COCO, iou_type: IouType) -> _Run:
    evaluator = COCOeval(truth, found, iou_type)
    evaluator.params.areaRng, evaluator.params.areaRngLbl = _ANY_SIZE, ["all"]
    evaluator.params.maxDets = [MAX_PREDICTIONS]
    with _quiet():
        evaluator.evaluate()
        evaluator.accumulate()
    return _Run(evaluator.eval["precision"][..., 0, 0], evaluator.eval["recall"][..., 0, 0])


def _mean(values: np.ndarray) -> float | None:
    there = values[values > -1]
    return float(there.mean()) if there.size else None


def _quiet() -> contextlib.AbstractContextManager[object]:
    """pycocotools prints its progress."""
    return contextlib.redirect_stdout(io.StringIO())
