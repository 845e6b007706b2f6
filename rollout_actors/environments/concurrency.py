"""Tasks, threads, clocks and scoring slots of rollouts, and how errors of environments are kept.

Plain (not asynchronous) reward functions and tools run in threads. No thread can be ended from
outside. If its caller reaches a time limit or is cancelled, the thread is given up: it runs until
its function returns, and another thread takes its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import sysconfig
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TypeVar, cast
from weakref import WeakKeyDictionary

from shared.config.secrets import redacted

_LOGGER = logging.getLogger(__name__)
T = TypeVar("T")

Work = Coroutine[object, None, T]
"""What calling an `async def` returns. A task sends None into it, and what it yields is asyncio's.
"""

# Errors and cancellations

FAILURES = (Exception, asyncio.CancelledError, SystemExit, KeyboardInterrupt)
"""Errors that may be one rollout's failure; `reraise_cancellation` knows those that are not."""


_ENVIRONMENTS = f"{Path(__file__).parent}/"
_EXAMPLES = f"{_ENVIRONMENTS}examples/"
_CLIENTS = f"{_ENVIRONMENTS}clients/"
_LIBRARIES = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib")})


def describe_error(error: BaseException) -> str:
    """Write an error as `state["error"]` has it: `KeyError: 'nope' (my_env.py:12)`.

    The line is the last one of the environment's own code; a client's error names none. An error
    that came up while another one was handled names that one too. Secrets are masked.
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
        if file.startswith(_EXAMPLES) or not file.startswith((_ENVIRONMENTS, *_LIBRARIES, "<")):
            where = f" ({Path(file).name}:{line})"
    text = redacted(text) + where
    cause = error.__context__
    if cause is None or error.__suppress_context__ or isinstance(cause, asyncio.CancelledError):
        return text
    return f"{text}, after {describe_error(cause)}"


def traceback_of(error: BaseException) -> str:
    """Write an error with its traceback, for a log. Secrets are masked."""
    return redacted("".join(traceback.format_exception(error)))


def is_cancelled() -> bool:
    """Tell whether this task is being cancelled.

    A CancelledError alone does not say so: awaiting a cancelled task raises one too.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def is_process_exit(error: BaseException) -> bool:
    """Tell the end of the process from an environment's `exit()`, or its KeyboardInterrupt.

    Signal handlers run on the main thread only. There it may be theirs, and ends the process.
    """
    on_main_thread = threading.current_thread() is threading.main_thread()
    return isinstance(error, SystemExit | KeyboardInterrupt) and on_main_thread


def reraise_cancellation(error: BaseException) -> None:
    """Raise again if this task is being cancelled or the process ends; no rollout swallows that."""
    if is_process_exit(error):
        raise error
    if is_cancelled():
        raise (
            error if isinstance(error, asyncio.CancelledError) else asyncio.CancelledError
        ) from error


async def run_in_task(work: Work[T]) -> T:
    """Return the work's value, run in a task and a context of its own.

    Work that cancels its own task fails alone. A cancelled caller cancels the work and waits for
    it.
    """
    try:
        value = await asyncio.create_task(without_exit(work))
    finally:
        work.close()  # it may not have begun when this was cancelled
    if is_cancelled():
        raise asyncio.CancelledError  # the work has swallowed it
    return value


async def without_exit(work: Work[T]) -> T:
    """Await an environment's work. What would leave its task and end the event loop, and with it
    every rollout, is raised as a RuntimeError: all that is neither an Exception nor a cancellation.
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
    """Make an error that rollouts may fail of, with the place of the one that it stands for."""
    said = "called exit()" if isinstance(error, SystemExit) else f"raised {type(error).__name__}"
    return RuntimeError(f"{who} {said}").with_traceback(error.__traceback__)


# Clocks

QUEUE_TIME: ContextVar[Stopwatch | None] = ContextVar("queue_time", default=None)
"""Stopwatch of the current rollout's queueing time, set by `generate`."""


