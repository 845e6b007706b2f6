"""An environment that cannot be loaded, as the commands say it: which of their keys is meant, and
the line of the environment that failed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rollout_actors.environments.environment import Environment
from rollout_actors.environments.failures import called_exit, last_of_users, ownership
from rollout_actors.environments.loading import find_environment, make_environment
from shared.errors import ConfigError, RecordError

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EnvironmentKeys:
    """By what a command is told its environment."""

    name: str
    args: str
    more: str = ""
    """What else helps with one that fails."""


def loaded_environment(name: str, args: Mapping[str, Any], keys: EnvironmentKeys) -> Environment:
    """`load_environment(name, **args)`. Whatever that raises is a ConfigError (or the RecordError
    that it is), whose cause it is; also `exit()`.
    """
    with environment_errors(name, keys, keys.name):
        load = find_environment(name)
    with environment_errors(name, keys, keys.args):
        return make_environment(name, load, args)


@contextmanager
def environment_errors(name: str, keys: EnvironmentKeys, key: str) -> Iterator[None]:
    """What the body raises of this environment as a ConfigError: a ValueError explains itself and
    is of `key`; with the rest goes the line that raised it.

    So is `exit()`, which would end the command without a word; not that of a signal's handler.
    """
    try:
        yield
    except (ConfigError, RecordError):
        raise
    except ValueError as error:
        _LOGGER.debug("%s was not loaded", name, exc_info=error)
        raise ConfigError(f"{key}: {error}") from error
    except SystemExit as error:
        raise _not_loaded(called_exit(error), name, keys) from error
    except Exception as error:  # whatever a module of somebody's raises
        raise _not_loaded(error, name, keys) from error


def _not_loaded(error: Exception, name: str, keys: EnvironmentKeys) -> ConfigError:
    _LOGGER.debug("%s was not loaded", name, exc_info=error)
    return ConfigError(
        f"{keys.name}: {name} was not loaded: {_told(error)}; check {keys.args} and the"
        f" environment{keys.more}"
    )


def _told(error: Exception) -> str:
    """With the last line that is the environment's own, where there is one: of no installed file
    where it can be, and neither Python's nor ours.
    """
    if isinstance(error, SyntaxError) and error.filename is not None and ownership(error.filename):
        # No frame has come to the line, which is in a file of the environment's.
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    text, last = f"{type(error).__name__}: {error}", last_of_users(error)
    return text if last is None else f"{text} ({last[0].f_code.co_filename}:{last[1]})"
