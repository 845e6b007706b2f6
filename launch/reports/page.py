"""The folder of a held-out report of detection.

report.json        every number
report.html        the numbers as a page, with the worst samples; loads only files in pictures/
config.json        the configuration of the evaluation
predictions.jsonl  every sample's answer and its objects; `rollmatch coco export` reads it
pictures/          images of the worst samples
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from launch.inspect.sample_pages.html import render
from launch.reports.coco_ap import MAX_PREDICTIONS, IouType
from launch.reports.detection import DetectionReport, WorstScene
from launch.reports.pictures import draw_scene
from shared.grounding.coco import ScoredObject
from shared.grounding.evaluation import DetectionSummary, Scene
from shared.rollouts import FinishReason
from shared.run_files import cannot_write

MAX_CHARACTERS = 600
"""Maximum length of an answer's text on the page."""


def page(report: DetectionReport, findings: Sequence[str] = ()) -> str:
    """Return a detection report as an HTML page, which loads images from `pictures/` next to it.

    `findings`: what the doctor has found in the run so far.
    """
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
        findings=findings,
        tables=report_tables(report),
        answers=[answer_line(scene, MAX_CHARACTERS) for scene in report.incomplete],
        stories=[story(worst) for worst in report.worst],
    )


def story(worst: WorstScene) -> str:
    """Describe the found, missed and dropped objects of a sample in words."""
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


def write_report(folder: Path, report: DetectionReport, findings: Sequence[str] = ()) -> None:
    """Write a detection report to a new folder. If anything fails, `folder` does not appear.

    The page and `report.json` have the `findings` of the doctor.

    Raises:
        StorageError: `folder` cannot be written.
        RecordError: an image that is drawn is missing or has changed.
    """
    with whole_folder(folder) as partial:
        (partial / "pictures").mkdir()
        of_doctor = {"findings": list(findings)} if findings else {}
        numbers = json.dumps(report.as_json() | of_doctor, indent=2, allow_nan=False)
        (partial / "report.json").write_text(numbers + "\n", encoding="utf-8")
        config = report.config.model_dump_json(indent=2)
        (partial / "config.json").write_text(config + "\n", encoding="utf-8")
        (partial / "report.html").write_text(page(report, findings), encoding="utf-8")
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


def _as_row(found: ScoredObject) -> dict[str, object]:
    row = asdict(found)
    if found.pixels is None:
        del row["pixels"]
    return row


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder, and rename it to `folder` when the `with` block succeeds.

    If the block raises, its files stay in `NAME.partial` until the next attempt. Raises
    StorageError.
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


# The report's numbers as text tables, which the page and the console share.


class Table(NamedTuple):
    title: str
    note: str
    """Text that explains the table to its reader."""
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    """Rows with a cell for each column of `head`: first a name, then numbers."""


def report_tables(report: DetectionReport) -> list[Table]:
    incomplete = Table(
        "Incomplete answers",
        f"{len(report.evaluation.outcomes)} answers in all. Objects are read from the JSON at the"
        " beginning of an answer, up to its last complete entry.",
        ("", "answers"),
        [(fault, str(number)) for fault, number in report.faults().items() if number],
    )
    dropped = Table(
        "Dropped entries",
        "Complete entries that are not valid objects, by the first reason that applies.",
        ("reason", "entries"),
        [(str(reason), str(count)) for reason, count in report.detection.dropped.items()],
    )
    tables = [_detection(report), _lenient(report), _coco(report), _sources(report)]
    tables += [_classes(report), dropped, incomplete]
    return [table for table in tables if table.rows]


_DETECTION_HEAD = ("", "precision", "recall", "F1", "equal names among pairs")


def _detection_rows(detection: DetectionSummary) -> list[tuple[str, ...]]:
    rows = []
    for at in detection.thresholds:
        # Pairs by class always have equal names, so their share is not shown.
        for name, counts, equal_names in (
            ("any class", at.any_class, at.any_class.class_accuracy),
            ("by class", at.same_class, None),
        ):
            figures = _figures(counts.precision, counts.recall, counts.f1, equal_names)
            rows.append((f"IoU {at.iou_threshold:g}, {name}", *figures))
    return rows