class Stopwatch:
    """The time in which at least one of several activities is under way. Works from any thread."""

    # One lock for all: there are thousands of stopwatches, and each holds it for a microsecond.
    _lock = threading.Lock()

    def __init__(self) -> None:
        self._running = 0
        self._since_s = 0.0
        self.total_s = 0.0
        """Seconds, without what is under way now."""

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
        """Return the time with what is under way now, such as a thread that was given up."""
        with self._lock:
            return self.total_s + (time.perf_counter() - self._since_s if self._running else 0.0)


def waiting() -> AbstractContextManager[None]:
    """Keep a wait out of the rollout's `timing`."""
    watch = QUEUE_TIME.get()
    return nullcontext() if watch is None else watch.running()


class PausableTimeout:
    """A time limit whose clock stands still while all thread calls of its task wait for a thread.

    One call that runs keeps the clock going: it may hang as well.
    """

    def __init__(self, timeout: asyncio.Timeout) -> None:
        self._timeout = timeout
        self._waiting = 0
        self._running = 0
        self._left_s: float | None = None
        """Seconds left on a clock that stands still; None while it goes."""
        self.is_over = False

    def count(self, *, waiting: int, running: int) -> None:
        """Change the numbers of calls that wait for a thread and of those that have one."""
        self._waiting += waiting
        self._running += running
        stands_still = self._waiting > 0 and not self._running
        if self.is_over or self._timeout.expired() or stands_still == (self._left_s is not None):
            return
        now_s = asyncio.get_running_loop().time()
        if self._left_s is None:
            when_s = self._timeout.when()
            assert when_s is not None, "a clock that goes has an end"
            self._left_s = when_s - now_s
            self._timeout.reschedule(None)
        else:
            self._timeout.reschedule(now_s + self._left_s)
            self._left_s = None


LIMITS: ContextVar[tuple[PausableTimeout, ...]] = ContextVar("limits", default=())
"""Time limits of this task and of the tasks around it, the outermost first."""


@contextmanager
def _counted(*, waiting: int = 0, running: int = 0) -> Iterator[None]:
    """Count a thread call in all time limits around it."""
    limits = LIMITS.get()
    for limit in limits:
        limit.count(waiting=waiting, running=running)
    try:
        yield
    finally:
        for limit in limits:
            limit.count(waiting=-waiting, running=-running)


def within(limit_s: float | None, late: str, remedy: str) -> AbstractAsyncContextManager[None]:
    """Cancel the block at the limit and raise TimeoutError, even if the block swallows the end.

    Args:
        limit_s: None for no limit.
        late: the beginning of the error, up to the limit's name.
        remedy: the end of the error.
    """
    return nullcontext() if limit_s is None else _within(limit_s, late, remedy)


