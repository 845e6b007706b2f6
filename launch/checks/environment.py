"""Loads an environment for a command; errors name the command's key and the failing line."""

from __future__ import annotations

import logging
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rollout_actors.environments.environment import Environment
from rollout_actors.environments.loading import find_environment, make_environment
from shared.config.secrets import masked_keys, redacted
from shared.errors import ConfigError, RecordError

_LOGGER = logging.getLogger(__name__)
_ROOT = Path(__file__).parents[2]
_EXAMPLES = f"{_ROOT}/rollout_actors/environments/examples/"
_NOT_THE_USERS = (
    *(f"{_ROOT / package}/" for package in ("launch", "rollout_actors", "shared")),
    f"{sysconfig.get_path('stdlib')}/",
    "<",  # code without a file
)


@dataclass(frozen=True, slots=True)
class EnvironmentKeys:
    """Names, for error messages, of the keys or options that choose a command's environment."""

    name: str
    """Key of the environment's name."""
    args: str
    """Key of the environment's arguments."""
    more: str = ""
    """Further advice, added to the error if the environment's code fails."""
    again: str = "give it again"
    """The remedy if a secret argument is missing, because secrets are not saved in files."""


def loaded_environment(name: str, args: Mapping[str, object], keys: EnvironmentKeys) -> Environment:
    """Return the environment `name`, made with `args`.

    Raises ConfigError for any error of the environment's code.
    """
    if missing := masked_keys(args):
        raise ConfigError(
            [
                f"{keys.args}: {key} is a secret, which is not saved in files; {keys.again}"
                for key in missing
            ]
        )
    with environment_errors(name, keys, keys.name):
        load = find_environment(name)
    with environment_errors(name, keys, keys.args):
        return make_environment(name, load, args)


@contextmanager
def environment_errors(name: str, keys: EnvironmentKeys, key: str) -> Iterator[None]:
    """Turn errors of the environment's code, in the `with` block, into a ConfigError.

    A ValueError is reported with its own text under `key`. Any other error is reported under
    `keys.name`, with the line of the environment's code that raised it.
    """
    try:
        yield
    except (ConfigError, RecordError):
        raise
    except (Exception, SystemExit) as error:  # exit() would end the command without a message
        _LOGGER.debug("%s was not loaded", name, exc_info=error)
        if isinstance(error, ValueError):
            raise ConfigError(f"{key}: {redacted(str(error))}") from error
        raise ConfigError(
            f"{keys.name}: {name} was not loaded: {redacted(_describe(error))}; check {keys.args}"
            f" and the environment{keys.more}"
        ) from error


def _describe(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).is_file():
        # The traceback has no frame for the line.
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename.startswith(_EXAMPLES) or not frame.filename.startswith(_NOT_THE_USERS)
    ]
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit):
        caller = frames[-1].name if frames else "an environment"
        status = "" if error.code is None else repr(error.code)
        text = f"RuntimeError: {caller} called exit({status})"
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})" if frames else text
