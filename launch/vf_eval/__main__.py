"""`vf-eval ENVIRONMENT -m MODEL [-b URL] [-n EXAMPLES] [-r ROLLOUTS] ...`: evaluate a model in an
environment. `python -m launch.vf_eval` is the same.

Every finished rollout is written to `rollouts.jsonl` of the evaluation's folder at once; scores,
the saved dataset and the pushed one are made of that file, so that an evaluation that was resumed
says what one that was not would have said.
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

from rich.console import Console
from tqdm.contrib.logging import logging_redirect_tqdm

from launch.checks.environment import EnvironmentKeys, loaded_environment
from launch.cli import EXPLAINED, end_on_signals, explained
from launch.vf_eval.arguments import read_options
from launch.vf_eval.record import EvaluationSettings, read_evaluation
from launch.vf_eval.run import EvalRun
from rollout_actors.environments.clients import openai as client
from rollout_actors.environments.concurrency import THREADS
from shared.errors import ConfigError, RecordError

KEYS = EnvironmentKeys("ENVIRONMENT", "-a", ", -v shows the traceback")
QUIET_S = 10.0
"""Between two words about calls that are tried again."""
PLAIN_S = 10.0
"""For plain reward functions and tools to return when the command is interrupted: no thread can be
ended.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    console = Console(stderr=True, soft_wrap=True, emoji=False)
    with explained(console):
        options = read_options(sys.argv[1:] if arguments is None else arguments)
        _log(options.verbose)
        evaluation = (
            EvaluationSettings.of(options)
            if options.resume is None
            else read_evaluation(options.resume).resumed(options, options.resume)
        )
        run = EvalRun(
            options,
            evaluation,
            loaded_environment(evaluation.environment, evaluation.env_args, KEYS),
        )
        with _kept(run), logging_redirect_tqdm(), _retries_said(options.verbose):
            _Interruptible(run).evaluate()
        if status := run.report():
            sys.exit(status)


def _log(verbose: bool) -> None:
    """Warnings; verbose: what goes on, with the tracebacks of rollouts that fail, but not a line
    per request.
    """
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
    )
    for name in ("rollout_actors", "launch"):
        logging.getLogger(name).setLevel(logging.DEBUG if verbose else logging.WARNING)
    for name in ("httpx", "httpx2", "openai"):
        logging.getLogger(name).setLevel(logging.WARNING)


@contextmanager
def _retries_said(verbose: bool) -> Iterator[None]:
    """All of them, or where every rollout meets the same difficulty, one in `QUIET_S` seconds."""
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
    """An evaluation that the first Ctrl-C or SIGTERM cancels, so that its rollouts clean up, and
    the second one ends with the process.
    """

    def __init__(self, run: EvalRun) -> None:
        self._run = run
        self._cancel: Callable[[], object] | None = None
        """What the first signal does; None: there is nothing to cancel."""
        self._is_interrupted = False

    def evaluate(self) -> None:
        """Raise KeyboardInterrupt where it was interrupted, when that has been waited for."""
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)
        try:
            asyncio.run(self._evaluated())
        except asyncio.CancelledError:
            if not self._is_interrupted:
                raise
            if late := THREADS.wait(PLAIN_S):
                self._run.say(f"cut off while they ran, after {PLAIN_S:g} s: {', '.join(late)}")
            raise KeyboardInterrupt from None
        finally:
            end_on_signals()

    async def _evaluated(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "asyncio.run makes one"
        self._cancel = partial(loop.call_soon_threadsafe, task.cancel)
        try:
            await self._run.evaluate()
        finally:
            self._cancel = None

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
        running = ", ".join(THREADS.running())
        if self._is_interrupted:
            lost = f"; cut off while they ran: {running}" if running else ""
            _say_at_once(
                "interrupted again: ended at once, and what had not cleaned up by now never"
                f" will{lost}\n{_what_is_kept(self._run)}"
            )
            os._exit(130)
        if self._cancel is None:
            raise KeyboardInterrupt
        self._is_interrupted = True
        plain = (
            f", and at most {PLAIN_S:g} s for plain functions that run ({running})"
            if running
            else ""
        )
        limit_s = self._run.cleanup_timeout_s
        _say_at_once(
            f"interrupted: waiting at most {limit_s:g} s for rollouts to clean up{plain}; the same"
            " signal again ends at once"
        )
        self._cancel()


def _say_at_once(text: str) -> None:
    """From a signal's handler, which may have interrupted a `print`."""
    os.write(2, f"\n{text.strip()}\n".encode())


def _what_is_kept(run: EvalRun) -> str:
    """Say where the finished rollouts are; nothing where there is none."""
    if run.folder is None or not run.finished:
        return ""
    failed = sum(one.error is not None for one in run.finished.values())
    also = f" (and {failed} that failed, which it makes again)" if failed else ""
    return (
        f"{len(run.finished) - failed} finished rollouts are kept in {run.folder}; `vf-eval"
        f" --resume {run.folder}` goes on{also}"
    )


@contextmanager
def _kept(run: EvalRun) -> Iterator[None]:
    """However it ends, what is there is said; but not of what is refused, where the refusal says
    what to do.
    """
    try:
        yield
    except (ConfigError, RecordError):
        raise
    except (KeyboardInterrupt, *EXPLAINED):
        if kept := _what_is_kept(run):
            run.say(kept)
        raise


if __name__ == "__main__":
    main()
