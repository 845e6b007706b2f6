"""Execution of an environment's functions in tasks and threads: errors, clocks, and scoring.

Plain (not asynchronous) reward functions and tools run in threads (`rollout_actors/threads.py`).
"""

from __future__ import annotations

import asyncio
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
)
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

from rollout_actors import threads
from rollout_actors.threads import THREADS
from shared.config.secrets import redacted

T = TypeVar("T")

Work = Coroutine[object, None, T]
"""A coroutine: the result of calling an `async def`."""

# Errors and cancellations

FAILURES = (Exception, asyncio.CancelledError, SystemExit, KeyboardInterrupt)
"""Errors that may be the failure of one rollout. An error that ends more than one rollout is raised
again by `reraise_cancellation`."""


_ENVIRONMENTS = f"{Path(__file__).parent}/"
_EXAMPLES = f"{_ENVIRONMENTS}examples/"
_CLIENTS = f"{_ENVIRONMENTS}clients/"
_LIBRARIES = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib")})
_NOT_ITS_OWN = (_ENVIRONMENTS, threads.__file__, *_LIBRARIES, "<")


def describe_error(error: BaseException) -> str:
    """Return the text about an error for `state["error"]`: `KeyError: 'nope' (my_env.py:12)`.

    The file and line are the last ones in the environment's own code; an error in a client has
    none. If the error was raised while another error was handled, the text also describes the
    other error. Secrets are masked.
    """
    text = f"{type(error).__name__}: {error}".rstrip()
    if isinstance(error, SystemExit):
        text = "RuntimeError: an environment called exit()"
    where = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if file.startswith(_CLIENTS):
            where = ""
            break
        if file.startswith(_EXAMPLES) or not file.startswith(_NOT_ITS_OWN):
            where = f" ({Path(file).name}:{line})"
    text = redacted(text) + where
    cause = error.__context__
    if cause is None or error.__suppress_context__ or isinstance(cause, asyncio.CancelledError):
        return text
    return f"{text}, after {describe_error(cause)}"


def traceback_of(error: BaseException) -> str:
    """Return an error and its traceback as text for a log. Secrets are masked."""
    return redacted("".join(traceback.format_exception(error)))


def is_cancelled() -> bool:
    """Return whether the current asyncio task is being cancelled.

    A CancelledError does not prove it, because awaiting a cancelled task raises one too.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def is_process_exit(error: BaseException) -> bool:
    """Return whether an error ends the process, and is not an environment's `exit()`.

    Signal handlers run only on the main thread. On this thread an exit or KeyboardInterrupt may
    come from a signal handler, so it ends the process.
    """
    on_main_thread = threading.current_thread() is threading.main_thread()
    return isinstance(error, SystemExit | KeyboardInterrupt) and on_main_thread


def reraise_cancellation(error: BaseException) -> None:
    """Raise the error again if it ends more than one rollout: the current task or the process.

    If the task is being cancelled, other errors are replaced by CancelledError.
    """
    if is_process_exit(error):
        raise error
    if is_cancelled():
        raise (
            error if isinstance(error, asyncio.CancelledError) else asyncio.CancelledError
        ) from error


async def run_in_task(work: Work[T]) -> T:
    """Run a coroutine in its own asyncio task and context, and return its value.

    A coroutine that cancels its own task does not cancel the caller. If the caller is cancelled,
    the coroutine is cancelled and awaited.
    """
    try:
        value = await asyncio.create_task(without_exit(work))
    finally:
        work.close()  # the task may have been cancelled before it began
    if is_cancelled():
        raise asyncio.CancelledError  # the work swallowed the cancellation
    return value


async def without_exit(work: Work[T]) -> T:
    """Await a coroutine of an environment, and raise RuntimeError if it calls `exit()`.

    Errors such as SystemExit would end the event loop, and with it every rollout.
    """
    try:
        return await work
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        if is_process_exit(error):
            raise
        raise _as_failure(error, "an environment") from error


def _as_failure(error: BaseException, who: str) -> RuntimeError:
    """Return a RuntimeError that stands for an exit, with the exit's traceback."""
    said = "called exit()" if isinstance(error, SystemExit) else f"raised {type(error).__name__}"
    return RuntimeError(f"{who} {said}").with_traceback(error.__traceback__)


# Clocks

QUEUE_TIME: ContextVar[Stopwatch | None] = ContextVar("queue_time", default=None)
"""Measures how long the current rollout waits in queues; set by `Environment.generate`."""


