"""Decorators for an environment's methods that end rollouts and release resources.

    @stop                         @stop(priority=10)
    async def solved(self, state: State) -> bool: ...

Decorated methods may be plain functions too. They run on the event loop, so they must not block.
Methods of higher priority run first; ties are ordered by name.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from types import CoroutineType, FrameType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from rollout_actors.environments.concurrency import (
    FAILURES,
    Work,
    describe_error,
    is_cancelled,
    is_process_exit,
    traceback_of,
    without_exit,
)
from rollout_actors.threads import within

if TYPE_CHECKING:
    from rollout_actors.environments.environment import Environment

_LOGGER = logging.getLogger(__name__)
_MARK = "_rollmatch_handles"
_REMEDY = "check what it waits for, or raise the limit"

Handler = Callable[..., Any]
F = TypeVar("F", bound=Handler)


class Event(StrEnum):
    """When an environment's decorated methods are called."""

    STOP = "stop"
    """`@stop` methods are called in each turn of a rollout, to decide whether it is over."""
    CLEANUP = "cleanup"
    """`@cleanup` methods are called once at the end of each rollout, also of a failed one."""
    TEARDOWN = "teardown"
    """`@teardown` methods are called once, when the environment is closed or the process ends."""


class _Mark:
    """A decorator, `@mark` or `@mark(priority=10)`, that marks a method as a handler."""

    def __init__(self, event: Event) -> None:
        self._event = event

    @overload
    def __call__(self, func: F) -> F: ...
    @overload
    def __call__(self, func: None = None, *, priority: int = 0) -> Callable[[F], F]: ...
    def __call__(self, func: F | None = None, *, priority: int = 0) -> F | Callable[[F], F]:
        def mark(marked: F) -> F:
            setattr(marked, _MARK, (self._event, priority))
            return marked

        return mark if func is None else mark(func)


stop = _Mark(Event.STOP)
"""Marks a method `(self, state) -> bool` of an environment that returns whether a rollout is over.

The method's name becomes the state's `stop_condition`.
"""
cleanup = _Mark(Event.CLEANUP)
"""Marks a method `(self, state)` of an environment that releases the resources of a rollout.

The method is called once per rollout, also after an exception or a cancellation.
"""
teardown = _Mark(Event.TEARDOWN)
"""Marks a method `(self)` of an environment that releases the environment's resources.

The method is called once, by `aclose` or at the end of the process.
"""


def handlers(owner: object, event: Event) -> tuple[Handler, ...]:
    """Return the methods of `owner` that are decorated for this event, in calling order.

    A subclass that overrides such a method must decorate it again.
    """
    # Looked up in the classes, because access on the instance would compute properties.
    members: dict[str, object] = {}
    for base in reversed(type(owner).__mro__):
        members.update(vars(base))
    found = []
    for name, member in members.items():
        marked_event, priority = getattr(member, _MARK, (None, 0))
        if marked_event is event:
            found.append((-priority, name))
    return tuple(getattr(owner, name) for _, name in sorted(found))


def awaited(value: object) -> Work[Any]:
    """Return a coroutine with the result of a call of a user's function, asynchronous or not."""
    # Most are asynchronous. A coroutine around each one would make every turn slower.
    return value if type(value) is CoroutineType else _awaited(value)


async def _awaited(value: object) -> Any:
    return await value if inspect.isawaitable(value) else value


async def call_all(
    called: Iterable[Handler],
    *arguments: object,
    limit_s: float | None = None,
    what: str = "handler",
) -> None:
    """Call each of the methods, even if others raise. Raise the first error at the end.

    Args:
        limit_s: time limit of each method, in seconds; None: no limit.
        what: name of the methods in the error at the limit.
    """
    first: BaseException | None = None
    for handler in called:
        try:
            async with within(limit_s, f"{what} is not done after cleanup_timeout_s", _REMEDY):
                await without_exit(_called(handler, arguments))
        except FAILURES as error:
            if is_process_exit(error):
                raise
            first = first or error
            if is_cancelled() and not isinstance(error, asyncio.CancelledError):
                _warn_of_cleanup(error)
    if first is not None:
        if is_cancelled():
            raise asyncio.CancelledError from first
        raise first


async def _called(handler: Handler, arguments: Sequence[object]) -> None:
    await awaited(handler(*arguments))


async def finish_cleanup(work: Work[None], limit_s: float) -> None:
    """Run a rollout's cleanup to its end, even if this task is cancelled meanwhile.

    A cancellation is raised after the cleanup. Then an error of the cleanup is only logged.

    Raises TimeoutError if the cleanup is not done after `limit_s` seconds.
    """
    task = asyncio.ensure_future(without_exit(work))
    cancelled = sys.exception() if is_cancelled() else None
    interrupted: asyncio.CancelledError | None = None
    now_s = asyncio.get_running_loop().time
    deadline_s = now_s() + limit_s
    while not task.done() and (left_s := deadline_s - now_s()) > 0:
        try:
            await asyncio.wait([task], timeout=left_s)
        except asyncio.CancelledError as error:
            interrupted = error
    try:
        if not task.done():
            task.cancel()
            raise TimeoutError(
                f"cleanup is not done after cleanup_timeout_s = {limit_s:g} s; {_REMEDY}"
            )
        task.result()
    except Exception as error:
        if interrupted is None and not isinstance(cancelled, asyncio.CancelledError):
            raise
        _warn_of_cleanup(error)
    if interrupted is not None:
        raise interrupted


def _warn_of_cleanup(error: BaseException) -> None:
    failed = "cleanup after a cancellation failed: %s\n%s"
    _LOGGER.warning(failed, describe_error(error), traceback_of(error))


_OPEN: set[Environment] = set()
"""Environments with `@teardown` methods that are not closed. The set keeps them alive."""
_LOCK = threading.Lock()


def close_at_exit(environment: Environment) -> None:
    """Close an environment when the process ends: normally, by an exception, or by SIGTERM.

    If there is no SIGTERM handler and this is the main thread, one is installed.
    """
    with _LOCK:
        if not _OPEN:
            atexit.register(_close_all)
        _OPEN.add(environment)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit)


def forget(environment: Environment) -> None:
    """Do not close this environment at the end of the process, because it is closed already."""
    with _LOCK:
        _OPEN.discard(environment)
        if not _OPEN:
            atexit.unregister(_close_all)


def _exit(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001
    # Unwinds the program, so that `atexit` runs; a process killed by the signal runs nothing.
    sys.exit(128 + signum)


def _close_all() -> None:
    for environment in list(_OPEN):
        try:
            asyncio.run(environment.aclose())
        except Exception as error:  # the process is ending, and the others must be closed too
            name = type(environment).__name__
            _LOGGER.error("teardown of %s failed\n%s", name, traceback_of(error))
