"""Interprets the four numbers of a box, and checks that a file's boxes fit their images.

Shape legend: N boxes.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import numpy as np

from shared.errors import RecordError


class BoxOrder(StrEnum):
    XYWH = "xywh"
    """Upper left corner, width and height, as in COCO."""
    XYXY = "xyxy"
    """Upper left and lower right corner."""
    YXYX = "yxyx"
    """Upper left and lower right corner, with y before x, as in TensorFlow."""
    CXCYWH = "cxcywh"
    """Centre, width and height, as in YOLO."""


class BoxUnit(StrEnum):
    PIXELS = "pixels"
    PARTS = "parts"
    """Fractions of the image's width and height: 0 to 1."""
    THOUSANDTHS = "thousandths"
    """0 to 1000, as in answers of Qwen-VL."""


_WHOLE = {BoxUnit.PIXELS: None, BoxUnit.PARTS: 1.0, BoxUnit.THOUSANDTHS: 1000.0}
"""By unit, the number at an image's right and lower border; None: the image's size in pixels."""
Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class BoxReading:
    """How a format writes a box: the order and unit of its four numbers.

    Example: `BoxReading(BoxOrder.XYXY).box([10, 20, 40, 60])` is `(10, 20, 30, 40)`.
    """

    order: BoxOrder = BoxOrder.XYWH
    unit: BoxUnit = BoxUnit.PIXELS
    one_based: bool = False
    """Pixel corners count from 1, and the last pixel is inside the box (Pascal VOC)."""

    def box(self, numbers: Sequence[float]) -> Box:
        """Convert numbers in this order to x, y, w, h in the same unit."""
        a, b, c, d = numbers
        if self.order is BoxOrder.XYWH:
            return a, b, c, d
        if self.order is BoxOrder.CXCYWH:
            return a - c / 2, b - d / 2, c, d
        if self.order is BoxOrder.YXYX:
            a, b, c, d = b, a, d, c
        if self.one_based and self.unit is BoxUnit.PIXELS:
            a, b = a - 1, b - 1
        return a, b, c - a, d - b

    def numbers(self, box: Box) -> Box:
        """Convert a box x, y, w, h to numbers in this order, in the same unit."""
        x, y, w, h = box
        if self.order is BoxOrder.XYWH:
            return x, y, w, h
        if self.order is BoxOrder.CXCYWH:
            return x + w / 2, y + h / 2, w, h
        right, below = x + w, y + h
        if self.one_based and self.unit is BoxUnit.PIXELS:
            x, y = x + 1, y + 1
        return (y, x, below, right) if self.order is BoxOrder.YXYX else (x, y, right, below)

    def pixels_per_unit(self, size: tuple[int, int]) -> tuple[float, float]:
        """Return the factors that convert x and y to pixels, for an image of this size."""
        whole = _WHOLE[self.unit]
        return (1.0, 1.0) if whole is None else (size[0] / whole, size[1] / whole)

    def __str__(self) -> str:
        return f"{self.order} in {self.unit}"


PIXELS_XYWH = BoxReading()


def is_in_parts(numbers: Sequence[float]) -> bool:
    """Return whether a box's numbers look like fractions: at most 1, and not all integers."""
    return max(numbers) <= 1 and any(value != int(value) for value in numbers)


# True boxes hardly reach beyond their image. On COCO, 647 of 839 boxes lie far outside with a wrong
# reading, and none with the right one.
@dataclass(frozen=True, slots=True)
class _Rule:
    """How many boxes must leave their image, and how far, before another reading is considered.

    They must be at least `least` boxes, and at least the fraction `share` of all boxes.
    """

    far: float
    """Minimum distance of these boxes beyond the border, as a fraction of the image's side."""
    share: float
    least: int


_RULES = (_Rule(0.1, 0.2, 1), _Rule(0.03, 0.08, 20))
"""A few boxes are enough if they lie far outside. If many boxes lie outside, a smaller share of all
boxes, at a smaller distance, is enough.
"""
_NEAR = 0.02
_SLACK_PIXELS = 2.0
_EXPLAINED = 0.9
"""Minimum share of the boxes outside their image that must fit the other reading."""


