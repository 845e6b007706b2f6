"""Held-out counts against slow obvious ones (issue 3, "Evaluation")."""

from collections import Counter
from dataclasses import replace

import pytest
from scene_support import counts_of, guess, random_scenes, scene, truth

from shared.data.annotations import Annotation, IgnoredRegion
from shared.grounding.evaluation import DetectionCounts, pair_scene, summarise, worst_scenes
from shared.grounding.geometry import mask_iou
from shared.grounding.objects import DropReason


def detections(predictions, ground_truth, *, iou_threshold=0.5, dropped=()):
    one = scene(0, ground_truth, predictions, dropped=dropped)
    return counts_of(one, iou_threshold=iou_threshold)


def test_counts_and_ratios_of_a_scene() -> None:
    dog = guess(200, 200, 300, 300, desc="dog")
    predictions = [guess(0, 0, 100, 100), dog, guess(600, 600, 700, 700)]
    ground_truth = [truth(200, 200, 300, 310), truth(0, 0, 100, 90)]
    counts = detections(predictions, ground_truth, dropped=[DropReason.MALFORMED])
    assert counts == DetectionCounts(
        num_predictions=3, num_dropped=1, num_ground_truth=2, num_matched=2, num_class_correct=1
    )
    assert (counts.valid_rate, counts.precision, counts.recall) == (3 / 4, 2 / 3, 1.0)
    assert (counts.f1, counts.class_accuracy) == (0.8, 0.5)


CAT = truth(0, 0, 100, 100, desc="cat")
DOG = truth(0, 0, 100, 100, desc="dog")
FOUND_CAT = guess(0, 0, 100, 100, desc="cat")
FOUND_DOG = guess(0, 0, 100, 100, desc="dog")
TRIANGLE = guess(0, 0, 600, 0, 600, 600)


@pytest.mark.parametrize(
    ("predictions", "ground_truth", "iou_threshold", "matched", "class_correct"),
    [
        # The best total would pair 0 with 0 and 1 with 1; the best pair is 0 with 1, and 1 with 0
        # is under the threshold.
        (
            [guess(0, 0, 100, 100), guess(45, 0, 145, 100)],
            [truth(0, 0, 60, 100), truth(15, 0, 115, 100)],
            0.5,
            1,
            1,
        ),
        # Ties go to the earlier prediction, then to the earlier ground truth.
        ([FOUND_CAT, FOUND_DOG], [CAT], 0.5, 1, 1),
        ([FOUND_DOG, FOUND_CAT], [CAT], 0.5, 1, 0),
        ([FOUND_CAT], [DOG, CAT], 0.5, 1, 0),
        # The threshold itself counts.
        ([FOUND_CAT], [truth(0, 0, 50, 100)], 0.5, 1, 1),
        ([FOUND_CAT], [truth(0, 0, 50, 100)], 0.51, 0, 0),
        # A pair with a polygon overlaps by mask: a triangle is half of the box around it.
        ([TRIANGLE], [truth(0, 0, 600, 600)], 0.45, 1, 1),
        ([TRIANGLE], [truth(0, 0, 600, 600)], 0.55, 0, 0),
        ([TRIANGLE], [truth(0, 0, 600, 600, 0, 600)], 0.05, 0, 0),
        ([TRIANGLE], [truth(*TRIANGLE.bins)], 1.0, 1, 1),
        # 50 bins between two points are an overlap of a half; with other shapes they have none.
        ([guess(30, 40)], [truth(0, 0)], 0.5, 1, 1),
        ([guess(31, 40)], [truth(0, 0)], 0.5, 0, 0),
        ([guess(0, 0, desc="dog")], [truth(0, 0)], 1.0, 1, 0),
        ([guess(0, 0)], [truth(0, 0, 0, 0)], 0.1, 0, 0),
        ([guess(0, 0, 100, 100), guess(9, 9)], [truth(9, 9), truth(0, 0, 100, 100)], 1.0, 2, 2),
    ],
)
def test_pairs_are_taken_greedily_by_iou(
    predictions, ground_truth, iou_threshold, matched, class_correct
) -> None:
    counts = detections(predictions, ground_truth, iou_threshold=iou_threshold)
    assert (counts.num_matched, counts.num_class_correct) == (matched, class_correct)


