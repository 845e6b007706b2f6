"""The held-out report: what an evaluation says in numbers, and the scenes it does worst on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from launch.reports.coco_ap import MAX_PREDICTIONS, CocoAP, CocoScores, IouType, coco_scores
from shared.config import RunConfig
from shared.grounding.evaluation import (
    DetectionCounts,
    DetectionSummary,
    Evaluation,
    Pair,
    Scene,
    pair_objects,
    summarise,
    worst_scenes,
)
from shared.rollouts import FinishReason

# The one figure of a held-out report that a run is about: it closes the run, and checkpoints are
# kept by it.


class PrimaryMetric(NamedTuple):
    name: str
    """`F1@0.5`, `mean reward`"""
    value: float
    """The higher the better."""


NUM_ANSWERS_SHOWN = 3
"""Of the answers that are not complete, where a report has any."""


@dataclass(frozen=True, slots=True)
class WorstScene:
    scene: Scene
    f1: float
    pairs: tuple[Pair, ...]
    """At the report's first threshold, whatever the class."""

    @property
    def picture(self) -> str:
        """Its file, relative to the report's folder. By position: a sample's id may be anything."""
        return f"pictures/{self.scene.position:05d}.png"


@dataclass(frozen=True, slots=True)
class DetectionReport:
    subject: str
    """What was evaluated, in words."""
    evaluation: Evaluation[Scene]
    config: RunConfig
    """What it was evaluated with."""
    detection: DetectionSummary
    coco: CocoScores
    worst: tuple[WorstScene, ...]
    """Lowest F1 first."""

    @property
    def counts(self) -> DetectionCounts:
        """At the first threshold, whatever the class."""
        return self.detection.thresholds[0].any_class

    @property
    def iou_threshold(self) -> float:
        """The first."""
        return self.detection.thresholds[0].iou_threshold

    @property
    def num_not_closed(self) -> int:
        """Answers that opened, and ended before they closed."""
        return self.detection.num_truncated - self.detection.num_never_opened

    @property
    def incomplete(self) -> list[Scene]:
        """Some of the scenes whose answers are not complete, first of those that never opened."""
        found = [scene for scene in self.evaluation.outcomes if scene.truncated]
        return sorted(found, key=lambda scene: not scene.never_opened)[:NUM_ANSWERS_SHOWN]

    def metrics(self) -> dict[str, float]:
        """The numbers to follow over a run. COCO's are absent where there is no ground truth."""
        first, coco = self.detection.thresholds[0], self.coco.by_class[IouType.BBOX]
        values: dict[str, float | None] = {
            "val/f1": first.any_class.f1,
            "val/precision": first.any_class.precision,
            "val/recall": first.any_class.recall,
            "val/valid_object_rate": first.any_class.valid_rate,
            "val/class_accuracy": first.any_class.class_accuracy,
            "val/class_f1": first.same_class.f1,
            "val/coco_ap": coco.ap,
            "val/coco_ap50": coco.ap50,
            "val/coco_ap75": coco.ap75,
            "val/coco_ar": coco.ar,
            "val/num_never_opened": self.detection.num_never_opened,
            "val/num_not_closed": self.num_not_closed,
            "val/num_length_limited": self.detection.num_length_limited,
        }
        for later in self.detection.thresholds[1:]:
            at = f"@{later.iou_threshold:g}"
            values |= {
                f"val/f1{at}": later.any_class.f1,
                f"val/precision{at}": later.any_class.precision,
                f"val/recall{at}": later.any_class.recall,
            }
        return {name: value for name, value in values.items() if value is not None}

    @property
    def headline(self) -> PrimaryMetric:
        return PrimaryMetric(f"F1@{self.iou_threshold:g}", self.counts.f1)

    def describe(self) -> str:
        """The figures at the first threshold, and what was wrong with answers, in a line."""
        counts = self.counts
        figures = (
            f"F1@{self.iou_threshold:g} {counts.f1:.3f}, precision {counts.precision:.3f}, recall"
            f" {counts.recall:.3f}, valid objects {counts.valid_rate:.3f}, class accuracy on"
            f" matched objects {counts.class_accuracy:.3f}"
        )
        faults = [f"{number} {what}" for what, number in self.faults().items() if number]
        return (
            f"{figures}; of {len(self.evaluation.outcomes)} answers {', '.join(faults)}"
            if faults
            else figures
        )

    def faults(self) -> dict[str, int]:
        """Return the number of answers by what is wrong with them; one that was cut may be counted
        under another name too.
        """
        limit = self.config.rollout_matching.max_new_tokens
        return {
            "never opened with {": self.detection.num_never_opened,
            "not closed": self.num_not_closed,
            f"cut by length (rollout_matching.max_new_tokens: {limit})": (
                self.detection.num_length_limited
            ),
        }

    def as_json(self) -> dict[str, Any]:
        """The content of `report.json`."""
        counts = self.counts
        return {
            "subject": self.subject,
            "step": self.evaluation.step,
            "weight_version": self.evaluation.weight_version,
            "num_samples": len(self.evaluation.outcomes),
            "wall_s": self.evaluation.wall_s,
            "score": self.config.evaluation.score,
            "repetition_penalty": self.config.rollout_matching.repetition_penalty,
            "num_predictions": counts.num_predictions,
            "num_ground_truth": counts.num_ground_truth,
            "num_dropped": counts.num_dropped,
            "num_truncated": self.detection.num_truncated,
            "num_never_opened": self.detection.num_never_opened,
            "num_not_closed": self.num_not_closed,
            "num_length_limited": self.detection.num_length_limited,
            "max_new_tokens": self.config.rollout_matching.max_new_tokens,
            "valid_object_rate": counts.valid_rate,
            "dropped": dict(self.detection.dropped),
            "detection": [
                {
                    "iou_threshold": at.iou_threshold,
                    **_ratios(at.any_class),
                    "class_accuracy": at.any_class.class_accuracy,
                    "class_aware": _ratios(at.same_class),
                }
                for at in self.detection.thresholds
            ],
            "coco": {
                "by_class": {type_: asdict(scores) for type_, scores in self.coco.by_class.items()},
                "any_class": {
                    type_: asdict(scores) for type_, scores in self.coco.any_class.items()
                },
            },
            "classes": [
                {
                    "name": name,
                    "num_ground_truth": counts.num_ground_truth,
                    "num_predictions": counts.num_predictions,
                    **_ratios(counts),
                    "ap": self.coco.class_ap[name],
                }
                for name, counts in self.detection.classes.items()
            ],
            "worst_scenes": [
                {
                    "sample_id": worst.scene.sample.sample_id,
                    "position": worst.scene.position,
                    "f1": worst.f1,
                    "picture": worst.picture,
                }
                for worst in self.worst
            ],
        }


