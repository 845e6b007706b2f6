"""What the commands have in common: how they end, and what they say when they end badly."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console

from shared.config import RunConfig
from shared.config.environment import EnvironmentSection
from shared.errors import ConfigError, LearnerError, RecordError, RolloutError, StorageError, WeightSyncError

EXPLAINED = (ConfigError, RecordError, RolloutError, WeightSyncError, LearnerError, StorageError, OSError)
"""Errors whose message says where and what to do; a traceback would hide it."""


@contextmanager
def explained(console: Console) -> Iterator[None]:
    """End the process when the body does: 2 for what the user can mend before a start, 1 for what went wrong after it, 130 for an interruption."""
    end_on_signals()
    try:
        yield
    except EXPLAINED as error:
        console.print(f"[bold red]{type(error).__name__}[/]", highlight=False)
        console.print(str(error), markup=False, highlight=False)
        # The other side of a failed sync. An error's own OSError would only say the same again, and so would what Ray makes of an actor's error, with a
        # traceback besides.
        if isinstance(error.__cause__, RolloutError | WeightSyncError | LearnerError) and str(error) not in str(error.__cause__):
            console.print(f"caused by {type(error.__cause__).__name__}: {error.__cause__}", markup=False, highlight=False)
        sys.exit(2 if isinstance(error, ConfigError | RecordError) else 1)
    except KeyboardInterrupt:
        console.print("interrupted; every process that this command started was ended")
        sys.exit(130)


def end_on_signals() -> None:
    """SIGTERM and SIGINT unwind the command, so that every `with` ends what it started. Again after `ray.init`, which puts a handler of its own there."""
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    # Once: a second signal must not interrupt the ending of the run's processes. (Not SIG_IGN: Python prints a traceback where a signal has come already.)
    signal.signal(signal.SIGTERM, _ignore)
    signal.signal(signal.SIGINT, _ignore)
    raise KeyboardInterrupt


def _ignore(signum: int, frame: FrameType | None) -> None:
    pass


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Actors run in a working directory of Ray's own."""
    data = {"train": config.data.train and config.data.train.resolve(), "val": config.data.val and config.data.val.resolve()}
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": str(Path(config.model.path).resolve())}),
            "data": config.data.model_copy(update=data),
            "environment": _with_absolute_path(config.environment),
            "telemetry": config.telemetry.model_copy(update={"run_dir": config.telemetry.run_dir.resolve()}),
        }
    )


def _with_absolute_path(section: EnvironmentSection | None) -> EnvironmentSection | None:
    """Where the environment is named by its file."""
    if section is None or not section.id.endswith(".py"):
        return section
    return section.model_copy(update={"id": str(Path(section.id).resolve())})
