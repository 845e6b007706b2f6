"""Runs one evaluation of `vf-eval`, which signals interrupt, and prints its results."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

from tqdm.contrib.logging import logging_redirect_tqdm

from launch.checks.environment import EnvironmentKeys, loaded_environment
from launch.cli import EXPLAINED, end_on_signals, ending_signals
from launch.tools.vf_eval.arguments import EvalOptions
from launch.tools.vf_eval.endpoint import say
from launch.tools.vf_eval.record import EvaluationSettings, read_evaluation
from launch.tools.vf_eval.run import EvalRun
from rollout_actors.environments.clients import openai as client
from rollout_actors.environments.training.child_processes import processes_of
from rollout_actors.threads import THREADS
from shared.errors import ConfigError, RecordError

KEYS = EnvironmentKeys("ENVIRONMENT", "-a", ", -v shows the traceback", "give -a again")
QUIET_S = 10.0
"""Minimum seconds between two messages about retried calls."""
PLAIN_S = 10.0
"""Seconds that functions without `async` have to return after an interrupt.

They run in threads, which cannot be stopped.
"""


def evaluate(options: EvalOptions) -> int:
    """Run the evaluation, print its results and return the exit status. Raises `EXPLAINED`."""
    _set_up_logging(options.verbose)
    if options.resume is None:
        evaluation = EvaluationSettings.from_options(options)
    else:
        evaluation = read_evaluation(options.resume).resumed(options, options.resume)
    with processes_of(evaluation.environment):
        environment = loaded_environment(evaluation.environment, evaluation.env_args, KEYS)
        run = EvalRun(options, evaluation, environment)
        with logging_redirect_tqdm(), _rare_retry_messages(options.verbose):
            try:
                _Interruptible(run).evaluate()
            except (ConfigError, RecordError):
                raise  # resuming would not help; the message has the remedy
            except (KeyboardInterrupt, *EXPLAINED):
                if kept := _describe_kept(run):
                    say(kept)
                raise
    return run.report()


def _set_up_logging(verbose: bool) -> None:
    """Log warnings. With `verbose` also log tracebacks of failed rollouts, but no requests."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
    )
    for name in ("rollout_actors", "launch"):
        logging.getLogger(name).setLevel(logging.DEBUG if verbose else logging.WARNING)
    for name in ("httpx", "httpx2", "openai"):
        logging.getLogger(name).setLevel(logging.WARNING)


@contextmanager
def _rare_retry_messages(verbose: bool) -> Iterator[None]:
    """Log at most one retry per `QUIET_S` seconds, because all rollouts may retry at once.

    With `verbose`, log all retries.
    """
    next_s = 0.0

    def passes(record: logging.LogRecord) -> bool:
        nonlocal next_s
        if verbose or record.created >= next_s:
            next_s = record.created + QUIET_S
            return True
        return False

    logger = logging.getLogger(client.__name__)
    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)


class _Interruptible:
    """Cancels an evaluation at the first signal, and ends the process at the second."""

    def __init__(self, run: EvalRun) -> None:
        self._run = run
        # Called at the first signal; None while the evaluation is not running.
        self._cancel: Callable[[], object] | None = None
        self._is_interrupted = False

    def evaluate(self) -> None:
        """Run the evaluation. Raises KeyboardInterrupt after an interrupt and its clean-up."""
        for number in ending_signals():
            signal.signal(number, self._on_signal)
        try:
            asyncio.run(self._evaluate())
        except asyncio.CancelledError:
            if not self._is_interrupted:
                raise
            if late := THREADS.wait(PLAIN_S):
                say(f"still running after {PLAIN_S:g} s, and cut off: {', '.join(late)}")
            raise KeyboardInterrupt from None
        finally:
            end_on_signals()

    async def _evaluate(self) -> None:
        async def wake_regularly() -> None:
            while True:
                await asyncio.sleep(1.0)

        task = asyncio.current_task()
        assert task is not None, "asyncio.run creates a task"
        self._cancel = partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel)
        # A signal that arrives when the loop goes to sleep is handled when the loop wakes up.
        waking = asyncio.create_task(wake_regularly())
        try:
            await self._run.evaluate()
        finally:
            self._cancel = None
            waking.cancel()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
        running = ", ".join(THREADS.running())
        if self._is_interrupted:
            if signum == signal.SIGHUP:
                return  # a closed terminal and its shell each send one
            lost = f"; cut off while running: {running}" if running else ""
            _write_at_once(
                "interrupted again: ended at once, without the rest of the clean-up"
                f"{lost}\n{_describe_kept(self._run)}"
            )
            os._exit(130)
        if self._cancel is None:
            raise KeyboardInterrupt
        self._is_interrupted = True
        plain = ""
        if running:
            plain = f", and at most {PLAIN_S:g} s for functions without async ({running})"
        _write_at_once(
            f"interrupted: waiting at most {self._run.cleanup_timeout_s:g} s for rollouts to clean"
            f" up{plain}; the same signal again ends at once"
        )
        self._cancel()


def _write_at_once(text: str) -> None:
    """Write from a signal handler, which may have interrupted a `print`."""
    os.write(2, f"\n{text.strip()}\n".encode())


def _describe_kept(run: EvalRun) -> str:
    """Return a text about the finished rollouts and their folder; empty if there are none."""
    if run.folder is None or not run.finished:
        return ""
    num_failed = sum(rollout.error is not None for rollout in run.finished.values())
    failed = f", and repeats {num_failed} that failed" if num_failed else ""
    return (
        f"{len(run.finished) - num_failed} finished rollouts are kept in {run.folder}; `vf-eval"
        f" --resume {run.folder}` continues{failed}"
    )
