"""Geometry of objects: conversion between pixels and bins, and overlap of shapes (decision 34).

A bin is a coordinate in norm1000: an integer 0..999 along an axis of the image.

Shape legend: P predictions, G ground truths, K candidates of each prediction, N shapes, V vertices
of all of them, R canvas pixels per axis, W words of 64 pixels per canvas row, T edges, C crossings
of edges with canvas rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Protocol, TypeAlias, TypeVar

import numpy as np

from shared.records import GeometryKind
from shared.tokens.vocabulary import NUM_BINS

# IoU by exact areas, for shapes too small for a raster (decision 34). Shape legend: T edges of both
# rings, L slabs between consecutive y values of ends and crossings.

Point: TypeAlias = tuple[int, int]

# Squared bins. Sums of floats over 999 x 999 bins have an error below 1e-9; an area below this
# limit is a line or a point.
_NO_AREA = 1e-6
# To the right of every bin: the x of an edge that does not cross a slab, so that it bounds nothing
# there.
_BEYOND = 1000.0
# Maximum of slabs times edges at once, about 8 MB per array.
_MAX_CELLS = 1_000_000


def polygon_iou(a: Sequence[Point], b: Sequence[Point]) -> float:
    """Return the exact IoU of two polygons, given by their vertices in bins (even-odd rule).

    If neither polygon has an area, the IoU is 1 for the same vertices, else 0.
    """
    edges_a = _edges(a)
    edges_b = _edges(b)
    edges_T4 = np.array(edges_a + edges_b, dtype=np.float64).reshape(-1, 4)
    is_a_T = np.arange(len(edges_T4)) < len(edges_a)
    levels = _levels(edges_T4)
    areas = np.zeros(3)  # of a, of b, of both
    step = max(_MAX_CELLS // max(len(edges_T4), 1), 1)
    for start in range(0, len(levels) - 1, step):
        areas += _slab_areas(levels[start : start + step + 1], edges_T4, is_a_T)
    union = areas[0] + areas[1] - areas[2]
    if union < _NO_AREA:
        return float(set(a) == set(b))
    return float(areas[2] / union)


def _edges(ring: Sequence[Point]) -> list[tuple[int, int, int, int]]:
    """List the edges of a polygon as (ax, ay, bx, by), with ay < by.

    Edges that bound no area are left out: horizontal edges, and edges with an even number of
    copies.
    """
    sides = zip(ring, [*ring[1:], ring[0]], strict=True)
    times = Counter((*a, *b) if a[1] < b[1] else (*b, *a) for a, b in sides)
    return [edge for edge, count in times.items() if edge[1] != edge[3] and count % 2]


def _levels(edges_T4: np.ndarray) -> np.ndarray:
    """Return the y values of all ends and crossings of edges, ascending: [L + 1]."""
    ax, ay, bx, by = edges_T4.T[:, :, None]
    cx, cy, dx, dy = edges_T4.T[:, None, :]
    determinant_TT = (bx - ax) * (dy - cy) - (by - ay) * (dx - cx)
    numerator_TT = (by - ay) * ((cx - ax) * (dy - cy) - (cy - ay) * (dx - cx))
    crossings_TT = ay + np.divide(
        numerator_TT,
        determinant_TT,
        out=np.full(determinant_TT.shape, np.inf),
        where=determinant_TT != 0,
    )
    is_on_both_TT = (np.maximum(ay, cy) < crossings_TT) & (crossings_TT < np.minimum(by, dy))
    return np.unique(np.concatenate([edges_T4[:, 1], edges_T4[:, 3], crossings_TT[is_on_both_TT]]))


def _slab_areas(levels: np.ndarray, edges_T4: np.ndarray, is_a_T: np.ndarray) -> np.ndarray:
    """Return the areas of polygon a, of polygon b and of their intersection, between two levels.

    The two levels are the first and the last of `levels`, which are y values in bins.
    """
    # No edges cross inside a slab, so each width changes linearly, and its mean is in the middle.
    middle_L1 = ((levels[:-1] + levels[1:]) / 2)[:, None]
    ax, ay, bx, by = edges_T4.T
    x_LT = ax + (middle_L1 - ay) * ((bx - ax) / (by - ay))
    # Half-open, so the number of crossings is even also if rounding puts a middle on a vertex.
    x_LT = np.where((ay <= middle_L1) & (middle_L1 < by), x_LT, _BEYOND)
    order_LT = np.argsort(x_LT, axis=1, kind="stable")
    gaps = np.diff(x_LT[np.arange(len(x_LT))[:, None], order_LT], axis=1)
    is_a_LT = is_a_T[order_LT]
    in_a, in_b = (
        np.logical_xor.accumulate(is_mine_LT, axis=1)[:, :-1] for is_mine_LT in (is_a_LT, ~is_a_LT)
    )
    heights = np.diff(levels)
    # If both rings are the same, all three sums have the same numbers, so their IoU is exactly 1.
    return np.array(
        [float(heights @ (gaps * inside).sum(axis=1)) for inside in (in_a, in_b, in_a & in_b)]
    )


Number = TypeVar("Number", int, float)

MIN_VERTICES = 3


def simplify_ring(
    points: Sequence[tuple[Number, Number]], max_vertices: int
) -> list[tuple[Number, Number]]:
    """Reduce a polygon to at most `max_vertices` vertices, in order (Visvalingam and Whyatt).

    Fewer vertices cost fewer tokens. The vertex whose triangle with its two neighbours has the
    smallest area is removed first; of equal areas, the vertex with the lowest index. Raises
    ValueError if `max_vertices` is below 3.
    """
    if max_vertices < MIN_VERTICES:
        raise ValueError(f"{max_vertices} vertices enclose no area; keep at least {MIN_VERTICES}")
    ring = list(points)
    areas = [_area_at(ring, i) for i in range(len(ring))]
    while len(ring) > max_vertices:
        least = areas.index(min(areas))
        del ring[least], areas[least]
        for i in ((least - 1) % len(ring), least % len(ring)):  # its former neighbours
            areas[i] = _area_at(ring, i)
    return ring


def _area_at(ring: Sequence[tuple[Number, Number]], i: int) -> Number:
    """Return twice the area of the triangle of vertex `i` and its two neighbours."""
    a = ring[i - 1]
    b = ring[i]
    c = ring[(i + 1) % len(ring)]
    return abs((b[0] - a[0]) * (c[1] - a[1]) - (c[0] - a[0]) * (b[1] - a[1]))


MAX_BIN = NUM_BINS - 1
MIN_RASTER_PIXELS = 16
"""If a shape covers fewer pixels of the canvas, its exact area is used instead of its raster."""

Box: TypeAlias = tuple[int, int, int, int]


class Shape(Protocol):
    """The geometry of a ground-truth or predicted object: its kind and its coordinates in bins."""

    @property
    def kind(self) -> GeometryKind: ...

    @property
    def bins(self) -> tuple[int, ...]: ...


def bin_box(box: Sequence[float], *, width: int, height: int) -> Box:
    """Turn a box (x1, y1, x2, y2) in pixels into bins, rounded outwards and clamped to 0..999.

    Raises ValueError for an axis under 2 pixels.
    """
    x1, y1, x2, y2 = box
    x_scale = _last_pixel(width)
    y_scale = _last_pixel(height)
    return (
        _clamp(math.floor(x1 * MAX_BIN / x_scale)),
        _clamp(math.floor(y1 * MAX_BIN / y_scale)),
        _clamp(math.ceil(x2 * MAX_BIN / x_scale)),
        _clamp(math.ceil(y2 * MAX_BIN / y_scale)),
    )


def bin_points(points: Sequence[float], *, width: int, height: int) -> tuple[int, ...]:
    """Turn the vertices x, y, x, y, ... of a polygon in pixels into the nearest bins.

    Halves are rounded up, and bins are clamped to 0..999. Raises ValueError for an axis under 2
    pixels.
    """
    scales = _last_pixel(width), _last_pixel(height)
    return tuple(
        _clamp(math.floor(value * MAX_BIN / scales[i % 2] + 0.5)) for i, value in enumerate(points)
    )


def pixels_of(bins: Sequence[int], *, width: int, height: int) -> tuple[float, ...]:
    """Turn bins x, y, x, y, ... into pixels of an image of this size, without rounding."""
    scales = _last_pixel(width), _last_pixel(height)
    return tuple(bin * scales[i % 2] / MAX_BIN for i, bin in enumerate(bins))


def vertices(shape: Shape) -> list[Point]:
    """Return the vertices of a shape in bins, clamped to 0..999.

    The vertices of a box are clockwise from (x1, y1). A point has itself as its only vertex.
    """
    values = [_clamp(bin) for bin in _ring(shape)]
    return list(zip(values[::2], values[1::2], strict=True))


def aabb(shape: Shape) -> Box:
    """Return the smallest axis-aligned box around a shape, in bins."""
    xs, ys = zip(*vertices(shape), strict=True)
    return min(xs), min(ys), max(xs), max(ys)


def box_iou(a_P4: np.ndarray, b_G4: np.ndarray) -> np.ndarray:
    """Return the IoU of each pair of boxes: [P, 4] and [G, 4] bins to float64 [P, G].

    Identical boxes have an IoU of 1, even without area.
    """
    return _paired_box_iou(a_P4[:, None], b_G4[None])


def point_overlap(a_P2: np.ndarray, b_G2: np.ndarray, tolerance: float) -> np.ndarray:
    """Return how close each pair of points is, 0..1: [P, 2] and [G, 2] bins to float64 [P, G].

    It is used like an IoU, with the same thresholds. It falls linearly with distance: 1 at distance
    0, 0.5 at `tolerance` bins, 0 from twice `tolerance` on.
    """
    distance_PG = np.linalg.norm(a_P2[:, None] - b_G2[None], axis=-1)
    return np.maximum(0.0, 1.0 - distance_PG / (2 * tolerance))


def mask_iou(a: Shape, b: Shape, *, resolution: int = 256) -> float:
    """Return the IoU of two filled shapes, drawn on a canvas of `resolution` pixels per axis.

    Bins are scaled by `(resolution - 1) / 999`. A pixel is covered if its centre is inside the
    half-open shape (even-odd rule). If either shape covers fewer than 16 pixels, exact areas are
    used instead of the raster. Identical shapes have an IoU of 1. Raises ValueError for a canvas
    under 2 pixels.
    """
    return float(Rasters.of([a, b], resolution).mask_iou(np.array([0]), np.array([[1]]))[0, 0])


@dataclass(frozen=True, slots=True)
class Rasters:
    """Shapes drawn on a canvas, to compute the mask IoU of many pairs of them."""

    shapes: Sequence[Shape]
    """The N shapes."""
    is_box_N: np.ndarray
    """bool [N]: whether each shape is a box."""
    boxes_N4: np.ndarray
    """int64 [N, 4]: the box around each shape, in bins."""
    windows_N4: np.ndarray
    """int64 [N, 4]: the canvas pixels of the box around each shape, as half-open column and row
    ranges (x1, y1, x2, y2)."""
    words_NRW: np.ndarray | None
    """uint64 [N, R, W]: the covered pixels of each canvas row, one bit each, lowest bit leftmost.

    None if all shapes are boxes, which cover all pixels of their windows.
    """
    num_pixels_N: np.ndarray
    """int64 [N]: number of pixels that each shape covers."""

    @classmethod
    def of(cls, shapes: Sequence[Shape], resolution: int) -> Rasters:
        """Draw the shapes on a canvas of `resolution` pixels per axis.

        Raises ValueError for a canvas under 2 pixels per axis.
        """
        if resolution < 2:
            raise ValueError(f"canvas has {resolution} pixels per axis; use at least 2")
        rings = [_ring(shape) for shape in shapes]
        is_box_N = np.array([shape.kind is GeometryKind.BBOX for shape in shapes], dtype=bool)
        points_V2 = (
            np.array([*chain.from_iterable(rings)], dtype=np.int64).clip(0, MAX_BIN).reshape(-1, 2)
        )
        stops_N = np.cumsum([len(ring) // 2 for ring in rings])
        starts_N = np.array([0, *stops_N[:-1]])
        boxes_N4 = np.hstack(
            [np.minimum.reduceat(points_V2, starts_N), np.maximum.reduceat(points_V2, starts_N)]
        )
        windows_N4 = _first_pixel(boxes_N4, resolution)
        if is_box_N.all():
            return cls(shapes, is_box_N, boxes_N4, windows_N4, None, _box_area(windows_N4))
        words_NRW = _rasterise(points_V2, starts_N, stops_N, resolution)
        num_pixels_N = np.bitwise_count(words_NRW).sum(axis=(1, 2), dtype=np.int64)
        return cls(shapes, is_box_N, boxes_N4, windows_N4, words_NRW, num_pixels_N)

    def mask_iou(self, left_P: np.ndarray, right_PK: np.ndarray) -> np.ndarray:
        """Return the mask IoU of shape `left[p]` with each shape `right[p, k]`: float64 [P, K]."""
        left_P1 = left_P[:, None]
        common_PK = self._common_pixels(left_P, right_PK)
        union_PK = self.num_pixels_N[left_P1] + self.num_pixels_N[right_PK] - common_PK
        iou_PK = np.divide(common_PK, union_PK, out=np.zeros(union_PK.shape), where=union_PK > 0)

        small_PK = (
            np.minimum(self.num_pixels_N[left_P1], self.num_pixels_N[right_PK]) < MIN_RASTER_PIXELS
        )
        if small_PK.any():
            # Exact for two boxes. For other shapes only 0 is exact: then their boxes share no area,
            # so the shapes share none. The others are computed below.
            iou_PK[small_PK] = _paired_box_iou(self.boxes_N4[left_P1], self.boxes_N4[right_PK])[
                small_PK
            ]
            for p, k in np.argwhere(
                small_PK & (iou_PK > 0) & ~(self.is_box_N[left_P1] & self.is_box_N[right_PK])
            ):
                iou_PK[p, k] = polygon_iou(
                    vertices(self.shapes[left_P[p]]), vertices(self.shapes[right_PK[p, k]])
                )
        return iou_PK

    def _common_pixels(self, left_P: np.ndarray, right_PK: np.ndarray) -> np.ndarray:
        if self.words_NRW is None:
            return _box_area(
                _intersection(self.windows_N4[left_P][:, None], self.windows_N4[right_PK])
            )
        common_PK = np.empty(right_PK.shape, dtype=np.int64)
        for p, left in enumerate(left_P):
            x1, y1, x2, y2 = self.windows_N4[left]
            window = np.s_[y1:y2, x1 // 64 : -(-x2 // 64)]
            both_Krw = self.words_NRW[right_PK[p], *window] & self.words_NRW[left, *window]
            common_PK[p] = np.bitwise_count(both_Krw).sum(axis=(1, 2), dtype=np.int64)
        return common_PK


def _rasterise(
    points_V2: np.ndarray, starts_N: np.ndarray, stops_N: np.ndarray, resolution: int
) -> np.ndarray:
    """Return the pixels whose centres are inside the rings `points[start:stop]`: uint64 [N, R, W].

    A centre is inside if the number of edges to its left is odd. Integers avoid rounding. The unit
    is 1 / 1998 pixel: a bin is `2 * (R - 1)` units, the centre of pixel k is at `(2 k + 1) * 999`.
    """
    next_V = np.arange(1, len(points_V2) + 1)
    next_V[stops_N - 1] = starts_N
    ring_V = np.repeat(np.arange(len(starts_N)), stops_N - starts_N)
    is_up_V1 = points_V2[:, 1:] <= points_V2[next_V, 1:]
    low_V2 = np.where(is_up_V1, points_V2, points_V2[next_V])
    high_V2 = np.where(is_up_V1, points_V2[next_V], points_V2)

    first_V = _first_pixel(low_V2[:, 1], resolution)
    last_V = _first_pixel(high_V2[:, 1], resolution)
    edge_C = np.repeat(np.arange(len(points_V2)), last_V - first_V)
    row_C = np.arange(len(edge_C)) - np.repeat(
        np.cumsum(last_V - first_V) - last_V, last_V - first_V
    )
    pixel = 2 * MAX_BIN
    scale = 2 * (resolution - 1)
    (ax_C, ay_C) = (low_V2[edge_C] * scale).T
    (dx_C, dy_C) = ((high_V2 - low_V2)[edge_C] * scale).T
    numerator_C = (ax_C - MAX_BIN) * dy_C + ((2 * row_C + 1) * MAX_BIN - ay_C) * dx_C
    column_C = -(-numerator_C // (pixel * dy_C)).clip(-resolution, 0)

    # A row has an even number of crossings, so an odd number to the right of a pixel means an odd
    # number to its left.
    row_C, column_C = np.divmod(
        np.sort((ring_V[edge_C] * resolution + row_C) * (resolution + 1) + column_C), resolution + 1
    )
    starts = np.flatnonzero(np.diff(row_C, prepend=-1))
    words_NRW = np.zeros((len(starts_N), resolution, -(-resolution // 64)), dtype=np.uint64)
    words_NRW.reshape(-1, words_NRW.shape[-1])[row_C[starts]] = np.bitwise_xor.reduceat(
        _words_left_of(resolution)[column_C], starts
    )
    return words_NRW


@lru_cache(maxsize=4)
def _words_left_of(resolution: int) -> np.ndarray:
    """Return the pixels of a canvas row left of each column: uint64 [R + 1, W]."""
    num_words = -(-resolution // 64)
    bits = np.arange(64 * num_words) < np.arange(resolution + 1)[:, None]
    return np.packbits(bits, axis=1, bitorder="little").view("<u8").astype(np.uint64)


def _first_pixel(bins: np.ndarray, resolution: int) -> np.ndarray:
    """Return the first pixels whose centres are at or after `bins`, in integers.

    That is ceil(bin * (R - 1) / 999 - 1/2).
    """
    return -((MAX_BIN - 2 * bins * (resolution - 1)) // (2 * MAX_BIN))


def _paired_box_iou(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the `box_iou` of each pair of boxes: [..., 4] and [..., 4] to float64 [...]."""
    common = _box_area(_intersection(a, b))
    union = _box_area(a) + _box_area(b) - common
    return np.divide(common, union, out=(a == b).all(axis=-1).astype(np.float64), where=union > 0)


def _intersection(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Intersect boxes [..., 4]; x1 > x2 or y1 > y2 if they do not intersect."""
    return np.concatenate(
        [np.maximum(a[..., :2], b[..., :2]), np.minimum(a[..., 2:], b[..., 2:])], axis=-1
    )


def _box_area(boxes: np.ndarray) -> np.ndarray:
    """Return the areas of boxes: [..., 4] to [...]."""
    return (boxes[..., 2] - boxes[..., 0]).clip(min=0) * (boxes[..., 3] - boxes[..., 1]).clip(min=0)


def _ring(shape: Shape) -> Sequence[int]:
    """Return x, y, ... as written; for a box, its corners in the order of `vertices`."""
    if shape.kind is not GeometryKind.BBOX:
        return shape.bins
    x1, y1, x2, y2 = shape.bins
    return x1, y1, x2, y1, x2, y2, x1, y2


def _last_pixel(length: int) -> int:
    if length < 2:
        raise ValueError(f"an image axis has {length} pixels; it needs at least 2 pixels")
    return length - 1


def _clamp(bin: int) -> int:
    return min(max(bin, 0), MAX_BIN)
