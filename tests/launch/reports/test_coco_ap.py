"""COCO AP against cases computed by hand and against pycocotools as everybody calls it (issue 3,
"Evaluation").
"""

import json
from dataclasses import replace

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from scene_support import guess, random_scenes, scene, truth

from launch.reports.coco_ap import IouType, coco_scores
from shared.data.annotations import Annotation, IgnoredRegion
from shared.grounding.coco import (
    ImagePredictions,
    number_categories,
    predictions_to_coco,
    samples_to_coco,
)

ONE = [truth(0, 0, 200, 200)]
TWO = [*ONE, truth(500, 500, 700, 700)]
SMALL = guess(0, 0, 9, 9)


def right(score=1.0):
    return guess(0, 0, 200, 200, score=score)


def wrong(score=1.0, desc="cat"):
    return guess(800, 0, 900, 100, score=score, desc=desc)


@pytest.mark.parametrize(
    ("scenes", "expected"),
    [
        # First the right one, then a wrong one: precision 1 at the recall levels 0, .01, ..., .5,
        # which are 51 of 101, and 0 at the others; the other way round 1/2 at those levels.
        ([scene(0, TWO, [right(0.9), wrong(0.8)])], [51 / 101] * 3 + [0.5]),
        ([scene(0, TWO, [right(0.8), wrong(0.9)])], [51 / 202] * 3 + [0.5]),
        # .50, .55, .60, .65, .70 are reached: rounding decides nothing at 0.72.
        ([scene(0, [truth(0, 0, 500, 500)], [guess(0, 0, 360, 500)])], [0.5, 1.0, 0.0, 0.5]),
        # A name that no ground truth has enters no mean.
        ([scene(0, ONE, [right(), wrong(desc="yak")])], [1.0] * 4),
        ([scene(0, ONE, [])], [0.0] * 4),
        ([scene(0, [], [SMALL])], [None] * 4),
        ([scene(0, [], [])], [None] * 4),
        ([], [None] * 4),
    ],
    ids=[
        "the surer one is right",
        "the surer one is wrong",
        "IoU 0.72",
        "a strange name",
        "no predictions",
        "no ground truth",
        "an empty scene",
        "no scenes",
    ],
)
def test_boxes_are_scored_as_by_hand(scenes, expected, capsys):
    scores = coco_scores(scenes).by_class[IouType.BBOX]
    values = (scores.ap, scores.ap50, scores.ap75, scores.ar)
    assert [value is None for value in values] == [value is None for value in expected]
    assert [value or 0.0 for value in values] == pytest.approx([value or 0.0 for value in expected])
    assert capsys.readouterr().out == ""


def test_a_name_that_no_ground_truth_has_has_no_score():
    scores = coco_scores([scene(0, ONE, [right(), wrong(desc="yak")])])
    assert scores.class_ap == {"cat": pytest.approx(1.0), "yak": None}


def test_points_are_left_out_and_counted():
    scores = coco_scores([scene(0, [*ONE, truth(5, 5, desc="ear")], [right(), guess(5, 5)])])
    assert scores.by_class[IouType.BBOX].ap == pytest.approx(1.0)
    assert (scores.class_ap["ear"], scores.num_points) == (None, 2)
    only = coco_scores([scene(0, [truth(5, 5)], [guess(5, 5)])])
    assert (only.by_class[IouType.BBOX].ap, only.any_class[IouType.BBOX].ap) == (None, None)


def test_among_equal_scores_the_one_written_first_comes_first():
    orders = ([right(), wrong(desc="dog")], [wrong(desc="dog"), right()])
    aps = [coco_scores([scene(0, ONE, found)]).any_class[IouType.BBOX].ap for found in orders]
    assert aps == pytest.approx([1.0, 0.5])


def ranked(scenes):
    """Exchange the scores, which have ties, for different ones."""
    scores = np.random.default_rng(0).permutation(1000) / 1000
    return [
        replace(
            at,
            objects=tuple(
                replace(one, score=scores[10 * i + j]) for j, one in enumerate(at.objects)
            ),
        )
        for i, at in enumerate(scenes)
    ]


