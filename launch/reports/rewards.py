"""The held-out report of an environment: rewards of greedy rollouts, one per held-out example."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launch.reports.detection import PrimaryMetric
from launch.reports.page import whole_folder
from learner.rollout_logs.trajectories import trajectory_record
from rollout_actors.environments.datasets import mean
from shared.grounding.evaluation import Evaluation
from shared.trajectory import EnvironmentRollout


@dataclass(frozen=True, slots=True)
class TaskFigures:
    """The rollouts of one environment of a group."""

    num_samples: int
    reward: float
    """Mean of those that did not fail; 0 where all have."""
    num_failed: int


@dataclass(frozen=True, slots=True)
class RewardReport:
    """The rewards on all held-out examples, at least one."""

    evaluation: Evaluation[EnvironmentRollout]

    @property
    def reward(self) -> float:
        """The mean over the rollouts that did not fail; 0 where all have: checkpoints need one."""
        rewards = [rollout.reward for rollout in self.evaluation.outcomes if rollout.error is None]
        return mean(rewards) if rewards else 0.0

    @property
    def num_failed(self) -> int:
        return sum(rollout.error is not None for rollout in self.evaluation.outcomes)

    @property
    def headline(self) -> PrimaryMetric:
        return PrimaryMetric("mean reward", self.reward)

    def describe(self) -> str:
        """Describe the report in a line: `mean reward 0.500 (exact 0.750), 1 failed`.

        Of a group, the line has the environments' rewards first.
        """
        tasks = (f"{name} {one.reward:.3f} of {one.num_samples}" for name, one in self._tasks())
        functions = (f"{name} {value:.3f}" for name, value in self._function_means().items())
        values = ", ".join((*tasks, *functions))
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        return f"mean reward {self.reward:.3f}" + (f" ({values})" if values else "") + failed

    def metrics(self) -> dict[str, float]:
        """Return the figures of a line of evaluations.jsonl."""
        outcomes = self.evaluation.outcomes
        tasks = dict(self._tasks())
        return {
            "val/reward": self.reward,
            "val/num_failed": self.num_failed,
            "val/num_reward_errors": sum(len(rollout.reward_errors) for rollout in outcomes),
            "val/num_truncated": sum(rollout.is_truncated for rollout in outcomes),
            "val/num_overlong": sum(rollout.is_overlong for rollout in outcomes),
            "val/turns": mean([rollout.num_turns for rollout in outcomes]),
            # A function may be called as an environment is: then its figure has another name.
            **{
                f"val/reward/{name} (function)" if name in tasks else f"val/reward/{name}": value
                for name, value in self._function_means().items()
            },
            **{f"val/reward/{name}": one.reward for name, one in tasks.items()},
        }

    def by_task(self) -> dict[str, dict[str, float]]:
        """Return the figures of each environment of a group; empty without a group."""
        return {name: asdict(one) for name, one in self._tasks()}

    def _tasks(self) -> list[tuple[str, TaskFigures]]:
        names = {one.task for one in self.evaluation.outcomes if one.task is not None}
        return [(name, self._figures_of(name)) for name in sorted(names)]

    def _figures_of(self, task: str) -> TaskFigures:
        outcomes = [one for one in self.evaluation.outcomes if one.task == task]
        rewards = [one.reward for one in outcomes if one.error is None]
        return TaskFigures(
            len(outcomes), mean(rewards) if rewards else 0.0, len(outcomes) - len(rewards)
        )

    def _function_means(self) -> dict[str, float]:
        """Average each reward function over the rollouts that have it: not all of a group do."""
        outcomes = self.evaluation.outcomes
        names = sorted({name for rollout in outcomes for name in rollout.metrics})
        return {
            name: mean([rollout.metrics[name] for rollout in outcomes if name in rollout.metrics])
            for name in names
        }


def write_reward_report(folder: Path, report: RewardReport) -> None:
    """Write `folder`, which must not exist, whole or not at all. Raises StorageError.

    `report.json` has the figures, `rollouts.jsonl` a line for every rollout.
    """
    evaluation = report.evaluation
    figures: dict[str, Any] = {
        "step": evaluation.step,
        "weight_version": evaluation.weight_version,
        "num_samples": len(evaluation.outcomes),
        "wall_s": evaluation.wall_s,
        **report.metrics(),
    }
    if by_task := report.by_task():
        figures["tasks"] = by_task
    with whole_folder(folder) as partial:
        text = json.dumps(figures, indent=2) + "\n"
        (partial / "report.json").write_text(text, encoding="utf-8")
        with (partial / "rollouts.jsonl").open("w", encoding="utf-8") as file:
            for rollout in evaluation.outcomes:
                file.write(json.dumps(trajectory_record(evaluation.step, rollout)) + "\n")
