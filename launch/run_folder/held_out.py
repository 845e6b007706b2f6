"""A run's held-out reports. Each has a folder, and a line in evaluations.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from launch.loggers.events import Picture
from launch.reports.detection import DetectionReport, make_report
from launch.reports.page import story, write_report
from launch.reports.rewards import RewardReport, write_reward_report
from shared.config import RunConfig
from shared.grounding.evaluation import Evaluation
from shared.run_files import Patience, damaged_line, read_steps

if TYPE_CHECKING:
    from shared.grounding.evaluation import Outcome, Scene
    from shared.trajectory import EnvironmentRollout


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """A held-out report as a line of evaluations.jsonl, with only some of its metrics.

    Example: `EvaluationRecord(20, 21, 64, "F1@0.5", 0.71, class_f1=0.64)`.
    """

    step: int | None
    """Number of optimizer updates of the evaluated weights; None if unknown."""
    weight_version: int
    num_samples: int
    headline: str
    """Name of the report's main metric."""
    score: float | None
    """Value of the main metric; None if too many rollouts failed."""
    class_f1: float | None = None
    """The metric `val/class_f1`; None in a report of rewards."""
    lenient_f1: float | None = None
    """The metric `val/lenient_f1`; None in a report of rewards."""

    @classmethod
    def of_line(cls, line: Mapping[str, Any]) -> EvaluationRecord:
        """Read a line of evaluations.jsonl. Raises KeyError if a required metric is missing."""
        return cls(
            line["step"],
            line["weight_version"],
            line["num_samples"],
            line["headline"],
            line["score"],
            line.get("val/class_f1"),
            line.get("val/lenient_f1"),
        )


def line_of(
    evaluation: Evaluation[Outcome], report: DetectionReport | RewardReport
) -> dict[str, object]:
    """Return the line of evaluations.jsonl for a held-out report."""
    return {
        "step": evaluation.step,
        "weight_version": evaluation.weight_version,
        "num_samples": len(evaluation.outcomes),
        "headline": report.headline.name,
        "score": report.headline.value,
        **report.metrics(),
    }


def read_evaluations(folder: Path) -> list[EvaluationRecord]:
    """Return a run's held-out reports from evaluations.jsonl; an empty list without that file.

    Raises OSError, and RecordError for a damaged line.
    """
    file = folder / "evaluations.jsonl"
    records = []
    for number, line in enumerate(read_steps(file), 1):
        try:
            records.append(EvaluationRecord.of_line(line))
        except KeyError as error:
            raise damaged_line(file, number, "is not a held-out report") from error
    return records


def write_held_out(
    evaluation: Evaluation[Outcome],
    folder: Path,
    config: RunConfig,
    patience: Patience,
    findings: Sequence[str] = (),
) -> tuple[DetectionReport | RewardReport, list[Picture]]:
    """Write the folder of a held-out report; return the report and the images in the folder.

    `findings`: what the doctor has found in the run so far.

    Raises StorageError, and RecordError if an image to draw is missing or has changed.
    """
    # The run's algorithm decides the type of all outcomes.
    if config.algorithm.uses_environment:
        rewards = RewardReport(cast("Evaluation[EnvironmentRollout]", evaluation))
        patience(lambda: write_reward_report(folder, rewards, findings))
        return rewards, []
    subject = f"{config.telemetry.name} after {evaluation.step} steps"
    scenes = cast("Evaluation[Scene]", evaluation)
    report = make_report(scenes, config, subject=subject)
    patience(lambda: write_report(folder, report, findings))
    pictures = [
        Picture(
            folder / worst.picture,
            f"{worst.scene.sample.sample_id}, F1 {worst.f1:.2f}. {story(worst)}",
        )
        for worst in report.worst
    ]
    return report, pictures


def improvement(records: Sequence[EvaluationRecord], warmup_steps: int) -> str | None:
    """Return a line that compares the last held-out report with an earlier one.

    The earlier one is the report after the warm-up (`warmup_steps`), or else the first. None if
    there are fewer than two reports.
    """
    if len(records) < 2:
        return None
    name = "warm-up"
    before = next((record for record in records if record.step == warmup_steps > 0), None)
    if before is None:
        name = "first"
        before = records[0]
    after = records[-1]
    if before.score is None or after.score is None:
        lacking = "the last report" if after.score is None else f"the {name} report"
        return f"val {after.headline}: {lacking} has no score, too many of its rollouts failed"
    line = f"val {after.headline} {name} {before.score:.2f} -> final {after.score:.2f}"
    if before.class_f1 is not None and after.class_f1 is not None:
        line += f", with names {before.class_f1:.2f} -> {after.class_f1:.2f}"
    if before.lenient_f1 is not None and after.lenient_f1 is not None:
        lenient = f"{before.lenient_f1:.2f} -> {after.lenient_f1:.2f}"
        if lenient != f"{before.score:.2f} -> {after.score:.2f}":
            line += f", read leniently {lenient}"
    return line
