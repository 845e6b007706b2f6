"""The rollouts of one step as rows for a run's page, from the step's file of the rollout log."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from launch.loggers.events import as_cell, sample_row, trajectory_row
from learner.rollout_logs import samples, trajectories
from learner.rollout_logs.samples import RolloutRecord
from learner.rollout_logs.trajectories import TrajectoryRecord
from learner.rollout_logs.writer import step_path
from shared.config import RunConfig
from shared.config.pipeline import Channel
from shared.trajectory import group_advantages

Row = dict[str, Any]


def step_rows(folder: Path, step: int, config: RunConfig) -> list[Row]:
    """Return a row for each sample or rollout that the run in `folder` logged in `step`.

    Siblings, which are rollouts of the same sample or dataset row, have the same `group`, a number
    from 0. A row has only the keys that apply: `reward` and `advantage` with a policy gradient,
    `error` in an environment, `match` (matched share of the ground truth) and `dropped` (reasons)
    in detection.

    Raises OSError, and RecordError for a damaged line.
    """
    path = step_path(folder / "rollouts", step)
    if config.environment is not None:
        size = config.environment.rollouts_per_example
        rows = [_of_trajectory(line) for line in trajectories.read_step(path)]
    else:
        lines = samples.read_step(path)
        has_sources = any(one.name is not None for one in config.data.sources("train"))
        is_b = bool(lines) and lines[0]["channel"] == Channel.B
        size = config.stage2_ab.channel_b.rollouts_per_sample if is_b else 1
        rows = [_of_sample(line, has_sources=has_sources) for line in lines]
        by_group: dict[int, list[Row]] = {}
        for row in rows:
            if row.get("reward") is not None:
                by_group.setdefault(row["position"] // size, []).append(row)
        for siblings in by_group.values():
            advantages = group_advantages([row["reward"] for row in siblings])
            for row, advantage in zip(siblings, advantages, strict=True):
                row["advantage"] = advantage
    return [
        {"group": row["position"] // size}
        | {name: as_cell(value) for name, value in row.items() if value not in (None, "")}
        for row in rows
    ]


def _of_trajectory(line: TrajectoryRecord) -> Row:
    row: Row = trajectory_row(line)
    # Examples of one rollout have the same advantage, unless the environment set it by token.
    advantages = {example["advantage"] for example in line["examples"]}
    advantage = advantages.pop() if len(advantages) == 1 else None
    return {
        "position": row["position"],
        "name": f"row {row['example']}",
        "source": line.get("task"),
        "reward": None if row["error"] else row["reward"],
        "advantage": advantage if advantage is not None and math.isfinite(advantage) else None,
        "tokens": line.get("num_tokens"),
        "end": "failed" if row["error"] else "cut" if line["is_truncated"] else "ended",
        "parts": row["rewards"],
        "turns": row["turns"],
        "error": row["error"],
        "prompt": row["prompt"],
        "answer": row["completion"],
    }


def _of_sample(line: RolloutRecord, *, has_sources: bool) -> Row:
    # A sample's name begins with the name of its file if there are several files.
    name = line["sample_id"]
    row: Row = {
        "position": line["position"],
        "name": name,
        "source": name.partition("/")[0] if has_sources else None,
        "truth": ", ".join(truth["desc"] for truth in line["ground_truth"]),
    }
    if (read := sample_row(line)) is not None:
        row |= {key: value for key, value in read.items() if key != "sample"}
        num_truths = len(line["ground_truth"])
        row["match"] = row["matched"] / num_truths if num_truths else None
        row["reward"] = line.get("reward")
    return row


def as_json(value: object) -> str:
    """Return a value as compact JSON that a script element of a page can contain."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
