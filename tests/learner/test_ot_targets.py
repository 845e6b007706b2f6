"""Decision 36, against a plain dense Sinkhorn in loops."""

import math
import random
from dataclasses import dataclass

import numpy as np
import pytest

from learner.ot_targets import OTSettings, barycentric_targets, slot_targets
from shared.records import GeometryKind

DEFAULTS = OTSettings(cost="l2", epsilon=10.0, iters=30)


@dataclass(frozen=True)
class Drawn:
    kind: GeometryKind
    bins: tuple[int, ...]


def box(*bins):
    return Drawn(GeometryKind.BBOX, bins)


def poly(*bins):
    return Drawn(GeometryKind.POLY, bins)


def slow_targets(points, gt_points, epsilon=10.0, iters=30, cost="l2"):
    """Sinkhorn's scalings entry by entry, then each row's weighted mean."""
    n, m = len(points), len(gt_points)
    kernel = [[0.0] * m for _ in range(n)]
    for i, (x, y) in enumerate(points):
        for j, (gx, gy) in enumerate(gt_points):
            distance = abs(x - gx) + abs(y - gy) if cost == "l1" else math.hypot(x - gx, y - gy)
            kernel[i][j] = math.exp(-distance / epsilon)
    u, v = [1.0] * n, [1.0] * m
    for _ in range(iters):
        v = [1 / m / sum(kernel[i][j] * u[i] for i in range(n)) for j in range(m)]
        u = [1 / n / sum(kernel[i][j] * v[j] for j in range(m)) for i in range(n)]
    targets = []
    for i in range(n):
        weights = [u[i] * kernel[i][j] * v[j] for j in range(m)]
        pairs = list(zip(weights, gt_points, strict=True))
        total = sum(weights)
        targets.append([sum(w * point[axis] for w, point in pairs) / total for axis in (0, 1)])
    return targets


