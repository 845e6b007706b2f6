"""Whether a folder holds a checkpoint at all, and of what kinds it may be: the looks that cost nothing, for commands that load nothing yet."""

from __future__ import annotations

from pathlib import Path

MODEL_TYPES = ("qwen2_5_vl", "qwen3_vl")
"""With a vision tower."""
TEXT_MODEL_TYPES = ("qwen2", "qwen3")
"""Trained on trajectories alone: there are no images to ask them about."""

_ANOTHER_MODEL = (
    "run `make demo-data` (it makes outputs/demo/model) or `make demo-lm` (outputs/demo/lm), or set model.path to a folder that save_pretrained wrote"
)


def checkpoint_problems(folder: Path, *, key: str = "model.path", remedy: str = _ANOTHER_MODEL) -> tuple[str, ...]:
    """Why `folder`, which `key` names, is no checkpoint, as a ConfigError says it; empty where it is one."""
    return () if (folder / "config.json").is_file() else (f"{key}: {folder} holds no checkpoint (no config.json); {remedy}",)
