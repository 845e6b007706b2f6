"""Matching of predicted objects with ground-truth objects, whatever their names (decision 34).

It is the assignment of least cost (Hungarian algorithm). A pair costs less the higher its mask IoU
is, the IoU of the filled shapes. Points are matched only with points, by their distance.

Shape legend: P predictions, G ground truths, K candidates of each prediction, N = P + G.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shared.grounding.geometry import Rasters, Shape, box_iou, point_overlap
from shared.grounding.objects import ParsedObject
from shared.records import POINT_TOLERANCE, GeometryKind, GroundTruthObject


class MatchedPair(NamedTuple):
    """A predicted object and the ground-truth object that it is matched with, by their indices."""

    prediction: int
    ground_truth: int
    iou: float
    """Mask IoU of the two objects; for points, their overlap by distance (`point_overlap`)."""


@dataclass(frozen=True, slots=True)
class MatchResult:
    """Which predicted objects are matched with which ground-truth objects, and which are not.

    Objects are given by their indices in the arguments of `match_objects`.

    Example: of 2 predictions and 1 ground truth the second matched: `MatchResult((MatchedPair(1, 0,
    0.8),), unmatched_predictions=(0,), unmatched_ground_truth=(), gating_rejections=1)`.
    """

    pairs: tuple[MatchedPair, ...]
    """The matched pairs, in order of predictions."""
    unmatched_predictions: tuple[int, ...]
    unmatched_ground_truth: tuple[int, ...]
    gating_rejections: int
    """Number of compared pairs that cannot match, because their IoU is below `maskiou_gate`."""


def match_objects(
    predictions: Sequence[ParsedObject],
    ground_truth: Sequence[GroundTruthObject],
    *,
    candidate_top_k: int = 10,
    maskiou_gate: float = 0.3,
    maskiou_resolution: int = 256,
    fp_cost: float = 1.0,
    fn_cost: float = 1.0,
    point_tolerance: float = POINT_TOLERANCE,
) -> MatchResult:
    """Match predicted objects with ground-truth objects, one to one, at least total cost.

    A pair costs `1 - maskIoU`, an unmatched prediction `fp_cost`, an unmatched ground truth
    `fn_cost`. Each prediction is compared only with its `candidate_top_k` nearest ground truths. A
    pair is possible only if its maskIoU is at least `maskiou_gate`. Two points use `point_overlap`
    instead of maskIoU; it is 0.5 at a distance of `point_tolerance` bins. A point never matches
    another kind of shape. Masks have `maskiou_resolution` pixels per axis. Raises ValueError for a
    `candidate_top_k` under 1.
    """
    if candidate_top_k < 1:
        raise ValueError(f"candidate_top_k is {candidate_top_k}; set it to at least 1")
    num_predictions = len(predictions)
    num_ground_truth = len(ground_truth)
    iou_PG = np.full((num_predictions, num_ground_truth), np.nan)
    for are_points in (False, True):
        found_P = _indices(predictions, are_points)
        truth_G = _indices(ground_truth, are_points)
        if not len(found_P) or not len(truth_G):
            continue
        shapes = [predictions[i] for i in found_P], [ground_truth[j] for j in truth_G]
        if are_points:
            found_P2, truth_G2 = (np.array([one.bins for one in points]) for points in shapes)
            overlap_PG = point_overlap(found_P2, truth_G2, point_tolerance)
            nearest_PK = candidates(np.tile(found_P2, 2), np.tile(truth_G2, 2), candidate_top_k)
            overlap_PK = np.take_along_axis(overlap_PG, nearest_PK, axis=1)
        else:
            rasters = Rasters.of([*shapes[0], *shapes[1]], maskiou_resolution)
            first = len(found_P)  # index of the first ground truth
            nearest_PK = candidates(
                rasters.boxes_N4[:first], rasters.boxes_N4[first:], candidate_top_k
            )
            overlap_PK = rasters.mask_iou(np.arange(first), first + nearest_PK)
        iou_PG[found_P[:, None], truth_G[nearest_PK]] = overlap_PK
    feasible_PG = iou_PG >= maskiou_gate  # false for a pair that was not compared: NaN

    # Imported here, because commands that match nothing import this module.
    from scipy.optimize import linear_sum_assignment

    cost_NN = np.zeros((num_predictions + num_ground_truth,) * 2)
    cost_NN[:num_predictions, :num_ground_truth] = np.where(feasible_PG, 1.0 - iou_PG, np.inf)
    cost_NN[:num_predictions, num_ground_truth:] = fp_cost
    cost_NN[num_predictions:, :num_ground_truth] = fn_cost
    rows, columns = linear_sum_assignment(cost_NN)
    pairs = tuple(
        MatchedPair(int(row), int(column), float(iou_PG[row, column]))
        for row, column in zip(rows, columns, strict=True)
        if row < num_predictions and column < num_ground_truth and feasible_PG[row, column]
    )
    return MatchResult(
        pairs=pairs,
        unmatched_predictions=_others(num_predictions, [pair.prediction for pair in pairs]),
        unmatched_ground_truth=_others(num_ground_truth, [pair.ground_truth for pair in pairs]),
        gating_rejections=int((iou_PG < maskiou_gate).sum()),
    )


def _indices(shapes: Sequence[Shape], are_points: bool) -> np.ndarray:
    """Return the indices of the shapes that are points, or of those that are not: int [n]."""
    return np.flatnonzero([(one.kind is GeometryKind.POINT) == are_points for one in shapes])


def candidates(boxes_P4: np.ndarray, boxes_G4: np.ndarray, top_k: int) -> np.ndarray:
    """Return the indices of the K nearest ground truths of each prediction: int [P, K].

    Ground truths with overlapping boxes come first, by IoU, then the others by distance. Ties are
    in order of indices.
    """
    iou_PG = box_iou(boxes_P4, boxes_G4)
    # Twice the centres, in integers, so that rounding does not break ties of equal distance.
    centres_P2 = boxes_P4[:, :2] + boxes_P4[:, 2:]
    centres_G2 = boxes_G4[:, :2] + boxes_G4[:, 2:]
    distance_PG = ((centres_P2[:, None] - centres_G2[None]) ** 2).sum(axis=-1)
    return np.argsort(np.where(iou_PG > 0, -iou_PG, distance_PG), axis=-1, kind="stable")[:, :top_k]


def _others(count: int, matched: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(set(range(count)) - set(matched)))
