"""A run's picture shows its first scenes before and after it, beside the ground truth."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from PIL import Image, ImageChops

from launch.tools.demo.picture import TITLE, compare_runs, draw_runs
from launch.tools.demo.scenes import make_crowded_data
from shared.dataset import load_dataset
from shared.errors import ConfigError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose first report found nothing, and whose last one found everything."""
    make_crowded_data(tmp_path / "data", seed=1, counts={"train": 0, "val": 2, "test": 0})
    val = tmp_path / "data" / "val.jsonl"
    run = tmp_path / "run"
    for step in (0, 5):
        report = run / "evaluations" / f"step_{step:06d}"
        report.mkdir(parents=True)
        rows = []
        samples = load_dataset(val, on_bad_row="error", sort_objects=True, check_images=False)
        for sample, line in zip(samples, val.read_text().splitlines(), strict=True):
            found = [
                {"kind": "bbox_2d", "bins": one["bbox_2d"], "desc": one["desc"], "score": 0.5}
                for one in json.loads(line)["objects"]
            ]
            row = {"sample_id": sample.sample_id, "objects": found if step else []}
            rows.append(json.dumps(row))
        (report / "predictions.jsonl").write_text("\n".join(rows) + "\n")
        detection = {"detection": [{"class_aware": {"f1": float(bool(step))}}]}
        (report / "report.json").write_text(json.dumps(detection))
    (run / "config.json").write_text(
        json.dumps(
            {
                "data": {"val": str(val), "on_bad_row": "skip"},
                "custom": {"trainer_variant": "stage2_two_channel"},
                "model": {"path": "start"},
                "telemetry": {"name": "demo"},
            }
        )
    )
    return run


def test_before_after_and_ground_truth_lie_side_by_side(run: Path) -> None:
    with Image.open(draw_runs([run], num_scenes=2)) as picture:
        width, height = picture.width // 3, picture.height
        before, after, truth = (
            picture.crop(
                (place * picture.width // 3, TITLE, place * picture.width // 3 + 400, height)
            )
            for place in range(3)
        )
    assert height > 2 * width, "one scene below the other"
    assert ImageChops.difference(before, after).getbbox(), "objects were found"
    assert ImageChops.difference(before, truth).getbbox(), "the truth is drawn"


def test_another_run_from_the_same_checkpoint_is_one_more_column(run: Path) -> None:
    with Image.open(draw_runs([run], num_scenes=1)) as picture:
        alone = picture.size
    other = run.with_name("other")
    shutil.copytree(run, other)
    first, last = sorted(other.glob("evaluations/*/predictions.jsonl"))
    shutil.copy(first, last)
    config = json.loads((other / "config.json").read_text())
    config["custom"]["trainer_variant"] = "stage1_sft"
    (other / "config.json").write_text(json.dumps(config))
    with Image.open(draw_runs([run, other], num_scenes=1)) as picture:
        beside = picture.size
        columns = [
            picture.crop((place * picture.width // 4, TITLE, place * picture.width // 4 + 400, 400))
            for place in range(4)
        ]
    assert (beside[0] / alone[0], beside[1]) == (pytest.approx(4 / 3, rel=0.01), alone[1])
    before, first, second, _ = columns
    assert ImageChops.difference(before, first).getbbox()
    assert ImageChops.difference(first, second).getbbox(), "the other run found nothing"


def test_rows_that_the_run_left_out_are_not_drawn(run: Path) -> None:
    """The first scene's picture could not be read then, and a row behind it is no record."""
    for predictions in run.glob("evaluations/*/predictions.jsonl"):
        predictions.write_text(predictions.read_text().splitlines()[1] + "\n")
    val = Path(json.loads((run / "config.json").read_text())["data"]["val"])
    val.write_text(val.read_text() + "{}\n")
    with Image.open(draw_runs([run], num_scenes=2)) as picture:
        assert picture.height < 2 * picture.width // 3, "one scene alone"


def test_a_run_with_one_report_has_no_picture(run: Path) -> None:
    (run / "evaluations" / "step_000005" / "predictions.jsonl").unlink()
    with pytest.raises(ConfigError, match="has 1 held-out report"):
        draw_runs([run], num_scenes=1)


def test_the_run_with_the_better_class_aware_f1_is_named(tmp_path: Path) -> None:
    runs = []
    for name, scores, step_s in (("demo", (0.5, 0.625), 2.0), ("control", (0.5, 0.75), 1.0)):
        run = tmp_path / name
        run.mkdir()
        config = {"telemetry": {"name": name}, "model": {"path": "start"}, "data": {"val": "val"}}
        (run / "config.json").write_text(json.dumps(config))
        (run / "metrics.jsonl").write_text(f"{json.dumps({'time/step_s': step_s})}\n" * 3)
        report = {"weight_version": 1, "num_samples": 2, "headline": "F1@0.5", "score": 0.9}
        (run / "evaluations.jsonl").write_text(
            "".join(
                json.dumps(report | {"step": step, "val/class_f1": score}) + "\n"
                for step, score in enumerate(scores)
            )
        )
        runs.append(run)
    demo, control, ahead = compare_runs(runs)
    assert re.fullmatch(rf"demo +F1 .* 0\.500 -> 0\.625 .* 3 .* 6 s .*\({runs[0]}\)", demo)
    assert re.fullmatch(rf"control +F1 .* 0\.500 -> 0\.750 .* 3 .* 3 s .*\({runs[1]}\)", control)
    assert re.fullmatch(r"ahead +control, .*0\.750", ahead)
    (runs[1] / "config.json").write_text(json.dumps(config | {"model": {"path": "another"}}))
    with pytest.raises(ConfigError, match=r"control: has .*another"):
        compare_runs(runs)
    (runs[1] / "config.json").write_text(json.dumps(config))
    (runs[0] / "evaluations.jsonl").unlink()
    with pytest.raises(ConfigError, match="demo: has no held-out report"):
        compare_runs(runs)
