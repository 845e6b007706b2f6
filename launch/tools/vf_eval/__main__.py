"""`vf-eval ENVIRONMENT -m MODEL [-b URL] [-n EXAMPLES] [-r ROLLOUTS] ...`: evaluate a model in an
environment. `rollmatch vf-eval` is the same.

Scores, the saved dataset and the pushed one are made of `rollouts.jsonl` in the evaluation's
folder, so that an evaluation that was resumed ends as one that was not.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType

from tqdm.contrib.logging import logging_redirect_tqdm

from launch.checks.environment import EnvironmentKeys, loaded_environment
from launch.cli import EXPLAINED, end_on_signals, ending_signals, explained
from launch.run_folder.console import make_console
from launch.tools.vf_eval.arguments import read_options
from launch.tools.vf_eval.endpoint import say
from launch.tools.vf_eval.record import EvaluationSettings, read_evaluation
from launch.tools.vf_eval.run import EvalRun
from rollout_actors.environments.clients import openai as client
from rollout_actors.environments.concurrency import THREADS
from rollout_actors.environments.training.child_processes import processes_of
from shared.errors import ConfigError, RecordError

KEYS = EnvironmentKeys("ENVIRONMENT", "-a", ", -v shows the traceback", "give -a again")
QUIET_S = 10.0
"""Shortest time between two messages about calls that are tried again."""
PLAIN_S = 10.0
"""Time for plain functions to return after an interrupt: no thread can be ended."""


def main(arguments: Sequence[str] | None = None) -> None:
    with explained(make_console(stderr=True)):
        options = read_options(sys.argv[1:] if arguments is None else arguments)
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
                    raise  # its message says what to do; going on is not it
                except (KeyboardInterrupt, *EXPLAINED):
                    if kept := _describe_kept(run):
                        say(kept)
                    raise
        if status := run.report():
            sys.exit(status)


def _set_up_logging(verbose: bool) -> None:
    """Show warnings; verbose: also tracebacks of rollouts that fail, but no line per request."""
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
    """Show one retry in `QUIET_S`; verbose: all. Every rollout may meet the same trouble."""
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
    """An evaluation that the first signal cancels, with clean-up, and the second ends at once."""

    def __init__(self, run: EvalRun) -> None:
        self._run = run
        # The first signal's action; None while there is nothing to cancel.
        self._cancel: Callable[[], object] | None = None
        self._is_interrupted = False

    def evaluate(self) -> None:
        """Run the evaluation. Raises KeyboardInterrupt once an interrupted one has cleaned up."""
        for number in ending_signals():
            signal.signal(number, self._on_signal)
        try:
            asyncio.run(self._evaluate())
        except asyncio.CancelledError:
            if not self._is_interrupted:
                raise
            if late := THREADS.wait(PLAIN_S):
                say(f"cut off while they ran, after {PLAIN_S:g} s: {', '.join(late)}")
            raise KeyboardInterrupt from None
        finally:
            end_on_signals()

    async def _evaluate(self) -> None:
        async def wake_regularly() -> None:
            while True:
                await asyncio.sleep(1.0)

        task = asyncio.current_task()
        assert task is not None, "asyncio.run makes one"
        self._cancel = partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel)
        # A signal that comes as the loop falls asleep is handled when something wakes the loop.
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
                return  # a closed terminal and its shell both send it
            lost = f"; cut off while they ran: {running}" if running else ""
            _write_at_once(
                "interrupted again: ended at once, and what had not cleaned up by now never"
                f" will{lost}\n{_describe_kept(self._run)}"
            )
            os._exit(130)
        if self._cancel is None:
            raise KeyboardInterrupt
        self._is_interrupted = True
        plain = ""
        if running:
            plain = f", and at most {PLAIN_S:g} s for plain functions that run ({running})"
        _write_at_once(
            f"interrupted: waiting at most {self._run.cleanup_timeout_s:g} s for rollouts to clean"
            f" up{plain}; the same signal again ends at once"
        )
        self._cancel()


def _write_at_once(text: str) -> None:
    """Write from a signal's handler, which may have interrupted a `print`."""
    os.write(2, f"\n{text.strip()}\n".encode())


def _describe_kept(run: EvalRun) -> str:
    """Describe where the finished rollouts are; empty where there is none."""
    if run.folder is None or not run.finished:
        return ""
    num_failed = sum(rollout.error is not None for rollout in run.finished.values())
    failed = f" (and {num_failed} that failed, which it makes again)" if num_failed else ""
    return (
        f"{len(run.finished) - num_failed} finished rollouts are kept in {run.folder}; `vf-eval"
        f" --resume {run.folder}` goes on{failed}"
    )


if __name__ == "__main__":
    main()
