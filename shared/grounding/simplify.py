"""Polygons with fewer vertices: each vertex costs tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Number = TypeVar("Number", int, float)

MIN_VERTICES = 3


def simplify_ring(points: Sequence[tuple[Number, Number]], max_vertices: int) -> list[tuple[Number, Number]]:
    """The ring with at most `max_vertices` of its vertices, in their order (Visvalingam and Whyatt).

    The vertex whose triangle with its two neighbours is smallest goes first, ties by index; so those that matter least to the area go.
    ValueError for fewer than 3.
    """
    if max_vertices < MIN_VERTICES:
        raise ValueError(f"a polygon of {max_vertices} vertices has no area; keep at least {MIN_VERTICES}")
    ring = list(points)
    areas = [_area_at(ring, i) for i in range(len(ring))]
    while len(ring) > max_vertices:
        least = areas.index(min(areas))
        del ring[least], areas[least]
        for i in ((least - 1) % len(ring), least % len(ring)):  # the neighbours that it had
            areas[i] = _area_at(ring, i)
    return ring


def _area_at(ring: Sequence[tuple[Number, Number]], i: int) -> Number:
    """Twice the area of the triangle of vertex `i` and its two neighbours."""
    a, b, c = ring[i - 1], ring[i], ring[(i + 1) % len(ring)]
    return abs((b[0] - a[0]) * (c[1] - a[1]) - (c[0] - a[0]) * (b[1] - a[1]))