def test_a_triangle_is_half_of_its_box() -> None:
    assert mask_iou(TRIANGLE, truth(0, 0, 600, 600)) == pytest.approx(0.5, abs=0.01)


def test_boxes_overlap_in_pixels_of_the_annotations_not_in_bins() -> None:
    # As if both had been rounded to the same bins.
    truths = [truth(0, 0, 60, 999)]
    found = [replace(guess(0, 0, 60, 999), pixels=(0.0, 0.0, 3.0, 60.0))]
    one = scene(0, truths, found)
    annotated = replace(one.sample, annotated=(Annotation((0.0, 0.0, 6.0, 60.0)),))
    assert pair_scene(one, iou_threshold=0.5)[0].iou == 1.0
    assert pair_scene(replace(one, sample=annotated), iou_threshold=0.5)[0].iou == 0.5


@pytest.mark.parametrize(
    ("is_crowd", "desc", "any_class", "same_class"),
    [(True, "cat", 1, 1), (True, "dog", 1, 0), (False, "cat", 0, 0)],
)
def test_a_prediction_in_a_region_to_ignore_is_neither_right_nor_wrong(
    is_crowd, desc, any_class, same_class
) -> None:
    # Inside the region with all of its area, which is a ninth of the region's.
    region = IgnoredRegion(Annotation((50.0, 0.0, 30.0, 30.0)), desc, is_crowd)
    right, inside = guess(0, 0, 100, 100), guess(595, 0, 693, 163)
    one = scene(0, [truth(0, 0, 100, 100)], [right, inside])
    summary = summarise([replace(one, sample=replace(one.sample, ignore=(region,)))], (0.5,))
    at = summary.thresholds[0]
    assert (at.any_class.num_ignored, at.same_class.num_ignored) == (any_class, same_class)
    assert at.any_class.precision == (1.0 if any_class else 0.5)
    assert (at.same_class.recall, at.same_class.num_ground_truth) == (1.0, 1)
    assert summary.classes["cat"].precision == (1.0 if same_class else 0.5)


def test_a_partner_comes_before_a_region_and_of_ignored_answers_alone_nothing_is_wrong() -> None:
    region = IgnoredRegion(Annotation((0.0, 0.0, 101.0, 61.0)), "cat", is_crowd=True)
    matched = scene(0, [truth(0, 0, 100, 100)], [guess(0, 0, 100, 100)])
    alone = scene(1, [], [guess(0, 0, 100, 100)])
    scenes = [
        replace(one, sample=replace(one.sample, ignore=(region,))) for one in (matched, alone)
    ]
    summary = summarise(scenes, (0.5,))
    assert (summary.thresholds[0].any_class.num_ignored, summary.scene_f1) == (1, (1.0, 1.0))


def test_counts_of_scenes_are_added() -> None:
    one = detections([guess(0, 0, 9, 9)], [truth(0, 0, 9, 9)])
    other = detections([], [truth(0, 0, 9, 9)], dropped=[DropReason.MALFORMED] * 2)
    total = one + other
    assert total == DetectionCounts(1, 2, 2, 1, 1)
    assert (total.recall, total.valid_rate) == (0.5, 1 / 3)


def test_a_ratio_over_nothing_is_0() -> None:
    empty = detections([], [])
    assert empty == DetectionCounts()
    ratios = (empty.valid_rate, empty.precision, empty.recall, empty.f1, empty.class_accuracy)
    assert ratios == (0.0,) * 5


def slow_iou(a, b) -> float:
    width = max(0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0, min(a[3], b[3]) - max(a[1], b[1]))
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - width * height
    return width * height / union