@asynccontextmanager
async def _within(limit_s: float, late: str, remedy: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(limit_s) as timeout:
            limit = PausableTimeout(timeout)
            token = LIMITS.set((*LIMITS.get(), limit))
            try:
                yield
            finally:
                # A task that was begun inside may outlive the block, and still count here.
                limit.is_over = True
                LIMITS.reset(token)
    except TimeoutError:
        if not timeout.expired():
            raise  # the block's own
    # Also if the block has swallowed its cancellation: a late one must not count as done.
    if timeout.expired():
        raise TimeoutError(f"{late} = {limit_s:g} s; {remedy}")


# Threads

MOST_GIVEN_UP = 256
"""Functions that were given up and may still run. Beyond them, calls are refused."""

GIVEN_UP: ContextVar[list[str] | None] = ContextVar("given_up", default=None)
"""Names of a rollout's functions that were given up; None if they are not collected."""


class _Call:
    """A function that has a thread."""

    def __init__(self, function: Callable[[], object], name: str) -> None:
        self.name = name
        self.is_given_up = False
        self.answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self.function = function
        # A thread has no context of its own: scope, clock and time limits are the caller's.
        self.context = contextvars.copy_context()

    def resolve(self, value: object, error: BaseException | None) -> None:
        if self.answer.done():
            return
        if error is None:
            self.answer.set_result(value)
        else:
            self.answer.set_exception(error)


class Threads:
    """Runs plain functions, each in a daemon thread of its own, a bounded number at a time.

    The pools of anyio and asyncio wait for their threads at the end of the process. One function
    that hangs would keep the process alive.
    """

    def __init__(self, most: int, most_given_up: int = MOST_GIVEN_UP) -> None:
        """
        Args:
            most: functions that run at a time in an event loop, without those that were given up.
            most_given_up: functions that were given up and may still run. Beyond, calls are
                refused.
        """
        self._most = most
        self._most_given_up = most_given_up
        # No lock: single operations of sets are atomic, and a signal handler may call `running`.
        self._running: set[_Call] = set()
        self._warned: set[str] = set()
        self._places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            WeakKeyDictionary()
        )

    async def call(self, function: Callable[[], T], name: str) -> T:
        """Return the function's value, run by a thread in the caller's context.

        If the caller is cancelled meanwhile, the thread is given up.

        Raises:
            RuntimeError: too many functions were given up and still run, or no thread can start.
        """
        loop = asyncio.get_running_loop()
        places = self._places.setdefault(loop, asyncio.Semaphore(self._most))
        with _counted(waiting=1) if places.locked() else nullcontext():
            await places.acquire()
        try:
            with _counted(running=1):
                return cast("T", await self._answer(_Call(function, name)))
        finally:
            places.release()

    def running(self) -> list[str]:
        """Return the names of the functions that run now, given up or not."""
        return sorted(call.name for call in list(self._running))

    def wait(self, limit_s: float) -> list[str]:
        """Wait until no function runs, and return the names of those that still do at the limit."""
        end_s = time.monotonic() + limit_s
        while (running := self.running()) and (left_s := end_s - time.monotonic()) > 0:
            time.sleep(min(0.01, left_s))
        return running

    def forget(self) -> None:
        """Forget all functions that run. A forked process has no thread of its parent's."""
        self._running.clear()

    async def _answer(self, call: _Call) -> object:
        # A copy of the set: threads take themselves out of it meanwhile.
        hanging = [one.name for one in list(self._running) if one.is_given_up]
        if len(hanging) > self._most_given_up:
            raise RuntimeError(
                f"no thread is left for {call.name}: {len(hanging)} plain functions that were given"
                f" up still run ({', '.join(sorted(set(hanging)))}); give what they wait for a"
                " limit of its own, or write them as `async def`"
            )
        thread = threading.Thread(
            target=self._work, args=(call,), name="plain-function", daemon=True
        )
        self._running.add(call)
        try:
            thread.start()
        except RuntimeError as error:
            self._running.discard(call)
            raise RuntimeError(
                f"no thread is left for {call.name}: the system starts no more threads; raise its"
                " limit of processes (`ulimit -u`, pids), or write plain functions as `async def`"
            ) from error
        try:
            return await call.answer
        except asyncio.CancelledError:
            if call in self._running:
                self._give_up(call)
            raise

    def _give_up(self, call: _Call) -> None:
        call.is_given_up = True
        names = GIVEN_UP.get()
        if names is not None:
            names.append(call.name)
        # Once for each name: one bad function may be given up in every rollout.
        if call.name not in self._warned:
            self._warned.add(call.name)
            _LOGGER.warning(
                "plain function %s was given up, because its caller was cancelled or had reached"
                " its limit of time: its thread runs until it returns, and another takes its place"
                " (at most %d are replaced); give what it waits for a limit of its own, or write it"
                " as `async def`",
                call.name,
                self._most_given_up,
            )

    def _work(self, call: _Call) -> None:
        value: object = None
        error: BaseException | None = None
        try:
            value = call.context.run(call.function)
        except BaseException as raised:  # of any kind, it is the caller's
            error = raised
        self._running.discard(call)
        with contextlib.suppress(RuntimeError):  # the caller's loop was closed
            call.answer.get_loop().call_soon_threadsafe(call.resolve, value, error)


