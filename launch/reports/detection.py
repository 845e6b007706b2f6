"""The held-out report of detection: metrics of an evaluation, and its worst samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import NamedTuple

from launch.reports.coco_ap import MAX_PREDICTIONS, CocoAP, CocoScores, IouType, coco_scores
from launch.reports.lenient import LenientReading, lenient_reading
from shared.config import RunConfig
from shared.grounding.evaluation import (
    DetectionCounts,
    DetectionSummary,
    Evaluation,
    Pair,
    Scene,
    ThresholdCounts,
    pair_scene,
    summarise,
    worst_scenes,
)

NUM_ANSWERS_SHOWN = 3
"""Maximum number of incomplete answers on a page."""


class PrimaryMetric(NamedTuple):
    """The main metric of a held-out report, by which checkpoints are ranked."""

    name: str
    """Name of the metric: `F1@0.5` or `mean reward`."""
    value: float | None
    """Higher is better. None if too many rollouts failed for a score."""


@dataclass(frozen=True, slots=True)
class WorstScene:
    scene: Scene
    f1: float
    pairs: tuple[Pair, ...]
    """Matched pairs at the report's first IoU threshold, regardless of class."""

    @property
    def picture(self) -> str:
        """Return the path of the drawn image, relative to the report's folder."""
        # Sample ids are not always valid file names.
        return f"pictures/{self.scene.position:05d}.png"


@dataclass(frozen=True, slots=True)
class SourceFigures:
    """The metrics of one file of `data.val`, if it lists several files."""

    name: str
    num_samples: int
    counts: ThresholdCounts
    """Numbers of found and missed objects at the report's first IoU threshold."""
    coco: CocoAP
    """COCO scores of boxes: means over classes."""


