"""The held-out report as one HTML page beside its pictures: nothing else is loaded, and every text
is escaped.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launch.reports.detection import DetectionReport, Table, WorstScene, answer_line, report_tables
from launch.reports.pictures import draw_scene
from launch.sample_pages.html import attribute, inline
from shared.errors import StorageError
from shared.grounding.evaluation import Scene

_STYLE = """
body { margin: 0; background: #f5f7fa; color: #1c2330; font: 15px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 22px; margin: 0 0 4px; overflow-wrap: anywhere; } h2 { font-size: 16px; margin: 0 0 6px; } p { margin: 0 0 10px; }
.soft, figcaption { color: #5c6675; font-size: 13px; }
section { background: #fff; border: 1px solid #dde2ea; border-radius: 10px; padding: 16px 18px; margin-top: 16px; overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th { font-size: 12px; color: #5c6675; font-weight: 600; } th, td { padding: 4px 18px 4px 0; border-bottom: 1px solid #dde2ea; text-align: right; }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere; } tbody tr:last-child td { border-bottom: 0; }
.scenes { display: grid; grid-template-columns: repeat(auto-fill, minmax(340px, 1fr)); gap: 18px; }
figure { margin: 0; } figure img { display: block; width: 100%; height: auto; border: 1px solid #dde2ea; }
figcaption { margin-top: 6px; overflow-wrap: anywhere; }
figcaption b { color: #1c2330; } .code { color: #8a4b00; background: #fff3dc; font-weight: 400; font-size: 0.85em; }
"""


MAX_CHARACTERS = 600
"""Of an answer's text on the page."""


def page(report: DetectionReport) -> str:
    evaluation, counts = report.evaluation, report.counts
    facts = [
        f"{len(evaluation.outcomes)} scenes",
        f"weight version {evaluation.weight_version}",
        f"{counts.num_ground_truth} objects to find",
        (
            f"{counts.num_predictions} valid objects of"
            f" {counts.num_predictions + counts.num_dropped} written ({counts.valid_rate:.3f})"
        ),
        *(f"{number} answers {what}" for what, number in report.faults().items()),
        f"generated and read in {evaluation.wall_s:.1f} s",
    ]
    title = inline(f"Held-out report: {report.subject}")
    body = "".join(_table(table) for table in report_tables(report))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport"'
        ' content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n<body><main><h1>{title}</h1>\n"
        f'<p class="soft">{inline(" · ".join(facts))}</p>\n{body}{_answers(report)}{_scenes(report.worst, report.iou_threshold)}</main></body></html>\n'
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{inline(cell)}</th>" for cell in table.head)
    rows = "\n".join(
        f"<tr>{''.join(f'<td>{inline(cell)}</td>' for cell in row)}</tr>" for row in table.rows
    )
    return (
        f'<section><h2>{inline(table.title)}</h2><p class="soft">{inline(table.note)}</p>\n'
        f"<table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></section>\n"
    )


def _answers(report: DetectionReport) -> str:
    if not report.incomplete:
        return ""
    shown = "".join(
        f"<p>{inline(answer_line(scene, MAX_CHARACTERS))}</p>" for scene in report.incomplete
    )
    note = (
        f"The first {len(report.incomplete)} of {report.detection.num_truncated};"
        " `predictions.jsonl` has every answer whole."
    )
    return (
        "<section><h2>What incomplete answers say</h2><p"
        f' class="soft">{inline(note)}</p>\n{shown}</section>\n'
    )


def _scenes(worst: Sequence[WorstScene], iou_threshold: float) -> str:
    if not worst:
        return ""
    note = (
        f"Lowest F1 at IoU {iou_threshold:g} first. Dashed: ground truth, named at its foot. Solid:"
        " predictions, named at their top with their scores."
    )
    figures = "\n".join(_figure(one) for one in worst)
    return (
        f'<section><h2>Worst scenes</h2><p class="soft">{inline(note)}</p>\n<div'
        f' class="scenes">{figures}</div></section>\n'
    )


def _figure(worst: WorstScene) -> str:
    scene = worst.scene
    partner = {pair.prediction: pair for pair in worst.pairs}
    found = []
    for index, one in enumerate(scene.objects):
        if index in partner:
            pair = partner[index]
            found.append(
                f"{one.desc} for {scene.sample.objects[pair.ground_truth].desc} (IoU"
                f" {pair.iou:.2f})"
            )
        else:
            found.append(f"{one.desc} for nothing")
    matched = {pair.ground_truth for pair in worst.pairs}
    missed = [
        truth.desc for index, truth in enumerate(scene.sample.objects) if index not in matched
    ]
    dropped = f"; dropped: {', '.join(scene.dropped)}" if scene.dropped else ""
    images = f" Image 1 of {len(scene.sample.images)}." if len(scene.sample.images) > 1 else ""
    story = (
        f"Found: {', '.join(found) or 'nothing'}; missed:"
        f" {', '.join(missed) or 'nothing'}{dropped}.{images}"
    )
    return (
        f'<figure><a href="{attribute(worst.picture)}"><img src="{attribute(worst.picture)}"'
        f' alt="{attribute(scene.sample.sample_id)}"></a><figcaption><b>{inline(scene.sample.sample_id)}</b>'
        f" F1 {worst.f1:.2f}. {inline(story)}</figcaption></figure>"
    )


# The folder of a held-out report.
#
# report.json        every number
# report.html        the same to read, with the worst scenes
# config.json        what it was evaluated with
# predictions.jsonl  every sample's answer and what was found in it; `launch.coco export` reads it
# pictures/          the worst scenes


def write_report(folder: Path, report: DetectionReport) -> None:
    """Writes `folder`, which must not exist: complete, or not there at all.

    Raises:
        StorageError: it cannot be written.
        RecordError: an image to be drawn is gone or has changed.
    """
    with whole_folder(folder) as partial:
        (partial / "pictures").mkdir()
        (partial / "report.json").write_text(
            json.dumps(report.as_json(), indent=2, allow_nan=False) + "\n", encoding="utf-8"
        )
        (partial / "config.json").write_text(
            report.config.model_dump_json(indent=2) + "\n", encoding="utf-8"
        )
        (partial / "report.html").write_text(page(report), encoding="utf-8")
        with (partial / "predictions.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(_row(scene)) + "\n" for scene in report.evaluation.outcomes)
        for worst in report.worst:
            draw_scene(worst.scene, worst.pairs).save(partial / worst.picture)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """An empty folder to fill, which becomes `folder`, which must not exist, at the end of the
    block: complete, or not there at all.

    Raises StorageError where a file or the folder cannot be written. What the block leaves when it
    raises is beside `folder`, and gone with the next attempt.
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
        "objects": [
            {"kind": found.kind, "bins": found.bins, "desc": found.desc, "score": found.score}
            for found in scene.objects
        ],
        "finish_reason": scene.finish_reason,
        "text": scene.text,
    }
