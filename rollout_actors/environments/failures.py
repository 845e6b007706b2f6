"""What the code of environments raises: told with its place, and kept from ending the process."""

from __future__ import annotations

import asyncio
import signal
import sysconfig
import traceback
from pathlib import Path
from types import FrameType

from rollout_actors.environments import client

FAILURES = (Exception, asyncio.CancelledError, SystemExit)
"""Of one rollout, but for what `raise_if_for_all` raises again."""

_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), "<")
_OURS = tuple(f"{Path(__file__).parents[2] / package}/" for package in ("rollout_actors", "shared"))


def told(error: BaseException) -> str:
    """As `state["error"]` has it: `KeyError: 'nope' (my_env.py:12)`. What a client raised says itself what was wrong, and no line of the environment is."""
    error = called_exit(error) if isinstance(error, SystemExit) else error
    text = f"{type(error).__name__}: {error}"
    last = _last_of_users(error)
    return text if last is None else f"{text.rstrip()} ({Path(last[0].f_code.co_filename).name}:{last[1]})"


def called_exit(error: SystemExit) -> RuntimeError:
    """In its place: out of a task of its own it would end the event loop, and with it every rollout. Raises a signal's, which shall."""
    if _is_of_signal(error):
        raise error
    last = _last_of_users(error)
    return RuntimeError(f"{'an environment' if last is None else last[0].f_code.co_name} called exit()").with_traceback(error.__traceback__)


def is_cancelled() -> bool:
    """Whether somebody wants this task to end; not where it met a CancelledError because it waited for a task that it had cancelled itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def raise_if_for_all(error: BaseException) -> None:
    """A cancellation of this task, whatever became of it on its way, and the end of the process, which a signal's handler calls wherever it is just then."""
    if isinstance(error, SystemExit) and _is_of_signal(error):
        raise error
    if is_cancelled():
        raise error if isinstance(error, asyncio.CancelledError) else asyncio.CancelledError from error


def _is_of_signal(error: SystemExit) -> bool:
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


def _last_of_users(error: BaseException) -> tuple[FrameType, int] | None:
    """The innermost frame, with its line, that is of no library and none of this package's."""
    places = [place for place in traceback.walk_tb(error.__traceback__) if not place[0].f_code.co_filename.startswith(_LIBRARIES)]
    if any(frame.f_code.co_filename == client.__file__ for frame, _ in places):
        return None
    return next((place for place in reversed(places) if not place[0].f_code.co_filename.startswith(_OURS)), None)
