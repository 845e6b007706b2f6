"""The folder of a held-out report.

report.json        every number
report.html        the same to read, with the worst scenes; loads nothing but their pictures
config.json        what it was evaluated with
predictions.jsonl  every sample's answer and what was found in it; `rollmatch coco export` reads it
pictures/          the worst scenes
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launch.inspect.sample_pages.html import render
from launch.reports.detection import DetectionReport, WorstScene, answer_line, report_tables
from launch.reports.pictures import draw_scene
from shared.grounding.coco import ScoredObject
from shared.run_files import cannot_write

MAX_CHARACTERS = 600
"""Longest text of an answer on the page."""


def page(report: DetectionReport) -> str:
    """Return the report as HTML, for a folder that holds its pictures."""
    evaluation = report.evaluation
    counts = report.counts
    written = counts.num_predictions + counts.num_dropped
    facts = [
        f"{len(evaluation.outcomes)} scenes",
        f"weight version {evaluation.weight_version}",
        f"{counts.num_ground_truth} objects to find",
        f"{counts.num_predictions} valid objects of {written} written ({counts.valid_rate:.3f})",
        *([f"{counts.num_ignored} in regions to ignore"] if counts.num_ignored else []),
        *(f"{number} answers {what}" for what, number in report.faults().items()),
        f"generated and read in {evaluation.wall_s:.1f} s",
    ]
    return render(
        "report.html",
        heading=f"Held-out report: {report.subject}",
        facts=facts,
        report=report,
        tables=report_tables(report),
        answers=[answer_line(scene, MAX_CHARACTERS) for scene in report.incomplete],
        stories=[story(worst) for worst in report.worst],
    )


def story(worst: WorstScene) -> str:
    """Describe a scene by what was found in it, missed and dropped."""
    scene = worst.scene
    truths = scene.sample.objects
    pairs = {pair.prediction: pair for pair in worst.pairs}
    found = []
    for index, prediction in enumerate(scene.objects):
        partner = "nothing"
        if index in pairs:
            pair = pairs[index]
            partner = f"{truths[pair.ground_truth].desc} (IoU {pair.iou:.2f})"
        found.append(f"{prediction.desc} for {partner}")
    matched = {pair.ground_truth for pair in worst.pairs}
    missed = [truth.desc for index, truth in enumerate(truths) if index not in matched]
    story = f"Found: {', '.join(found) or 'nothing'}; missed: {', '.join(missed) or 'nothing'}"
    if scene.dropped:
        story += f"; dropped: {', '.join(scene.dropped)}"
    story += "."
    if len(scene.sample.images) > 1:
        story += f" Image 1 of {len(scene.sample.images)}."
    return story


def write_report(folder: Path, report: DetectionReport) -> None:
    """Write `folder`, which must not exist, whole or not at all.

    Raises:
        StorageError: it cannot be written.
        RecordError: an image to be drawn is gone or has changed.
    """
    with whole_folder(folder) as partial:
        (partial / "pictures").mkdir()
        numbers = json.dumps(report.as_json(), indent=2, allow_nan=False)
        (partial / "report.json").write_text(numbers + "\n", encoding="utf-8")
        config = report.config.model_dump_json(indent=2)
        (partial / "config.json").write_text(config + "\n", encoding="utf-8")
        (partial / "report.html").write_text(page(report), encoding="utf-8")
        with (partial / "predictions.jsonl").open("w", encoding="utf-8") as file:
            for scene in report.evaluation.outcomes:
                row = {
                    "sample_id": scene.sample.sample_id,
                    "width": scene.sample.width,
                    "height": scene.sample.height,
                    "metadata": dict(scene.sample.metadata),
                    "objects": [_as_row(found) for found in scene.objects],
                    "finish_reason": scene.finish_reason,
                    "text": scene.text,
                }
                file.write(json.dumps(row) + "\n")
        for worst in report.worst:
            draw_scene(worst.scene, worst.pairs).save(partial / worst.picture)


def _as_row(found: ScoredObject) -> dict[str, Any]:
    row = asdict(found)
    if found.pixels is None:
        del row["pixels"]
    return row


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Give an empty folder, which becomes `folder` at the end of the block. Raises StorageError.

    What a block that raises leaves lies beside it until the next attempt.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    try:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        yield partial
        partial.rename(folder)
    except OSError as error:
        raise cannot_write(folder, error) from error
