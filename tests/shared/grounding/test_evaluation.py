"""Held-out counts against slow obvious ones (issue 3, "Evaluation")."""

from collections import Counter

import pytest
from scene_support import counts_of, guess, random_scenes, scene, truth

from shared.grounding.evaluation import DetectionCounts, summarise, worst_scenes
from shared.grounding.geometry import mask_iou
from shared.grounding.objects import DropReason


def detections(predictions, ground_truth, *, iou_threshold=0.5, dropped=()):
    return counts_of(
        scene(0, ground_truth, predictions, dropped=dropped), iou_threshold=iou_threshold
    )


def test_counts_and_ratios_of_a_scene() -> None:
    predictions = [
        guess(0, 0, 100, 100),
        guess(200, 200, 300, 300, desc="dog"),
        guess(600, 600, 700, 700),
    ]
    ground_truth = [truth(200, 200, 300, 310), truth(0, 0, 100, 90)]
    counts = detections(predictions, ground_truth, dropped=[DropReason.MALFORMED])
    assert counts == DetectionCounts(
        num_predictions=3, num_dropped=1, num_ground_truth=2, num_matched=2, num_class_correct=1
    )
    assert (
        counts.valid_rate,
        counts.precision,
        counts.recall,
        counts.f1,
        counts.class_accuracy,
    ) == (3 / 4, 2 / 3, 1.0, 0.8, 0.5)
    assert counts.f1 == pytest.approx(
        2 * counts.precision * counts.recall / (counts.precision + counts.recall)
    )


def test_pairs_are_taken_greedily_by_iou() -> None:
    # The best total would pair 0 with 0 and 1 with 1; the best pair is 0 with 1, and 1 with 0 is
    # under the threshold.
    predictions, ground_truth = (
        [guess(0, 0, 100, 100), guess(45, 0, 145, 100)],
        [truth(0, 0, 60, 100), truth(15, 0, 115, 100)],
    )
    assert detections(predictions, ground_truth).num_matched == 1


def test_ties_go_to_the_earlier_prediction_then_to_the_earlier_ground_truth() -> None:
    twins = [guess(0, 0, 100, 100, desc="cat"), guess(0, 0, 100, 100, desc="dog")]
    assert detections(twins, [truth(0, 0, 100, 100, desc="cat")]).num_class_correct == 1
    assert detections(twins[::-1], [truth(0, 0, 100, 100, desc="cat")]).num_class_correct == 0
    assert (
        detections(
            [twins[0]], [truth(0, 0, 100, 100, desc="dog"), truth(0, 0, 100, 100, desc="cat")]
        ).num_class_correct
        == 0
    )


def test_the_threshold_itself_counts() -> None:
    predictions, ground_truth = [guess(0, 0, 100, 100)], [truth(0, 0, 50, 100)]
    assert detections(predictions, ground_truth).num_matched == 1
    assert detections(predictions, ground_truth, iou_threshold=0.51).num_matched == 0


def test_counts_of_scenes_are_added() -> None:
    counts = [
        detections([guess(0, 0, 9, 9)], [truth(0, 0, 9, 9)]),
        detections([], [truth(0, 0, 9, 9)], dropped=[DropReason.MALFORMED] * 2),
    ]
    total = sum(counts, DetectionCounts())
    assert (
        total == DetectionCounts(1, 2, 2, 1, 1)
        and total.recall == 0.5
        and total.valid_rate == 1 / 3
    )


def test_a_ratio_over_nothing_is_0() -> None:
    empty = detections([], [])
    assert empty == DetectionCounts()
    assert (empty.valid_rate, empty.precision, empty.recall, empty.f1, empty.class_accuracy) == (
        0.0,
    ) * 5


def test_a_pair_with_a_polygon_overlaps_by_mask() -> None:
    # A triangle is half of the box around it, and the boxes of these two are the same.
    triangle, box = guess(0, 0, 600, 0, 600, 600), truth(0, 0, 600, 600)
    assert detections([triangle], [box], iou_threshold=0.45).num_matched == 1
    assert detections([triangle], [box], iou_threshold=0.55).num_matched == 0
    other_half = truth(0, 0, 600, 600, 0, 600)
    assert detections([triangle], [other_half], iou_threshold=0.05).num_matched == 0
    assert detections([triangle], [truth(*triangle.bins)], iou_threshold=1.0).num_matched == 1
    assert mask_iou(triangle, box) == pytest.approx(0.5, abs=0.01)


