"""COCO AP against a case computed by hand and against pycocotools as everybody calls it (issue 3,
"Evaluation").
"""

import json

import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from scene_support import guess, random_scenes, scene, truth

from launch.reports.coco_ap import CocoAP, IouType, coco_scores
from shared.grounding.coco import (
    ImagePredictions,
    number_categories,
    predictions_to_coco,
    samples_to_coco,
)
from shared.grounding.evaluation import Scene

NOTHING = CocoAP(None, None, None, None)


def boxes(scenes: list[Scene]) -> CocoAP:
    return coco_scores(scenes).by_class[IouType.BBOX]


def test_one_of_two_found_with_one_mistake_by_hand():
    there = [truth(0, 0, 200, 200), truth(500, 500, 700, 700)]
    # First the right one, then a wrong one: precision 1 at the recall levels 0, .01, ..., .5, which
    # are 51 of 101, and 0 at the others.
    found = [guess(0, 0, 200, 200, score=0.9), guess(800, 0, 900, 100, score=0.8)]
    assert boxes([scene(0, there, found)]) == CocoAP(*[pytest.approx(51 / 101)] * 3, 0.5)
    # The other way round: precision 1/2 at those levels.
    surer_of_the_wrong_one = [guess(0, 0, 200, 200, score=0.8), guess(800, 0, 900, 100, score=0.9)]
    assert boxes([scene(0, there, surer_of_the_wrong_one)]) == CocoAP(
        *[pytest.approx(51 / 202)] * 3, 0.5
    )


def test_a_box_of_iou_07_counts_at_five_of_ten_thresholds():
    # .50, .55, .60, .65, .70: rounding decides nothing at 0.72.
    scores = boxes([scene(0, [truth(0, 0, 500, 500)], [guess(0, 0, 360, 500)])])
    assert scores == CocoAP(pytest.approx(0.5), pytest.approx(1.0), 0.0, pytest.approx(0.5))


def test_among_equal_scores_the_one_written_first_comes_first():
    there, right, wrong = (
        [truth(0, 0, 200, 200)],
        guess(0, 0, 200, 200),
        guess(500, 500, 700, 700, desc="dog"),
    )
    first, last = (
        coco_scores([scene(0, there, found)]).any_class[IouType.BBOX]
        for found in ([right, wrong], [wrong, right])
    )
    assert (first.ap, last.ap) == (pytest.approx(1.0), pytest.approx(0.5))


def test_perfect_predictions_have_1():
    scenes = [
        scene(
            one.position,
            one.sample.objects,
            [guess(*t.bins, desc=t.desc) for t in one.sample.objects],
        )
        for one in random_scenes(20)
    ]
    scores = coco_scores(scenes)
    assert [scores.by_class[IouType.BBOX], scores.any_class[IouType.BBOX]] == [
        CocoAP(*[pytest.approx(1.0)] * 4)
    ] * 2
    assert scores.class_ap == {name: pytest.approx(1.0) for name in ("cat", "dog", "owl")}


@pytest.mark.parametrize("iou_type", IouType)
def test_the_scores_are_those_of_pycocotools_as_everybody_calls_it(tmp_path, iou_type):
    scenes = random_scenes(30, seed=4)
    if iou_type is IouType.SEGM:
        scenes.append(scene(30, [truth(0, 0, 600, 0, 600, 600)], [guess(0, 0, 600, 0, 600, 500)]))
    categories = number_categories(["cat", "dog", "owl"])
    (tmp_path / "truth.json").write_text(
        json.dumps(samples_to_coco([one.sample for one in scenes], range(len(scenes)), categories))
    )
    predictions = [
        ImagePredictions(i, one.sample.width, one.sample.height, one.objects)
        for i, one in enumerate(scenes)
    ]
    (tmp_path / "found.json").write_text(
        json.dumps(predictions_to_coco(predictions, categories).results)
    )
    truths = COCO(str(tmp_path / "truth.json"))
    theirs = COCOeval(truths, truths.loadRes(str(tmp_path / "found.json")), iou_type.value)
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
    scores = coco_scores([half])
    # The boxes around the two halves of a square are the same; the halves are not.
    assert (scores.by_class[IouType.BBOX].ap50, scores.by_class[IouType.SEGM].ap50) == (
        pytest.approx(1.0),
        0.0,
    )


def test_without_ground_truth_there_is_no_score_and_without_predictions_it_is_0():
    assert (
        boxes([])
        == boxes([scene(0, [], [])])
        == boxes([scene(0, [], [guess(0, 0, 9, 9)])])
        == NOTHING
    )
    assert boxes([scene(0, [truth(0, 0, 9, 9)], [])]) == CocoAP(0.0, 0.0, 0.0, 0.0)
    # A name that no ground truth has enters no mean.
    scores = coco_scores(
        [
            scene(
                0,
                [truth(0, 0, 200, 200)],
                [guess(0, 0, 200, 200), guess(300, 0, 400, 99, desc="yak")],
            )
        ]
    )
    assert scores.by_class[IouType.BBOX].ap == pytest.approx(1.0)
    assert scores.class_ap == {"cat": pytest.approx(1.0), "yak": None}


def test_nothing_is_printed(capsys):
    coco_scores(random_scenes(2))
    assert capsys.readouterr().out == ""
