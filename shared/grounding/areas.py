"""IoU by exact areas, for shapes too small for a raster (DESIGN 7.4).

Shape legend: T edges of both rings, L slabs between successive ordinates of ends and crossings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

Point: TypeAlias = tuple[int, int]

# Squared bins. Sums of floats over 999 x 999 bins are wrong by less than 1e-9; what is under this is a line or a point.
_NO_AREA = 1e-6
# Right of every bin: where an edge that does not cross a slab is put, so that it bounds nothing there.
_BEYOND = 1000.0
# Slabs times edges at once, about 8 MB per array.
_MAX_CELLS = 1_000_000


def exact_iou(a: Sequence[Point], b: Sequence[Point]) -> float:
    """IoU, 0..1, of the areas that two rings in 0..999 enclose (even-odd rule). Without any area: 1 for the same vertices, else 0."""
    edges_a, edges_b = _edges(a), _edges(b)
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
    """(ax, ay, bx, by) upwards. Left out is what bounds no area: horizontal edges, and those walked an even number of times."""
    times = Counter((*a, *b) if a[1] < b[1] else (*b, *a) for a, b in zip(ring, [*ring[1:], ring[0]], strict=True))
    return [edge for edge, count in times.items() if edge[1] != edge[3] and count % 2]


def _levels(edges_T4: np.ndarray) -> np.ndarray:
    """[L + 1]: the ordinates of all ends and crossings of edges, ascending."""
    ax, ay, bx, by = edges_T4.T[:, :, None]
    cx, cy, dx, dy = edges_T4.T[:, None, :]
    determinant_TT = (bx - ax) * (dy - cy) - (by - ay) * (dx - cx)
    numerator_TT = (by - ay) * ((cx - ax) * (dy - cy) - (cy - ay) * (dx - cx))
    crossings_TT = ay + np.divide(numerator_TT, determinant_TT, out=np.full(determinant_TT.shape, np.inf), where=determinant_TT != 0)
    is_on_both_TT = (np.maximum(ay, cy) < crossings_TT) & (crossings_TT < np.minimum(by, dy))
    return np.unique(np.concatenate([edges_T4[:, 1], edges_T4[:, 3], crossings_TT[is_on_both_TT]]))


def _slab_areas(levels: np.ndarray, edges_T4: np.ndarray, is_a_T: np.ndarray) -> np.ndarray:
    """The areas of a, of b and of both between the first and the last level."""
    # No edges cross inside a slab, so every width is linear there and the middle one is the mean.
    middle_L1 = ((levels[:-1] + levels[1:]) / 2)[:, None]
    ax, ay, bx, by = edges_T4.T
    x_LT = ax + (middle_L1 - ay) * ((bx - ax) / (by - ay))
    # Half-open: an even number of crossings also where rounding puts a middle on a vertex.
    x_LT = np.where((ay <= middle_L1) & (middle_L1 < by), x_LT, _BEYOND)
    order_LT = np.argsort(x_LT, axis=1, kind="stable")
    gaps = np.diff(x_LT[np.arange(len(x_LT))[:, None], order_LT], axis=1)
    is_a_LT = is_a_T[order_LT]
    in_a, in_b = (np.logical_xor.accumulate(is_mine_LT, axis=1)[:, :-1] for is_mine_LT in (is_a_LT, ~is_a_LT))
    heights = np.diff(levels)
    # Where both rings are the same, all three sums are of the same numbers: their IoU is 1 without rounding.
    return np.array([float(heights @ (gaps * inside).sum(axis=1)) for inside in (in_a, in_b, in_a & in_b)])