# What `summarise` does, slowly: every pair of every scene again for every threshold.


def slow_iou(a, b) -> float:
    width = max(0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0, min(a[3], b[3]) - max(a[1], b[1]))
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - width * height
    return width * height / union


def slow_pairs(one, threshold, *, same_class):
    """Take the best pair that is left until there is none."""
    found, truths = dict(enumerate(one.objects)), dict(enumerate(one.sample.objects))
    pairs = []
    while True:
        left = [
            (-slow_iou(p.bins, t.bins), i, j)
            for i, p in found.items()
            for j, t in truths.items()
            if slow_iou(p.bins, t.bins) >= threshold and (p.desc == t.desc or not same_class)
        ]
        if not left:
            return pairs
        _, i, j = min(left)
        pairs.append((found.pop(i), truths.pop(j)))


@pytest.mark.parametrize("seed", range(3))
def test_the_summary_equals_a_slow_one(seed) -> None:
    scenes, thresholds = random_scenes(40, seed=seed), (0.3, 0.5, 0.75)
    summary = summarise(scenes, thresholds)
    assert [at.iou_threshold for at in summary.thresholds] == list(thresholds)
    for at in summary.thresholds:
        for counts, same_class in ((at.any_class, False), (at.same_class, True)):
            pairs = [
                pair
                for one in scenes
                for pair in slow_pairs(one, at.iou_threshold, same_class=same_class)
            ]
            assert counts.num_matched == len(pairs) > 0
            assert counts.num_class_correct == sum(p.desc == t.desc for p, t in pairs)
            assert counts.num_predictions == sum(len(one.objects) for one in scenes)
            assert counts.num_ground_truth == sum(len(one.sample.objects) for one in scenes)
            assert counts.num_dropped == sum(len(one.dropped) for one in scenes)
    for name, counts in summary.classes.items():
        matched = sum(
            p.desc == name for one in scenes for p, _ in slow_pairs(one, 0.3, same_class=True)
        )
        found = sum(p.desc == name for one in scenes for p in one.objects)
        there = sum(t.desc == name for one in scenes for t in one.sample.objects)
        assert counts == DetectionCounts(
            num_predictions=found,
            num_ground_truth=there,
            num_matched=matched,
            num_class_correct=matched,
        )
    assert list(summary.classes) == ["cat", "dog", "owl"]
    assert summary.dropped == Counter(reason for one in scenes for reason in one.dropped)
    assert summary == summarise(scenes, thresholds)


def test_a_name_that_only_one_side_has_is_a_class_too() -> None:
    summary = summarise(
        [scene(0, [truth(0, 0, 9, 9, desc="cat")], [guess(0, 0, 9, 9, desc="yak")])], (0.5,)
    )
    assert {
        name: (c.num_ground_truth, c.num_predictions, c.num_matched)
        for name, c in summary.classes.items()
    } == {"cat": (1, 0, 0), "yak": (0, 1, 0)}
    assert summary.thresholds[0].any_class.num_matched == 1


def test_reasons_are_counted_the_most_frequent_first() -> None:
    dropped = [DropReason.MALFORMED, DropReason.WRONG_ARITY, DropReason.WRONG_ARITY]
    assert list(summarise([scene(0, [], [], dropped=dropped)], (0.5,)).dropped.items()) == [
        (DropReason.WRONG_ARITY, 2),
        (DropReason.MALFORMED, 1),
    ]


def test_the_worst_scenes_have_the_lowest_f1_ties_by_position_and_none_is_without_a_mistake() -> (
    None
):
    right, wrong = (
        ([truth(0, 0, 99, 99)], [guess(0, 0, 99, 99)]),
        ([truth(0, 0, 99, 99)], [guess(500, 500, 599, 599)]),
    )
    half = ([*right[0], *wrong[0]], [*right[1], *wrong[1]])
    empty = ([], [])
    scenes = [scene(i, *sides) for i, sides in enumerate([half, right, wrong, empty, half, wrong])]
    summary = summarise(scenes, (0.5,))
    assert summary.scene_f1 == (0.5, 1.0, 0.0, 1.0, 0.5, 0.0)
    assert worst_scenes(summary, 3) == [2, 5, 0]
    assert worst_scenes(summary, 10) == [2, 5, 0, 4]
    assert worst_scenes(summary, 0) == []
