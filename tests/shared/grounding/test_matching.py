from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from scene_support import truth

from benchmarks.matching import slow_candidates
from shared.grounding.geometry import aabb, mask_iou
from shared.grounding.matching import MatchedPair, MatchResult, candidates, match_objects
from shared.grounding.objects import ParsedObject
from shared.grounding.scores import Criterion, num_found
from shared.records import GroundTruthObject


def guess(*bins: int, desc: str = "guess") -> ParsedObject:
    kind = truth(*bins).kind
    return ParsedObject("object_1", 1, kind, desc, bins, tuple(range(len(bins))), (0, len(bins)))


def indices(result: MatchResult) -> list[tuple[int, int]]:
    return [pair[:2] for pair in result.pairs]


def slow_match(
    predictions: list[ParsedObject],
    ground_truth: list[GroundTruthObject],
    *,
    gate: float,
    fp_cost: float,
    fn_cost: float,
) -> float:
    """The least total cost over every way to pair some predictions with different ground truths."""
    table = [[mask_iou(prediction, other) for other in ground_truth] for prediction in predictions]
    costs = []
    for size in range(min(len(predictions), len(ground_truth)) + 1):
        unmatched = (len(predictions) - size) * fp_cost + (len(ground_truth) - size) * fn_cost
        for chosen in itertools.combinations(range(len(predictions)), size):
            for partners in itertools.permutations(range(len(ground_truth)), size):
                ious = [table[i][j] for i, j in zip(chosen, partners, strict=True)]
                if all(iou >= gate for iou in ious):
                    costs.append(sum(1 - iou for iou in ious) + unmatched)
    return min(costs)


def random_bins(generator: random.Random) -> tuple[int, ...]:
    x, y = generator.randint(0, 700), generator.randint(0, 700)
    right, bottom = x + generator.randint(100, 299), y + generator.randint(100, 299)
    return (x, y, right, bottom) if generator.random() < 0.7 else (x, y, right, y, x, bottom)


def check_partition(result: MatchResult, num_predictions: int, num_ground_truth: int) -> None:
    predictions = [pair.prediction for pair in result.pairs]
    truths = [pair.ground_truth for pair in result.pairs]
    assert sorted([*predictions, *result.unmatched_predictions]) == list(range(num_predictions))
    assert sorted([*truths, *result.unmatched_ground_truth]) == list(range(num_ground_truth))


@pytest.mark.slow
def test_the_assignment_has_the_least_cost_of_all() -> None:
    generator = random.Random(11)
    for _ in range(80):
        predictions = [guess(*random_bins(generator)) for _ in range(generator.randint(0, 4))]
        ground_truth = [truth(*random_bins(generator)) for _ in range(generator.randint(0, 4))]
        gate = generator.choice([0.0, 0.1, 0.3])
        fp_cost = generator.choice([0.2, 1.0])
        fn_cost = generator.choice([0.2, 1.0])
        result = match_objects(
            predictions, ground_truth, maskiou_gate=gate, fp_cost=fp_cost, fn_cost=fn_cost
        )
        check_partition(result, len(predictions), len(ground_truth))
        for i, j, iou in result.pairs:
            assert iou == mask_iou(predictions[i], ground_truth[j]) >= gate
        cost = (
            sum(1 - pair.iou for pair in result.pairs)
            + len(result.unmatched_predictions) * fp_cost
            + len(result.unmatched_ground_truth) * fn_cost
        )
        assert cost == pytest.approx(
            slow_match(predictions, ground_truth, gate=gate, fp_cost=fp_cost, fn_cost=fn_cost)
        )
        again = match_objects(
            predictions, ground_truth, maskiou_gate=gate, fp_cost=fp_cost, fn_cost=fn_cost
        )
        assert again == result


def test_pre_assignment_gating_prevents_wrong_matches_and_triggers_fn_append() -> None:
    predictions = [
        guess(100, 100, 300, 300),
        guess(900, 0, 950, 50),
        guess(600, 600, 700, 600, 600, 700),
    ]
    ground_truth = [truth(200, 200, 400, 400), truth(650, 650, 750, 650, 750, 750)]
    result = match_objects(predictions, ground_truth)
    assert result == MatchResult((), (0, 1, 2), (0, 1), gating_rejections=6)
    result = match_objects(predictions, ground_truth, maskiou_gate=0.149)
    assert indices(result) == [(0, 0)]
    assert result.pairs[0].iou == pytest.approx(0.149359, abs=5e-7)
    assert (result.unmatched_ground_truth, result.gating_rejections) == ((1,), 5)


def test_gating_comes_before_the_assignment() -> None:
    # By cost alone 0 -> 1 (under the gate) and 1 -> 0 win together; a gate after the assignment
    # would leave the worse pair 1 -> 0.
    predictions = [guess(276, 0, 476, 500), guess(104, 0, 304, 500)]
    ground_truth = [truth(200, 0, 400, 500), truth(386, 0, 586, 500)]
    assert indices(match_objects(predictions, ground_truth, maskiou_gate=0.0)) == [(0, 1), (1, 0)]
    assert indices(match_objects(predictions, ground_truth)) == [(0, 0)]


def test_a_desc_plays_no_part_in_the_match() -> None:
    result = match_objects([guess(0, 0, 100, 100, desc="cat")], [truth(0, 0, 100, 100, desc="dog")])
    assert result.pairs == (MatchedPair(0, 0, 1.0),)


