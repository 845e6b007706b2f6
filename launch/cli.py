"""What the commands have in common: how they end, and what they say when they end badly."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from rich.console import Console

from shared.config import RunConfig
from shared.config.algorithm import EnvironmentSection
from shared.config.base import Section
from shared.config.explain import as_yaml, explain
from shared.errors import (
    ConfigError,
    LearnerError,
    RecordError,
    RolloutError,
    StorageError,
    WeightSyncError,
)

EXPLAINED = (
    ConfigError,
    RecordError,
    RolloutError,
    WeightSyncError,
    LearnerError,
    StorageError,
    OSError,
)
"""Errors whose message says where and what to do; a traceback would hide it."""


@contextmanager
def explained(console: Console) -> Iterator[None]:
    """End the process when the body does: 2 for what the user can mend before a start, 1 for what
    went wrong after it, 130 for an interruption.
    """
    end_on_signals()
    try:
        yield
    except EXPLAINED as error:
        console.print(f"[bold red]{type(error).__name__}[/]", highlight=False)
        console.print(str(error), markup=False, highlight=False)
        # The other side of a failed sync. An error's own OSError would only say the same again, and
        # so would what Ray makes of an actor's error, with a traceback besides.
        if isinstance(error.__cause__, RolloutError | WeightSyncError | LearnerError) and str(
            error
        ) not in str(error.__cause__):
            console.print(
                f"caused by {type(error.__cause__).__name__}: {error.__cause__}",
                markup=False,
                highlight=False,
            )
        sys.exit(2 if isinstance(error, ConfigError | RecordError) else 1)
    except KeyboardInterrupt:
        console.print("interrupted; every process that this command started was ended")
        sys.exit(130)


def end_on_signals() -> None:
    """SIGTERM and SIGINT unwind the command, so that every `with` ends what it started. Again after
    `ray.init`, which puts a handler of its own there.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    # Once: a second signal must not interrupt the ending of the run's processes. (Not SIG_IGN:
    # Python prints a traceback where a signal has come already.)
    signal.signal(signal.SIGTERM, _ignore)
    signal.signal(signal.SIGINT, _ignore)
    raise KeyboardInterrupt


def _ignore(signum: int, frame: FrameType | None) -> None:
    pass


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Actors run in a working directory of Ray's own."""
    data = {
        "train": config.data.train and config.data.train.resolve(),
        "val": config.data.val and config.data.val.resolve(),
    }
    return config.model_copy(
        update={
            "model": config.model.model_copy(
                update={"path": str(Path(config.model.path).resolve())}
            ),
            "data": config.data.model_copy(update=data),
            "environment": _with_absolute_path(config.environment),
            "telemetry": config.telemetry.model_copy(
                update={"run_dir": config.telemetry.run_dir.resolve()}
            ),
        }
    )


def _with_absolute_path(section: EnvironmentSection | None) -> EnvironmentSection | None:
    """Where the environment is named by its file."""
    if section is None or not section.id.endswith(".py"):
        return section
    return section.model_copy(update={"id": str(Path(section.id).resolve())})


# `key=value` arguments of the commands that are not a run, read as a closed section of the
# configuration would be.


Options = TypeVar("Options", bound=Section)


def read_arguments(schema: type[Options], arguments: Sequence[str]) -> Options:
    """The arguments as one `schema`; `--help` prints its keys and exits. ConfigError with every
    problem: no `=`, a key given twice, and what the schema refuses.

    Values are YAML scalars (`8`, `true`, `null`), anything else is text. For text and paths every
    value is text, `5` too; `null` is none where the schema knows none.
    """
    if {"-h", "--help"} & set(arguments):
        print("\n".join(_help(schema)))
        sys.exit(0)
    problems: list[str] = []
    values: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals:
            problems.append(
                f"{argument}: is not key=value; the keys are {', '.join(schema.model_fields)}"
            )
        elif key in values:
            problems.append(f"{key}: is given twice; keep one")
        else:
            values[key] = _value(schema, key, text)
    try:
        options = schema.model_validate(values)
    except ValidationError as error:
        problems += (str(explain(schema, one)) for one in error.errors(include_url=False))
        raise ConfigError(problems) from None
    if problems:
        raise ConfigError(problems)
    return options


def _help(schema: type[Section]) -> list[str]:
    """A line per key: its default (`...` where it is required), and what it means."""
    given = {
        key: f"{key}={'...' if field.is_required() else as_yaml(field.default)}"
        for key, field in schema.model_fields.items()
    }
    width = max(map(len, given.values()))
    return [
        f"{given[key]:<{width}}  {' '.join((field.description or '').split())}"
        for key, field in schema.model_fields.items()
    ]


def _value(schema: type[Section], key: str, text: str) -> bool | int | float | str | None:
    types = _types(schema.model_fields[key].annotation) if key in schema.model_fields else set()
    if types & {str, Path}:
        return None if text == "null" and NoneType in types else text
    return _scalar(text)


def _types(annotation: Any) -> set[Any]:
    """What a value may be, without what is said about it: `Annotated[str, ...] | None` is str or
    NoneType.
    """
    if get_origin(annotation) is Annotated:
        return _types(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return {kind for part in get_args(annotation) for kind in _types(part)}
    return {annotation}


def _scalar(text: str) -> bool | int | float | str | None:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return value if value is None or isinstance(value, bool | int | float) else text


# How a command of the run's configuration reads it: files of conf/, composed by Hydra, and the
# command line.


CONF = Path(__file__).resolve().parent.parent / "conf"


def as_mapping(composed: DictConfig) -> dict[str, Any]:
    """The end of OmegaConf's life: the schema reads plain values. ConfigError for an interpolation
    that leads nowhere.
    """
    try:
        mapping = OmegaConf.to_container(composed, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        remedy = "write the value itself, or ${...} with the whole path of a key that is there"
        raise ConfigError(
            f"{error.full_key}: its interpolation cannot be resolved ({reason}); {remedy}"
        ) from error
    assert isinstance(mapping, dict)
    return {str(key): value for key, value in mapping.items()}


def as_schema_overrides(arguments: list[str]) -> list[str]:
    """`a.b=c` becomes `++a.b=c`: any key of the schema may be set from the command line, written in
    a file or not, and a wrong key gets the schema's answer.

    Options, config groups (`model=...`), Hydra's own keys and overrides with a prefix stay as they
    are. ConfigError for a key inside a list, which Hydra cannot read.
    """
    if problems := [
        _inside_a_list(key)
        for key, equals, _ in (argument.partition("=") for argument in arguments)
        if equals and "[" in key
    ]:
        raise ConfigError(problems)

    def converted(argument: str) -> str:
        key = argument.split("=", 1)[0]
        plain = (
            "=" in argument
            and key[:1].isalpha()
            and not (CONF / key).is_dir()
            and not key.startswith("hydra")
        )
        return f"++{argument}" if plain else argument

    return [converted(argument) for argument in arguments]


def _inside_a_list(key: str) -> str:
    above = key.lstrip("+~").partition("[")[0]
    whole = f"give the whole list ('{above}=[...]'), or write it in a file of conf/experiment"
    return f"{key.lstrip('+~')}: a key inside a list cannot be set on the command line; {whole}"
