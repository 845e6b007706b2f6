"""The configuration saved in a run's folder, for commands that use the run later."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from launch.cli import as_mapping
from shared.errors import ConfigError

if TYPE_CHECKING:
    from shared.config import RunConfig

_FROM_A_COPY = "restore it from another copy of the run's folder"


def read_run(run: Path) -> dict[str, object]:
    """Read the configuration in the run's folder as it was saved, by any version.

    Raises ConfigError if the folder holds no run, or its configuration is unreadable or damaged.
    """
    file = run / "config.json"
    try:
        saved = json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(
            f"run: {run} holds no run (no config.json); give the folder that a run printed as its"
            " run folder, such as outputs/2026-11-21/10-30-00"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"run: {file} cannot be read ({error.strerror}); permit reading it, or {_FROM_A_COPY}"
        ) from error
    except ValueError as error:
        raise ConfigError(f"run: {file} is damaged ({error}); {_FROM_A_COPY}") from error
    if not isinstance(saved, dict):
        raise ConfigError(f"run: {file} holds no configuration; {_FROM_A_COPY}")
    return saved


def load_run(run: Path, changes: Mapping[str, object] | None = None) -> RunConfig:
    """Load the configuration in the run's folder, with `changes` to the values of dotted keys.

    Raises ConfigError for an error of `read_run`, a configuration that another version of rollmatch
    wrote, or wrong changes.
    """
    from shared.config import load_config  # the whole schema, which `read_run` does not need

    saved = read_run(run)
    try:
        # First without changes, so that another version's problem is not blamed on them.
        config = load_config(saved)
    except ConfigError as error:
        version = (
            f"run: {run / 'config.json'} was written by another version of rollmatch; check"
            " out that version"
        )
        raise ConfigError((version, *error.problems)) from error
    return changed_config(saved, changes) if changes else config


def changed_config(saved: Mapping[str, object], changes: Mapping[str, object]) -> RunConfig:
    """Return the validated configuration `saved`, with `changes` to the values of dotted keys.

    Interpolations such as `${oc.env:NAME}` are resolved. Raises ConfigError.
    """
    from omegaconf import OmegaConf

    from shared.config import load_config

    return load_config(_changed(saved, as_mapping(OmegaConf.create(dict(changes)))))


def _changed(saved: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """Return a copy with values set at dotted keys; parents that are not mappings are replaced."""
    changed = dict(saved)
    for dotted, value in changes.items():
        key, _, rest = dotted.partition(".")
        inner = changed.get(key)
        section = inner if isinstance(inner, dict) else {}
        changed[key] = _changed(section, {rest: value}) if rest else value
    return changed
