"""The held-out report of an environment: rewards of greedy rollouts, one per held-out example."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from launch.reports.detection import PrimaryMetric
from launch.reports.page import whole_folder
from learner.rollout_logs.trajectories import trajectory_record
from rollout_actors.environments.datasets import mean
from shared.grounding.evaluation import Evaluation
from shared.trajectory import EnvironmentRollout


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
        """Describe the report in a line: `mean reward 0.500 (exact 0.750), 1 failed`."""
        values = ", ".join(f"{name} {value:.3f}" for name, value in self._function_means().items())
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        return f"mean reward {self.reward:.3f}" + (f" ({values})" if values else "") + failed

    def metrics(self) -> dict[str, float]:
        """Return the figures of a line of evaluations.jsonl."""
        outcomes = self.evaluation.outcomes
        return {
            "val/reward": self.reward,
            "val/num_failed": self.num_failed,
            "val/num_reward_errors": sum(len(rollout.reward_errors) for rollout in outcomes),
            "val/num_truncated": sum(rollout.is_truncated for rollout in outcomes),
            "val/num_overlong": sum(rollout.is_overlong for rollout in outcomes),
            "val/turns": mean([rollout.num_turns for rollout in outcomes]),
            **{f"val/reward/{name}": value for name, value in self._function_means().items()},
        }

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
    figures = {
        "step": evaluation.step,
        "weight_version": evaluation.weight_version,
        "num_samples": len(evaluation.outcomes),
        "wall_s": evaluation.wall_s,
        **report.metrics(),
    }
    with whole_folder(folder) as partial:
        text = json.dumps(figures, indent=2) + "\n"
        (partial / "report.json").write_text(text, encoding="utf-8")
        with (partial / "rollouts.jsonl").open("w", encoding="utf-8") as file:
            for rollout in evaluation.outcomes:
                file.write(json.dumps(trajectory_record(evaluation.step, rollout)) + "\n")
