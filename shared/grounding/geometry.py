"""Shapes in norm1000: pixels to bins and back, boxes around shapes, and how much two shapes overlap (DESIGN 4 and 7.4).

Shape legend: P predictions, G ground truths, V polygon vertices, R canvas pixels per axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeAlias

import numpy as np

from shared.records import GeometryKind
from shared.tokens.vocabulary import NUM_BINS

MAX_BIN = NUM_BINS - 1
MIN_RASTER_PIXELS = 16
"""A shape that covers fewer canvas pixels is compared by exact area."""

Box: TypeAlias = tuple[int, int, int, int]
Point: TypeAlias = tuple[int, int]


class Shape(Protocol):
    """What a ground-truth object and a parsed object have in common."""

    @property
    def kind(self) -> GeometryKind: ...

    @property
    def bins(self) -> tuple[int, ...]: ...


def bin_box(box: Sequence[float], *, width: int, height: int) -> Box:
    """Pixels (x1, y1, x2, y2) of an image to bins, rounded outwards and clamped to 0..999. ValueError for an axis under 2 pixels."""
    x1, y1, x2, y2 = box
    x_scale, y_scale = _last_pixel(width), _last_pixel(height)
    return (
        _clamp(math.floor(x1 * MAX_BIN / x_scale)),
        _clamp(math.floor(y1 * MAX_BIN / y_scale)),
        _clamp(math.ceil(x2 * MAX_BIN / x_scale)),
        _clamp(math.ceil(y2 * MAX_BIN / y_scale)),
    )


def bin_points(points: Sequence[float], *, width: int, height: int) -> tuple[int, ...]:
    """Polygon vertices x, y, ... in pixels to the nearest bins (a half goes up), clamped to 0..999. ValueError as for `bin_box`."""
    scales = _last_pixel(width), _last_pixel(height)
    return tuple(_clamp(math.floor(value * MAX_BIN / scales[i % 2] + 0.5)) for i, value in enumerate(points))


def pixels_of(bins: Sequence[int], *, width: int, height: int) -> tuple[float, ...]:
    """Bins x, y, ... to pixels of an image of that size, not rounded."""
    scales = _last_pixel(width), _last_pixel(height)
    return tuple(bin * scales[i % 2] / MAX_BIN for i, bin in enumerate(bins))


def vertices(shape: Shape) -> list[Point]:
    """The ring of a shape, bins clamped to 0..999; a box as its four corners, clockwise from (x1, y1) as an image shows it."""
    bins = [_clamp(bin) for bin in shape.bins]
    if shape.kind is GeometryKind.BBOX:
        x1, y1, x2, y2 = bins
        return [(x1, y1), (x2, y1), (x2, y2), (x1, y2)]
    return list(zip(bins[::2], bins[1::2], strict=True))


def aabb(shape: Shape) -> Box:
    """The smallest axis-aligned box around a shape, in bins."""
    xs, ys = zip(*vertices(shape), strict=True)
    return min(xs), min(ys), max(xs), max(ys)


def box_iou(a_P4: np.ndarray, b_G4: np.ndarray) -> np.ndarray:
    """[P, 4] and [G, 4] boxes to float64 [P, G]: IoU of their continuous areas. Identical boxes have 1, also without area."""
    a_P14, b_1G4 = a_P4[:, None, :], b_G4[None, :, :]
    sides_PG2 = np.minimum(a_P14[..., 2:], b_1G4[..., 2:]) - np.maximum(a_P14[..., :2], b_1G4[..., :2])
    intersection_PG = sides_PG2.clip(min=0).prod(axis=-1)
    union_PG = (a_P14[..., 2:] - a_P14[..., :2]).prod(axis=-1) + (b_1G4[..., 2:] - b_1G4[..., :2]).prod(axis=-1) - intersection_PG
    iou_PG = (a_P14 == b_1G4).all(axis=-1).astype(np.float64)
    return np.divide(intersection_PG, union_PG, out=iou_PG, where=union_PG > 0)


def mask_iou(a: Shape, b: Shape, *, resolution: int = 256) -> float:
    """IoU of two shapes rasterised on a canvas of `resolution` x `resolution` pixels, 0..1.

    Bins are scaled by `(resolution - 1) / 999`; a pixel is covered where its centre lies in the half-open shape (even-odd rule). Where
    either shape covers fewer than 16 pixels the ratio of the exact areas takes the place of the raster's; identical shapes have 1.
    """
    return raster_iou(Raster.of(a, resolution), Raster.of(b, resolution))


@dataclass(frozen=True, slots=True)
class Raster:
    """One shape on the canvas, to be compared with many others."""

    ring: list[Point]
    window: tuple[int, int, int, int] | None
    """A box's pixels as half-open column and row ranges (x1, y1, x2, y2); None for a polygon."""
    mask: np.ndarray | None
    """bool [R, R], rows first; None for a box."""
    num_pixels: int

    @classmethod
    def of(cls, shape: Shape, resolution: int) -> Raster:
        if resolution < 2:
            raise ValueError(f"a canvas of {resolution} pixels per axis shows nothing; use at least 2")
        ring = vertices(shape)
        if shape.kind is GeometryKind.BBOX:
            (x1, y1), _, (x2, y2), _ = [(_first_pixel(x, resolution), _first_pixel(y, resolution)) for x, y in ring]
            return cls(ring, (x1, y1, x2, y2), None, max(x2 - x1, 0) * max(y2 - y1, 0))
        mask_RR = _rasterise(ring, resolution)
        return cls(ring, None, mask_RR, int(mask_RR.sum()))