class Stopwatch:
    """Measures the total time in which at least one of several concurrent activities runs.

    It is thread-safe.
    """

    # One lock for all: there are thousands of stopwatches, and each holds it for a microsecond.
    _lock = threading.Lock()

    def __init__(self) -> None:
        self._running = 0
        self._since_s = 0.0
        self.total_s = 0.0
        """Measured seconds, without the activities that are running now."""

    @contextmanager
    def running(self) -> Iterator[None]:
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        with self._lock:
            if not self._running:
                self._since_s = time.perf_counter()
            self._running += 1

    def end(self) -> None:
        with self._lock:
            self._running -= 1
            if not self._running:
                self.total_s += time.perf_counter() - self._since_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.end()
        try:
            yield
        finally:
            self.begin()

    def so_far_s(self) -> float:
        """Return the measured seconds, including the activities that are running now."""
        with self._lock:
            return self.total_s + (time.perf_counter() - self._since_s if self._running else 0.0)


def waiting() -> AbstractContextManager[None]:
    """Exclude the time of the `with` block, a wait in a queue, from the rollout's `timing`."""
    watch = QUEUE_TIME.get()
    return nullcontext() if watch is None else watch.running()


# Scoring

_SLOT: ContextVar[ScoringSlot | None] = ContextVar("scoring_slot", default=None)


class ScoringSlot(Stopwatch):
    """Limits how many rollouts are scored at a time, and measures the scoring time.

    Use it in an `async with` block around the scoring of one rollout, or of all rollouts of a
    dataset row. In the block the slot holds one of the `places`. While it calls functions for
    several rollouts (`gather`), each call takes a place and the slot releases the place that it
    holds. Waits for a place or a thread are not measured.
    """

    def __init__(self, places: asyncio.Semaphore | None) -> None:
        """`places`: one for each rollout that may be scored at the same time; None: no limit."""
        super().__init__()
        self._places = places

    async def __aenter__(self) -> ScoringSlot:
        if self._places is not None:
            await self._places.acquire()
        self._before = _SLOT.get()
        _SLOT.set(self)
        self.begin()
        return self

    async def __aexit__(self, *error: object) -> None:
        self.end()
        _SLOT.set(self._before)
        if self._places is not None:
            self._places.release()

    async def gather(self, works: Sequence[Work[T]]) -> list[T]:
        """Run the coroutines concurrently, each in its own place, and return their results."""
        if self._places is not None:
            self._places.release()
        try:
            with self.paused():
                return await _gather([self._in_place(work) for work in works])
        finally:
            for work in works:
                work.close()  # it may have been cancelled before it began
            if self._places is not None:
                await self._places.acquire()

    async def _in_place(self, work: Work[T]) -> T:
        async with self._places or nullcontext():
            with self.running():
                return await work


async def gather_all(works: Sequence[Work[T]]) -> list[T]:
    """Run coroutines concurrently, within the limit of concurrent scoring. Return their results.

    If some fail, the first error is raised after all have ended.
    """
    if len(works) == 1:
        return [await works[0]]
    slot = _SLOT.get()
    return await (_gather(works) if slot is None else slot.gather(works))


async def _gather(works: Sequence[Work[T]]) -> list[T]:
    try:
        values = await asyncio.gather(*map(without_exit, works), return_exceptions=True)
    finally:
        for work in works:
            work.close()  # it may have been cancelled before it began
    for value in values:
        if isinstance(value, BaseException):
            raise value
    return cast("list[T]", values)


async def in_thread(function: Callable[..., T], **arguments: object) -> T:
    """Run a plain function in a thread and return its value, without blocking the event loop.

    If the caller is cancelled, the function continues and no caller waits for it.

    Raises:
        RuntimeError: the function called `exit()`, raised something that is not an Exception, or
            raised StopIteration, which a future cannot hold: its caller would wait forever.
    """
    slot = _SLOT.get()
    name = name_of(function)
    if slot is not None:
        slot.end()  # its clock counts the function, but not the wait for a thread
    try:
        return await THREADS.call(partial(_in_slot, slot, function, name, arguments), name)
    finally:
        if slot is not None:
            slot.begin()


def _in_slot(
    slot: ScoringSlot | None, function: Callable[..., T], name: str, arguments: Mapping[str, object]
) -> T:
    if slot is not None:
        slot.begin()
    try:
        return function(**arguments)
    except StopIteration as error:
        raise RuntimeError(f"{name} raised StopIteration; give next() a default") from error
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:  # never from a signal: those arrive on the main thread
        raise _as_failure(error, name) from error
    finally:
        if slot is not None:
            slot.end()


def unwrap_partial(function: Callable[..., object]) -> Callable[..., object]:
    """Return a copy of a `functools.partial` without attributes such as `__wrapped__`.

    `update_wrapper` sets these attributes, and they hide the bound arguments. Any other function is
    returned unchanged.
    """
    if not isinstance(function, partial):
        return function
    return partial(unwrap_partial(function.func), *function.args, **function.keywords)


def name_of(function: Callable[..., object]) -> str:
    """Return a function's name.

    A partial without its own name has the name of the function that it wraps. Any other object
    without a name has the name of its class.
    """
    name: str | None = getattr(function, "__name__", None)
    if name is None:
        return name_of(function.func) if isinstance(function, partial) else type(function).__name__
    return name
