"""What became of every rollout of an environment: a line each in `rollouts/step_000123.jsonl` (`learner.step_log`), in the order of positions.

    jq -c 'select(.error != null) | [.position, .error]' step_000123.jsonl
    jq -r 'select(.reward == 1) | .completion[] | "\\(.role): \\(.content)"' step_000123.jsonl

`examples` are what it trains on: `token_ids` as the engine had them, `mask` 1 where a token is learned, `logprobs` the engine's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from learner.step_log import StepLog
from shared.trajectory import EnvironmentRollout, TrainingExample


class TrajectoryLog:
    def __init__(self, folder: Path, *, rank: int = 0) -> None:
        """Makes `folder` where it is missing. Raises StorageError."""
        self._step = 0
        self._lines = StepLog(folder, rank=rank)

    def begin(self, step: int) -> None:
        """The lines that follow are of this step. Raises StorageError."""
        self._step = step
        self._lines.begin(step)

    def write(self, rollout: EnvironmentRollout) -> None:
        """Raises StorageError."""
        self._lines.write(
            {
                "step": self._step,
                "position": rollout.position,
                "example": rollout.example,
                "reward": rollout.reward,
                "metrics": dict(rollout.metrics),
                "error": rollout.error,
                "is_truncated": rollout.is_truncated,
                "num_turns": rollout.num_turns,
                "num_splits": rollout.num_splits,
                "actor": rollout.actor,
                "generate_s": rollout.generate_s,
                "prompt": rollout.prompt,
                "completion": rollout.completion,
                "examples": [_entry(example) for example in rollout.examples],
            }
        )

    def close(self) -> None:
        self._lines.close()


def _entry(example: TrainingExample) -> dict[str, Any]:
    return {
        "token_ids": example.token_ids,
        "mask": example.mask,
        "logprobs": example.logprobs,
        "reward": example.reward,
        "advantage": example.advantage,
        "token_advantages": example.token_advantages,
        "weight_version": example.weight_version,
        "engine": example.engine,
        "turns": example.steps,
    }
