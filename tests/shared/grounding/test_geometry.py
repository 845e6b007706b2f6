from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import numpy as np
import pytest

from benchmarks.matching import slow_area_iou
from shared.grounding.geometry import (
    Point,
    Rasters,
    aabb,
    bin_box,
    bin_points,
    box_iou,
    mask_iou,
    pixels_of,
    polygon_iou,
    simplify_ring,
    vertices,
)
from shared.records import GeometryKind, GroundTruthObject


def box(*bins: int) -> GroundTruthObject:
    return GroundTruthObject(GeometryKind.BBOX, bins, "box")


def poly(*bins: int) -> GroundTruthObject:
    return GroundTruthObject(GeometryKind.POLY, bins, "poly")


def edges_of(ring: list) -> list[tuple]:
    return list(zip(ring, [*ring[1:], ring[0]], strict=True))


def slow_mask(shape: GroundTruthObject, resolution: int) -> np.ndarray:
    """Pixel by pixel, in exact fractions: an odd number of edges to the left of the centre."""
    scale = Fraction(resolution - 1, 999)
    ring = [(x * scale, y * scale) for x, y in vertices(shape)]
    mask = np.zeros((resolution, resolution), dtype=bool)
    for row, column in itertools.product(range(resolution), repeat=2):
        cx, cy = column + Fraction(1, 2), row + Fraction(1, 2)
        for (ax, ay), (bx, by) in edges_of(ring):
            if (ay <= cy) != (by <= cy) and ax + (cy - ay) * (bx - ax) / (by - ay) <= cx:
                mask[row, column] ^= True
    return mask


def random_shape(generator: random.Random, reach: int = 999) -> GroundTruthObject:
    if generator.random() < 0.4:
        x1, x2 = sorted(generator.choices(range(reach + 1), k=2))
        y1, y2 = sorted(generator.choices(range(reach + 1), k=2))
        return box(x1, y1, x2, y2)
    return poly(*generator.choices(range(reach + 1), k=2 * generator.randint(3, 7)))


def test_the_example_of_the_design() -> None:
    iou = mask_iou(box(100, 100, 300, 300), box(200, 200, 400, 400))
    assert iou == pytest.approx(0.149359, abs=5e-7)


def unpacked(words_RW: np.ndarray, resolution: int) -> np.ndarray:
    bits = np.unpackbits(words_RW.astype("<u8").view(np.uint8), axis=1, bitorder="little")
    assert not bits[:, resolution:].any()
    return bits[:, :resolution].astype(bool)


LARGE = poly(3, 5, 990, 40, 400, 500, 995, 980, 20, 900, 700, 450)


@pytest.mark.slow
@pytest.mark.parametrize(("resolution", "count"), [(2, 30), (7, 30), (16, 30), (21, 30), (130, 0)])
def test_rasters_are_those_of_the_definition(resolution: int, count: int) -> None:
    """A row of the last is more than one word of pixels."""
    generator = random.Random(resolution)
    shapes = [LARGE, *(random_shape(generator) for _ in range(count))]
    rasters = Rasters.of(shapes, resolution)
    assert rasters.words_NRW is not None
    for shape, words_RW, num_pixels, (x1, y1, x2, y2) in zip(
        shapes, rasters.words_NRW, rasters.num_pixels_N, rasters.windows_N4, strict=True
    ):
        expected = slow_mask(shape, resolution)
        np.testing.assert_array_equal(unpacked(words_RW, resolution), expected)
        assert num_pixels == expected.sum() == expected[y1:y2, x1:x2].sum()


def test_boxes_alone_cover_the_pixels_that_they_cover_among_polygons() -> None:
    generator = random.Random(8)
    shapes = [random_shape(generator) for _ in range(100)]
    boxes = [shape for shape in shapes if shape.kind is GeometryKind.BBOX]
    alone = Rasters.of(boxes, 70)
    among = Rasters.of([*boxes, poly(0, 0, 9, 0, 9, 9)], 70)
    assert alone.words_NRW is None
    assert among.words_NRW is not None
    np.testing.assert_array_equal(alone.num_pixels_N, among.num_pixels_N[:-1])
    first = np.arange(len(boxes))
    others = np.tile(first, (len(boxes), 1))
    np.testing.assert_array_equal(alone.mask_iou(first, others), among.mask_iou(first, others))


