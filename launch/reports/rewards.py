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
    """On all held-out examples, at least one."""

    evaluation: Evaluation[EnvironmentRollout]

    @property
    def reward(self) -> float:
        """The mean over the rollouts that did not fail; 0 where all have: checkpoints are compared
        by it.
        """
        rewards = [rollout.reward for rollout in self.evaluation.outcomes if rollout.error is None]
        return mean(rewards) if rewards else 0.0

    @property
    def num_failed(self) -> int:
        return sum(rollout.error is not None for rollout in self.evaluation.outcomes)

    @property
    def headline(self) -> PrimaryMetric:
        return PrimaryMetric("mean reward", self.reward)

    def describe(self) -> str:
        values = ", ".join(f"{name} {value:.3f}" for name, value in self._functions().items())
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        return f"mean reward {self.reward:.3f}" + (f" ({values})" if values else "") + failed

    def metrics(self) -> dict[str, float]:
        """As a line of evaluations.jsonl has them."""
        outcomes = self.evaluation.outcomes
        return {
            "val/reward": self.reward,
            "val/num_failed": self.num_failed,
            "val/num_reward_errors": sum(len(rollout.reward_errors) for rollout in outcomes),
            "val/num_truncated": sum(rollout.is_truncated for rollout in outcomes),
            "val/turns": mean([rollout.num_turns for rollout in outcomes]),
            **{f"val/reward/{name}": value for name, value in self._functions().items()},
        }

    def _functions(self) -> dict[str, float]:
        """What each reward function gave, of the rollouts that have it: those of another
        environment of a group do not.
        """
        outcomes = self.evaluation.outcomes
        names = sorted({name for rollout in outcomes for name in rollout.metrics})
        return {
            name: mean([rollout.metrics[name] for rollout in outcomes if name in rollout.metrics])
            for name in names
        }


def write_reward_report(folder: Path, report: RewardReport) -> None:
    """`report.json` with the figures, and `rollouts.jsonl` with a line for every rollout
    (learner.rollout_logs.trajectories), in `folder`, which must not exist: complete, or not there
    at all. Raises StorageError."""
    evaluation = report.evaluation
    place = {
        "step": evaluation.step,
        "weight_version": evaluation.weight_version,
        "num_samples": len(evaluation.outcomes),
        "wall_s": evaluation.wall_s,
    }
    with whole_folder(folder) as partial:
        (partial / "report.json").write_text(
            json.dumps({**place, **report.metrics()}, indent=2) + "\n", encoding="utf-8"
        )
        with (partial / "rollouts.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(
                json.dumps(trajectory_record(evaluation.step, rollout)) + "\n"
                for rollout in evaluation.outcomes
            )
