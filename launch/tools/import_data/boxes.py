"""Tells what the four numbers of a box mean, and whether those of a whole file fit that meaning.

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
    """The four numbers of a box."""

    XYWH = "xywh"
    """Upper left corner, width and height, as COCO has it."""
    XYXY = "xyxy"
    """Upper left and lower right corner."""
    YXYX = "yxyx"
    """The same corners, y before x, as TensorFlow has it."""
    CXCYWH = "cxcywh"
    """Centre, width and height, as YOLO has it."""


class BoxUnit(StrEnum):
    """The unit of a box's numbers."""

    PIXELS = "pixels"
    PARTS = "parts"
    """Of the picture's width and height: 0 to 1."""
    THOUSANDTHS = "thousandths"
    """0 to 1000, as Qwen-VL answers."""


_WHOLE = {BoxUnit.PIXELS: None, BoxUnit.PARTS: 1.0, BoxUnit.THOUSANDTHS: 1000.0}
"""The number of a picture's right and lower border; None: its size."""
Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class BoxReading:
    """The meaning of the four numbers of a box.

    Example: `BoxReading(BoxOrder.XYXY).box([10, 20, 40, 60])` is `(10, 20, 30, 40)`.
    """

    order: BoxOrder = BoxOrder.XYWH
    unit: BoxUnit = BoxUnit.PIXELS
    one_based: bool = False
    """Corners in pixels count from 1, and the last pixel is inside (Pascal VOC)."""

    def box(self, numbers: Sequence[float]) -> Box:
        """Return x, y, w, h in the same unit."""
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
        """Return the numbers that `box` was read from."""
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
        """Return the factors that turn x and y into pixels of a picture of that size."""
        whole = _WHOLE[self.unit]
        return (1.0, 1.0) if whole is None else (size[0] / whole, size[1] / whole)

    def __str__(self) -> str:
        return f"{self.order} in {self.unit}"


PIXELS_XYWH = BoxReading()


def is_in_parts(numbers: Sequence[float]) -> bool:
    """Tell whether numbers are hardly pixels: up to 1, and not whole."""
    return max(numbers) <= 1 and any(value != int(value) for value in numbers)


# A true box reaches beyond its picture by little. Where a file is misread, of the boxes of COCO
# 647 of 839 lie far outside, and of true ones none.
@dataclass(frozen=True, slots=True)
class _Rule:
    """The boxes that have to leave their pictures, so that another reading is considered."""

    far: float
    """By that part of a side."""
    share: float
    least: int


_RULES = (_Rule(0.1, 0.2, 1), _Rule(0.03, 0.08, 20))
"""Few boxes have to leave by much; of many, fewer and by less."""
_NEAR = 0.02
_SLACK_PIXELS = 2.0
_EXPLAINED = 0.9
"""The share of them that fits the other reading."""


class BoxEvidence:
    """The boxes of a file with the sizes of their pictures; they tell a wrong order or unit."""

    def __init__(self) -> None:
        self._values: defaultdict[BoxReading, array[float]] = defaultdict(lambda: array("d"))
        self._where: defaultdict[BoxReading, list[str]] = defaultdict(list)

    def add(self, reading: BoxReading, box: Box, size: tuple[int, int], where: str) -> None:
        """Add a box as `reading` has read it, and the size of the picture it is relative to."""
        self._values[reading].extend((*reading.numbers(box), *size))
        self._where[reading].append(where)

    def require_fitting(self, file: Path) -> None:
        """Raise RecordError if the boxes contradict their reading, with the keys to set."""
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
                keys[-1] += ", or give the pictures that the boxes were drawn on"
            raise RecordError(
                f"{wrong_N.sum()} of {len(wrong_N)} boxes cannot be {reading}; they fit as"
                f" {' or '.join(map(str, likely[:4]))} (first: [{shown}] on {width} x {height}"
                f" pixels, {self._where[reading][first]})",
                field="boxes",
                remedy=f"set {' '.join(keys)}; check_boxes=false takes them as they are",
                file=str(file),
            )


_Found = tuple[np.ndarray, list[BoxReading]]


def _in_parts(reading: BoxReading, numbers_N4: np.ndarray, sizes_N2: np.ndarray) -> _Found | None:
    """Numbers up to 1 in nearly all boxes of a file are no pixels."""
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
    """Find readings that fit the boxes that leave their picture, and all others too."""
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
        # A centre, or a larger scale, fits any box that leaves its picture: one is no evidence.
        is_weak = other.order is BoxOrder.CXCYWH or other.unit is not reading.unit
        if is_weak and (num_wrong < 2 or (num_wrong < 5 and num_wrong < 0.5 * num_boxes)):
            continue
        found.append(other)
    return (wrong_N, found) if found else None


def _others(reading: BoxReading) -> Iterator[BoxReading]:
    """Yield other readings, the likeliest first."""
    for unit in (reading.unit, *(unit for unit in BoxUnit if unit is not reading.unit)):
        for order in (reading.order, *(order for order in BoxOrder if order is not reading.order)):
            other = replace(reading, order=order, unit=unit)
            if other != reading:
                yield other


def _misfits(
    reading: BoxReading, numbers_N4: np.ndarray, sizes_N2: np.ndarray, slack: float
) -> np.ndarray:
    """Tell which boxes leave their picture by more than `slack` of a side, or have no area."""
    a, b, c, d = numbers_N4.T
    if reading.order is BoxOrder.YXYX:
        a, b, c, d = b, a, d, c
    with np.errstate(over="ignore", invalid="ignore"):  # numbers of a file go up to 1e308
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