def test_with_one_score_for_all_the_order_of_the_rows_has_no_effect():
    scenes = [
        replace(at, objects=tuple(replace(one, score=1.0) for one in at.objects))
        for at in random_scenes(12, seed=4)
    ]
    expected = coco_scores(scenes)
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(len(scenes))
        assert coco_scores([scenes[i] for i in order]) == expected
    # The first that were written are half right: precision 1/2 up to recall 1/2.
    halves = [scene(0, ONE, [right()]), scene(1, ONE, [wrong()])]
    for order in (halves, halves[::-1]):
        assert coco_scores(order).by_class[IouType.BBOX].ap == pytest.approx(51 / 202)


def test_pictures_with_more_than_a_hundred_objects_of_a_class_are_counted():
    many = [guess(i, 0, i + 5, 5) for i in range(101)]
    by_two = [replace(one, desc="dog" if i % 2 else "cat") for i, one in enumerate(many)]
    assert coco_scores([scene(0, ONE, many), scene(1, ONE, by_two)]).num_crowded == 1


@pytest.mark.parametrize("iou_type", IouType)
def test_the_scores_are_those_of_pycocotools_as_everybody_calls_it(tmp_path, iou_type):
    scenes = ranked(random_scenes(30, seed=4))
    if iou_type is IouType.SEGM:
        scenes.append(scene(30, [truth(0, 0, 600, 0, 600, 600)], [guess(0, 0, 600, 0, 600, 500)]))
    categories = number_categories(["cat", "dog", "owl"])
    samples = [at.sample for at in scenes]
    predictions = [
        ImagePredictions(i, at.sample.width, at.sample.height, at.objects)
        for i, at in enumerate(scenes)
    ]
    truth_file = tmp_path / "truth.json"
    truth_file.write_text(json.dumps(samples_to_coco(samples, range(len(scenes)), categories)))
    found_file = tmp_path / "found.json"
    found_file.write_text(json.dumps(predictions_to_coco(predictions, categories).results))
    truths = COCO(str(truth_file))
    theirs = COCOeval(truths, truths.loadRes(str(found_file)), iou_type.value)
    theirs.evaluate()
    theirs.accumulate()
    theirs.summarize()
    scores = coco_scores(scenes)
    ours = scores.by_class[iou_type]
    assert [ours.ap, ours.ap50, ours.ap75, ours.ar] == pytest.approx(
        [*theirs.stats[:3], theirs.stats[8]], abs=1e-12
    )
    assert 0 < ours.ap < 1
    if iou_type is IouType.BBOX:
        assert sum(scores.class_ap.values()) / 3 == pytest.approx(ours.ap)


def test_masks_are_scored_only_where_there_are_polygons():
    assert list(coco_scores(random_scenes(3)).by_class) == [IouType.BBOX]
    half = scene(0, [truth(0, 0, 600, 0, 600, 600)], [guess(0, 0, 600, 600, 0, 600)])
    by_class = coco_scores([half]).by_class
    # The boxes around the two halves of a square are the same; the halves are not.
    assert by_class[IouType.BBOX].ap50 == pytest.approx(1.0)
    assert by_class[IouType.SEGM].ap50 == 0.0


def test_a_picture_of_crowds_alone_is_compared_in_pixels():
    # The pixels of the answer are in the crowd, its bins are not.
    crowd = IgnoredRegion(Annotation((50.0, 0.0, 30.0, 30.0)), "cat", True)
    inside = replace(guess(0, 0, 99, 99), pixels=(52.0, 2.0, 70.0, 20.0))
    crowded = scene(0, [], [inside])
    crowded = replace(crowded, sample=replace(crowded.sample, ignore=(crowd,)))
    scores = coco_scores([crowded, scene(1, ONE, [right(0.5)])])
    assert scores.by_class[IouType.BBOX].ap == pytest.approx(1.0)
