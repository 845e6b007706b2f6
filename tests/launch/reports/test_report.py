"""The held-out report: its numbers, its folder, its page and its pictures (issue 3,
"Evaluation")."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from config_support import configuration
from page_support import Page
from scene_support import guess, png, random_scenes, scene, truth

from launch.reports.detection import make_report
from launch.reports.page import answer_line, page, report_tables, write_report
from launch.reports.pictures import (
    FOUND,
    OTHER_NAME,
    REPEATED,
    TRUTH,
    UNMATCHED,
    draw_scene,
)
from launch.tools.coco import read_predictions
from shared.config import RunConfig
from shared.errors import StorageError
from shared.grounding.coco import ImagePredictions
from shared.grounding.evaluation import Evaluation, pair_objects, summarise
from shared.rollouts import FinishReason

HOSTILE = '<script src="https://example.org/x.js">alert(1)</script>&\u202e\ud800'
SQUARE = [truth(0, 0, 99, 99)]
AWAY = (500, 500, 599, 599)


def report_on(scenes, subject="demo after 30 steps", **changes):
    config = configuration(Path("model"), Path("data"), Path("run"), **changes)
    return make_report(Evaluation(30, 4, tuple(scenes), 1.5), config, subject=subject)


def lines_of(folder):
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]


def test_report_json_says_what_the_summary_says():
    scenes = random_scenes(30)
    content = report_on(scenes).as_json()
    summary = summarise(scenes, (0.5, 0.75))
    facts = {"step": 30, "weight_version": 4, "num_samples": 30, "score": "coord_probability"}
    assert {name: content[name] for name in facts} == facts
    assert [at["iou_threshold"] for at in content["detection"]] == [0.5, 0.75]
    for written, at in zip(content["detection"], summary.thresholds, strict=True):
        for name in ("precision", "recall", "f1", "class_accuracy"):
            assert written[name] == getattr(at.any_class, name)
        assert written["class_aware"]["f1"] == at.same_class.f1
    assert content["valid_object_rate"] == summary.thresholds[0].any_class.valid_rate
    assert sum(content["dropped"].values()) == content["num_dropped"] > 0
    assert set(content["coco"]["by_class"]["bbox"]) == {"ap", "ap50", "ap75", "ar"}
    assert {row["name"]: row["num_matched"] for row in content["classes"]} == {
        name: counts.num_matched for name, counts in summary.classes.items()
    }
    assert all(0 <= row["ap"] <= 1 for row in content["classes"])
    f1 = [worst["f1"] for worst in content["worst_scenes"]]
    assert len(f1) == 8
    assert f1 == sorted(f1)


def test_the_first_threshold_has_the_plain_names_and_later_ones_their_own():
    metrics = report_on(random_scenes(10), evaluation__iou_thresholds=[0.4, 0.5, 0.85]).metrics()
    plain = {"precision", "recall", "class_f1", "coco_ap"}
    assert {f"val/{name}" for name in (*plain, "recall@0.85")} <= metrics.keys()
    assert metrics["val/f1"] >= metrics["val/f1@0.5"] >= metrics["val/f1@0.85"]


def test_each_file_of_several_has_the_figures_of_its_own_samples():
    scenes = []
    for number, one in enumerate(random_scenes(20)):
        name = "coco" if number % 3 else "refs"
        scenes.append(replace(one, sample=replace(one.sample, source=name)))
    files = [{"path": "refs.jsonl"}, {"path": "val.jsonl", "name": "coco"}]
    report = report_on(scenes, data__val=files)
    metrics = report.metrics()
    assert [one["name"] for one in report.as_json()["sources"]] == ["refs", "coco"]
    for name, written in zip(("refs", "coco"), report.as_json()["sources"], strict=True):
        alone = report_on([scene for scene in scenes if scene.sample.source == name])
        expected = alone.metrics()
        for figure in ("f1", "precision", "recall", "class_f1", "coco_ap"):
            assert metrics[f"val/{figure}/{name}"] == expected[f"val/{figure}"]
        assert written["num_samples"] == len(alone.evaluation.outcomes)
        assert written["coco"]["ap50"] == expected["val/coco_ap50"]
    (table,) = (table for table in report_tables(report) if table.title == "Files")
    assert [row[:2] for row in table.rows] == [("refs", "7"), ("coco", "13")]
    assert report_on(scenes).as_json()["sources"] == []


def test_numbers_that_do_not_exist_are_absent_from_the_metrics_and_null_in_the_report():
    report = report_on([scene(0, [], [guess(0, 0, 9, 9)])])
    assert "val/coco_ap" not in report.metrics()
    assert report.as_json()["coco"]["by_class"]["bbox"]["ap"] is None


def test_the_folder_holds_report_page_predictions_and_pictures(tmp_path):
    found = [guess(0, 0, 99, 99, score=0.25)]
    strange = [guess(500, 500, 599, 599, 500, 599, score=0.5)]
    scenes = [
        scene(0, SQUARE, found, image=png()),
        scene(1, SQUARE, strange, image=png(), sample_id="a/b c"),
    ]
    report = report_on(scenes)
    folder = tmp_path / "evaluations" / "step_000030"
    write_report(folder, report)
    names = ["config.json", "pictures", "predictions.jsonl", "report.html", "report.json"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert RunConfig.model_validate_json((folder / "config.json").read_text()) == report.config
    content = json.loads((folder / "report.json").read_text())
    assert content == json.loads(json.dumps(report.as_json()))
    assert [path.name for path in (folder / "pictures").iterdir()] == ["00001.png"]
    first, second = lines_of(folder)
    assert first == {
        "sample_id": "val:1",
        "width": 101,
        "height": 61,
        "metadata": {},
        "objects": [{"kind": "bbox_2d", "bins": [0, 0, 99, 99], "desc": "cat", "score": 0.25}],
        "finish_reason": "stop",
        "text": "",
    }
    assert second["objects"][0]["kind"] == "poly"
    assert [path.name for path in folder.parent.iterdir()] == ["step_000030"]


def unread(position, text, finish_reason=FinishReason.LENGTH):
    """A scene whose answer held no object."""
    empty = scene(position, SQUARE, [], image=png())
    return replace(empty, text=text, finish_reason=finish_reason, truncated=True)


def test_an_f1_of_zero_says_what_the_answers_were(tmp_path):
    """Counts on the console and in every file, and three of the answers, those first of which
    nothing could be read.
    """
    rambling = [unread(at, f"Sure! Here are the objects: {HOSTILE}") for at in (1, 3, 4)]
    opened = unread(0, '{"object_1": {"desc"')
    scenes = [opened, rambling[0], unread(2, "", FinishReason.STOP), *rambling[1:]]
    report = report_on(scenes)
    assert report.describe().endswith(
        " 0.000; of 5 answers 4 never opened with {, 1 not closed, 4 cut by length"
        " (rollout_matching.max_new_tokens: 160)"
    )
    counts = {"num_never_opened": 4, "num_not_closed": 1, "num_length_limited": 4}
    metrics = {f"val/{name}": number for name, number in counts.items()}
    assert metrics.items() <= report.metrics().items()
    facts = counts | {"num_truncated": 5, "max_new_tokens": 160}
    assert facts.items() <= report.as_json().items()
    tables = {table.title: table.rows for table in report_tables(report)}
    assert tables["Incomplete answers"][0] == ("never opened with {", "4")
    ends = [
        ("length", "Sure! Here a..."),
        ("model", "no text at all"),
        ("length", "Sure! Here a..."),
    ]
    for number, at, (end, text) in zip((2, 3, 4), report.incomplete, ends, strict=True):
        pattern = rf"val:{number} \(never opened, .*{end}\): {re.escape(text)}"
        assert re.fullmatch(pattern, answer_line(at, 12))
    write_report(tmp_path / "report", report)
    rows = lines_of(tmp_path / "report")
    assert [row["text"] for row in rows] == [at.text for at in scenes]
    assert [row["finish_reason"] for row in rows] == [at.finish_reason for at in scenes]
    shown = Page((tmp_path / "report" / "report.html").read_text())
    assert "4 answers never opened with {" in shown.text
    assert re.search(r"val:2 \(never opened, [^()]*length\): Sure!", shown.text)
    assert "script" not in shown.tags


def test_answers_that_are_complete_are_not_spoken_of():
    report = report_on(random_scenes(5))
    assert report.describe().rpartition(", ")[2].startswith("class accuracy on matched objects")
    assert report.incomplete == []
    assert "incomplete answers" not in page(report)


def test_the_predictions_can_be_exported_to_coco(tmp_path):
    at = random_scenes(8)[3]
    at = replace(at, sample=replace(at.sample, images=(), metadata={"image_id": 17}))
    write_report(tmp_path / "report", report_on([at], evaluation__worst_scenes=0))
    assert read_predictions(tmp_path / "report" / "predictions.jsonl") == [
        ImagePredictions(17, at.sample.width, at.sample.height, at.objects)
    ]


def test_what_cannot_be_written_says_where_and_leaves_nothing_half_done(tmp_path):
    (tmp_path / "evaluations").write_text("a file")
    with pytest.raises(StorageError, match=r"cannot write .*evaluations/step_000030"):
        write_report(tmp_path / "evaluations" / "step_000030", report_on([]))
    # What a killed process left is in nobody's way.
    (tmp_path / "report.partial").mkdir()
    (tmp_path / "report.partial" / "old").touch()
    write_report(tmp_path / "report", report_on([]))
    assert [path.name for path in tmp_path.iterdir() if "report" in path.name] == ["report"]
    assert not (tmp_path / "report" / "old").exists()


def test_the_page_is_sound_loads_nothing_and_escapes_every_text():
    truths = [truth(0, 0, 99, 99, desc=HOSTILE)]
    found = [guess(*AWAY, desc=HOSTILE)]
    text = page(report_on([scene(3, truths, found, sample_id=HOSTILE)], subject=HOSTILE))
    text.encode()
    read = Page(text)
    assert "script" not in read.tags
    assert set(read.links) == {"pictures/00003.png"}
    assert read.text.count("alert(1)") >= 4
    assert "\u202e" not in text
    for title in ("Detection", "COCO", "Classes", "Worst scenes"):
        assert title in read.text


@pytest.mark.parametrize(
    ("penalty", "score", "is_noted"),
    [(1.0, "coord_probability", False), (1.3, "coord_probability", True), (1.3, "constant", False)],
)
def test_scores_under_a_repetition_penalty_are_said_to_be(penalty, score, is_noted):
    settings = {"evaluation__score": score, "rollout_matching__repetition_penalty": penalty}
    report = report_on(random_scenes(3), **settings)
    assert report.as_json()["repetition_penalty"] == penalty
    note = "rollout_matching.repetition_penalty 1.3"
    assert (note in report_tables(report)[1].note) == (note in page(report)) == is_noted


def test_tables_are_rectangular_and_leave_out_what_is_empty():
    tables = {table.title: table for table in report_tables(report_on(random_scenes(10)))}
    assert list(tables) == ["Detection", "COCO", "Classes", "Dropped entries"]
    assert all(len(row) == len(table.head) for table in tables.values() for row in table.rows)
    assert "mean probability of its coord tokens" in tables["COCO"].note
    # How many names are equal among pairs of equal names is no number.
    assert [(row[0], row[-1] == "-") for row in tables["Detection"].rows] == [
        ("IoU 0.5, any class", False),
        ("IoU 0.5, by class", True),
        ("IoU 0.75, any class", False),
        ("IoU 0.75, by class", True),
    ]
    points = scene(0, [truth(0, 0)], [guess(30, 40), guess(60, 80)])
    learned = {"rollout_matching__geometry": ["bbox_2d", "point_2d"]}
    of_points = report_on([points], rollout_matching__point_tolerance=100.0, **learned)
    assert (of_points.counts.num_matched, of_points.coco.num_points) == (1, 3)
    detection, coco = report_tables(of_points)[:2]
    assert "two points 100 bins apart" in detection.note
    assert "Leaves out 3 points" in coco.note
    assert "points" not in tables["COCO"].note + tables["Detection"].note
    empty = report_on([scene(0, [], [])], evaluation__score="constant")
    assert [table.title for table in report_tables(empty)] == ["Detection", "COCO"]


def test_a_picture_shows_ground_truth_dashed_and_predictions_by_what_became_of_them():
    # One box each, far apart; the image is enlarged six times, so a bin is 0.6006 pixels wide.
    truths = [truth(0, 0, 200, 400), truth(300, 0, 500, 400), truth(0, 500, 200, 999)]
    found = [guess(0, 0, 190, 400), guess(300, 0, 490, 400, desc="dog"), guess(800, 0, 990, 400)]
    picture = draw_scene(
        scene(0, truths, found, image=png()), pair_objects(found, truths, iou_threshold=0.5)
    )
    assert picture.size == (606, 366 + 24)
    pixels = np.asarray(picture)

    def colours(rows, columns):
        return {tuple(map(int, pixel)) for pixel in pixels[rows, columns].reshape(-1, 3)}

    upper = slice(30, 114)
    assert FOUND in colours(upper, slice(0, 3))
    assert OTHER_NAME in colours(upper, slice(179, 182))
    assert UNMATCHED in colours(upper, slice(479, 482))
    assert TRUTH in colours(slice(210, 336), slice(0, 3))
    # Dashes leave the image in between.
    assert (90, 90, 90) in colours(slice(210, 330), slice(0, 1))


def test_a_picture_tells_an_object_that_was_found_before_from_one_without_a_match():
    truths = [truth(0, 0, 200, 400), truth(300, 0, 500, 400)]
    found = [guess(0, 0, 190, 400), guess(0, 0, 200, 300), guess(800, 0, 990, 400)]
    pairs = pair_objects(found, truths, iou_threshold=0.5)
    of = scene(0, truths, found, image=png())

    def colours(picture, rows, columns):
        return {tuple(map(int, pixel)) for pixel in picture[rows, columns].reshape(-1, 3)}

    page = np.asarray(draw_scene(of, pairs))
    # The lower edge of the second prediction, and the left edge of the third.
    assert REPEATED in colours(page, slice(105, 114), 60)
    assert UNMATCHED in colours(page, 80, slice(479, 484))
    demo = np.asarray(draw_scene(of, pairs, only_missed=True))
    # The upper edge of the second true object is missed; the lower edge of the first is not.
    assert TRUTH in colours(demo, slice(0, 2), slice(190, 300))
    assert TRUTH in colours(page, slice(140, 152), slice(0, 100))
    assert TRUTH not in colours(demo, slice(140, 152), slice(0, 100))


@pytest.mark.parametrize("size", [(2, 2), (20_000, 2), (700, 700)])
def test_a_picture_of_anything_can_be_drawn(size):
    extreme = [
        guess(0, 0, 0, 0),
        guess(999, 999, 999, 999, desc=HOSTILE),
        guess(0, 999, 0, 999, 0, 999),
        guess(999, 0, 0, 999, 5, 5, desc="猫" * 300),
        guess(999, 0),
    ]
    at = scene(0, [truth(0, 0, 999, 999, desc=HOSTILE)], extreme, image=png(*size))
    assert max(draw_scene(at, []).size) <= 1280 + 24


def test_the_same_evaluation_gives_the_same_report_twice(tmp_path):
    scenes = [
        scene(at.position, at.sample.objects, at.objects, image=png()) for at in random_scenes(6)
    ]
    contents = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        write_report(folder, report_on(scenes))
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        contents.append({path.relative_to(folder): path.read_bytes() for path in files})
    assert contents[0] == contents[1]
    assert len(contents[0]) > 4
