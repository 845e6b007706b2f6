"""A run in the packages of `telemetry.loggers`, as each of them reads it back
(docs/how_to/loggers.md).

trackio and mlflow are no part of the environment that `make` sets up: their versions of other
packages are not ours. Their tests are skipped there.
"""

from __future__ import annotations

import io
import json
import os
import sqlite3
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from config_support import configuration
from PIL import Image
from rich.console import Console
from scene_support import guess, png, scene, truth

from launch.doctor.learning import VERDICT
from launch.processes.batch_algebra import batch_algebra
from launch.run_folder.resume import ResumePoint
from launch.run_folder.saved_checkpoints import RunState
from launch.run_folder.telemetry import Telemetry
from learner.rollout_logs.samples import RolloutRecord, read_step
from shared.config import RunConfig
from shared.grounding.evaluation import Evaluation
from shared.metrics import METRICS, StepReport
from shared.rollouts import SyncReport
from shared.run_files import Span
from shared.schedule import RunSchedule

TEXTS = {"rollout/decode_mode", "sync/mode", "sync/version", "time/bounded_by"}
"""Metrics that the driver sets, three of them texts."""
EVERY_METRIC = {
    metric.name.replace("<function>", "correct"): float(number)
    for number, metric in enumerate(METRICS)
    if metric.name not in TEXTS
}
ANSWER = '{"object_1": {"desc": "a | b",\n"bbox_2d": []}}'
LINE: RolloutRecord = {
    "step": 1,
    "position": 0,
    "channel": "B",
    "sample_id": "scene-7",
    "ground_truth": [{"kind": "bbox_2d", "bins": [0, 0, 9, 9], "desc": "seven"}],
    "rollout": {
        "weight_version": 1,
        "actor": "a",
        "seed": 3,
        "attempt": 0,
        "finish_reason": "stop",
        "num_prompt_tokens": 2,
        "response_token_ids": [1, 2, 3],
        "forced_positions": [],
        "text": ANSWER,
    },
    "reading": {
        "prefix_text": "{",
        "num_kept_bytes": 1,
        "num_kept": 1,
        "num_prefix": 1,
        "truncated": False,
        "fallback": False,
        "max_object_index": None,
        "objects": [],
        "dropped": [{"key": "object_1", "reason": "wrong_arity"}],
        "pairs": [],
        "excluded": [],
        "unmatched_predictions": [],
        "gating_rejections": 0,
        "appended": [0],
        "appended_text": "...",
    },
    "target": {
        "token_ids": [1],
        "supervision": [(0, 1, "closing", 1.0)],
        "coord_positions": [],
        "coord_targets": [],
    },
}
OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",
}


def require(*distributions: str) -> None:
    for name in distributions:
        try:
            version(name)
        except PackageNotFoundError:
            continue
        return
    pytest.skip(f"{distributions[0]} is not installed (docs/how_to/loggers.md says how)")


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def begin(config: RunConfig, point: ResumePoint | None = None) -> Telemetry:
    telemetry = Telemetry(config, Console(file=io.StringIO(), width=300), point)
    telemetry.placed(batch_algebra(config, (1, 1)), ("a", "b"), learner_threads=2)
    if point is not None:
        telemetry.go_on(point)
    return telemetry


def take_step(telemetry: Telemetry, config: RunConfig, number: int, loss: float) -> None:
    plan = RunSchedule(config).plan(number - 1)
    metrics = EVERY_METRIC | {"loss/total": loss}
    with telemetry.step(plan) as record:
        span = Span("learner", "learn round", 1.0, 2.0)
        record.report = StepReport(plan.step, plan.channel, 7, metrics, (span,))
        record.sync = SyncReport(8, 11_000_000, {"wire": 0.01}, 2e-6)