def draw_points(draw, count, low=0, high=999):
    return [(draw.randint(low, high), draw.randint(low, high)) for _ in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("cost", ["l1", "l2"])
def test_targets_are_those_of_a_plain_dense_sinkhorn(cost):
    draw = random.Random(1)
    for _ in range(25):
        points = draw_points(draw, draw.randint(1, 9))
        gt_points = draw_points(draw, draw.randint(1, 9))
        # The plain loops underflow for smaller ones.
        epsilon, iters = draw.choice([10.0, 30.0, 200.0]), draw.randint(1, 40)
        actual = barycentric_targets(
            np.array(points), np.array(gt_points), epsilon=epsilon, iters=iters, cost=cost
        )
        expected = slow_targets(points, gt_points, epsilon, iters, cost)
        assert actual.dtype == np.float64
        np.testing.assert_allclose(actual, expected, atol=1e-8)


def test_a_small_epsilon_is_computed_in_the_log_domain():
    draw = random.Random(2)
    for _ in range(10):
        # Small distances, so that the plain loops do not underflow, at an epsilon that leads to the
        # log domain.
        points, gt_points = draw_points(draw, 5, high=60), draw_points(draw, 4, high=60)
        actual = barycentric_targets(np.array(points), np.array(gt_points), epsilon=0.25, iters=20)
        np.testing.assert_allclose(actual, slow_targets(points, gt_points, 0.25, 20), atol=1e-8)


def points_of(bins):
    return list(zip(bins[::2], bins[1::2], strict=True))


@pytest.mark.parametrize(
    ("truth", "corners", "settings"),
    [
        (poly(105, 95, 310, 100, 300, 300, 110, 305), None, DEFAULTS),
        (
            box(110, 90, 310, 305),
            (110, 90, 310, 90, 310, 305, 110, 305),
            OTSettings(cost="l1", epsilon=5.0, iters=20),
        ),
    ],
    ids=["polygon", "box"],
)
def test_poly_prediction_is_supervised_by_barycentric_projected_targets_of_a_polygon(
    truth, corners, settings
):
    prediction = poly(100, 100, 300, 110, 290, 310, 90, 300)
    expected = slow_targets(
        points_of(prediction.bins),
        points_of(corners or truth.bins),
        settings.epsilon,
        settings.iters,
        settings.cost,
    )
    targets = slot_targets(prediction, truth, settings)
    assert all(isinstance(value, float) for value in targets)
    np.testing.assert_allclose(np.reshape(targets, (4, 2)), expected, atol=1e-8)


def test_a_cap_of_epsilon_keeps_a_small_square_as_large_as_it_is_and_a_large_one_as_it_was():
    def square(side):
        return poly(500, 500, 500 + side, 500, 500 + side, 500 + side, 500, 500 + side)

    def moved(shape, settings):
        return np.abs(np.array(slot_targets(shape, shape, settings)) - shape.bins).max()

    capped = OTSettings(cost="l2", epsilon=10.0, iters=30, epsilon_cap=0.2)
    assert moved(square(10), DEFAULTS) > 2.9
    assert moved(square(10), capped) < 0.1
    assert capped.epsilon_of(square(10)) == pytest.approx(2.0)
    assert capped.epsilon_of(square(50)) == DEFAULTS.epsilon_of(square(10)) == 10.0
    assert slot_targets(square(50), square(50), capped) == slot_targets(
        square(50), square(50), DEFAULTS
    )
    # By its shorter side, so that the long edges of a thin shape are not drawn together; at least
    # of one bin, so that there always is an epsilon.
    assert capped.epsilon_of(poly(0, 0, 400, 0, 400, 6, 0, 6)) == pytest.approx(1.2)
    assert capped.epsilon_of(box(0, 0, 400, 6)) == pytest.approx(1.2)
    flat = poly(0, 5, 400, 5, 200, 5)
    assert capped.epsilon_of(flat) == 0.2
    assert moved(flat, capped) < 1e-6


def test_a_box_matched_with_a_polygon_takes_the_enclosing_box_of_its_projected_corners():
    prediction, truth = box(100, 100, 300, 310), poly(200, 90, 310, 200, 205, 320, 95, 190)
    corners = [(100, 100), (300, 100), (300, 310), (100, 310)]
    projected = np.array(slow_targets(corners, points_of(truth.bins)))
    expected = [*projected.min(axis=0), *projected.max(axis=0)]
    np.testing.assert_allclose(slot_targets(prediction, truth, DEFAULTS), expected, atol=1e-8)


def test_a_box_matched_with_a_box_takes_the_ground_truth_directly():
    targets = slot_targets(box(100, 100, 300, 300), box(90, 110, 333, 299), DEFAULTS)
    assert targets == (90.0, 110.0, 333.0, 299.0)
    assert all(isinstance(value, float) for value in targets)


def test_any_shapes_have_one_target_per_slot_within_the_bins():
    draw = random.Random(7)

    def shape(high):
        points = draw_points(draw, draw.randint(3, 9), low=draw.choice([0, high]), high=high)
        if draw.random() < 0.4:
            xs, ys = zip(*points, strict=True)
            return box(min(xs), min(ys), max(xs), max(ys))
        return poly(*(value for point in points for value in point))

    for _ in range(60):
        high = draw.choice([0, 2, 999])
        prediction, truth = shape(high), shape(high)
        epsilon, cost = draw.choice([1e-3, 10.0]), draw.choice(["l1", "l2"])
        targets = slot_targets(prediction, truth, OTSettings(cost=cost, epsilon=epsilon, iters=5))
        assert len(targets) == len(prediction.bins)
        assert all(0 <= value <= 999 for value in targets)


def test_a_projection_that_is_not_finite_is_none():
    prediction, truth = poly(0, 0, 9, 0, 9, 9), poly(0, 0, 9, 0, 9, 900)
    assert slot_targets(prediction, truth, OTSettings("l2", 1e-310, 30)) is None
