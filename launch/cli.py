"""The command line: `rollmatch`, how commands end, `key=value` options, and Hydra overrides."""

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
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, get_args, get_origin

import psutil
import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from rich.console import Console

from launch.run_folder.console import EscapedRecord, outlive_console
from shared.errors import (
    ConfigError,
    LearnerError,
    RecordError,
    RolloutError,
    StorageError,
    WeightSyncError,
)

if TYPE_CHECKING:
    from shared.config import RunConfig
    from shared.config.base import Section
    from shared.config.model import SourceSection

CONF = Path(__file__).resolve().parent.parent / "conf"
"""Folder of Hydra's configuration files, next to the packages (in the repository or installed)."""
COMMANDS = {
    "add-coord-tokens": "give a stock checkpoint the 1,000 coord tokens",
    "coco": "import COCO annotations as records, export predictions as COCO results",
    "demo": "make the demo's data and models, draw a run",
    "diff-runs": "find the first difference between two runs: step, stage and sample",
    "doctor": "say what is wrong with a run, and what bounded its time",
    "evaluate": "make the held-out report of a run's checkpoint",
    "import-data": "make records of YOLO, VOC, COCO, LVIS, RefCOCO, ms-swift or hub data",
    "import-gguf": "write a checkpoint folder from a GGUF file",
    "keys": "explain the keys of the configuration, or of one section",
    "ledger": "check that a run's ledger is complete",
    "new-environment": "write a starter environment, its test and an experiment",
    "preflight": "check what a run would do, and whether it can, without starting anything",
    "replay": "train one step of a run again from its records",
    "rex-omni": "write the tokenizer.json that a Rex-Omni checkpoint lacks",
    "serve": "serve one vLLM engine over HTTP",
    "show-sample": "show one sample of a run as a page",
    "train": "run the job: engines, learner, every step, the reports",
    "vf-eval": "evaluate a model in an environment",
    "view": "make the page of runs: curves, findings, faults, rollouts of a step",
}
"""The commands of `rollmatch` with descriptions. `launch.__path__` finds their modules."""
PROCESS_ERRORS = (RolloutError, WeightSyncError, LearnerError)
TWICE_S = 1.0
"""A SIGINT within this many seconds of the first signal is ignored: one Ctrl-C may send two."""
EXPLAINED = (ConfigError, RecordError, StorageError, OSError, *PROCESS_ERRORS)
"""Expected errors. `explained` prints only their message; a traceback would hide the message."""

Options = TypeVar("Options", bound="Section")


@contextmanager
def explained(console: Console) -> Iterator[None]:
    """Print an expected error (`EXPLAINED`) of the `with` block without a traceback, and exit.

    The exit status is 2 for ConfigError and RecordError, 1 for other expected errors, and 130 after
    an interruption. Also calls `end_on_signals` and `outlive_console`.
    """
    outlive_console()
    logging.setLogRecordFactory(EscapedRecord)
    end_on_signals()
    try:
        yield
    except EXPLAINED as error:
        from shared.config.secrets import redacted  # after `--help`: imports pydantic

        console.print(f"[bold red]{type(error).__name__}[/]", highlight=False)
        console.print(redacted(str(error)), markup=False, highlight=False)
        # The error of the other side of a failed weight sync. Ray's wrapper of an actor's error
        # is skipped, because it repeats the message.
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

    SIGHUP is left out if it is ignored, as under `nohup`.
    """
    # SIGINT is not left out: scripts ignore it for background jobs, which must end on it too.
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return (signal.SIGTERM, signal.SIGINT)
    return (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def end_on_signals() -> None:
    """Make each of `ending_signals` raise KeyboardInterrupt, so that `with` blocks clean up.

    A Ctrl-C more than `TWICE_S` seconds after the first signal ends the command without clean-up.
    Call this function again after `ray.init`, which installs other handlers.
    """
    for number in ending_signals():
        signal.signal(number, _interrupt)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    # Schedulers repeat SIGTERM, a terminal and its shell both send SIGHUP, and one Ctrl-C may
    # arrive twice, through a terminal and a parent. None of them may interrupt the clean-up of
    # processes. (Not SIG_IGN: Python prints a traceback if a signal has arrived already.)
    for number in ending_signals():
        signal.signal(number, lambda signum, frame: None)
    again_s = time.monotonic() + TWICE_S
    signal.signal(signal.SIGINT, lambda signum, frame: _end_at_once(again_s))
    raise KeyboardInterrupt


def _end_at_once(again_s: float) -> None:
    """Exit without any clean-up, because the user has pressed Ctrl-C again.

    Does nothing before the time `again_s` on the monotonic clock.
    """
    if time.monotonic() < again_s:
        return
    left = [str(child.pid) for child in psutil.Process().children(recursive=True)]
    message = (
        "\nended at once: files that were being written may be incomplete; processes"
        f" {', '.join(left) or 'none'} were not waited for, and end by themselves unless they"
        " hang\n"
    )
    # A progress bar hides the cursor, and no other code will show it again.
    cursor = "\x1b[?25h" if os.isatty(2) else ""
    with suppress(OSError):  # the terminal may be gone
        os.write(2, f"{cursor}{message}".encode())
    os._exit(130)


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return the configuration with absolute paths of model, data, environment and run folder.

    Ray's actors need them, because they have another working directory.
    """
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
    """Run `rollmatch NAME ...` like `python -m launch.NAME`; exit with 2 if NAME is unknown."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name not in COMMANDS:
        width = max(map(len, COMMANDS))
        lines = [f"  {command:<{width}}  {does}" for command, does in COMMANDS.items()]
        text = "\n".join(
            ["rollmatch NAME ...; see `rollmatch NAME --help`. NAME is one of", *lines]
        )
        if name in ("-h", "--help"):
            print(text)
            sys.exit(0)
        print(f"rollmatch: {name} is not one of its commands\n{text}", file=sys.stderr)
        sys.exit(2)
    # As with `-m`, the user's own modules here can be imported (an environment, an objective).
    # Last, so that a user's folder named `shared` does not hide ours.
    sys.path.append(str(Path.cwd()))
    sys.argv[1:] = arguments
    # As `__main__`, like `-m`, because spawned processes import the command by its name.
    runpy.run_module(f"launch.{name.replace('-', '_')}", run_name="__main__", alter_sys=True)


def read_words(doc: str | None, arguments: Sequence[str] | None) -> list[str]:
    """Return a command's arguments, by default the process's; `--help` prints `doc` and exits."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(words):
        print(doc)
        sys.exit(0)
    return words


