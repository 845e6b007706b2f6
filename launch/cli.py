"""The command line: `rollmatch`, how commands end, `key=value` options, and the Hydra bridge."""

from __future__ import annotations

import logging
import os
import re
import runpy
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import psutil
import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from rich.console import Console

from launch.run_folder.console import EscapedRecord, outlive_console
from shared.config import RunConfig, load_config
from shared.config.base import Section
from shared.config.explain import as_yaml, explain
from shared.config.model import SourceSection
from shared.config.secrets import redacted
from shared.errors import (
    ConfigError,
    LearnerError,
    RecordError,
    RolloutError,
    StorageError,
    WeightSyncError,
)

CONF = Path(__file__).resolve().parent.parent / "conf"
"""The experiments and their parts: beside the packages, in the repository and installed."""
COMMANDS = {
    "add-coord-tokens": "give a stock checkpoint the 1,000 coord tokens",
    "coco": "import COCO annotations as records, export predictions as COCO results",
    "demo": "make the demo's data and models, draw a run",
    "diff-runs": "say where two runs part: step, stage and sample",
    "evaluate": "make the held-out report of a run's checkpoint",
    "import-data": "make records of YOLO, VOC, COCO, LVIS, RefCOCO, ms-swift or hub data",
    "keys": "explain the keys of the configuration, or of one section",
    "ledger": "say whether a run's ledger is whole",
    "new-environment": "write an environment to begin with, its test and an experiment",
    "preflight": "say what a run would do and whether it can, without starting anything",
    "replay": "learn a step of a run again from what was recorded",
    "rex-omni": "write the tokenizer.json that a Rex-Omni checkpoint lacks",
    "serve": "serve one vLLM engine over HTTP",
    "show-sample": "show one sample of a run as a page",
    "train": "run the job: engines, learner, every step, the reports",
    "vf-eval": "evaluate a model in an environment",
}
"""The commands of `rollmatch`, and what each does. `launch.__path__` finds their modules."""
PROCESS_ERRORS = (RolloutError, WeightSyncError, LearnerError)
TWICE_S = 1.0
"""Seconds in which a second SIGINT is the first one once more."""
EXPLAINED = (ConfigError, RecordError, StorageError, OSError, *PROCESS_ERRORS)
"""Errors whose message says where and what to do; a traceback would hide it."""

Options = TypeVar("Options", bound=Section)


@contextmanager
def explained(console: Console) -> Iterator[None]:
    """Print the body's errors without a traceback, and end the process where it fails.

    Exit status 2: the user can mend it before a start; 1: it went wrong after that; 130: it was
    interrupted.
    """
    outlive_console()
    logging.setLogRecordFactory(EscapedRecord)
    end_on_signals()
    try:
        yield
    except EXPLAINED as error:
        console.print(f"[bold red]{type(error).__name__}[/]", highlight=False)
        console.print(redacted(str(error)), markup=False, highlight=False)
        # The other side of a failed sync; what Ray makes of an actor's error says the same again.
        cause = error.__cause__
        if isinstance(cause, PROCESS_ERRORS) and str(error) not in str(cause):
            line = redacted(f"caused by {type(cause).__name__}: {cause}")
            console.print(line, markup=False, highlight=False)
        sys.exit(2 if isinstance(error, ConfigError | RecordError) else 1)
    except KeyboardInterrupt:
        console.print("interrupted; every process that this command started was ended")
        sys.exit(130)


