from __future__ import annotations

import numpy as np
import pytest

from shared.grounding.geometry import simplify_ring


def slow_simplified(points: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """Every triangle anew for each vertex that goes."""
    ring = list(points)
    while len(ring) > count:
        areas = [
            abs(np.linalg.det([[*ring[i - 1], 1], [*ring[i], 1], [*ring[(i + 1) % len(ring)], 1]]))
            for i in range(len(ring))
        ]
        ring.pop(next(i for i, area in enumerate(areas) if area <= min(areas) + 1e-6))
    return ring


def test_it_equals_the_slow_version() -> None:
    rng = np.random.default_rng(0)
    for count in range(3, 15):
        points = [(int(x), int(y)) for x, y in rng.integers(0, 1000, size=(15, 2))]
        assert simplify_ring(points, count) == slow_simplified(points, count)


def test_what_changes_the_area_least_goes_first() -> None:
    ring = [(0, 0), (5, 0), (10, 0), (10, 10), (5, 11), (0, 10)]
    assert simplify_ring(ring, 5) == [(0, 0), (10, 0), (10, 10), (5, 11), (0, 10)]
    assert simplify_ring(ring, 4) == [(0, 0), (10, 0), (10, 10), (0, 10)]
    assert simplify_ring(ring, 6) == ring


def test_fewer_than_three_vertices_are_no_polygon() -> None:
    with pytest.raises(ValueError, match="keep at least 3"):
        simplify_ring([(0, 0), (1, 0), (0, 1)], 2)
