"""Target bins of coordinate slots for matched polygons, by entropic optimal transport.

Only barycentric projection is implemented (decision 36).

Shape legend: N points of the prediction, M points of the ground truth.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shared.grounding.geometry import MAX_BIN, Shape, vertices
from shared.records import GeometryKind

# The order of the norm for each distance.
_NORMS = {"l1": 1, "l2": 2}

# If distance / epsilon is at most this, products of scalings and kernel stay far from e^-708.
_MAX_EXPONENT = 200.0


@dataclass(frozen=True, slots=True)
class OTSettings:
    """Settings of the optimal transport between predicted and ground-truth polygons.

    They come from the section `rollout_matching` of the configuration.
    """

    cost: str
    """Cost of moving a point to another: their distance in bins, `l1` or `l2`, not squared."""
    epsilon: float
    """Entropy weight, in bins, above 0. Large values move targets to the ground truth's mean."""
    iters: int
    """Number of Sinkhorn iterations, at least 1."""
    epsilon_cap: float | None = None
    """Upper limit of `epsilon`, as a multiple of the polygon's size (see `epsilon_of`); None: no
    limit."""

    def epsilon_of(self, ground_truth: Shape) -> float:
        """Return the entropy weight for a ground-truth polygon: `epsilon`, capped by its size.

        The size of a polygon is the shorter side of its enclosing box, in bins, and at least 1. The
        longer side or the area would give an epsilon that merges the two long edges of a thin
        shape.

        Example: for a square of side 10, epsilon 10 with a cap of 0.2 is 2.
        """
        if self.epsilon_cap is None:
            return self.epsilon
        sides = np.ptp(np.array(vertices(ground_truth)), axis=0)
        return min(self.epsilon, self.epsilon_cap * max(1.0, float(sides.min())))


def slot_targets(
    prediction: Shape, ground_truth: Shape, settings: OTSettings
) -> tuple[float, ...] | None:
    """Return the bins (0..999) that the coordinates of a matched predicted object should have.

    The result has one target per coordinate of the prediction, in the same order.

    Two boxes or two points: the ground truth's bins. A predicted polygon: its vertices, projected
    onto the ground truth. A predicted box with a polygon as ground truth: the enclosing box of its
    four projected corners. None if a projection is not finite, because epsilon is so small that
    distance / epsilon overflows. The caller then excludes the pair and counts it.

    Example: a box [110, 90, 310, 290] matched with the box [100, 100, 300, 300] has the targets
    (100.0, 100.0, 300.0, 300.0).
    """
    if GeometryKind.POLY not in (prediction.kind, ground_truth.kind):
        return tuple(float(bin) for bin in ground_truth.bins)
    targets_N2 = barycentric_targets(
        np.array(vertices(prediction), dtype=np.float64),
        np.array(vertices(ground_truth), dtype=np.float64),
        epsilon=settings.epsilon_of(ground_truth),
        iters=settings.iters,
        cost=settings.cost,
    )
    if not np.isfinite(targets_N2).all():
        return None
    if prediction.kind is GeometryKind.BBOX:
        targets_N2 = np.stack([targets_N2.min(axis=0), targets_N2.max(axis=0)])
    return tuple(targets_N2.clip(0, MAX_BIN).ravel().tolist())


def barycentric_targets(
    pred_points: np.ndarray,
    gt_points: np.ndarray,
    *,
    epsilon: float = 10.0,
    iters: int = 30,
    cost: str = "l2",
) -> np.ndarray:
    """Return the point to which optimal transport moves each predicted point.

    It is a mean of the ground-truth points, weighted by the transport plan.

    Args:
        pred_points: [N, 2], in bins.
        gt_points: [M, 2], in bins.
        epsilon: entropy weight, in bins, above 0.
        iters: number of Sinkhorn iterations, without early stopping; the last one makes the
            predicted points' marginal exact.
        cost: `l1` or `l2`, the distance of two points, not squared.

    Returns:
        float64 [N, 2], in the convex hull of `gt_points` except for rounding. Not finite only if
        `distance / epsilon` overflows.
    """
    from ot import sinkhorn  # the import takes a second or more, and boxes do not need it

    distance_NM = np.linalg.norm(pred_points[:, None] - gt_points[None], ord=_NORMS[cost], axis=-1)
    uniform_N = np.full(len(pred_points), 1 / len(pred_points))
    uniform_M = np.full(len(gt_points), 1 / len(gt_points))
    # Both methods compute the same iterations. For 12 x 12 points "sinkhorn" takes 0.5 ms and
    # "sinkhorn_log" 4 ms, but "sinkhorn_log" never underflows.
    method = "sinkhorn" if distance_NM.max() < _MAX_EXPONENT * epsilon else "sinkhorn_log"
    with np.errstate(over="ignore", invalid="ignore"):
        plan_NM = sinkhorn(
            uniform_N,
            uniform_M,
            distance_NM,
            epsilon,
            method=method,
            numItermax=iters,
            stopThr=0.0,
            warn=False,
        )
        return (plan_NM @ gt_points) / plan_NM.sum(axis=1, keepdims=True)
