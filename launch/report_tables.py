"""The report's numbers as tables of text: the page and the console show the same ones."""

from __future__ import annotations

from dataclasses import dataclass

from launch.coco_ap import MAX_PREDICTIONS, CocoAP, IouType
from launch.report import Report
from shared.config import RunConfig
from shared.evaluation import Scene
from shared.rollouts import FinishReason


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    note: str
    """How to read it."""
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """As wide as the head; the first column is a name, the others are numbers."""


def report_tables(report: Report) -> list[Table]:
    tables = [_detection(report), _coco(report), _classes(report), _dropped(report), _answers(report)]
    return [table for table in tables if table.rows]


def _detection(report: Report) -> Table:
    rows = []
    for at in report.detection.thresholds:
        # Where only equal names can be a pair, how many are equal says nothing.
        for name, counts, equal_names in (("any class", at.any_class, at.any_class.class_accuracy), ("by class", at.same_class, None)):
            values = (counts.precision, counts.recall, counts.f1, equal_names)
            rows.append((f"IoU {at.iou_threshold:g}, {name}", *map(_number, values)))
    note = "Pairs are taken greedily by IoU: whatever the names of their objects, or only among objects of equal names."
    return Table("Detection", note, ("", "precision", "recall", "F1", "equal names among pairs"), tuple(rows))


def _coco(report: Report) -> Table:
    names = {IouType.BBOX: "boxes", IouType.SEGM: "masks"}
    by_class = [(f"{names[type_]}, by class", *_ap(scores)) for type_, scores in report.coco.by_class.items()]
    any_class = [(f"{names[type_]}, any class", *_ap(scores)) for type_, scores in report.coco.any_class.items()]
    note = f"pycocotools, objects of every size, at most {MAX_PREDICTIONS} predictions per image and class; {_score(report.config)}."
    return Table("COCO", note, ("", "AP", "AP50", "AP75", "AR"), (*by_class, *any_class))


def _score(config: RunConfig) -> str:
    if config.evaluation.score == "constant":
        return "every prediction has score 1"
    penalty = config.rollout_matching.repetition_penalty
    # The engine gives probabilities as it samples by them: a coord token that the prompt or the answer has had already is less probable.
    altered = "" if penalty == 1 else f", which are not the model's own but those under rollout_matching.repetition_penalty {penalty:g}"
    return f"a prediction's score is the mean probability of its coord tokens{altered}"


def _ap(scores: CocoAP) -> tuple[str, ...]:
    return tuple(map(_number, (scores.ap, scores.ap50, scores.ap75, scores.ar)))


def _classes(report: Report) -> Table:
    rows = [
        (
            name,
            str(counts.num_ground_truth),
            str(counts.num_predictions),
            *map(_number, (counts.precision, counts.recall, counts.f1, report.coco.class_ap[name])),
        )
        for name, counts in report.detection.classes.items()
    ]
    note = f"Pairs of equal names with an IoU of at least {report.iou_threshold:g}; AP as COCO's, of boxes."
    return Table("Classes", note, ("name", "ground truths", "predictions", "precision", "recall", "F1", "AP"), tuple(rows))


def _dropped(report: Report) -> Table:
    rows = tuple((str(reason), str(count)) for reason, count in report.detection.dropped.items())
    return Table("Dropped entries", "Complete entries that are no valid objects, by the first reason that holds.", ("reason", "entries"), rows)


def _answers(report: Report) -> Table:
    rows = tuple((what, str(number)) for what, number in report.faults().items() if number)
    note = f"Of {len(report.evaluation.outcomes)}. Objects are read from the JSON object that an answer begins with, up to its last complete entry."
    return Table("Incomplete answers", note, ("", "answers"), rows)


def answer_line(scene: Scene, max_characters: int) -> str:
    """Describe an answer that is not complete: whose it is, what is wrong with it, and its text, or the beginning of that."""
    ends = {
        FinishReason.STOP: "ended by the model",
        FinishReason.LENGTH: "cut by length",
        FinishReason.REPETITION: "ended by the repeat guard",
        FinishReason.ABORTED: "aborted",
    }
    fault = "never opened" if scene.never_opened else "not closed"
    shown = scene.text if len(scene.text) <= max_characters else f"{scene.text[:max_characters]}..."
    return f"{scene.sample.sample_id} ({fault}, {ends[scene.finish_reason]}): {shown or 'no text at all'}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
