"""`vf-eval ENVIRONMENT -m MODEL [-b URL] [-n EXAMPLES] [-r ROLLOUTS] ...`: evaluate a model in an environment. `python -m launch.vf_eval` is the same.

Every finished rollout is written to `rollouts.jsonl` of the evaluation's folder at once; scores, the saved dataset and the pushed one are made of that file, so
that an evaluation that was resumed says what one that was not would have said.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from tqdm.contrib.logging import logging_redirect_tqdm

from launch.command import EXPLAINED, end_on_signals, explained
from launch.environment_checks import EnvironmentKeys, loaded_environment
from launch.eval_arguments import read_options
from launch.eval_record import Evaluation, read_evaluation
from launch.eval_run import EvalRun
from rollout_actors.environments import client
from shared.errors import ConfigError, RecordError

KEYS = EnvironmentKeys("ENVIRONMENT", "-a", ", -v shows the traceback")
QUIET_S = 10.0
"""Between two words about calls that are tried again."""


def main(arguments: Sequence[str] | None = None) -> None:
    console = Console(stderr=True, soft_wrap=True, emoji=False)
    with explained(console):
        options = read_options(sys.argv[1:] if arguments is None else arguments)
        _log(options.verbose)
        evaluation = Evaluation.of(options) if options.resume is None else read_evaluation(options.resume).resumed(options, options.resume)
        run = EvalRun(options, evaluation, loaded_environment(evaluation.environment, evaluation.env_args, KEYS))
        with _kept(run), _cancelled_by_signals(), logging_redirect_tqdm(), _retries_said(options.verbose):
            asyncio.run(run.evaluate())
        if status := run.report():
            sys.exit(status)


def _log(verbose: bool) -> None:
    """Warnings; verbose: what goes on, with the tracebacks of rollouts that fail, but not a line per request."""
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
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


@contextmanager
def _cancelled_by_signals() -> Iterator[None]:
    """Ctrl-C and SIGTERM cancel the rollouts, which clean up after themselves; `asyncio.run` raises KeyboardInterrupt then. A second one ends that too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        end_on_signals()


@contextmanager
def _kept(run: EvalRun) -> Iterator[None]:
    """However it ends, what is there is said; but not of what is refused, where the refusal says what to do."""
    try:
        yield
    except (ConfigError, RecordError):
        raise
    except (KeyboardInterrupt, *EXPLAINED):
        if run.folder is not None and run.finished:
            failed = sum(one.error is not None for one in run.finished.values())
            also = f" (and {failed} that failed, which it makes again)" if failed else ""
            run.say(f"{len(run.finished) - failed} finished rollouts are kept in {run.folder}; `vf-eval --resume {run.folder}` goes on{also}")
        raise


if __name__ == "__main__":
    main()