def ending_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that end a command: SIGTERM, SIGINT, and SIGHUP of a closed terminal.

    Without SIGHUP if it is ignored, as under `nohup`.
    """
    # SIGINT is ignored in a script's background, too, and ends a command there all the same.
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return (signal.SIGTERM, signal.SIGINT)
    return (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def end_on_signals() -> None:
    """Have `ending_signals` unwind the command, so that every `with` ends what it started.

    Another Ctrl-C, more than `TWICE_S` later, ends the command at once. Call it again after
    `ray.init`, which installs a handler of its own.
    """
    for number in ending_signals():
        signal.signal(number, _interrupt)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    # Schedulers repeat SIGTERM, a terminal and its shell both send SIGHUP, and one Ctrl-C may come
    # twice, through a terminal and a parent: none of them must interrupt the ending of the run's
    # processes. (Not SIG_IGN: Python prints a traceback where a signal has come already.)
    for number in ending_signals():
        signal.signal(number, lambda signum, frame: None)
    again_s = time.monotonic() + TWICE_S
    signal.signal(signal.SIGINT, lambda signum, frame: _end_at_once(again_s))
    raise KeyboardInterrupt


def _end_at_once(again_s: float) -> None:
    """End without any clean-up, where somebody presses Ctrl-C again."""
    if time.monotonic() < again_s:
        return
    left = [str(child.pid) for child in psutil.Process().children(recursive=True)]
    message = (
        "\nended at once: what was being written may be lost; processes"
        f" {', '.join(left) or 'none'} were not waited for, and end by themselves, unless they"
        " hang\n"
    )
    # A bar hides the cursor, and nobody comes back to show it.
    cursor = "\x1b[?25h" if os.isatty(2) else ""
    with suppress(OSError):  # the terminal may be gone
        os.write(2, f"{cursor}{message}".encode())
    os._exit(130)


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Make every path absolute: actors run in a working directory of Ray's own."""
    model = {"path": str(Path(config.model.path).resolve())}
    data = {"train": _absolute(config.data.train), "val": _absolute(config.data.val)}
    environment = config.environment
    if environment is not None and environment.id.endswith(".py"):
        environment = environment.model_copy(update={"id": str(Path(environment.id).resolve())})
    telemetry = {"run_dir": config.telemetry.run_dir.resolve()}
    sections = {
        "model": config.model.model_copy(update=model),
        "data": config.data.model_copy(update=data),
        "environment": environment,
        "telemetry": config.telemetry.model_copy(update=telemetry),
    }
    return config.model_copy(update=sections)


def _absolute(
    files: Path | Sequence[SourceSection] | None,
) -> Path | tuple[SourceSection, ...] | None:
    if files is None or isinstance(files, Path):
        return files and files.resolve()
    return tuple(one.model_copy(update={"path": one.path.resolve()}) for one in files)


def run_command() -> None:
    """Run `rollmatch NAME ...`, as `python -m launch.NAME` runs; exit status 2 for no such NAME."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name not in COMMANDS:
        width = max(map(len, COMMANDS))
        lines = [f"  {command:<{width}}  {does}" for command, does in COMMANDS.items()]
        text = "\n".join(
            ["rollmatch NAME ...; `rollmatch NAME --help` says more. NAME is one of", *lines]
        )
        if name in ("-h", "--help"):
            print(text)
            sys.exit(0)
        print(f"rollmatch: {name} is not one of its commands\n{text}", file=sys.stderr)
        sys.exit(2)
    # With `-m` Python finds modules of the user's own here (an environment, an objective). Last: a
    # folder of theirs named `shared` must not stand in for ours.
    sys.path.append(str(Path.cwd()))
    sys.argv[1:] = arguments
    # As `-m` does it, `__main__` and all: spawned processes import the command by its name.
    runpy.run_module(f"launch.{name.replace('-', '_')}", run_name="__main__", alter_sys=True)


def read_arguments(schema: type[Options], arguments: Sequence[str]) -> Options:
    """Read `key=value` arguments as one closed section; `--help` prints its keys and exits.

    Values are YAML scalars, but for text and paths, whose every value is text; `null` is None where
    the schema knows it. Raises ConfigError with every problem.
    """
    if {"-h", "--help"} & set(arguments):
        _print_help(schema)
        sys.exit(0)
    problems: list[str] = []
    values: dict[str, object] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals:
            keys = ", ".join(schema.model_fields)
            problems.append(f"{argument}: is not key=value; the keys are {keys}")
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


def _print_help(schema: type[Section]) -> None:
    """Print a line per key: its default (`...` where it is required: first), and its meaning."""
    keys = {}
    fields = sorted(schema.model_fields.items(), key=lambda item: not item[1].is_required())
    for key, field in fields:
        default = "..." if field.is_required() else as_yaml(field.default)
        keys[f"{key}={default}"] = " ".join((field.description or "").split())
    width = max(map(len, keys))
    for key, description in keys.items():
        print(f"{key:<{width}}  {description}")


def _value(schema: type[Section], key: str, text: str) -> bool | int | float | str | None:
    types = _types(schema.model_fields[key].annotation) if key in schema.model_fields else set()
    if types & {str, Path}:
        return None if text == "null" and NoneType in types else text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return value if value is None or isinstance(value, bool | int | float) else text


def _types(annotation: object) -> set[object]:
    """Return the types of a value: str and NoneType for `Annotated[str, ...] | None`."""
    if get_origin(annotation) is Annotated:
        return _types(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return {kind for part in get_args(annotation) for kind in _types(part)}
    return {annotation}


def as_mapping(composed: DictConfig) -> dict[str, Any]:
    """Turn Hydra's configuration into plain values. Raises ConfigError for a lost interpolation."""
    try:
        mapping = OmegaConf.to_container(composed, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{error.full_key}: its interpolation cannot be resolved ({reason}); write the value"
            " itself, or ${...} with the whole path of an existing key, or set the environment"
            " variable that it names"
        ) from error
    assert isinstance(mapping, dict)
    return {str(key): value for key, value in mapping.items()}