def raster_iou(a: Raster, b: Raster) -> float:
    """`mask_iou` of two shapes on the same canvas."""
    if min(a.num_pixels, b.num_pixels) < MIN_RASTER_PIXELS:
        return exact_iou(a.ring, b.ring)
    intersection = _common_pixels(a, b)
    return intersection / (a.num_pixels + b.num_pixels - intersection)


def exact_iou(a: Sequence[Point], b: Sequence[Point]) -> float:
    """IoU of the areas that two rings enclose (even-odd rule). Without any area: 1 for the same vertices, else 0."""
    edges_a, edges_b = _edges(a), _edges(b)
    levels = _levels(edges_a + edges_b)
    areas = np.zeros(3)  # of a, of b, of both
    for low, high in pairwise(levels):
        # No edges cross between two levels, so every width is linear there and the middle one is the mean.
        middle = (low + high) / 2
        crossings_a, crossings_b = _crossings(edges_a, middle), _crossings(edges_b, middle)
        areas += (high - low) * np.array([_overlap(crossings_a, crossings_a), _overlap(crossings_b, crossings_b), _overlap(crossings_a, crossings_b)])
    union = areas[0] + areas[1] - areas[2]
    if union == 0:
        return float(set(a) == set(b))
    return float(areas[2] / union)


_Edge: TypeAlias = tuple[Point, Point]


def _edges(ring: Sequence[Point]) -> list[_Edge]:
    """Each upwards; horizontal ones bound no area between two levels and are left out."""
    pairs = [(a, b) if a[1] < b[1] else (b, a) for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)]
    return [(a, b) for a, b in pairs if a[1] != b[1]]


def _levels(edges: Sequence[_Edge]) -> list[float]:
    """The ordinates of all ends and crossings of edges, ascending."""
    levels = {float(point[1]) for edge in edges for point in edge}
    for i, ((ax, ay), (bx, by)) in enumerate(edges):
        for (cx, cy), (dx, dy) in edges[:i]:
            determinant = (bx - ax) * (dy - cy) - (by - ay) * (dx - cx)
            if determinant:
                y = ay + (by - ay) * ((cx - ax) * (dy - cy) - (cy - ay) * (dx - cx)) / determinant
                if max(ay, cy) < y < min(by, dy):
                    levels.add(y)
    return sorted(levels)


def _crossings(edges: Sequence[_Edge], y: float) -> list[float]:
    """Where edges cross the line at `y`, ascending: inside is between each odd one and the next."""
    return sorted(ax + (y - ay) * (bx - ax) / (by - ay) for (ax, ay), (bx, by) in edges if ay < y < by)


def _overlap(a: Sequence[float], b: Sequence[float]) -> float:
    """The length that is inside both; with itself, the length inside, summed in the same order, so that equal shapes have equal areas."""
    return sum(
        max(min(a_end, b_end) - max(a_start, b_start), 0.0)
        for a_start, a_end in zip(a[::2], a[1::2], strict=True)
        for b_start, b_end in zip(b[::2], b[1::2], strict=True)
    )


def _common_pixels(a: Raster, b: Raster) -> int:
    if a.window is not None and b.window is not None:
        width = min(a.window[2], b.window[2]) - max(a.window[0], b.window[0])
        height = min(a.window[3], b.window[3]) - max(a.window[1], b.window[1])
        return max(width, 0) * max(height, 0)
    if a.window is not None:
        a, b = b, a
    assert a.mask is not None
    if b.window is not None:
        x1, y1, x2, y2 = b.window
        return int(a.mask[y1:y2, x1:x2].sum())
    assert b.mask is not None
    return int((a.mask & b.mask).sum())


def _first_pixel(bin: int, resolution: int) -> int:
    """The first pixel whose centre is not before `bin`: ceil(bin * (R - 1) / 999 - 1/2), in integers."""
    return -((MAX_BIN - 2 * bin * (resolution - 1)) // (2 * MAX_BIN))


def _rasterise(ring: Sequence[Point], resolution: int) -> np.ndarray:
    """bool [R, R] of the pixels whose centres lie inside: left of them is an odd number of edges. In integers, so without rounding.

    The unit is 1 / 1998 of a pixel: a bin is `2 * (R - 1)` of them, a pixel's centre `(2 k + 1) * 999`.
    """
    toggles = np.zeros((resolution, resolution + 1), dtype=np.int64)
    pixel, scale = 2 * MAX_BIN, 2 * (resolution - 1)
    for (ax, ay), (bx, by) in _edges(ring):
        rows = np.arange(_first_pixel(ay, resolution), _first_pixel(by, resolution), dtype=np.int64)
        dx, dy = (bx - ax) * scale, (by - ay) * scale
        numerator = (ax * scale - MAX_BIN) * dy + ((2 * rows + 1) * MAX_BIN - ay * scale) * dx
        columns = -(-numerator // (pixel * dy))
        np.add.at(toggles, (rows, columns.clip(0, resolution)), 1)
    return toggles.cumsum(axis=1)[:, :resolution] % 2 == 1


def _last_pixel(length: int) -> int:
    if length < 2:
        raise ValueError(f"an axis of {length} pixels has no scale; images need at least 2 pixels per axis")
    return length - 1


def _clamp(bin: int) -> int:
    return min(max(bin, 0), MAX_BIN)
