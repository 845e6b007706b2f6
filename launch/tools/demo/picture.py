"""Draws held-out scenes before and after runs next to the ground truth, and compares runs.

::

    before | after the run | after another run | ground truth        one row for each scene
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from launch.reports.pictures import draw_scene
from launch.run_folder.held_out import read_evaluations
from shared.dataset import load_dataset
from shared.errors import ConfigError
from shared.grounding.coco import ScoredObject
from shared.grounding.evaluation import Scene, pair_objects
from shared.records import GeometryKind, Sample
from shared.run_files import read_lines

IOU = 0.5
TITLE = 34
"""Height of a column's title, in pixels."""
GAP = 8


def draw_runs(runs: Sequence[Path], *, num_scenes: int) -> Path:
    """Write `demo.png` to the first run's folder.

    It shows scenes of the first run's first held-out report and of every run's last one.

    Raises ConfigError if a run has fewer than two reports, or another initial model or other
    held-out scenes than the first run.
    """
    configs = [json.loads((run / "config.json").read_text()) for run in runs]
    _require_equal_beginnings(runs, configs)
    reports = []
    for run in runs:
        of_run = sorted((run / "evaluations").glob("step_*/predictions.jsonl"))
        if len(of_run) < 2:
            raise ConfigError(f"{run}: has {len(of_run)} held-out reports; two are needed")
        reports.append(of_run)
    data = configs[0]["data"]
    held_out = load_dataset(
        Path(data["val"]), on_bad_row=data["on_bad_row"], sort_objects=True, check_images=False
    )
    shown = [("before", reports[0][0])]
    for config, of_run in zip(configs, reports, strict=True):
        variant = config["custom"]["trainer_variant"]
        how = "supervised only" if variant == "stage1_sft" else "with rollouts"
        shown.append((f"{config['telemetry']['name']}, {how}", of_run[-1]))
    found = [_objects_by_sample(report) for _, report in shown]
    # Reports lack rows that a run skipped, such as rows without their image.
    samples = [
        sample
        for sample in held_out.samples
        if all(sample.sample_id in of_report for of_report in found)
    ][:num_scenes]
    columns = []
    for (title, report), of_report in zip(shown, found, strict=True):
        objects = [of_report[sample.sample_id] for sample in samples]
        figures = json.loads((report.parent / "report.json").read_text())["detection"][0]
        f1 = figures["class_aware"]["f1"]
        columns.append(_column(f"{title} (F1 {f1:.2f} with names)", samples, objects))
    truths = [
        tuple(ScoredObject(one.kind, one.bins, one.desc, 1.0) for one in sample.objects)
        for sample in samples
    ]
    columns.append(_column("ground truth", samples, truths))
    width, height = columns[0].size
    whole = Image.new("RGB", (len(columns) * (width + GAP) - GAP, height), "white")
    for place, column in enumerate(columns):
        whole.paste(column, (place * (width + GAP), 0))
    out = runs[0] / "demo.png"
    whole.save(out, optimize=True)
    return out


def compare_runs(runs: Sequence[Path]) -> list[str]:
    """Return a line on each run, and a line that names the run with the best final class-aware F1.

    Raises ConfigError if a run has no held-out report, or has another initial model or other
    held-out scenes than the first run.
    """
    configs = [json.loads((run / "config.json").read_text()) for run in runs]
    _require_equal_beginnings(runs, configs)
    lines = []
    best: tuple[float, str] | None = None
    for run, config in zip(runs, configs, strict=True):
        reports = read_evaluations(run)
        scores = [report.class_f1 for report in reports if report.class_f1 is not None]
        if not scores:
            raise ConfigError(f"{run}: has no held-out report of detection to compare")
        steps = read_lines(run / "metrics.jsonl")
        seconds = sum(step["time/step_s"] for step in steps)
        name = config["telemetry"]["name"]
        lines.append(
            f"{name:<9} F1 with names {scores[0]:.3f} -> {scores[-1]:.3f} in {len(steps)} updates,"
            f" {seconds:.0f} s of steps ({run})"
        )
        if best is None or scores[-1] > best[0]:
            best = scores[-1], name
    assert best is not None, "at least one run is given"
    return [*lines, f"ahead     {best[1]}, at {best[0]:.3f}"]


def _require_equal_beginnings(runs: Sequence[Path], configs: Sequence[dict[str, Any]]) -> None:
    begins = [
        {"model.path": config["model"]["path"], "data.val": config["data"]["val"]}
        for config in configs
    ]
    for run, of_run in zip(runs, begins, strict=True):
        if of_run != begins[0]:
            raise ConfigError(
                f"{run}: has {of_run}, but {runs[0]} has {begins[0]}; compare runs with equal"
                " values"
            )


def _objects_by_sample(predictions: Path) -> dict[str, tuple[ScoredObject, ...]]:
    with predictions.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return {
        row["sample_id"]: tuple(
            ScoredObject(GeometryKind(one["kind"]), tuple(one["bins"]), one["desc"], one["score"])
            for one in row["objects"]
        )
        for row in rows
    }


def _column(
    title: str, samples: Sequence[Sample], found: Sequence[tuple[ScoredObject, ...]]
) -> Image.Image:
    pictures = []
    for position, (sample, objects) in enumerate(zip(samples, found, strict=True)):
        scene = Scene(position, sample, objects, dropped=(), truncated=False)
        pairs = pair_objects(objects, sample.objects, iou_threshold=IOU)
        pictures.append(draw_scene(scene, pairs, only_missed=True))
    width = max(picture.width for picture in pictures)
    height = sum(picture.height + GAP for picture in pictures)
    column = Image.new("RGB", (width, TITLE + height), "white")
    font = ImageFont.load_default(size=20)
    ImageDraw.Draw(column).text((6, 6), title, fill="black", font=font)
    top = TITLE
    for picture in pictures:
        column.paste(picture, (0, top))
        top += picture.height + GAP
    return column
