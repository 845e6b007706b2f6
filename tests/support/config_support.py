"""A small sound configuration for tests, light to import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from shared.config import RunConfig, load_config

MINIMAL = Path(__file__).parents[1] / "data" / "minimal_config.yaml"
GROUP = 4
"""Rollouts of an example in `trajectory_config`."""
_OBJECTIVE = {"clip_low": 0.2, "clip_high": 0.28, "ratio_cap": 3.0, "normalize": "step", "advantage_std": False}


def mapping(checkpoint: Path, data: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """The minimal configuration over these folders; `changes` name keys by dotted path with `__` for the dot."""
    values = yaml.safe_load(MINIMAL.read_text())
    values["model"]["path"] = str(checkpoint)
    values["data"] = {"train": str(data / "train.jsonl"), "val": str(data / "val.jsonl")}
    values["telemetry"] = {"run_dir": str(run_dir), "timeline": True}
    for path, value in changes.items():
        *parents, key = path.split("__")
        section = values
        for parent in parents:
            section = section.setdefault(parent, {})
        section[key] = value
    return values


def configuration(checkpoint: Path, data: Path, run_dir: Path, **changes: Any) -> RunConfig:
    return load_config(mapping(checkpoint, data, run_dir, **changes))


def trajectory_config(checkpoint: Path, run_dir: Path, *, objective: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    """Three steps of three examples, four rollouts each, in rows of 48 tokens; `objective` changes keys of the policy gradient's."""
    entry = {"name": "policy_gradient", "enabled": True, "weight": 1.0, "channels": ["B"], "config": _OBJECTIVE | (objective or {})}
    settings = {
        "global_max_length": 48,
        "training__max_steps": 3,
        "training__effective_batch_size": 3 * GROUP,
        "training__packing_window": 4,
        "training__adam_epsilon": 1e-4,
        "custom__trainer_variant": "trajectory_pg",
        "environment__id": "copy_digits",
        "environment__rollouts_per_example": GROUP,
        "rollout_matching__pipeline": {"objective": [entry], "diagnostics": []},
        "rollout_matching__decoding": {"temperature": 1.0},
        "rollout_matching__max_new_tokens": 8,
        "learner__cpu_threads": 1,
    }
    values = mapping(checkpoint, checkpoint, run_dir, **settings | changes)
    # The environment has data of its own, and there is no channel A.
    del values["data"]
    values["stage2_ab"] = {"channel_b": {"enable_pipeline": True}}
    return load_config(values)