@pytest.mark.slow
def test_mask_iou_is_the_ratio_of_the_rasters() -> None:
    generator = random.Random(3)
    compared = 0
    for _ in range(40):
        a, b = random_shape(generator), random_shape(generator)
        mask_a, mask_b = slow_mask(a, 20), slow_mask(b, 20)
        if min(mask_a.sum(), mask_b.sum()) >= 16:
            compared += 1
            expected = (mask_a & mask_b).sum() / (mask_a | mask_b).sum()
            assert mask_iou(a, b, resolution=20) == expected == mask_iou(b, a, resolution=20)
    assert compared > 10


CORNER = poly(10, 10, 14, 10, 10, 14)
L_SHAPE = poly(0, 0, 8, 0, 8, 4, 4, 4, 4, 8, 0, 8)
POINT = poly(5, 5, 5, 5, 5, 5)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        # Coordinates beyond the bins are clamped.
        (box(-50, 0, 2000, 999), box(0, 0, 999, 999), 1.0),
        (box(10, 10, 14, 14), box(12, 10, 16, 14), 1 / 3),
        (box(10, 10, 11, 11), box(10, 10, 11, 12), 1 / 2),
        (box(10, 10, 12, 12), box(11, 11, 13, 13), 1 / 7),
        (box(500, 500, 510, 510), box(0, 0, 999, 999), 100 / 999**2),
        (box(10, 10, 12, 12), poly(10, 10, 12, 10, 12, 12), 1 / 2),
        (poly(10, 10, 14, 10, 14, 14), poly(10, 10, 14, 14, 10, 14), 0.0),
        (CORNER, poly(14, 14, 10, 14, 14, 10), 0.0),
        (CORNER, poly(10, 10, 14, 10, 14, 14), 1 / 3),
        # An L against the square that is missing in it, and against the square around both.
        (L_SHAPE, box(4, 4, 8, 8), 0.0),
        (L_SHAPE, box(0, 0, 8, 8), 3 / 4),
        # A bow tie: two triangles, half of the box.
        (poly(0, 0, 8, 8, 8, 0, 0, 8), box(0, 0, 8, 8), 1 / 2),
        (box(10, 10, 10, 20), box(10, 10, 20, 20), 0.0),
        (box(10, 10, 10, 20), box(10, 10, 10, 30), 0.0),
        # Without area: collinear on a slope that has no exact slope in floats, repeated vertices, a
        # ring walked twice.
        (poly(0, 0, 3, 1, 9, 3), poly(0, 0, 3, 1, 6, 2), 0.0),
        (poly(0, 0, 3, 1, 9, 3), poly(9, 3, 0, 0, 3, 1), 1.0),
        (POINT, box(5, 5, 5, 5), 1.0),
        (POINT, box(5, 5, 5, 6), 0.0),
        (POINT, box(0, 0, 9, 9), 0.0),
        (poly(*CORNER.bins, *CORNER.bins), CORNER, 0.0),
        # Vertices repeated within a ring change nothing.
        (poly(10, 10, 10, 10, 14, 10, 14, 10, 10, 14), CORNER, 1.0),
    ],
)
def test_small_shapes_are_compared_by_exact_area(a, b, expected: float) -> None:
    assert mask_iou(a, b) == pytest.approx(expected, abs=1e-12) == mask_iou(b, a)


@pytest.mark.parametrize(
    "shape",
    [
        box(0, 0, 0, 0),
        box(999, 999, 999, 999),
        box(5, 5, 5, 900),
        box(7, 8, 9, 10),
        box(0, 0, 999, 999),
        POINT,
        poly(1, 1, 2, 2, 3, 3),
        poly(7, 7, 9, 8, 8, 11),
        poly(1, 1, 8, 9, 8, 1, 1, 9),
        poly(0, 0, 999, 999, 999, 0, 0, 999),
        poly(4, 4, 4, 4, 9, 4, 9, 4, 9, 9),
        poly(3, 3, 900, 3, 3, 900, 3, 3, 900, 3, 3, 900),
        *(box(500, 500, 500 + width, 500 + height) for width in range(4) for height in range(4)),
    ],
)
def test_identical_shapes_have_iou_1_at_any_size(shape: GroundTruthObject) -> None:
    assert mask_iou(shape, shape) == 1.0
    assert mask_iou(shape, GroundTruthObject(shape.kind, shape.bins, "another name")) == 1.0


def test_a_random_shape_is_identical_to_itself_and_to_itself_begun_elsewhere() -> None:
    generator = random.Random(5)
    for _ in range(60):
        shape = random_shape(generator, reach=generator.choice([5, 40, 999]))
        first, *rest = vertices(shape)
        turned = poly(*itertools.chain(*rest, first))
        assert mask_iou(shape, shape) == 1.0
        assert mask_iou(shape, turned) == pytest.approx(1.0, abs=1e-12)