@dataclass(frozen=True, slots=True)
class DetectionReport:
    """The metrics of a detection evaluation on held-out samples, with its worst samples."""

    subject: str
    """Description of the checkpoint: `demo after 30 steps`."""
    evaluation: Evaluation[Scene]
    config: RunConfig
    detection: DetectionSummary
    coco: CocoScores
    lenient: LenientReading
    """The same answers, read leniently. All other fields use the strict reading."""
    worst: tuple[WorstScene, ...]
    """Samples with the lowest F1 first."""
    sources: tuple[SourceFigures, ...] = ()
    """One for each file of `data.val`, in order; empty if `data.val` is a path."""

    @property
    def counts(self) -> DetectionCounts:
        """Return the counts of matched objects at the first IoU threshold, regardless of class."""
        return self.detection.thresholds[0].any_class

    @property
    def iou_threshold(self) -> float:
        """Return the first IoU threshold of the evaluation, for the main metric."""
        return self.detection.thresholds[0].iou_threshold

    @property
    def num_not_closed(self) -> int:
        """Return the number of answers that began their list of objects but did not close it."""
        return self.detection.num_truncated - self.detection.num_never_opened

    @property
    def incomplete(self) -> list[Scene]:
        """Return up to `NUM_ANSWERS_SHOWN` answers whose list of objects is not closed.

        Answers that never opened a list come first.
        """
        found = [scene for scene in self.evaluation.outcomes if scene.truncated]
        return sorted(found, key=lambda scene: not scene.never_opened)[:NUM_ANSWERS_SHOWN]

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the report; those without a value are left out."""
        first = self.detection.thresholds[0]
        coco = self.coco.by_class[IouType.BBOX]
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
            "val/num_objects_after_close": self.detection.num_behind,
            "val/lenient_f1": self.lenient.detection.thresholds[0].any_class.f1,
            "val/lenient_class_f1": self.lenient.detection.thresholds[0].same_class.f1,
            "val/num_read_leniently": self.lenient.num_answers,
        }
        for later in self.detection.thresholds[1:]:
            at = f"@{later.iou_threshold:g}"
            values |= {
                f"val/f1{at}": later.any_class.f1,
                f"val/precision{at}": later.any_class.precision,
                f"val/recall{at}": later.any_class.recall,
            }
        for source in self.sources:
            values |= {
                f"val/f1/{source.name}": source.counts.any_class.f1,
                f"val/precision/{source.name}": source.counts.any_class.precision,
                f"val/recall/{source.name}": source.counts.any_class.recall,
                f"val/class_f1/{source.name}": source.counts.same_class.f1,
                f"val/coco_ap/{source.name}": source.coco.ap,
            }
        return {name: value for name, value in values.items() if value is not None}

    @property
    def headline(self) -> PrimaryMetric:
        return PrimaryMetric(f"F1@{self.iou_threshold:g}", self.counts.f1)

    def describe(self) -> str:
        """Describe metrics at the first IoU threshold, and faults of answers, in one line."""
        counts = self.counts
        figures = (
            f"F1@{self.iou_threshold:g} {counts.f1:.3f}, precision {counts.precision:.3f}, recall"
            f" {counts.recall:.3f}, valid objects {counts.valid_rate:.3f}, class accuracy on"
            f" matched objects {counts.class_accuracy:.3f}"
        )
        faults = [f"{number} {what}" for what, number in self.faults().items() if number]
        if faults:
            figures += f"; of {len(self.evaluation.outcomes)} answers {', '.join(faults)}"
        if self.lenient.num_answers:
            f1 = self.lenient.detection.thresholds[0].any_class.f1
            needed = ", ".join(f"{kind} {count}" for kind, count in self.lenient.needed.items())
            figures += (
                f"; read leniently F1@{self.iou_threshold:g} {f1:.3f}, with"
                f" {self.lenient.num_objects} more objects in {self.lenient.num_answers} answers"
                f" ({needed})"
            )
        return figures

    def faults(self) -> dict[str, int]:
        """Return the number of answers with each fault. An answer may have several faults."""
        limit = self.config.rollout_matching.max_new_tokens
        opening = self.config.answer_format.opening
        return {
            f"never opened with {opening}": self.detection.num_never_opened,
            "not closed": self.num_not_closed,
            f"cut by length (rollout_matching.max_new_tokens: {limit})": (
                self.detection.num_length_limited
            ),
            "with objects after the close, which are not read": sum(
                scene.num_behind > 0 for scene in self.evaluation.outcomes
            ),
        }

    def as_json(self) -> dict[str, object]:
        """Return the content of `report.json`."""
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
            "num_ignored": counts.num_ignored,
            "num_ground_truth": counts.num_ground_truth,
            "num_dropped": counts.num_dropped,
            "num_truncated": self.detection.num_truncated,
            "num_never_opened": self.detection.num_never_opened,
            "num_not_closed": self.num_not_closed,
            "num_length_limited": self.detection.num_length_limited,
            "num_objects_after_close": self.detection.num_behind,
            "max_new_tokens": self.config.rollout_matching.max_new_tokens,
            "valid_object_rate": counts.valid_rate,
            "dropped": dict(self.detection.dropped),
            "detection": _at_thresholds(self.detection),
            "lenient": {
                "num_answers": self.lenient.num_answers,
                "num_objects": self.lenient.num_objects,
                "needed": dict(self.lenient.needed),
                "detection": _at_thresholds(self.lenient.detection),
            },
            "coco": {
                "by_class": {kind: asdict(scores) for kind, scores in self.coco.by_class.items()},
                "any_class": {kind: asdict(scores) for kind, scores in self.coco.any_class.items()},
                "max_predictions": MAX_PREDICTIONS,
                "num_crowded": self.coco.num_crowded,
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
            "sources": [
                {
                    "name": source.name,
                    "num_samples": source.num_samples,
                    **_ratios(source.counts.any_class),
                    "class_aware": _ratios(source.counts.same_class),
                    "coco": asdict(source.coco),
                }
                for source in self.sources
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
    """Return the detection report of an evaluation, with the thresholds of `config.evaluation`."""
    settings = config.evaluation
    tolerance = config.rollout_matching.point_tolerance
    detection = summarise(evaluation.outcomes, settings.iou_thresholds, point_tolerance=tolerance)
    worst = []
    for index in worst_scenes(detection, settings.worst_scenes):
        scene = evaluation.outcomes[index]
        pairs = pair_scene(
            scene, iou_threshold=settings.iou_thresholds[0], point_tolerance=tolerance
        )
        worst.append(WorstScene(scene, detection.scene_f1[index], tuple(pairs)))
    coco = coco_scores(evaluation.outcomes)
    lenient = lenient_reading(evaluation.outcomes, detection, config.geometry, tolerance)
    sources = []
    for source in config.data.sources("val"):
        scenes = [one for one in evaluation.outcomes if one.sample.source == source.name]
        if source.name is not None:
            of_source = summarise(scenes, settings.iou_thresholds[:1], point_tolerance=tolerance)
            counts = of_source.thresholds[0]
            boxes = coco_scores(scenes).by_class[IouType.BBOX]
            sources.append(SourceFigures(source.name, len(scenes), counts, boxes))
    return DetectionReport(
        subject, evaluation, config, detection, coco, lenient, tuple(worst), tuple(sources)
    )


def _at_thresholds(detection: DetectionSummary) -> list[dict[str, object]]:
    return [
        {
            "iou_threshold": at.iou_threshold,
            **_ratios(at.any_class),
            "class_accuracy": at.any_class.class_accuracy,
            "class_aware": _ratios(at.same_class),
        }
        for at in detection.thresholds
    ]


def _ratios(counts: DetectionCounts) -> Mapping[str, float | int]:
    return {
        "num_matched": counts.num_matched,
        "precision": counts.precision,
        "recall": counts.recall,
        "f1": counts.f1,
    }