@pytest.mark.parametrize(("num_predictions", "num_ground_truth"), [(0, 0), (2, 0), (0, 2)])
def test_either_side_may_be_empty(num_predictions: int, num_ground_truth: int) -> None:
    predictions = [guess(0, 0, 9, 9)] * num_predictions
    ground_truth = [truth(0, 0, 9, 9)] * num_ground_truth
    unmatched = (tuple(range(num_predictions)), tuple(range(num_ground_truth)))
    assert match_objects(predictions, ground_truth) == MatchResult((), *unmatched, 0)


@pytest.mark.parametrize("side", range(4))
def test_identical_small_shapes_match_with_iou_1(side: int) -> None:
    corners = list(itertools.product(range(0, 1000 - side, 197), repeat=2))
    boxes = [(x, y, x + side, y + side) for x, y in corners]
    triangles = [
        (x + 40, y + 40, x + 40 + side, y + 40, x + 40 + side, y + 40 + side)
        for x, y in corners
        if max(x, y) + side < 900
    ]
    bins = boxes + triangles
    result = match_objects(
        [guess(*values) for values in reversed(bins)], [truth(*values) for values in bins]
    )
    last = len(bins) - 1
    assert result.pairs == tuple(MatchedPair(i, last - i, 1.0) for i in range(len(bins)))


def test_any_shape_a_model_may_write_is_matched_or_not_but_never_an_error() -> None:
    generator = random.Random(13)

    def odd_bins() -> tuple[int, ...]:
        reach = generator.choice([0, 1, 3, 12, 999])
        x, y = generator.randint(0, 999 - reach), generator.randint(0, 999 - reach)
        points = [
            (x + generator.randint(0, reach), y + generator.randint(0, reach))
            for _ in range(generator.randint(3, 8))
        ]
        if generator.random() < 0.3:
            (x1, x2), (y1, y2) = (sorted(values[:2]) for values in zip(*points, strict=True))
            return x1, y1, x2, y2
        repeated = points[: generator.randint(0, 3)]
        return tuple(value for point in points + repeated for value in point)

    for _ in range(40):
        predictions = [guess(*odd_bins()) for _ in range(generator.randint(1, 6))]
        others = [truth(*odd_bins()) for _ in range(3)]
        ground_truth = others + [truth(*prediction.bins) for prediction in predictions]
        result = match_objects(predictions, ground_truth)
        check_partition(result, len(predictions), len(ground_truth))
        for i, j, iou in result.pairs:
            assert iou == mask_iou(predictions[i], ground_truth[j])
        assert [pair.iou for pair in result.pairs] == [1.0] * len(predictions)


@pytest.mark.parametrize(
    ("distance", "overlap", "is_pair"),
    [((0, 0), 1.0, True), ((30, 40), 0.5, True), ((31, 40), 0.494, False), ((0, 100), 0.0, False)],
)
def test_points_match_by_their_distance_and_the_tolerance_is_an_overlap_of_half(
    distance: tuple[int, int], overlap: float, is_pair: bool
) -> None:
    found = guess(500 + distance[0], 300 + distance[1])
    result = match_objects([found], [truth(500, 300)], maskiou_gate=0.5)
    assert indices(result) == ([(0, 0)] if is_pair else [])
    assert result.gating_rejections == (not is_pair)
    # Half the tolerance is twice as strict.
    stricter = match_objects([found], [truth(500, 300)], maskiou_gate=0.0, point_tolerance=25.0)
    assert stricter.pairs[0].iou == pytest.approx(max(0.0, 2 * overlap - 1), abs=1e-3)


def test_a_point_and_another_shape_are_no_pair_and_neither_hides_the_other() -> None:
    boxes = [truth(x, x, x + 50, x + 50) for x in range(0, 900, 30)]
    on_a_box = truth(15, 15, 15, 15)
    found = [guess(15, 15), guess(0, 0, 50, 50), guess(610, 600)]
    assert indices(match_objects(found[:1], [*boxes, on_a_box], maskiou_gate=0.0)) == []
    result = match_objects(found, [truth(600, 600), *boxes, truth(15, 10)], candidate_top_k=1)
    assert result.pairs == (
        MatchedPair(0, len(boxes) + 1, 0.95),
        MatchedPair(1, 1, 1.0),
        MatchedPair(2, 0, 0.9),
    )
    # The nearest point of each is compared, and nothing of another kind.
    assert result.gating_rejections == 0


def test_candidates_are_by_overlap_then_by_distance_then_by_index() -> None:
    generator = random.Random(2)
    for _ in range(60):
        predictions = [guess(*random_bins(generator)) for _ in range(3)]
        ground_truth = [truth(*random_bins(generator)) for _ in range(8)]
        ground_truth.append(ground_truth[generator.randrange(8)])  # ties
        boxes_P4 = np.array([aabb(shape) for shape in predictions], dtype=np.int64)
        boxes_G4 = np.array([aabb(shape) for shape in ground_truth], dtype=np.int64)
        for top_k in (1, 3, 20):
            expected = [slow_candidates(shape, ground_truth, top_k) for shape in predictions]
            assert candidates(boxes_P4, boxes_G4, top_k).tolist() == expected


def test_no_candidates_are_refused() -> None:
    with pytest.raises(ValueError, match="candidate_top_k"):
        match_objects([], [], candidate_top_k=0)


def test_a_found_point_is_within_the_runs_tolerance() -> None:
    found, wanted = [guess(530, 300)], [truth(500, 300)]
    assert num_found(found, wanted, Criterion(0.5, by_name=False)) == 1
    assert num_found(found, wanted, Criterion(0.5, by_name=False, point_tolerance=20.0)) == 0
