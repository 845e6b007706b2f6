"""The folder of a held-out report.

report.json        every number
report.html        the same to read, with the worst scenes
config.json        what it was evaluated with
predictions.jsonl  every sample's answer and what was found in it; `launch.export_coco` reads it
pictures/          the worst scenes
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launch.pictures import draw_scene
from launch.report import Report
from launch.report_page import page
from shared.errors import StorageError
from shared.evaluation import Scene


def write_report(folder: Path, report: Report) -> None:
    """Writes `folder`, which must not exist: complete, or not there at all.

    Raises:
        StorageError: it cannot be written.
        RecordError: an image to be drawn is gone or has changed.
    """
    with whole_folder(folder) as partial:
        (partial / "pictures").mkdir()
        (partial / "report.json").write_text(json.dumps(report.as_json(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        (partial / "config.json").write_text(report.config.model_dump_json(indent=2) + "\n", encoding="utf-8")
        (partial / "report.html").write_text(page(report), encoding="utf-8")
        with (partial / "predictions.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(_row(scene)) + "\n" for scene in report.evaluation.outcomes)
        for worst in report.worst:
            draw_scene(worst.scene, worst.pairs).save(partial / worst.picture)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """An empty folder to fill, which becomes `folder`, which must not exist, at the end of the block: complete, or not there at all.

    Raises StorageError where a file or the folder cannot be written. What the block leaves when it raises is beside `folder`, and gone with the next attempt.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    try:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        yield partial
        partial.rename(folder)
    except OSError as error:
        raise StorageError(str(folder), str(error)) from error


def _row(scene: Scene) -> dict[str, Any]:
    return {
        "sample_id": scene.sample.sample_id,
        "width": scene.sample.width,
        "height": scene.sample.height,
        "metadata": dict(scene.sample.metadata),
        "objects": [{"kind": found.kind, "bins": found.bins, "desc": found.desc, "score": found.score} for found in scene.objects],
        "finish_reason": scene.finish_reason,
        "text": scene.text,
    }
