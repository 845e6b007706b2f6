"""The held-out report of an environment: rewards of one greedy rollout per example."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from launch.reports.detection import PrimaryMetric
from launch.reports.page import whole_folder
from learner.rollout_logs.trajectories import trajectory_record
from shared.grounding.evaluation import Evaluation
from shared.metrics import mean
from shared.trajectory import EnvironmentRollout

MOST_FAILED_SHARE = 0.05
"""If a larger share of rollouts failed, a report has no score. The remaining rollouts are a biased
selection, and their mean could beat a complete report. One in twenty allows for rare timeouts."""


@dataclass(frozen=True, slots=True)
class TaskFigures:
    """Mean reward of a report's rollouts: of all, or of one environment of an environment group."""

    num_samples: int
    reward: float | None
    """Mean reward of rollouts that did not fail; None if over `MOST_FAILED_SHARE` failed."""
    num_failed: int

    @classmethod
    def of(cls, outcomes: Sequence[EnvironmentRollout]) -> TaskFigures:
        rewards = [one.reward for one in outcomes if one.error is None]
        num_failed = len(outcomes) - len(rewards)
        is_sound = num_failed <= MOST_FAILED_SHARE * len(outcomes)
        return cls(len(outcomes), mean(rewards) if is_sound else None, num_failed)


@dataclass(frozen=True, slots=True)
class RewardReport:
    """The held-out report of an environment: rewards on all held-out examples (at least one)."""

    evaluation: Evaluation[EnvironmentRollout]

    @property
    def figures(self) -> TaskFigures:
        return TaskFigures.of(self.evaluation.outcomes)

    @property
    def reward(self) -> float | None:
        """Return the mean reward (`TaskFigures.reward`); None if too many failed."""
        return self.figures.reward

    @property
    def num_failed(self) -> int:
        return self.figures.num_failed

    @property
    def headline(self) -> PrimaryMetric:
        return PrimaryMetric("mean reward", self.reward)

    def describe(self) -> str:
        """Describe the report in one line: `mean reward 0.500 (exact 0.750), 1 failed`.

        For an environment group, the means of its environments come before the reward functions.
        """
        total = self.figures
        tasks = (f"{name} {shown(one.reward)} of {one.num_samples}" for name, one in self._tasks())
        functions = (f"{name} {value:.3f}" for name, value in self._function_means().items())
        values = ", ".join((*tasks, *functions))
        failed = f", {total.num_failed} failed" if total.num_failed else ""
        if total.reward is None:
            failed = (
                f": {total.num_failed} of {total.num_samples} rollouts failed, more than"
                f" {MOST_FAILED_SHARE:.0%}, too many for a score; see their errors in"
                " rollouts.jsonl"
            )
        return f"mean reward {shown(total.reward)}" + (f" ({values})" if values else "") + failed

    def metrics(self) -> dict[str, float]:
        """Return the report's metrics for `evaluations.jsonl`."""
        outcomes = self.evaluation.outcomes
        tasks = dict(self._tasks())
        values: dict[str, float | None] = {
            "val/reward": self.reward,
            "val/num_failed": self.num_failed,
            "val/num_reward_errors": sum(len(rollout.reward_errors) for rollout in outcomes),
            "val/num_truncated": sum(rollout.is_truncated for rollout in outcomes),
            "val/num_overlong": sum(rollout.is_overlong for rollout in outcomes),
            "val/turns": mean([rollout.num_turns for rollout in outcomes]),
            # A function may have the name of an environment; then its metric gets a suffix.
            **{
                f"val/reward/{name} (function)" if name in tasks else f"val/reward/{name}": value
                for name, value in self._function_means().items()
            },
            **{f"val/reward/{name}": one.reward for name, one in tasks.items()},
        }
        return {name: value for name, value in values.items() if value is not None}

    def by_task(self) -> dict[str, dict[str, float | None]]:
        """Return the figures of each environment of an environment group; without a group, none."""
        return {name: asdict(one) for name, one in self._tasks()}

    def _tasks(self) -> list[tuple[str, TaskFigures]]:
        names = {one.task for one in self.evaluation.outcomes if one.task is not None}
        outcomes = self.evaluation.outcomes
        return [
            (name, TaskFigures.of([one for one in outcomes if one.task == name]))
            for name in sorted(names)
        ]

    def _function_means(self) -> dict[str, float]:
        """Average each reward function over the rollouts that have it."""
        outcomes = self.evaluation.outcomes
        names = sorted({name for rollout in outcomes for name in rollout.metrics})
        return {
            name: mean([rollout.metrics[name] for rollout in outcomes if name in rollout.metrics])
            for name in names
        }


def shown(score: float | None) -> str:
    """Format a score, or `-` for None."""
    return "-" if score is None else f"{score:.3f}"


def write_reward_report(folder: Path, report: RewardReport, findings: Sequence[str] = ()) -> None:
    """Write a reward report to a new folder, which appears only if all files are written.

    `report.json` has the metrics, and the `findings` of the doctor; `rollouts.jsonl` has one line
    per rollout. Raises StorageError.
    """
    evaluation = report.evaluation
    figures: dict[str, object] = {
        "step": evaluation.step,
        "weight_version": evaluation.weight_version,
        "num_samples": len(evaluation.outcomes),
        "wall_s": evaluation.wall_s,
        **report.metrics(),
    }
    if by_task := report.by_task():
        figures["tasks"] = by_task
    if findings:
        figures["findings"] = list(findings)
    with whole_folder(folder) as partial:
        text = json.dumps(figures, indent=2) + "\n"
        (partial / "report.json").write_text(text, encoding="utf-8")
        with (partial / "rollouts.jsonl").open("w", encoding="utf-8") as file:
            for rollout in evaluation.outcomes:
                file.write(json.dumps(trajectory_record(evaluation.step, rollout)) + "\n")
