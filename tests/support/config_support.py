"""A small sound configuration for tests, light to import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from shared.config import RunConfig, load_config

MINIMAL = Path(__file__).parents[1] / "data" / "minimal_config.yaml"


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
