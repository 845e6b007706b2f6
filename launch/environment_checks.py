"""An environment that cannot be loaded, as the commands say it: which of their keys is meant, and the line of the environment that failed."""

from __future__ import annotations

import logging
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_actors.environments import examples
from rollout_actors.environments.environment import Environment
from rollout_actors.environments.loading import find_environment, make_environment
from shared.errors import ConfigError, RecordError

_LOGGER = logging.getLogger(__name__)

_OURS = tuple(f"{Path(__file__).parents[1] / package}/" for package in ("launch", "learner", "rollout_actors", "shared"))
_EXAMPLES = tuple(f"{folder}/" for folder in examples.__path__)


@dataclass(frozen=True, slots=True)
class EnvironmentKeys:
    """By what a command is told its environment."""

    name: str
    args: str
    more: str = ""
    """What else helps with one that fails."""


def loaded_environment(name: str, args: Mapping[str, Any], keys: EnvironmentKeys) -> Environment:
    """`load_environment(name, **args)`. Whatever that raises is a ConfigError (or the RecordError that it is), whose cause it is."""
    with environment_errors(name, keys, keys.name):
        load = find_environment(name)
    with environment_errors(name, keys, keys.args):
        return make_environment(name, load, args)


@contextmanager
def environment_errors(name: str, keys: EnvironmentKeys, key: str) -> Iterator[None]:
    """What the body raises of this environment as a ConfigError: a ValueError explains itself and is of `key`; with the rest goes the line that raised it."""
    try:
        yield
    except (ConfigError, RecordError):
        raise
    except ValueError as error:
        _LOGGER.debug("%s was not loaded", name, exc_info=error)
        raise ConfigError(f"{key}: {error}") from error
    except Exception as error:  # whatever a module of somebody's raises
        _LOGGER.debug("%s was not loaded", name, exc_info=error)
        what, remedy = f"{type(error).__name__}: {error} ({_place(error)})", f"check {keys.args} and the environment"
        raise ConfigError(f"{keys.name}: {name} was not loaded: {what}; {remedy}{keys.more}") from error


def _place(error: Exception) -> str:
    """Of the last line that is the environment's own: of no installed file where it can be, and neither Python's nor ours."""
    frames = traceback.extract_tb(error.__traceback__)
    last = max(reversed(frames), key=lambda frame: _ownership(frame.filename))
    return f"{last.filename}:{last.lineno}"


def _ownership(file: str) -> int:
    if file.startswith(_EXAMPLES):
        return 2
    if file.startswith((*_OURS, "<")):
        return 0
    # An installation without a virtual environment has the packages inside the library's folder.
    if "/site-packages/" in file or "/dist-packages/" in file:
        return 1
    return 0 if file.startswith((f"{sysconfig.get_path('stdlib')}/", f"{sysconfig.get_path('platstdlib')}/")) else 2