def slow_pairs(scenes, threshold, *, same_class):
    """Take the best pair that is left in each scene until there is none."""
    pairs = []
    for one in scenes:
        found = dict(enumerate(one.objects))
        truths = dict(enumerate(one.sample.objects))
        while left := [
            (-slow_iou(p.bins, t.bins), i, j)
            for i, p in found.items()
            for j, t in truths.items()
            if slow_iou(p.bins, t.bins) >= threshold and (p.desc == t.desc or not same_class)
        ]:
            _, i, j = min(left)
            pairs.append((found.pop(i), truths.pop(j)))
    return pairs


@pytest.mark.parametrize("seed", range(3))
def test_the_summary_equals_a_slow_one(seed) -> None:
    """The slow one pairs every scene again for every threshold."""
    scenes = random_scenes(40, seed=seed)
    thresholds = (0.3, 0.5, 0.75)
    found = [p.desc for one in scenes for p in one.objects]
    truths = [t.desc for one in scenes for t in one.sample.objects]
    summary = summarise(scenes, thresholds)
    assert [at.iou_threshold for at in summary.thresholds] == list(thresholds)
    for at in summary.thresholds:
        for counts, same_class in ((at.any_class, False), (at.same_class, True)):
            pairs = slow_pairs(scenes, at.iou_threshold, same_class=same_class)
            assert counts.num_matched == len(pairs) > 0
            assert counts.num_class_correct == sum(p.desc == t.desc for p, t in pairs)
            assert (counts.num_predictions, counts.num_ground_truth) == (len(found), len(truths))
            assert counts.num_dropped == sum(len(one.dropped) for one in scenes)
    assert list(summary.classes) == ["cat", "dog", "owl"]
    matched = [p.desc for p, _ in slow_pairs(scenes, 0.3, same_class=True)]
    for name, counts in summary.classes.items():
        num_matched = matched.count(name)
        expected = (found.count(name), 0, truths.count(name), num_matched, num_matched)
        assert counts == DetectionCounts(*expected)
    assert summary.dropped == Counter(reason for one in scenes for reason in one.dropped)
    assert summary == summarise(scenes, thresholds)


def test_a_name_that_only_one_side_has_is_a_class_too() -> None:
    one = scene(0, [truth(0, 0, 9, 9, desc="cat")], [guess(0, 0, 9, 9, desc="yak")])
    summary = summarise([one], (0.5,))
    assert summary.classes == {
        "cat": DetectionCounts(num_ground_truth=1),
        "yak": DetectionCounts(num_predictions=1),
    }
    assert summary.thresholds[0].any_class.num_matched == 1


def test_reasons_are_counted_the_most_frequent_first() -> None:
    dropped = [DropReason.MALFORMED, DropReason.WRONG_ARITY, DropReason.WRONG_ARITY]
    summary = summarise([scene(0, [], [], dropped=dropped)], (0.5,))
    expected = [(DropReason.WRONG_ARITY, 2), (DropReason.MALFORMED, 1)]
    assert list(summary.dropped.items()) == expected


def test_the_worst_scenes_have_the_lowest_f1_ties_by_position_and_none_is_without_a_mistake() -> (
    None
):
    object_ = truth(0, 0, 99, 99)
    right = ([object_], [guess(0, 0, 99, 99)])
    wrong = ([object_], [guess(500, 500, 599, 599)])
    half = ([object_] * 2, right[1] + wrong[1])
    empty = ([], [])
    scenes = [scene(i, *sides) for i, sides in enumerate([half, right, wrong, empty, half, wrong])]
    summary = summarise(scenes, (0.5,))
    assert summary.scene_f1 == (0.5, 1.0, 0.0, 1.0, 0.5, 0.0)
    for number, expected in ((3, [2, 5, 0]), (10, [2, 5, 0, 4]), (0, [])):
        assert worst_scenes(summary, number) == expected