class BoxEvidence:
    """Detects that a file's boxes were read in a wrong order or unit.

    It uses all boxes of the file, and the sizes of their images.
    """

    def __init__(self) -> None:
        self._values: defaultdict[BoxReading, array[float]] = defaultdict(lambda: array("d"))
        self._where: defaultdict[BoxReading, list[str]] = defaultdict(list)

    def add(self, reading: BoxReading, box: Box, size: tuple[int, int], where: str) -> None:
        """Record a box that was read with `reading`, and the size of its image, as evidence.

        `where` names the image in messages.
        """
        self._values[reading].extend((*reading.numbers(box), *size))
        self._where[reading].append(where)

    def require_fitting(self, file: Path) -> None:
        """Raise RecordError, with the keys to set, if recorded boxes contradict their reading."""
        for reading, values in self._values.items():
            table = np.array(values, dtype=np.float64).reshape(-1, 6)
            numbers_N4, sizes_N2 = table[:, :4], table[:, 4:]
            found = _in_parts(reading, numbers_N4, sizes_N2)
            for rule in _RULES:
                found = found or _misread(reading, numbers_N4, sizes_N2, rule)
            if found is None:
                continue
            wrong_N, likely = found
            first = int(wrong_N.argmax())
            shown = ", ".join(f"{value:.6g}" for value in numbers_N4[first])
            width, height = sizes_N2[first].astype(int)
            best = likely[0]
            keys = [f"box_order={best.order}"] if best.order is not reading.order else []
            keys += [f"box_unit={best.unit}"] if best.unit is not reading.unit else []
            if best.unit is BoxUnit.THOUSANDTHS:
                keys[-1] += ", or give the images that the boxes were drawn on"
            raise RecordError(
                f"{wrong_N.sum()} of {len(wrong_N)} boxes do not fit {reading}, but fit"
                f" {' or '.join(map(str, likely[:4]))} (first: [{shown}] on {width} x {height}"
                f" pixels, {self._where[reading][first]})",
                field="boxes",
                remedy=f"set {' '.join(keys)}; check_boxes=false turns this check off",
                file=str(file),
            )


_Found = tuple[np.ndarray, list[BoxReading]]


def _in_parts(reading: BoxReading, numbers_N4: np.ndarray, sizes_N2: np.ndarray) -> _Found | None:
    """Find the readings in fractions that fit, if nearly all boxes of a file have numbers up to 1.

    Return which boxes have such numbers, and the readings; None if too few boxes have them.
    """
    if reading.unit is not BoxUnit.PIXELS:
        return None
    tiny_N = numbers_N4.max(axis=1) <= 1
    if tiny_N.mean() < _EXPLAINED:
        return None
    orders = [reading.order, *(order for order in BoxOrder if order is not reading.order)]
    readings = [BoxReading(order, BoxUnit.PARTS) for order in orders]
    tiny = numbers_N4[tiny_N], sizes_N2[tiny_N]
    fit = [one for one in readings if _misfits(one, *tiny, _NEAR).mean() <= 1 - _EXPLAINED]
    return tiny_N, fit or readings[:1]


def _misread(
    reading: BoxReading, numbers_N4: np.ndarray, sizes_N2: np.ndarray, rule: _Rule
) -> _Found | None:
    """Find other readings that fit the boxes outside their image as well as the remaining boxes.

    Return which boxes lie outside, and the readings; None if there is no such reading.
    """
    wrong_N = _misfits(reading, numbers_N4, sizes_N2, rule.far)
    num_wrong, num_boxes = int(wrong_N.sum()), len(wrong_N)
    if num_wrong < max(rule.share * num_boxes, rule.least):
        return None
    found = []
    for other in _others(reading):
        explained = int((wrong_N & ~_misfits(other, numbers_N4, sizes_N2, _NEAR)).sum())
        spoiled = int((~wrong_N & _misfits(other, numbers_N4, sizes_N2, rule.far)).sum())
        if explained < _EXPLAINED * num_wrong or spoiled > (1 - _EXPLAINED) * explained:
            continue
        # A centre or another unit fits nearly any box, so a single box is not enough evidence.
        is_weak = other.order is BoxOrder.CXCYWH or other.unit is not reading.unit
        if is_weak and (num_wrong < 2 or (num_wrong < 5 and num_wrong < 0.5 * num_boxes)):
            continue
        found.append(other)
    return (wrong_N, found) if found else None


def _others(reading: BoxReading) -> Iterator[BoxReading]:
    """Yield all readings with another order or unit, the most likely first."""
    for unit in (reading.unit, *(unit for unit in BoxUnit if unit is not reading.unit)):
        for order in (reading.order, *(order for order in BoxOrder if order is not reading.order)):
            other = replace(reading, order=order, unit=unit)
            if other != reading:
                yield other


def _misfits(
    reading: BoxReading, numbers_N4: np.ndarray, sizes_N2: np.ndarray, slack: float
) -> np.ndarray:
    """Return which boxes have no area or leave the image by more than `slack` of a side."""
    a, b, c, d = numbers_N4.T
    if reading.order is BoxOrder.YXYX:
        a, b, c, d = b, a, d, c
    with np.errstate(over="ignore", invalid="ignore"):  # numbers in files go up to 1e308
        if reading.order is BoxOrder.CXCYWH:
            a, b = a - c / 2, b - d / 2
        elif reading.one_based and reading.order is not BoxOrder.XYWH:
            a, b = a - (reading.unit is BoxUnit.PIXELS), b - (reading.unit is BoxUnit.PIXELS)
        if reading.order in (BoxOrder.XYWH, BoxOrder.CXCYWH):
            c, d = a + c, b + d
    width, height = sizes_N2.T
    whole = _WHOLE[reading.unit]
    right, below = (width, height) if whole is None else (np.full_like(width, whole),) * 2
    slack_x = (slack + _SLACK_PIXELS / width) * right
    slack_y = (slack + _SLACK_PIXELS / height) * below
    outside = (a < -slack_x) | (b < -slack_y) | (c > right + slack_x) | (d > below + slack_y)
    return np.asarray(outside | (c <= a) | (d <= b))