def run_in_two_starts(config: RunConfig) -> None:
    """The first one ends behind step 2 and its report, the second repeats both and goes on."""
    log = config.telemetry.run_dir / "rollouts" / "step_000001.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text(json.dumps(LINE) + "\n")
    assert read_step(log), "a line as the learner writes it"
    found, missed = guess(0, 0, 99, 99, desc="ä", score=0.5), truth(500, 500, 900, 900, desc="two")
    scenes = tuple(
        scene(position, [truth(0, 0, 99, 99), missed], [found], image=png())
        for position in range(2)
    )
    report = Evaluation(2, 3, scenes, wall_s=1.0)
    with begin(config) as telemetry:
        take_step(telemetry, config, 1, loss=4.0)
        take_step(telemetry, config, 2, loss=3.0)
        telemetry.evaluation(report)
    state = RunState(1, config.model_dump(mode="json"), {})
    with begin(config, ResumePoint(config.telemetry.run_dir, state)) as telemetry:
        take_step(telemetry, config, 2, loss=3.0)
        telemetry.evaluation(report)
        take_step(telemetry, config, 3, loss=2.0)


@pytest.fixture
def logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Make the run, as a function of the logger's name; returns its configuration."""
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "mlruns"))

    def make(logger: str) -> RunConfig:
        config = configuration(
            tmp_path / "model",
            tmp_path / "data",
            tmp_path / "day" / "time",
            telemetry__ray_metrics=False,
            telemetry__loggers=["jsonl", logger],
            telemetry__project="demo",
            stage2_ab__schedule__warmup_steps=0,
            stage2_ab__schedule__b_ratio=1.0,
            timeouts__logger_s=300.0,
        )
        before = children()
        run_in_two_starts(config)
        assert children() <= before
        return config

    return make


def lines(config: RunConfig, name: str) -> list[dict[str, Any]]:
    path = config.telemetry.run_dir / name
    return [json.loads(line) for line in path.read_text().splitlines()]


def figures(line: dict[str, Any]) -> dict[str, Any]:
    """What a line of metrics.jsonl or evaluations.jsonl has of metrics."""
    return {name: value for name, value in line.items() if "/" in name}


def numbers(line: dict[str, Any]) -> dict[str, float]:
    return {k: v for k, v in figures(line).items() if not isinstance(v, str)}


@pytest.mark.slow
def test_tensorboard_has_every_figure_of_the_files_pictures_and_rollouts_and_a_repeated_step_once(
    logged,
):
    config = logged("tensorboard")
    found = {line["rule"] for line in lines(config, "doctor.jsonl")} - {VERDICT}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(config.telemetry.run_dir / "loggers" / "tensorboard"), {})
    read.Reload()
    tags = read.Tags()
    assert found and {f"doctor/{rule}/text_summary" for rule in found} <= set(tags["tensors"])
    expected: dict[str, dict[int, float]] = {}
    for line in (*lines(config, "metrics.jsonl"), *lines(config, "evaluations.jsonl")):
        for name, number in numbers(line).items():
            expected.setdefault(name, {})[line["step"]] = pytest.approx(number, rel=1e-6)
    assert {
        name: {event.step: event.value for event in read.Scalars(name)} for name in tags["scalars"]
    } == expected
    assert EVERY_METRIC.keys() < expected.keys()
    assert [event.step for event in read.Scalars("loss/total")] == [1, 2, 3]

    def text(tag: str) -> dict[int, str]:
        events = read.Tensors(f"{tag}/text_summary")
        return {event.step: event.tensor_proto.string_val[0].decode() for event in events}

    assert text("rollout/decode_mode") == {1: "greedy", 2: "greedy", 3: "greedy"}
    assert "| training.seed | 17 |" in text("config")[1]
    assert r'{"object\_1": {"desc": "a \| b",<br>"bbox\_2d": []}}' in text("rollouts")[1]
    assert "| scene-7 |" in text("rollouts")[1]
    assert "ä 0.50" in text("held_out_rollouts")[2]
    (image,) = read.Images("held_out/0")
    (picture, _) = sorted(config.telemetry.run_dir.glob("evaluations/step_000002/pictures/*"))
    shown = Image.open(io.BytesIO(image.encoded_image_string))
    assert image.step == 2 and np.array_equal(np.asarray(shown), np.asarray(Image.open(picture)))
    assert "missed: two" in text("held_out/captions")[2]