def test_exact_areas_are_those_of_arithmetic_in_fractions() -> None:
    generator = random.Random(9)
    for _ in range(150):
        a = vertices(random_shape(generator, reach=generator.choice([3, 8, 999])))
        b = vertices(random_shape(generator, reach=generator.choice([3, 8, 999])))
        assert polygon_iou(a, b) == pytest.approx(slow_area_iou(a, b), abs=1e-9)


def test_a_long_tangle_is_compared_in_slabs_of_bounded_size() -> None:
    generator = random.Random(10)
    tangle = [(generator.randint(0, 15), generator.randint(0, 15)) for _ in range(150)]
    assert polygon_iou(tangle, tangle) == 1.0
    assert 0.1 < polygon_iou(tangle, [(0, 0), (15, 0), (15, 15), (0, 15)]) < 0.9


def test_a_canvas_needs_pixels() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        mask_iou(box(0, 0, 1, 1), box(0, 0, 1, 1), resolution=1)


def test_the_box_around_a_shape() -> None:
    assert aabb(poly(5, 90, 3, 7, 80, 20)) == (3, 7, 80, 90)
    assert aabb(box(1, 2, 3, 4)) == (1, 2, 3, 4)


def test_box_iou_is_that_of_continuous_areas() -> None:
    a = np.array([[0, 0, 10, 10], [5, 5, 5, 5]])
    b = np.array([[0, 0, 10, 10], [5, 0, 15, 10], [10, 0, 20, 10], [5, 5, 5, 5]])
    np.testing.assert_array_equal(box_iou(a, b), [[1.0, 50 / 150, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])


def test_pixels_become_bins_rounded_outwards() -> None:
    assert bin_box((0, 0, 767, 511), width=768, height=512) == (0, 0, 999, 999)
    assert bin_box((10, 20, 30, 40), width=96, height=96) == (
        math.floor(10 * 999 / 95),
        math.floor(20 * 999 / 95),
        math.ceil(30 * 999 / 95),
        math.ceil(40 * 999 / 95),
    )
    assert bin_box((-5, -5, 5000, 5000), width=100, height=100) == (0, 0, 999, 999)
    # Every pixel of an axis of 1,000 is a bin of its own: nothing to round, in floats too.
    for size, step in ((1000, 1), (334, 3)):
        for k in range(size):
            assert bin_box((k, k, k, k), width=size, height=size) == (step * k,) * 4


def test_polygon_vertices_become_the_nearest_bins_and_bins_pixels() -> None:
    assert bin_points((0, 0, 95, 95, 47.5, 30), width=96, height=96) == (0, 0, 999, 999, 500, 315)
    assert bin_points((-1, 200), width=96, height=96) == (0, 999)
    assert pixels_of((0, 999, 333, 0), width=334, height=101) == (0.0, 100.0, 111.0, 0.0)


def test_an_axis_of_one_pixel_has_no_scale() -> None:
    with pytest.raises(ValueError, match="at least 2 pixels"):
        bin_box((0, 0, 0, 0), width=1, height=10)


def slow_simplified(points: list[Point], count: int) -> list[Point]:
    """Every triangle anew for each vertex that goes."""
    ring = list(points)
    while len(ring) > count:
        triangles = zip([ring[-1], *ring[:-1]], ring, [*ring[1:], ring[0]], strict=True)
        areas = [abs(np.linalg.det([[*p, 1] for p in triangle])) for triangle in triangles]
        ring.pop(next(i for i, area in enumerate(areas) if area <= min(areas) + 1e-6))
    return ring


def test_a_simplified_ring_equals_the_slow_version() -> None:
    rng = np.random.default_rng(0)
    for count in range(3, 15):
        points = [(int(x), int(y)) for x, y in rng.integers(0, 1000, size=(15, 2))]
        assert simplify_ring(points, count) == slow_simplified(points, count)


def test_the_vertex_that_changes_the_area_least_goes_first() -> None:
    ring = [(0, 0), (5, 0), (10, 0), (10, 10), (5, 11), (0, 10)]
    assert simplify_ring(ring, 6) == ring
    assert simplify_ring(ring, 5) == [(0, 0), (10, 0), (10, 10), (5, 11), (0, 10)]
    assert simplify_ring(ring, 4) == [(0, 0), (10, 0), (10, 10), (0, 10)]


def test_fewer_than_three_vertices_are_no_polygon() -> None:
    with pytest.raises(ValueError, match="keep at least 3"):
        simplify_ring([(0, 0), (1, 0), (0, 1)], 2)