def _lenient(report: DetectionReport) -> Table:
    lenient = report.lenient
    needed = ", ".join(f"{kind} {count}" for kind, count in lenient.needed.items())
    note = (
        f"{lenient.num_objects} more objects in {lenient.num_answers} answers, by the leniency they"
        f" needed: {needed}. All other tables use the strict reading, as training does."
    )
    rows = _detection_rows(lenient.detection) if lenient.num_answers else []
    return Table("Detection, read leniently", note, _DETECTION_HEAD, rows)


def _detection(report: DetectionReport) -> Table:
    rows = _detection_rows(report.detection)
    note = (
        "Objects are paired greedily by IoU: regardless of their names (any class), or only if"
        " their names are equal (by class)."
    )
    if report.coco.num_points:
        tolerance = report.config.rollout_matching.point_tolerance
        note += f" The IoU of two points {tolerance:g} bins apart counts as 0.5 (point_tolerance)."
    return Table("Detection", note, _DETECTION_HEAD, rows)


def _coco(report: DetectionReport) -> Table:
    names = {IouType.BBOX: "boxes", IouType.SEGM: "masks"}
    groups = (("by class", report.coco.by_class), ("any class", report.coco.any_class))
    rows = [
        (f"{names[kind]}, {group}", *_figures(scores.ap, scores.ap50, scores.ap75, scores.ar))
        for group, by_kind in groups
        for kind, scores in by_kind.items()
    ]
    score = "a prediction's score is the mean probability of its coord tokens"
    penalty = report.config.rollout_matching.repetition_penalty
    if report.config.evaluation.score == "constant":
        score = "every prediction has score 1, so AP ranks predictions by position in the answer"
    elif penalty != 1:
        # The engine returns the probabilities it samples with. The penalty lowers them for coord
        # tokens that the prompt or the answer already contains.
        score += f", which rollout_matching.repetition_penalty {penalty:g} has changed"
    note = (
        f"pycocotools, objects of every size, at most {MAX_PREDICTIONS} predictions per image and"
        f" class; {score}."
    )
    if report.coco.num_crowded:
        note += (
            f" {report.coco.num_crowded} images have more than {MAX_PREDICTIONS} objects of one"
            " class: AP and AR leave out those with the lowest scores."
        )
    if report.coco.num_points:
        note += f" Leaves out {report.coco.num_points} points (ground truth and predictions)."
    return Table("COCO", note, ("", "AP", "AP50", "AP75", "AR"), rows)


def _sources(report: DetectionReport) -> Table:
    rows = []
    for source in report.sources:
        any_class = source.counts.any_class
        figures = _figures(
            *(any_class.precision, any_class.recall, any_class.f1),
            *(source.counts.same_class.f1, source.coco.ap),
        )
        rows.append((source.name, str(source.num_samples), *figures))
    note = (
        "The samples of each file of data.val. Pairs have an IoU of at least"
        f" {report.iou_threshold:g}; AP is COCO's, of boxes by class."
    )
    head = ("file", "samples", "precision", "recall", "F1", "F1 by class", "AP")
    return Table("Files", note, head, rows)


def _classes(report: DetectionReport) -> Table:
    rows = []
    for name, counts in report.detection.classes.items():
        ap = report.coco.class_ap[name]
        figures = _figures(counts.precision, counts.recall, counts.f1, ap)
        rows.append((name, str(counts.num_ground_truth), str(counts.num_predictions), *figures))
    note = (
        f"Pairs of equal names with an IoU of at least {report.iou_threshold:g}; AP is COCO's, of"
        " boxes."
    )
    head = ("name", "ground truths", "predictions", "precision", "recall", "F1", "AP")
    return Table("Classes", note, head, rows)


def _figures(*values: float | None) -> list[str]:
    return ["-" if value is None else f"{value:.3f}" for value in values]


def answer_line(scene: Scene, max_characters: int) -> str:
    """Describe an incomplete answer by its sample, its fault and the start of its text."""
    ends = {
        FinishReason.STOP: "ended by the model",
        FinishReason.LENGTH: "cut by length",
        FinishReason.REPETITION: "ended by the repeat guard",
        FinishReason.ABORTED: "aborted",
    }
    fault = "never opened" if scene.never_opened else "not closed"
    text = scene.text if len(scene.text) <= max_characters else f"{scene.text[:max_characters]}..."
    text = text or "no text at all"
    return f"{scene.sample.sample_id} ({fault}, {ends[scene.finish_reason]}): {text}"
