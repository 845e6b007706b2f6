"""The held-out report: its numbers, its folder, its page and its pictures (issue 3,
"Evaluation")."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from config_support import configuration
from page_support import Page
from scene_support import guess, png, random_scenes, scene, truth

from launch.coco.__main__ import read_predictions
from launch.reports.detection import answer_line, make_report, report_tables
from launch.reports.page import page, write_report
from launch.reports.pictures import FOUND, OTHER_NAME, TRUTH, UNMATCHED, draw_scene
from shared.config import RunConfig
from shared.errors import StorageError
from shared.grounding.coco import ImagePredictions
from shared.grounding.evaluation import Evaluation, pair_objects, summarise
from shared.rollouts import FinishReason

HOSTILE = '<script src="https://example.org/x.js">alert(1)</script>&\u202e\ud800'


def report_on(scenes, **settings):
    return make_report(
        Evaluation(30, 4, tuple(scenes), 1.5),
        with_evaluation(**settings),
        subject="demo after 30 steps",
    )


def with_evaluation(**settings):
    return configuration(Path("model"), Path("data"), Path("run"), evaluation=settings)


def test_report_json_says_what_the_summary_says():
    scenes = random_scenes(30)
    content = report_on(scenes).as_json()
    summary = summarise(scenes, (0.5, 0.75))
    assert (
        content["step"],
        content["weight_version"],
        content["num_samples"],
        content["score"],
    ) == (30, 4, 30, "coord_probability")
    assert [at["iou_threshold"] for at in content["detection"]] == [0.5, 0.75]
    for written, at in zip(content["detection"], summary.thresholds, strict=True):
        assert (written["precision"], written["recall"], written["f1"]) == (
            at.any_class.precision,
            at.any_class.recall,
            at.any_class.f1,
        )
        assert written["class_accuracy"] == at.any_class.class_accuracy
        assert written["class_aware"]["f1"] == at.same_class.f1
    assert content["valid_object_rate"] == summary.thresholds[0].any_class.valid_rate
    assert sum(content["dropped"].values()) == content["num_dropped"] > 0
    assert set(content["coco"]["by_class"]["bbox"]) == {"ap", "ap50", "ap75", "ar"}
    assert {row["name"]: row["num_matched"] for row in content["classes"]} == {
        name: counts.num_matched for name, counts in summary.classes.items()
    }
    assert all(0 <= row["ap"] <= 1 for row in content["classes"])
    f1 = [worst["f1"] for worst in content["worst_scenes"]]
    assert len(f1) == 8 and f1 == sorted(f1)


def test_the_first_threshold_has_the_plain_names_and_later_ones_their_own():
    metrics = report_on(random_scenes(10), iou_thresholds=[0.4, 0.5, 0.85]).metrics()
    assert {
        "val/f1",
        "val/precision",
        "val/recall",
        "val/f1@0.5",
        "val/f1@0.85",
        "val/recall@0.85",
        "val/coco_ap",
        "val/class_f1",
    } <= metrics.keys()
    assert metrics["val/f1"] >= metrics["val/f1@0.5"] >= metrics["val/f1@0.85"]


def test_numbers_that_do_not_exist_are_absent_from_the_metrics_and_null_in_the_report():
    report = report_on([scene(0, [], [guess(0, 0, 9, 9)])])
    assert "val/coco_ap" not in report.metrics()
    assert report.as_json()["coco"]["by_class"]["bbox"]["ap"] is None


def test_the_folder_holds_report_page_predictions_and_pictures(tmp_path):
    scenes = [
        scene(0, [truth(0, 0, 99, 99)], [guess(0, 0, 99, 99, score=0.25)], image=png()),
        scene(
            1,
            [truth(0, 0, 99, 99)],
            [guess(500, 500, 599, 599, 500, 599, score=0.5)],
            image=png(),
            sample_id="a/b c",
        ),
    ]
    report = report_on(scenes)
    write_report(tmp_path / "evaluations" / "step_000030", report)
    folder = tmp_path / "evaluations" / "step_000030"
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "pictures",
        "predictions.jsonl",
        "report.html",
        "report.json",
    ]
    assert RunConfig.model_validate_json((folder / "config.json").read_text()) == report.config
    assert json.loads((folder / "report.json").read_text()) == json.loads(
        json.dumps(report.as_json())
    )
    assert [path.name for path in (folder / "pictures").iterdir()] == ["00001.png"]
    rows = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    assert rows[0] == {
        "sample_id": "val:1",
        "width": 101,
        "height": 61,
        "metadata": {},
        "objects": [{"kind": "bbox_2d", "bins": [0, 0, 99, 99], "desc": "cat", "score": 0.25}],
        "finish_reason": "stop",
        "text": "",
    }
    assert rows[1]["objects"][0]["kind"] == "poly"
    assert [path.name for path in folder.parent.iterdir()] == ["step_000030"]


def unread(position, text, finish_reason=FinishReason.LENGTH):
    """A scene whose answer held no object."""
    return replace(
        scene(position, [truth(0, 0, 99, 99)], [], image=png()),
        text=text,
        finish_reason=finish_reason,
        truncated=True,
    )


def test_an_f1_of_zero_says_what_the_answers_were(tmp_path):
    """Counts on the console and in every file, and three of the answers, those first of which
    nothing could be read.
    """
    rambling = [unread(place, f"Sure! Here are the objects: {HOSTILE}") for place in (1, 3, 4)]
    scenes = [
        unread(0, '{"object_1": {"desc"'),
        rambling[0],
        unread(2, "", FinishReason.STOP),
        *rambling[1:],
    ]
    report = report_on(scenes)
    faults = (
        "4 never opened with {, 1 not closed, 4 cut by length (rollout_matching.max_new_tokens:"
        " 160)"
    )
    assert report.describe().endswith(f" 0.000; of 5 answers {faults}")
    counts = {"num_never_opened": 4, "num_not_closed": 1, "num_length_limited": 4}
    assert {
        f"val/{name}": number for name, number in counts.items()
    }.items() <= report.metrics().items()
    assert (
        counts | {"num_truncated": 5, "max_new_tokens": 160}
    ).items() <= report.as_json().items()
    assert {table.title: table.rows for table in report_tables(report)}["Incomplete answers"][
        0
    ] == ("never opened with {", "4")
    assert [answer_line(one, 12) for one in report.incomplete] == [
        "val:2 (never opened, cut by length): Sure! Here a...",
        "val:3 (never opened, ended by the model): no text at all",
        "val:4 (never opened, cut by length): Sure! Here a...",
    ]
    write_report(tmp_path / "report", report)
    rows = [
        json.loads(line)
        for line in (tmp_path / "report" / "predictions.jsonl").read_text().splitlines()
    ]
    assert [(row["text"], row["finish_reason"]) for row in rows] == [
        (one.text, one.finish_reason) for one in scenes
    ]
    shown = Page((tmp_path / "report" / "report.html").read_text())
    assert (
        "4 answers never opened with {" in shown.text
        and "val:2 (never opened, cut by length): Sure!" in shown.text
    )
    assert "script" not in shown.tags


def test_answers_that_are_complete_are_not_spoken_of():
    report = report_on(random_scenes(5))
    assert report.describe().rpartition(", ")[2].startswith("class accuracy on matched objects")
    assert report.incomplete == [] and "incomplete answers" not in page(report)


def test_the_predictions_can_be_exported_to_coco(tmp_path):
    one = random_scenes(8)[3]
    sample = type(one.sample)(
        one.sample.sample_id,
        (),
        one.sample.width,
        one.sample.height,
        one.sample.objects,
        {"image_id": 17},
    )
    write_report(
        tmp_path / "report",
        report_on([type(one)(0, sample, one.objects, one.dropped, one.truncated)], worst_scenes=0),
    )
    assert read_predictions(tmp_path / "report" / "predictions.jsonl") == [
        ImagePredictions(17, sample.width, sample.height, one.objects)
    ]


def test_what_cannot_be_written_says_where_and_leaves_nothing_half_done(tmp_path):
    (tmp_path / "evaluations").write_text("a file")
    with pytest.raises(StorageError, match=r"cannot write .*evaluations/step_000030"):
        write_report(tmp_path / "evaluations" / "step_000030", report_on([]))
    # What a killed process left is in nobody's way.
    (tmp_path / "report.partial").mkdir()
    write_report(tmp_path / "report", report_on([]))
    assert [path.name for path in tmp_path.iterdir() if "report" in path.name] == ["report"]


def test_the_page_is_sound_loads_nothing_and_escapes_every_text():
    scenes = [
        scene(
            3,
            [truth(0, 0, 99, 99, desc=HOSTILE)],
            [guess(500, 500, 599, 599, desc=HOSTILE)],
            sample_id=HOSTILE,
        )
    ]
    report = make_report(
        Evaluation(None, 0, tuple(scenes), 1.0), with_evaluation(), subject=HOSTILE
    )
    text = page(report)
    text.encode()
    read = Page(text)
    assert "script" not in read.tags
    assert set(read.links) == {"pictures/00003.png"}
    assert read.text.count("alert(1)") >= 4
    assert "\u202e" not in text
    for title in ("Detection", "COCO", "Classes", "Worst scenes"):
        assert title in read.text


def test_equal_names_among_pairs_of_equal_names_is_no_number():
    rows = report_tables(report_on(random_scenes(10)))[0].rows
    assert [row[0] for row in rows] == [
        "IoU 0.5, any class",
        "IoU 0.5, by class",
        "IoU 0.75, any class",
        "IoU 0.75, by class",
    ]
    assert [row[-1] == "-" for row in rows] == [False, True, False, True]


@pytest.mark.parametrize(
    ("penalty", "score", "told"),
    [(1.0, "coord_probability", False), (1.3, "coord_probability", True), (1.3, "constant", False)],
)
def test_scores_under_a_repetition_penalty_are_said_to_be(penalty, score, told):
    config = configuration(
        Path("model"),
        Path("data"),
        Path("run"),
        evaluation__score=score,
        rollout_matching__repetition_penalty=penalty,
    )
    report = make_report(Evaluation(30, 4, tuple(random_scenes(3)), 1.5), config, subject="demo")
    assert report.as_json()["repetition_penalty"] == penalty
    note = "those under rollout_matching.repetition_penalty 1.3"
    assert (note in report_tables(report)[1].note) == (note in page(report)) == told


def test_tables_are_rectangular_and_leave_out_what_is_empty():
    tables = {table.title: table for table in report_tables(report_on(random_scenes(10)))}
    assert list(tables) == ["Detection", "COCO", "Classes", "Dropped entries"]
    assert all(len(row) == len(table.head) for table in tables.values() for row in table.rows)
    assert "mean probability of its coord tokens" in tables["COCO"].note
    assert [
        table.title for table in report_tables(report_on([scene(0, [], [])], score="constant"))
    ] == ["Detection", "COCO"]


def colours_on(picture, box):
    """The colours of the picture on the edge at the left of a box, in pixels."""
    x1, y1, _, y2 = box
    return {
        tuple(map(int, pixel))
        for pixel in np.asarray(picture)[y1 + 30 : y2 - 30, x1 - 1 : x1 + 2].reshape(-1, 3)
    }


def test_a_picture_shows_ground_truth_dashed_and_predictions_by_what_became_of_them():
    # One box each, far apart; the image is enlarged six times.
    there = [truth(0, 0, 200, 400), truth(300, 0, 500, 400), truth(0, 500, 200, 999)]
    found = [guess(0, 0, 190, 400), guess(300, 0, 490, 400, desc="dog"), guess(800, 0, 990, 400)]
    one = scene(0, there, found, image=png())
    picture = draw_scene(one, pair_objects(found, there, iou_threshold=0.5))
    assert picture.size == (606, 366 + 24)
    boxes = {
        name: (round(x * 0.6006), 0, 0, round(0.36 * 400))
        for name, x in (("right", 0), ("other name", 300), ("wrong", 800))
    }
    assert FOUND in colours_on(picture, (boxes["right"][0] + 1, *boxes["right"][1:]))
    assert OTHER_NAME in colours_on(picture, boxes["other name"])
    assert UNMATCHED in colours_on(picture, boxes["wrong"])
    # Dashes leave the image in between.
    missed = colours_on(picture, (1, 180, 0, 366))
    assert TRUTH in missed and (90, 90, 90) in {
        tuple(map(int, pixel)) for pixel in np.asarray(picture)[210:330, 0]
    }


def test_a_picture_of_anything_can_be_drawn():
    extreme = [
        guess(0, 0, 0, 0),
        guess(999, 999, 999, 999, desc=HOSTILE),
        guess(0, 999, 0, 999, 0, 999),
        guess(999, 0, 0, 999, 5, 5, desc="猫" * 300),
    ]
    for width, height in ((2, 2), (20_000, 2), (700, 700)):
        one = scene(0, [truth(0, 0, 999, 999, desc=HOSTILE)], extreme, image=png(width, height))
        assert max(draw_scene(one, []).size) <= 1280 + 24


def test_the_same_evaluation_gives_the_same_report_twice(tmp_path):
    scenes = [
        scene(one.position, one.sample.objects, one.objects, image=png())
        for one in random_scenes(6)
    ]
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        write_report(folder, report_on(scenes))
    files = [
        {
            path.relative_to(folder): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
        for folder in folders
    ]
    assert files[0] == files[1] and len(files[0]) > 4
