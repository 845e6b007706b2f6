"""The original annotations of an image, kept in a row for evaluation.

A model is trained on bins, but evaluated on the annotations themselves. A row from an importer has
two more keys, both in pixels of the displayed image:

    "annotated": [{"bbox": [10.5, 20, 30, 40.25]}, ...]
    "ignore": [{"bbox": [0, 0, 64, 48], "desc": "person", "iscrowd": 1}, ...]

`annotated` has one entry per entry of `objects`, in the same order. `ignore` lists regions that are
not trained and need not be found. A prediction inside such a region is neither right nor wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from shared.errors import RecordError

Box = tuple[float, float, float, float]
Segmentation = Sequence[Sequence[float]] | Mapping[str, object]
"""The outline of an object: polygons with vertices x, y, x, y, ... in pixels, or COCO's RLE.

RLE is COCO's run-length encoding of a mask.
"""


@dataclass(frozen=True, slots=True)
class Annotation:
    """The original annotation of an object, in pixels, as the imported file has it.

    Example: `Annotation((10.5, 20.0, 30.0, 40.0))` reaches from x 10.5 to 40.5.
    """

    box: Box
    """The box (x, y, width, height) in pixels, half-open."""
    segmentation: Segmentation | None = None

    @property
    def corners(self) -> Box:
        """The box as its corners (x1, y1, x2, y2) in pixels."""
        x, y, w, h = self.box
        return x, y, x + w, y + h

    def as_json(self) -> dict[str, object]:
        found: dict[str, object] = {"bbox": list(self.box)}
        return found if self.segmentation is None else {**found, "segmentation": self.segmentation}


@dataclass(frozen=True, slots=True)
class IgnoredRegion:
    """A region to ignore: predictions of its class inside it are neither right nor wrong."""

    annotation: Annotation
    desc: str
    is_crowd: bool
    """How it is decided whether a prediction is inside the region.

    True: by the share of the prediction's area in it (a crowd in COCO). False: by their IoU.
    """

    def as_json(self) -> dict[str, object]:
        return {**self.annotation.as_json(), "desc": self.desc, "iscrowd": int(self.is_crowd)}


def load_annotated(value: object, num_objects: int) -> tuple[Annotation, ...]:
    """Check the value of `annotated` in a row of a dataset, and return the annotations.

    There must be one for each of the row's `num_objects` objects. Raises RecordError.
    """
    if not isinstance(value, list) or len(value) != num_objects:
        _refuse("annotated", f"is not a list of {num_objects} annotations, one per object")
    return tuple(_annotation(f"annotated[{i}]", one) for i, one in enumerate(value))


def load_ignored(value: object) -> tuple[IgnoredRegion, ...]:
    """Check the value of `ignore` in a row of a dataset, and return the regions to ignore.

    In these regions of the image, predictions are neither right nor wrong. Raises RecordError.
    """
    if not isinstance(value, list):
        _refuse("ignore", "is not a list of regions")
    regions = []
    for i, one in enumerate(value):
        annotation = _annotation(f"ignore[{i}]", one)
        desc = one.get("desc")
        is_crowd = one.get("iscrowd", 0)
        if not isinstance(desc, str) or not desc.strip():
            _refuse(f"ignore[{i}].desc", "is not a class name")
        if is_crowd not in (0, 1):
            _refuse(f"ignore[{i}].iscrowd", f"is {is_crowd!r}, not 0 or 1")
        regions.append(IgnoredRegion(annotation, desc, bool(is_crowd)))
    return tuple(regions)


def _annotation(field: str, value: object) -> Annotation:
    if not isinstance(value, dict):
        _refuse(field, "is not an object with the key bbox")
    box = _numbers(value.get("bbox"))
    if box is None or len(box) != 4:
        _refuse(f"{field}.bbox", "is not a list x, y, w, h of finite numbers")
    x, y, w, h = box
    if w < 0 or h < 0:
        _refuse(f"{field}.bbox", f"is {box}, but w and h must not be negative")
    segmentation = value.get("segmentation")
    is_rings = isinstance(segmentation, list) and None not in map(_numbers, segmentation)
    if segmentation is not None and not is_rings and not isinstance(segmentation, dict):
        _refuse(
            f"{field}.segmentation",
            "is neither a list of rings of numbers nor a run-length encoding",
        )
    return Annotation((x, y, w, h), segmentation)


def _numbers(value: object) -> list[float] | None:
    """Return a list of finite numbers; None for any other value."""
    if not isinstance(value, list):
        return None
    for one in value:
        if isinstance(one, bool) or not isinstance(one, (int, float)):
            return None
    try:
        numbers = [float(one) for one in value]
    except OverflowError:  # an integer of hundreds of digits
        return None
    return numbers if all(map(math.isfinite, numbers)) else None


def _refuse(field: str, problem: str) -> NoReturn:
    remedy = "import the annotations again, or remove the key to evaluate on the objects' bins"
    raise RecordError(problem, field=field, remedy=remedy)