def config_of_command(composed: DictConfig) -> RunConfig:
    """Return the configuration: as composed, or with `resume=RUN` that run's own, changed.

    Raises ConfigError.
    """
    # Here: commands without Hydra import this module.
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.override_parser.overrides_parser import OverridesParser

    # Not resolved: an override may be an interpolation, whose problem `as_mapping` tells.
    overrides = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    assert isinstance(overrides, list)
    resumed = [one for one in overrides if one.startswith("++resume.run=")]
    path = OverridesParser.create().parse_override(resumed[-1]).value() if resumed else None
    if path is None:
        return load_config(as_mapping(composed))
    if path == "auto":
        if "${now" in OmegaConf.to_yaml(composed.telemetry):
            raise ConfigError(
                "resume.run: auto looks for the run in telemetry.run_dir, which has a new name at"
                " every start; set telemetry.run_dir=FOLDER"
            )
        return load_config(as_mapping(composed))
    from launch.run_folder.resume import config_of_run

    return config_of_run(
        Path(str(path)).expanduser(), [one for one in overrides if one not in resumed]
    )


def _quoted(argument: str) -> str:
    """Quote the value of `key=value` if Hydra cannot read it as it is, and it is no structure."""
    # Here: commands without Hydra import this module.
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, _, value = argument.partition("=")
    is_path = key == "resume.run" and value not in ("auto", "null", "")
    if value[:1] in ("'", '"') or (value[:1] in ("[", "{") and not is_path):
        return argument
    try:
        read = OverridesParser.create().parse_override(argument)
        # Hydra would take `a,b` for two runs, and `f(x)` for a function.
        if not is_path or (read.value() == value and not read.is_sweep_override()):
            return argument
    except HydraException:
        pass
    return f"{key}={quoted(value)}"


def quoted(text: str) -> str:
    """Return a text as Hydra's grammar reads it, whatever is in it."""
    escaped = re.sub(r"(\\*)(?='|$)", lambda run: 2 * run[0], text).replace("'", "\\'")
    return f"'{escaped}'"


def as_schema_overrides(arguments: list[str]) -> list[str]:
    """Turn `a.b=c` into `++a.b=c`, so that the schema, not Hydra, judges the key.

    Options, config groups (`model=...`), Hydra's keys and overrides with a prefix stay.
    `resume=RUN` stands for `resume.run=RUN`, and `cluster=local` for `cluster.kind=local`. A value
    that Hydra's grammar does not take, such as a path with brackets, becomes a quoted text.

    Raises:
        ConfigError: a key lies inside a list, which Hydra cannot read.
    """
    overrides = []
    problems = []
    for argument in arguments:
        for section, key in (("resume", "run"), ("cluster", "kind")):
            argument = re.sub(f"^{section}=", f"{section}.{key}=", argument)
        key, equals, _ = argument.partition("=")
        if equals and "[" in key:
            path = key.lstrip("+~")
            problems.append(
                f"{path}: a key inside a list cannot be set on the command line; give the whole"
                f" list ('{path.partition('[')[0]}=[...]'), or write it in a file of"
                " conf/experiment"
            )
        is_group = (CONF / key).is_dir() or key.startswith("hydra")
        is_plain = equals and key[:1].isalpha() and not is_group
        overrides.append(f"++{_quoted(argument)}" if is_plain else argument)
    if problems:
        raise ConfigError(problems)
    return overrides