def make_report(
    evaluation: Evaluation[Scene], config: RunConfig, *, subject: str
) -> DetectionReport:
    """The report on all scenes, as `config.evaluation` wants it."""
    settings = config.evaluation
    detection = summarise(evaluation.outcomes, settings.iou_thresholds)
    worst = tuple(
        _worst(evaluation.outcomes[index], detection.scene_f1[index], settings.iou_thresholds[0])
        for index in worst_scenes(detection, settings.worst_scenes)
    )
    return DetectionReport(
        subject, evaluation, config, detection, coco_scores(evaluation.outcomes), worst
    )


def _worst(scene: Scene, f1: float, iou_threshold: float) -> WorstScene:
    return WorstScene(
        scene,
        f1,
        tuple(pair_objects(scene.objects, scene.sample.objects, iou_threshold=iou_threshold)),
    )


def _ratios(counts: DetectionCounts) -> Mapping[str, float | int]:
    return {
        "num_matched": counts.num_matched,
        "precision": counts.precision,
        "recall": counts.recall,
        "f1": counts.f1,
    }


# The report's numbers as tables of text: the page and the console show the same ones.


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    note: str
    """How to read it."""
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """As wide as the head; the first column is a name, the others are numbers."""


def report_tables(report: DetectionReport) -> list[Table]:
    tables = [
        _detection(report),
        _coco(report),
        _classes(report),
        _dropped(report),
        _answers(report),
    ]
    return [table for table in tables if table.rows]


