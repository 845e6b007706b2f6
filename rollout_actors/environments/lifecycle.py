"""When a rollout ends, and what is put away afterwards: methods marked with `@stop`, `@cleanup` and
`@teardown` (spec: trajectories, 5).

    @stop                         @stop(priority=10)
    async def solved(self, state: State) -> bool: ...

Handlers may be plain functions too; they run on the event loop, so they must not block. Higher
priority first, ties by name.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from enum import StrEnum
from types import CoroutineType, FrameType
from typing import Any, Protocol, TypeVar, overload

from rollout_actors.environments.failures import (
    FAILURES,
    called_exit,
    is_cancelled,
    raise_if_for_all,
    told,
)

_LOGGER = logging.getLogger(__name__)
_MARK = "_rollmatch_handles"

Handler = Callable[..., Any]
F = TypeVar("F", bound=Handler)


class Event(StrEnum):
    STOP = "stop"
    """Each turn: whether the rollout is over."""
    CLEANUP = "cleanup"
    """Once for each rollout, however it ended."""
    TEARDOWN = "teardown"
    """Once for each environment, when it is closed, or else when the process ends."""


@overload
def stop(func: F) -> F: ...
@overload
def stop(func: None = None, *, priority: int = 0) -> Callable[[F], F]: ...
def stop(func: F | None = None, *, priority: int = 0) -> F | Callable[[F], F]:
    """Marks a method `(self, state) -> bool` that says whether a rollout is over; its name becomes
    the state's `stop_condition`.
    """
    return _marked(Event.STOP, func, priority)


@overload
def cleanup(func: F) -> F: ...
@overload
def cleanup(func: None = None, *, priority: int = 0) -> Callable[[F], F]: ...
def cleanup(func: F | None = None, *, priority: int = 0) -> F | Callable[[F], F]:
    """Marks a method `(self, state)` that gives back what a rollout holds; called once, also behind
    an exception or a cancellation.
    """
    return _marked(Event.CLEANUP, func, priority)


@overload
def teardown(func: F) -> F: ...
@overload
def teardown(func: None = None, *, priority: int = 0) -> Callable[[F], F]: ...
def teardown(func: F | None = None, *, priority: int = 0) -> F | Callable[[F], F]:
    """Marks a method `(self)` that gives back what the environment holds; called once, by `aclose`
    or at the end of the process.
    """
    return _marked(Event.TEARDOWN, func, priority)


def _marked(event: Event, func: F | None, priority: int) -> F | Callable[[F], F]:
    def mark(marked: F) -> F:
        setattr(marked, _MARK, (event, priority))
        return marked

    return mark if func is None else mark(func)


def handlers(owner: object, event: Event) -> tuple[Handler, ...]:
    """The owner's marked methods, bound, in their order. An override has a mark of its own, or is
    no handler.
    """
    found = []
    for name in dir(type(owner)):
        # Not of the instance: a property would be computed.
        marked = inspect.getattr_static(type(owner), name)
        if getattr(marked, _MARK, (None, 0))[0] is event:
            found.append((-getattr(marked, _MARK)[1], name))
    return tuple(getattr(owner, name) for _, name in sorted(found))


def awaited(value: Any) -> Coroutine[Any, Any, Any]:
    """To be awaited: what a plain function returned, or what an asynchronous one comes to."""
    return value if isinstance(value, CoroutineType) else _come_to(value)


async def _come_to(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


async def all_of(called: Iterable[Handler], *arguments: Any) -> None:
    """Each of them, whatever the others raise; the first error is raised at the end. What would end
    more than a rollout comes as RuntimeError.
    """
    first: BaseException | None = None
    for handler in called:
        try:
            await awaited(handler(*arguments))
        except FAILURES as error:
            if is_cancelled() and not isinstance(error, asyncio.CancelledError):
                _LOGGER.warning(
                    "cleaning up what is cancelled failed: %s", told(error), exc_info=error
                )
            raise_if_for_all(error)
            first = first or error
    if isinstance(first, SystemExit):
        raise called_exit(first) from first
    if isinstance(first, asyncio.CancelledError):
        raise RuntimeError(
            "a task that was waited for is cancelled; catch its CancelledError"
        ).with_traceback(first.__traceback__) from first
    if first is not None:
        raise first


async def to_the_end(work: Coroutine[Any, Any, None], limit_s: float) -> None:
    """For what is put away, however often this task is cancelled meanwhile: that counts when it is
    done. Raises what the work raises, and TimeoutError where it is not done within the limit; but
    where the task is being cancelled, that is what happens to it then, and the error is logged."""
    task, cancelled, deadline_s = asyncio.ensure_future(work), None, time.monotonic() + limit_s
    # By what the caller is in the middle of. (A cancellation that somebody has kept to himself is
    # over.)
    is_ending = is_cancelled() and isinstance(sys.exception(), asyncio.CancelledError)
    while not task.done() and (left_s := deadline_s - time.monotonic()) > 0:
        try:
            await asyncio.wait([task], timeout=left_s)
        except asyncio.CancelledError as error:
            cancelled = error
    try:
        if not task.done():
            task.cancel()
            raise TimeoutError(
                f"cleaning up is not done after {limit_s:g} s; check what it waits for, or allow"
                " more (the environment's cleanup_timeout_s)"
            )
        task.result()
    except Exception as error:
        if cancelled is None and not is_ending:
            raise
        _LOGGER.warning(
            "cleaning up after what was cancelled failed: %s", told(error), exc_info=error
        )
    if cancelled is not None:
        raise cancelled


class TearsDown(Protocol):
    async def aclose(self) -> None: ...


_OPEN: set[TearsDown] = set()
"""Environments with something to tear down, until that is done: however few others still refer to
them.
"""
_LOCK = threading.Lock()


def close_at_exit(environment: TearsDown) -> None:
    """`aclose` it when the process ends: normally, by an exception, or by SIGTERM, which gets a
    handler where it has none (and this is the main thread).
    """
    with _LOCK:
        if not _OPEN:
            atexit.register(_close_all)
        _OPEN.add(environment)
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    ):
        signal.signal(signal.SIGTERM, _exit)


def forget(environment: TearsDown) -> None:
    """It is closed."""
    with _LOCK:
        _OPEN.discard(environment)
        if not _OPEN:
            atexit.unregister(_close_all)


def _exit(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001
    # Unwinds the program, so that `atexit` runs; a process that dies of the signal itself runs
    # nothing.
    sys.exit(128 + signum)


def _close_all() -> None:
    for environment in list(_OPEN):
        try:
            asyncio.run(environment.aclose())
        except Exception:  # the process is ending: the others have to be closed too
            _LOGGER.exception("teardown of %s failed", type(environment).__name__)
