"""The driver's side of the loggers (`telemetry.loggers`).

::

    Telemetry -> Loggers -> queue -> thread -> process of a logger -> wandb
                                  -> thread -> process of another  -> mlflow

The driver puts events into queues and continues. A logger is a process, because only a process can
be ended when its package hangs, and because some packages wait for their servers when Python ends.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import Pipe
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple

import psutil

from launch.loggers.events import (
    AlertEvent,
    EndEvent,
    Event,
    MetricsEvent,
    Picture,
    PicturesEvent,
    RolloutFile,
    RolloutsEvent,
    RunEvent,
    Scalar,
)
from shared.config import RunConfig
from shared.config.base import leaves
from shared.errors import Timeout

FOLDER = "loggers"
QUEUE_SIZE = 1000
"""Maximum number of events that wait for a logger."""
TABLE_STEPS = 10
"""A table of rollouts is logged for the first step, and for every tenth."""
EARLY_END_S = 10.0
"""Maximum seconds to wait for the loggers of a run that fails or is interrupted."""
EXIT_S = 5.0
"""Maximum seconds to wait for the end of a process that has logged everything."""


class Package(NamedTuple):
    """The tracking package of a logger, such as wandb, and how it is installed."""

    distributions: tuple[str, ...]
    """Python distributions that provide the package; any one of them is sufficient."""
    install: str
    remedy: str
    """What to check if the logger fails."""


PACKAGES = {
    "tensorboard": Package(
        ("tensorboard",),
        "pip install 'rollmatch[tensorboard]'",
        "free space or permit writing in the run's folder",
    ),
    "trackio": Package(
        ("trackio",),
        # It requires another pillow than ours but works with ours, which results depend on.
        "pip install 'rollmatch[trackio]' && pip install --no-deps trackio==0.43.0",
        "check that TRACKIO_DIR is writable, or that the server of TRACKIO_SERVER_URL or"
        " TRACKIO_SPACE_ID is up",
    ),
    "wandb": Package(
        ("wandb",),
        "pip install 'rollmatch[wandb]'",
        "run `wandb login` on the driver's node, or set WANDB_MODE=offline and `wandb sync` later",
    ),
    "mlflow": Package(
        ("mlflow", "mlflow-skinny"),
        "pip install 'rollmatch[mlflow]'",
        "check that MLFLOW_TRACKING_URI is right and its server is up",
    ),
}


def missing_packages(loggers: Sequence[str]) -> Iterator[str]:
    """Yield a problem for every logger whose package is not installed."""
    for name in _names(loggers):
        package = PACKAGES[name]
        # Not by an import: wandb creates a folder named wandb, which Python could import.
        if not any(map(_is_installed, package.distributions)):
            yield (
                f"telemetry.loggers: {package.distributions[0]} is not installed; run"
                f" `{package.install}`, or leave {name} out"
            )


def _is_installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


def _names(loggers: Sequence[str]) -> list[str]:
    return [name for name in dict.fromkeys(loggers) if name != "jsonl"]


class Loggers:
    """Sends a run's metrics, images and tables to its loggers. Only `close` waits for them."""

    def __init__(self, config: RunConfig, *, first_step: int, warn: Callable[[str], None]) -> None:
        """Begin the run in all loggers, or continue it with the step `first_step`."""
        section = config.telemetry
        limit = Timeout(config.timeouts.logger_s, "timeouts.logger_s")
        # The last two parts: a day and a time, or a sweep and its trial.
        name = "-".join((section.name, *section.run_dir.parts[-2:]))
        values = config.model_dump(mode="json")
        self._limit = limit
        self._rollouts: Path | None = None
        if section.rollouts:
            self._rollouts = section.run_dir / "rollouts"
        self._is_of_environment = config.algorithm.uses_environment
        self._loggers = []
        for logger in _names(section.loggers):
            run = RunEvent(
                logger=logger,
                folder=section.run_dir / FOLDER,
                project=section.project,
                name=name,
                first_step=first_step,
                config=values,
                flat_config=leaves(values),
            )
            self._loggers.append(_LoggerClient(run, limit, warn))

    def step(self, number: int, values: Mapping[str, Scalar]) -> None:
        """Log the metrics of step `number`, and for some steps a table of rollouts."""
        self._put(MetricsEvent(number, values))
        if self._rollouts is None or (number > 1 and number % TABLE_STEPS):
            return
        # Rank 0's file. It is missing if the node of rank 0 does not share its disk.
        path = self._rollouts / f"step_{number:06d}.jsonl"
        kind = RolloutFile.TRAJECTORIES if self._is_of_environment else RolloutFile.SAMPLES
        if self._loggers and path.exists():
            self._put(RolloutsEvent(number, "rollouts", path, kind))

    def report(
        self, step: int, folder: Path, values: Mapping[str, Scalar], pictures: Sequence[Picture]
    ) -> None:
        """Log the held-out report after `step`, in `folder`: metrics, images and answers."""
        self._put(MetricsEvent(step, values))
        if pictures:
            self._put(PicturesEvent(step, "held_out", tuple(pictures)))
        if self._is_of_environment:
            file, kind = folder / "rollouts.jsonl", RolloutFile.TRAJECTORIES
        else:
            file, kind = folder / "predictions.jsonl", RolloutFile.PREDICTIONS
        self._put(RolloutsEvent(step, "held_out_rollouts", file, kind))

    def alert(self, event: AlertEvent) -> None:
        """Log a finding: as an alert if the package has alerts, else as a text."""
        self._put(event)

    def _put(self, event: Event) -> None:
        for logger in self._loggers:
            logger.put(event)

    def close(self, *, failed: bool) -> None:
        """Wait until everything is logged, and end the processes of all loggers.

        Waits for at most `timeouts.logger_s` seconds, or `EARLY_END_S` if the run has failed.
        """
        limit_s = min(self._limit.seconds, EARLY_END_S) if failed else self._limit.seconds
        for logger in self._loggers:
            logger.end(EndEvent(failed))
        deadline_s = time.monotonic() + limit_s
        for logger in self._loggers:
            logger.close(deadline_s)