def _detection(report: DetectionReport) -> Table:
    rows = []
    for at in report.detection.thresholds:
        # Where only equal names can be a pair, how many are equal says nothing.
        for name, counts, equal_names in (
            ("any class", at.any_class, at.any_class.class_accuracy),
            ("by class", at.same_class, None),
        ):
            values = (counts.precision, counts.recall, counts.f1, equal_names)
            rows.append((f"IoU {at.iou_threshold:g}, {name}", *map(_number, values)))
    note = (
        "Pairs are taken greedily by IoU: whatever the names of their objects, or only among"
        " objects of equal names."
    )
    return Table(
        "Detection", note, ("", "precision", "recall", "F1", "equal names among pairs"), tuple(rows)
    )


def _coco(report: DetectionReport) -> Table:
    names = {IouType.BBOX: "boxes", IouType.SEGM: "masks"}
    by_class = [
        (f"{names[type_]}, by class", *_ap(scores))
        for type_, scores in report.coco.by_class.items()
    ]
    any_class = [
        (f"{names[type_]}, any class", *_ap(scores))
        for type_, scores in report.coco.any_class.items()
    ]
    note = (
        f"pycocotools, objects of every size, at most {MAX_PREDICTIONS} predictions per image and"
        f" class; {_score(report.config)}."
    )
    return Table("COCO", note, ("", "AP", "AP50", "AP75", "AR"), (*by_class, *any_class))


def _score(config: RunConfig) -> str:
    if config.evaluation.score == "constant":
        return "every prediction has score 1"
    penalty = config.rollout_matching.repetition_penalty
    # The engine gives probabilities as it samples by them: a coord token that the prompt or the
    # answer has had already is less probable.
    altered = (
        ""
        if penalty == 1
        else (
            ", which are not the model's own but those under rollout_matching.repetition_penalty"
            f" {penalty:g}"
        )
    )
    return f"a prediction's score is the mean probability of its coord tokens{altered}"


def _ap(scores: CocoAP) -> tuple[str, ...]:
    return tuple(map(_number, (scores.ap, scores.ap50, scores.ap75, scores.ar)))


def _classes(report: DetectionReport) -> Table:
    rows = [
        (
            name,
            str(counts.num_ground_truth),
            str(counts.num_predictions),
            *map(_number, (counts.precision, counts.recall, counts.f1, report.coco.class_ap[name])),
        )
        for name, counts in report.detection.classes.items()
    ]
    note = (
        f"Pairs of equal names with an IoU of at least {report.iou_threshold:g}; AP as COCO's, of"
        " boxes."
    )
    return Table(
        "Classes",
        note,
        ("name", "ground truths", "predictions", "precision", "recall", "F1", "AP"),
        tuple(rows),
    )


def _dropped(report: DetectionReport) -> Table:
    rows = tuple((str(reason), str(count)) for reason, count in report.detection.dropped.items())
    return Table(
        "Dropped entries",
        "Complete entries that are no valid objects, by the first reason that holds.",
        ("reason", "entries"),
        rows,
    )


def _answers(report: DetectionReport) -> Table:
    rows = tuple((what, str(number)) for what, number in report.faults().items() if number)
    note = (
        f"Of {len(report.evaluation.outcomes)}. Objects are read from the JSON object that an"
        " answer begins with, up to its last complete entry."
    )
    return Table("Incomplete answers", note, ("", "answers"), rows)


def answer_line(scene: Scene, max_characters: int) -> str:
    """Describe an answer that is not complete: whose it is, what is wrong with it, and its text, or
    the beginning of that.
    """
    ends = {
        FinishReason.STOP: "ended by the model",
        FinishReason.LENGTH: "cut by length",
        FinishReason.REPETITION: "ended by the repeat guard",
        FinishReason.ABORTED: "aborted",
    }
    fault = "never opened" if scene.never_opened else "not closed"
    shown = scene.text if len(scene.text) <= max_characters else f"{scene.text[:max_characters]}..."
    return (
        f"{scene.sample.sample_id} ({fault}, {ends[scene.finish_reason]}):"
        f" {shown or 'no text at all'}"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
