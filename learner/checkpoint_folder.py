"""Whether a folder holds a checkpoint at all: the one look that costs nothing, for commands that load nothing yet."""

from __future__ import annotations

from pathlib import Path

_ANOTHER_MODEL = "run `make demo-data`, or set model.path to a folder that save_pretrained wrote"


def checkpoint_problems(folder: Path, *, key: str = "model.path", remedy: str = _ANOTHER_MODEL) -> tuple[str, ...]:
    """Why `folder`, which `key` names, is no checkpoint, as a ConfigError says it; empty where it is one."""
    return () if (folder / "config.json").is_file() else (f"{key}: {folder} holds no checkpoint (no config.json); {remedy}",)