THREADS = Threads(min(32, (os.cpu_count() or 1) + 4))
"""This process's threads for plain functions."""
os.register_at_fork(after_in_child=THREADS.forget)


# Scoring

_SLOT: ContextVar[ScoringSlot | None] = ContextVar("scoring_slot", default=None)


class ScoringSlot(Stopwatch):
    """A turn at scoring, of one rollout or of all those of an example.

    It measures the time in which any of its functions runs, without the wait for a place or for a
    thread. It holds one of the places. While it calls functions for many rollouts at once, each of
    those calls takes a place and the slot gives its own back, so that the bound always holds.
    """

    def __init__(self, places: asyncio.Semaphore | None) -> None:
        """Take no place yet. `places` None: any number may be scored at a time."""
        super().__init__()
        self._places: AbstractAsyncContextManager[object] = (
            nullcontext() if places is None else places
        )

    async def __aenter__(self) -> ScoringSlot:
        await self._places.__aenter__()
        self._before = _SLOT.get()
        _SLOT.set(self)
        self.begin()
        return self

    async def __aexit__(self, *error: object) -> None:
        self.end()
        _SLOT.set(self._before)
        await self._places.__aexit__(None, None, None)

    async def gather(self, works: Sequence[Work[T]]) -> list[T]:
        """Run all works, each in a place, while this slot's own is free."""
        await self._places.__aexit__(None, None, None)
        try:
            with self.paused():
                return await _gather([self._in_place(work) for work in works])
        finally:
            for work in works:
                work.close()  # it may not have begun when this was cancelled
            await self._places.__aenter__()

    async def _in_place(self, work: Work[T]) -> T:
        async with self._places:
            with self.running():
                return await work


async def gather_all(works: Sequence[Work[T]]) -> list[T]:
    """Run all at once, as far as there are places, and at the end raise the first error."""
    if len(works) == 1:
        return [await works[0]]
    slot = _SLOT.get()
    return await (_gather(works) if slot is None else slot.gather(works))


async def _gather(works: Sequence[Work[T]]) -> list[T]:
    try:
        values = await asyncio.gather(*map(without_exit, works), return_exceptions=True)
    finally:
        for work in works:
            work.close()  # it may not have begun when this was cancelled
    for value in values:
        if isinstance(value, BaseException):
            raise value
    return cast("list[T]", values)


async def in_thread(function: Callable[..., T], **arguments: object) -> T:
    """Return a plain function's value without holding up the event loop.

    A cancelled caller gives the thread up (`Threads.call`).

    Raises:
        RuntimeError: the function called `exit()`, raised another thing that is no Exception, or
            StopIteration, which no future can hold: its caller would wait for ever.
    """
    slot = _SLOT.get()
    name = name_of(function)
    # The slot's clock counts the function, and not its wait for a thread.
    with nullcontext() if slot is None else slot.paused():
        return await THREADS.call(partial(_in_slot, slot, function, name, arguments), name)


def _in_slot(
    slot: ScoringSlot | None, function: Callable[..., T], name: str, arguments: Mapping[str, object]
) -> T:
    with nullcontext() if slot is None else slot.running():
        try:
            return function(**arguments)
        except StopIteration as error:
            raise RuntimeError(f"{name} raised StopIteration; give next() a default") from error
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException as error:  # never a signal's: those come on the main thread
            raise _as_failure(error, name) from error


def unwrap_partial(function: Callable[..., object]) -> Callable[..., object]:
    """Drop what `update_wrapper` notes on a partial: it hides which arguments are bound."""
    if not isinstance(function, partial):
        return function
    return partial(unwrap_partial(function.func), *function.args, **function.keywords)


def name_of(function: Callable[..., object]) -> str:
    """Return a function's name, or that of what a partial wraps, or that of its class."""
    name: str | None = getattr(function, "__name__", None)
    if name is None:
        return name_of(function.func) if isinstance(function, partial) else type(function).__name__
    return name