def read_arguments(schema: type[Options], arguments: Sequence[str] | None) -> Options:
    """Parse a command's `key=value` arguments into its options; `--help` prints the keys and exits.

    A value is read as a YAML scalar, unless its key has the type `str` or `Path`: then it stays
    text. `null` is read as None if the schema permits None. `arguments` None: the process's.

    Raises ConfigError with every problem.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
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
        from shared.config.explain import explain  # after `--help`: imports the whole schema

        problems += (str(explain(schema, one)) for one in error.errors(include_url=False))
        raise ConfigError(problems) from None
    if problems:
        raise ConfigError(problems)
    return options


def _print_help(schema: type[Section]) -> None:
    """Print each key with its default and meaning; required keys come first, default `...`."""
    from shared.config.explain import as_yaml

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
    """Return the types that an annotation permits.

    Example: str and NoneType for `Annotated[str, ...] | None`.
    """
    if get_origin(annotation) is Annotated:
        return _types(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return {kind for part in get_args(annotation) for kind in _types(part)}
    return {annotation}


def as_mapping(composed: DictConfig) -> dict[str, Any]:
    """Turn Hydra's configuration into plain values. Raises ConfigError for a bad interpolation."""
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
    """Return the validated configuration of a command from what Hydra composed.

    With `resume=RUN`, return the saved configuration of RUN instead, changed by the command line's
    overrides. Raises ConfigError if the configuration is invalid, and for `resume=auto` if
    `telemetry.run_dir` contains the time, because every start then has another folder.
    """
    # Imported here, because commands without Hydra import this module.
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.override_parser.overrides_parser import OverridesParser

    from shared.config import load_config

    # Not resolved: an override may be a bad interpolation, which `as_mapping` reports.
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
    """Return `key=value`, with the value quoted if Hydra's grammar does not accept it.

    The path in `resume.run` is also quoted if Hydra would read it as another value or as a sweep.
    Quoted values, and lists and mappings of other keys, do not change.
    """
    # Imported here, because commands without Hydra import this module.
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, _, value = argument.partition("=")
    is_path = key == "resume.run" and value not in ("auto", "null", "")
    if value[:1] in ("'", '"') or (value[:1] in ("[", "{") and not is_path):
        return argument
    try:
        read = OverridesParser.create().parse_override(argument)
        # Hydra would read `a,b` as a sweep of two runs, and `f(x)` as a function call.
        if not is_path or (read.value() == value and not read.is_sweep_override()):
            return argument
    except HydraException:
        pass
    return f"{key}={quoted(value)}"


def quoted(text: str) -> str:
    """Quote a text for Hydra's grammar, whatever characters it contains."""
    escaped = re.sub(r"(\\*)(?='|$)", lambda run: 2 * run[0], text).replace("'", "\\'")
    return f"'{escaped}'"


def as_schema_overrides(arguments: list[str]) -> list[str]:
    """Turn command-line arguments `a.b=c` into `++a.b=c`: the schema, not Hydra, validates keys.

    Options, config groups (`model=...`), Hydra's keys, and overrides that begin with `+` or `~` do
    not change. `resume=RUN` is short for `resume.run=RUN`, and `cluster=local` for
    `cluster.kind=local`. A value that Hydra's grammar does not accept is quoted, such as a path
    with brackets.

    Raises ConfigError if a key names an entry of a list in brackets (`a[0]`), which Hydra cannot
    parse.
    """
    overrides = []
    problems = []
    for argument in arguments:
        for section, key in (("resume", "run"), ("cluster", "kind")):
            argument = re.sub(f"^{section}=", f"{section}.{key}=", argument)
        key, equals, _ = argument.partition("=")
        if equals and "[" in key:
            path = key.lstrip("+~")
            dotted = re.sub(r"\[(.*?)\]", r".\1", path)
            problems.append(
                f"{path}: an entry of a list is named by its number between dots; write"
                f" '{dotted}=...', or give the whole list ('{path.partition('[')[0]}=[...]')"
            )
        is_group = (CONF / key).is_dir() or key.startswith("hydra")
        is_plain = equals and key[:1].isalpha() and not is_group
        overrides.append(f"++{_quoted(argument)}" if is_plain else argument)
    if problems:
        raise ConfigError(problems)
    return overrides