class _LoggerClient:
    """The queue, the thread and the process of one logger."""

    def __init__(self, run: RunEvent, limit: Timeout, warn: Callable[[str], None]) -> None:
        self._name = run.logger
        self._log = run.folder / f"{run.logger}.log"
        self._limit = limit
        self._warn = warn
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._process: psutil.Popen | None = None
        self._is_lost = False
        self._is_full = False
        self._num_put = 0
        """Number of events from the driver, whether they were logged or not."""
        self._num_logged = 0
        # Imported here, because it imports openai.
        from rollout_actors.environments.training.child_processes import unmarked

        try:
            run.folder.mkdir(exist_ok=True)
            self._pipe, far_end = Pipe()
            with far_end, self._log.open("ab") as log:
                number = far_end.fileno()
                module = "launch.loggers.process"
                self._process = psutil.Popen(
                    [sys.executable, "-m", module, str(number), str(limit.seconds)],
                    pass_fds=[number],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    # Only the driver handles Ctrl-C.
                    start_new_session=True,
                    env=unmarked(),  # it must not count as a child of an environment
                )
        except OSError as error:
            self._lose(f"its process cannot be started ({error})")
            return
        self._events.put(run)
        self._thread = Thread(target=self._hand_on, name=f"logger {self._name}", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        """Queue an event, unless the logger is lost or too many events wait already."""
        self._num_put += 1
        if self._is_lost:
            return
        if self._events.qsize() < QUEUE_SIZE:
            self._events.put(event)
        elif not self._is_full:
            self._is_full = True
            self._warn(
                f"telemetry.loggers: {self._name} is slower than the run, {QUEUE_SIZE} events wait"
                f" for it: until it catches up, new events are not logged there; {self._advice()}"
            )

    def end(self, event: EndEvent) -> None:
        self._events.put(event)

    def close(self, deadline_s: float) -> None:
        """Wait for the logger until `deadline_s` on the monotonic clock; then end its process."""
        if self._process is not None:
            self._thread.join(max(0.0, deadline_s - time.monotonic()))
            if self._thread.is_alive():
                self._lose(
                    "it had not logged everything within the time limit for the end of a run"
                    f" ({self._limit.key} = {self._limit.seconds:g} s, at most {EARLY_END_S:g} s"
                    " if the run failed)",
                    then="and was ended",
                )
                self._thread.join(EXIT_S)
            with suppress(psutil.TimeoutExpired):
                self._process.wait(EXIT_S)
            self._kill()
            self._pipe.close()
        if num_lost := self._num_put - self._num_logged:
            self._warn(
                f"telemetry.loggers: {num_lost} of {self._num_put} events (metrics of a step,"
                f" images, tables) did not reach {self._name}; metrics.jsonl has all metrics"
            )

    def _hand_on(self) -> None:
        """Send the queued events to the process, one after the other."""
        while not self._is_lost:
            event = self._events.get()
            try:
                self._pipe.send(event)
                if not self._pipe.poll(self._limit.seconds):
                    self._lose(f"no answer after {self._limit.key} = {self._limit.seconds:g} s")
                elif (fault := self._pipe.recv()) is not None:
                    self._lose(fault)
                elif isinstance(event, EndEvent):
                    return
                elif not isinstance(event, RunEvent):
                    self._num_logged += 1
            except (OSError, EOFError):
                self._lose("its process has ended")

    def _lose(self, fault: str, then: str = "and the run continues without it") -> None:
        """End the logger's process, and warn that the logger failed because of `fault`.

        `then` is the consequence that the warning names. Does nothing if the logger has failed
        already.
        """
        if self._is_lost:
            return
        self._is_lost = True
        self._kill()
        self._warn(f"telemetry.loggers: {self._name} failed ({fault}), {then}; {self._advice()}")

    def _advice(self) -> str:
        return (
            f"{PACKAGES[self._name].remedy}; metrics.jsonl has all metrics, {self._log} has the"
            f" output of {self._name}"
        )

    def _kill(self) -> None:
        """Kill the process and the processes that it has started."""
        if self._process is None or not self._process.is_running():
            return
        with suppress(psutil.NoSuchProcess):
            for process in (*self._process.children(recursive=True), self._process):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        # A process that hangs in the kernel cannot be killed.
        with suppress(psutil.TimeoutExpired):
            self._process.wait(EXIT_S)
