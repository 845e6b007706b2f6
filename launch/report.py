"""The held-out report: what an evaluation says in numbers, and the scenes it does worst on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from launch.coco_ap import CocoScores, IouType, coco_scores
from launch.headline import Headline
from shared.config import RunConfig
from shared.evaluation import DetectionCounts, DetectionSummary, Evaluation, Pair, Scene, pair_objects, summarise, worst_scenes

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
class Report:
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
            values |= {f"val/f1{at}": later.any_class.f1, f"val/precision{at}": later.any_class.precision, f"val/recall{at}": later.any_class.recall}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def headline(self) -> Headline:
        return Headline(f"F1@{self.iou_threshold:g}", self.counts.f1)

    def describe(self) -> str:
        """The figures at the first threshold, and what was wrong with answers, in a line."""
        counts = self.counts
        figures = (
            f"F1@{self.iou_threshold:g} {counts.f1:.3f}, precision {counts.precision:.3f}, recall {counts.recall:.3f}, "
            f"valid objects {counts.valid_rate:.3f}, class accuracy on matched objects {counts.class_accuracy:.3f}"
        )
        faults = [f"{number} {what}" for what, number in self.faults().items() if number]
        return f"{figures}; of {len(self.evaluation.outcomes)} answers {', '.join(faults)}" if faults else figures

    def faults(self) -> dict[str, int]:
        """Return the number of answers by what is wrong with them; one that was cut may be counted under another name too."""
        limit = self.config.rollout_matching.max_new_tokens
        return {
            "never opened with {": self.detection.num_never_opened,
            "not closed": self.num_not_closed,
            f"cut by length (rollout_matching.max_new_tokens: {limit})": self.detection.num_length_limited,
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
                "any_class": {type_: asdict(scores) for type_, scores in self.coco.any_class.items()},
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
                {"sample_id": worst.scene.sample.sample_id, "position": worst.scene.position, "f1": worst.f1, "picture": worst.picture} for worst in self.worst
            ],
        }


def make_report(evaluation: Evaluation[Scene], config: RunConfig, *, subject: str) -> Report:
    """The report on all scenes, as `config.evaluation` wants it."""
    settings = config.evaluation
    detection = summarise(evaluation.outcomes, settings.iou_thresholds)
    worst = tuple(
        _worst(evaluation.outcomes[index], detection.scene_f1[index], settings.iou_thresholds[0]) for index in worst_scenes(detection, settings.worst_scenes)
    )
    return Report(subject, evaluation, config, detection, coco_scores(evaluation.outcomes), worst)


def _worst(scene: Scene, f1: float, iou_threshold: float) -> WorstScene:
    return WorstScene(scene, f1, tuple(pair_objects(scene.objects, scene.sample.objects, iou_threshold=iou_threshold)))


def _ratios(counts: DetectionCounts) -> Mapping[str, float | int]:
    return {"num_matched": counts.num_matched, "precision": counts.precision, "recall": counts.recall, "f1": counts.f1}
