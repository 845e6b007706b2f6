"""What the code of environments raises: told with its place, and kept from ending the process, or a
task that is not its own.
"""

from __future__ import annotations

import asyncio
import inspect
import sysconfig
import traceback
from collections.abc import Coroutine
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from rollout_actors.environments.clients import openai as client

FAILURES = (Exception, asyncio.CancelledError, SystemExit)
"""Of one rollout, but for what `raise_if_for_all` raises again."""

T = TypeVar("T")

_STANDARD = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
_OURS = tuple(
    f"{Path(__file__).parents[2] / package}/"
    for package in ("launch", "learner", "rollout_actors", "shared")
)
_OF_SIGNALS = ("signal only works in main thread", "signal.alarm()")
"""In the errors of Python, and of math_verify, where a handler of signals is wanted outside of the
main thread.
"""
_NO_SIGNALS = (
    "plain functions run in threads, where no limit of time works that is kept by signals: switch"
    " it off (math_verify: parse(..., parsing_timeout=None), verify(..., timeout_seconds=None)),"
    " and set scoring_timeout_s"
)
_EXAMPLES = f"{Path(__file__).parent / 'examples'}/"


def told(error: BaseException) -> str:
    """As `state["error"]` has it: `KeyError: 'nope' (my_env.py:12)`, and where it came up while
    another one was dealt with, that one behind it. What a client raised says itself what was wrong,
    and no line of the environment is."""
    text, first = _told(error), error.__context__
    if (
        first is not None
        and not error.__suppress_context__
        and not isinstance(first, asyncio.CancelledError)
    ):
        text = f"{text}, after {_told(first)}"
    return f"{text}; {_NO_SIGNALS}" if any(mark in text for mark in _OF_SIGNALS) else text


def _told(error: BaseException) -> str:
    error = called_exit(error) if isinstance(error, SystemExit) else error
    text = f"{type(error).__name__}: {error}"
    last = last_of_users(error)
    return (
        text
        if last is None
        else f"{text.rstrip()} ({Path(last[0].f_code.co_filename).name}:{last[1]})"
    )


def called_exit(error: SystemExit) -> RuntimeError:
    """In its place: out of a task of its own it would end the event loop, and with it every
    rollout. Raises a signal's, which shall.
    """
    if is_of_signal(error):
        raise error
    last = last_of_users(error)
    who, told_with = (
        "an environment" if last is None else last[0].f_code.co_name,
        ("" if error.code is None else repr(error.code)),
    )
    return RuntimeError(f"{who} called exit({told_with})").with_traceback(error.__traceback__)


def is_cancelled() -> bool:
    """Whether somebody wants this task to end; not where it met a CancelledError because it waited
    for a task that it had cancelled itself.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def raise_if_for_all(error: BaseException) -> None:
    """A cancellation of this task, whatever became of it on its way, and the end of the process,
    which a signal's handler calls wherever it is just then.
    """
    if isinstance(error, SystemExit) and is_of_signal(error):
        raise error
    if is_cancelled():
        raise (
            error if isinstance(error, asyncio.CancelledError) else asyncio.CancelledError
        ) from error


async def in_own_task(work: Coroutine[Any, Any, T]) -> T:
    """The work's value. Its `exit()` comes as RuntimeError, where it would end the event loop; and
    where it cancels its own task, as one does for a limit of time of one's own, it is not the
    caller that is cancelled. Where the caller is, so is the work, and that is waited for."""
    try:
        value = await asyncio.create_task(staying(work))
    finally:
        work.close()  # it may not have begun when this was cancelled
    if is_cancelled():
        raise asyncio.CancelledError  # which the work has kept to itself
    return value


async def staying(work: Coroutine[Any, Any, T]) -> T:
    """To be made a task, where `exit()` would end the event loop."""
    try:
        return await work
    except SystemExit as error:
        raise called_exit(error) from error


def is_of_signal(error: SystemExit) -> bool:
    """Whether a handler raised it: what a signal's number and the interrupted frame were given
    to."""
    return any(
        any(isinstance(value, FrameType) for value in _arguments(frame))
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def _arguments(frame: FrameType) -> list[Any]:
    names, more, _, values = inspect.getargvalues(frame)
    given = [values[name] for name in names if name in values]
    return given if more is None else [*given, *values.get(more, ())]


def last_of_users(error: BaseException) -> tuple[FrameType, int] | None:
    """The innermost frame, with its line, that is of no library and none of this package's; or
    where the environment is installed as a library, the first of those."""
    places = list(traceback.walk_tb(error.__traceback__))
    if any(_file(place) == client.__file__ for place in places):
        return None
    by_ownership: dict[int, list[tuple[FrameType, int]]] = {0: [], 1: [], 2: []}
    for place in places:
        by_ownership[ownership(_file(place))].append(place)
    users, installed = by_ownership[2], by_ownership[1]
    return users[-1] if users else next(iter(installed), None)


def ownership(file: str) -> int:
    """0: not an environment's; 1: an installed file, which may be its; 2: its own."""
    if file.startswith(_EXAMPLES):
        return 2
    if file.startswith((*_OURS, "<")):
        return 0
    # An installation without a virtual environment has the packages inside the library's folder.
    if "/site-packages/" in file or "/dist-packages/" in file:
        return 1
    return 0 if file.startswith(_STANDARD) else 2


def _file(place: tuple[FrameType, int]) -> str:
    return place[0].f_code.co_filename