def wandb_records(file: Path) -> list[Any]:
    """Read the records of an offline run: LevelDB's log format behind seven bytes of wandb's own."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = file.read_bytes()
    position, parts, records = 7, b"", []
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        size = int.from_bytes(data[position + 4 : position + 6], "little")
        kind = data[position + 6]
        parts += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or the last part
            records.append(Record.FromString(parts))
            parts = b""
    return records


@pytest.mark.long
def test_wandb_offline_has_every_figure_pictures_and_rollouts_of_one_run_in_two_parts(logged):
    require("wandb")
    config = logged("wandb")
    folders = sorted((config.telemetry.run_dir / "loggers" / "wandb").glob("offline-run-*"))
    records = [wandb_records(next(folder.glob("*.wandb"))) for folder in folders]
    runs = [record.run for part in records for record in part if record.HasField("run")]
    assert len(folders) == 2
    assert {(run.run_id, run.project, run.display_name) for run in runs} == {
        (folders[0].name.rpartition("-")[2], "demo", "run-day-time")
    }
    settings = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert settings["training"]["seed"] == 17
    history: dict[int, dict[str, Any]] = {}
    for record in (record for part in records for record in part if record.HasField("history")):
        items = {
            ".".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in record.history.item
        }
        history.setdefault(record.history.step.num or items["_step"], {}).update(items)
    for line in (*lines(config, "metrics.jsonl"), *lines(config, "evaluations.jsonl")):
        wanted = figures(line)
        # Figures of a repeated step are those of the first part, and so are its times.
        timed = {name for name in wanted if name.startswith("time/")}
        assert {name: history[line["step"]][name] for name in wanted.keys() - timed} == {
            name: wanted[name] for name in wanted.keys() - timed
        }
    exits = [
        record.exit.exit_code for part in records for record in part if record.HasField("exit")
    ]
    assert exits == [0, 0]
    (table,) = folders[0].glob("files/media/table/rollouts_1_*.json")
    assert ANSWER in json.loads(table.read_text())["data"][0]
    assert list(folders[0].glob("files/media/images/*.png"))
    captions = history[2]["held_out.captions"]
    assert len(captions) == 2 and "missed: two" in captions[0]


@pytest.mark.long
def test_trackio_has_every_figure_pictures_and_rollouts_of_one_run(logged, tmp_path):
    require("trackio")
    config = logged("trackio")
    (file,) = (tmp_path / "trackio").glob("demo*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute(
            "select run_name, step, metrics from metrics order by id"
        ).fetchall()
        settings = database.execute("select run_name, config from configs").fetchall()
    name = (config.telemetry.run_dir / "loggers" / "trackio.id").read_text().strip()
    assert {row[0] for row in rows} == {name} and name.startswith("run-day-time-")
    assert json.loads(settings[0][1])["training"]["seed"] == 17
    history: dict[int, dict[str, Any]] = {}
    for _, step, metrics in rows:
        history.setdefault(step, {}).update(json.loads(metrics))
    for line in (*lines(config, "metrics.jsonl"), *lines(config, "evaluations.jsonl")):
        wanted = figures(line)
        assert {name: history[line["step"]][name] for name in wanted} == wanted
    assert ANSWER in str(history[1]["rollouts"]).encode().decode("unicode_escape")
    picture = history[2]["held_out/0"]
    assert "missed: two" in picture["caption"]
    assert list((tmp_path / "trackio").glob("media/**/*.png"))


@pytest.mark.long
def test_an_mlflow_file_store_has_every_figure_pictures_and_rollouts_of_one_run(logged, tmp_path):
    require("mlflow", "mlflow-skinny")
    config = logged("mlflow")
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=os.environ["MLFLOW_TRACKING_URI"])
    experiment = client.get_experiment_by_name("demo")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run-day-time", "FINISHED")
    assert run.data.params["training.seed"] == "17"
    assert run.data.tags["rollout/decode_mode"] == "greedy"
    for line in (*lines(config, "metrics.jsonl"), *lines(config, "evaluations.jsonl")):
        for name, number in numbers(line).items():
            points = client.get_metric_history(run.info.run_id, name.replace("@", "_"))
            assert number in [point.value for point in points if point.step == line["step"]], name
    folder = tmp_path / "artifacts"
    folder.mkdir()
    client.download_artifacts(run.info.run_id, "", str(folder))
    assert json.loads((folder / "config.json").read_text())["training"]["seed"] == 17
    table = json.loads((folder / "rollouts" / "step_000001.json").read_text())
    assert ANSWER in table["data"][0]
    captions = json.loads((folder / "held_out" / "captions_step_000002.json").read_text())
    assert "missed: two" in captions["0"]
    assert list((folder / "images").glob("*held_out*0*.png"))
