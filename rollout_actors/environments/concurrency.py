"""Execution of an environment's functions in tasks and threads, with time limits.

Plain (not asynchronous) reward functions and tools run in threads. A thread cannot be ended from
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
from collections import deque
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
from queue import SimpleQueue
from typing import TypeVar, cast
from weakref import WeakKeyDictionary

from shared.config.secrets import redacted

_LOGGER = logging.getLogger(__name__)
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
        if file.startswith(_EXAMPLES) or not file.startswith((_ENVIRONMENTS, *_LIBRARIES, "<")):
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


class PausableTimeout:
    """A time limit that is paused while its task waits for a free thread.

    It is not paused while a function of the task runs in a thread, because the function may hang.
    """

    def __init__(self, timeout: asyncio.Timeout) -> None:
        self._timeout = timeout
        self._waiting = 0
        self._running = 0
        self._left_s: float | None = None
        """Seconds left while the clock is paused; None while it runs."""
        self.is_over = False

    def count(self, *, waiting: int, running: int) -> None:
        """Add to the number of functions that wait for a thread, and of those that run in one.

        A negative number subtracts.
        """
        self._waiting += waiting
        self._running += running
        stands_still = self._waiting > 0 and not self._running
        if self.is_over or self._timeout.expired() or stands_still == (self._left_s is not None):
            return
        now_s = asyncio.get_running_loop().time()
        if self._left_s is None:
            when_s = self._timeout.when()
            assert when_s is not None, "a running clock has a deadline"
            self._left_s = when_s - now_s
            self._timeout.reschedule(None)
        else:
            self._timeout.reschedule(now_s + self._left_s)
            self._left_s = None


LIMITS: ContextVar[tuple[PausableTimeout, ...]] = ContextVar("limits", default=())
"""Time limits of the current task and of the tasks that started it, the outermost first."""


def within(limit_s: float | None, late: str, remedy: str) -> AbstractAsyncContextManager[None]:
    """Limit the time of the `async with` block: at the limit, cancel it and raise TimeoutError.

    The error is raised even if the block swallows the cancellation.

    Args:
        limit_s: seconds; None: no limit.
        late: the beginning of the error message, up to the limit's name.
        remedy: the end of the error message.
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
                # A task that began inside may outlive the block, and still call `count`.
                limit.is_over = True
                LIMITS.reset(token)
    except TimeoutError:
        if not timeout.expired():
            raise  # the block raised it
    # Also if the block swallowed its cancellation: a late block must not count as done.
    if timeout.expired():
        raise TimeoutError(f"{late} = {limit_s:g} s; {remedy}")


# Threads

MOST_GIVEN_UP = 256
"""With more given-up functions that still run in threads, further calls are refused."""

GIVEN_UP: ContextVar[list[str] | None] = ContextVar("given_up", default=None)
"""Names of the current rollout's functions that were given up at a time limit or a cancellation.
None: they are not collected."""


class _Call:
    """A call of a plain function for a caller in an event loop."""

    def __init__(self, function: Callable[[], object], name: str) -> None:
        self.name = name
        self.is_given_up = False
        self.answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self.function = function
        # Threads do not inherit the context: scope, clock and time limits are the caller's.
        self.context = contextvars.copy_context()
        self.limits = LIMITS.get()
        self._waiting = 0
        self._running = 0

    def count(self, *, waiting: int = 0, running: int = 0) -> None:
        """Tell the caller's time limits whether the function waits for a thread or runs in one."""
        for limit in self.limits:
            limit.count(waiting=waiting - self._waiting, running=running - self._running)
        self._waiting = waiting
        self._running = running

    def begin(self) -> None:
        if not self.answer.done():
            self.count(running=1)

    def resolve(self, value: object, error: BaseException | None) -> None:
        if self.answer.done():
            return
        if error is None:
            self.answer.set_result(value)
        else:
            self.answer.set_exception(error)


class _LoopQueue:
    """The calls of an event loop that wait for a thread, and the callbacks of its threads."""

    def __init__(self) -> None:
        self.waiting: deque[_Call] = deque()
        self.num_threads = 0
        """Number of threads that run calls of this queue, given-up functions not counted."""
        self._callbacks: deque[Callable[[], None]] = deque()
        self._is_woken = False

    def call_in_loop(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        """Call `callback` in the loop. Waking the loop is slow: one wake-up serves several."""
        self._callbacks.append(callback)
        if not self._is_woken:
            self._is_woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._run_callbacks)

    def _run_callbacks(self) -> None:
        self._is_woken = (
            False  # first, so that a callback that comes from now on wakes the loop again
        )
        while self._callbacks:
            self._callbacks.popleft()()


class Threads:
    """Runs plain (not asynchronous) functions in daemon threads, a limited number at a time.

    A thread serves many calls. Values that a function stores for its thread (`threading.local`, or
    torch's gradient mode) remain for later calls. The pools of anyio and asyncio wait for their
    threads when the process ends, so one function that hangs would keep the process alive.
    """

    def __init__(self, most: int, most_given_up: int = MOST_GIVEN_UP) -> None:
        """
        Args:
            most: largest number of functions that run at a time per event loop. Functions that were
                given up at a time limit or a cancellation do not count.
            most_given_up: with more given-up functions that still run, calls are refused.
        """
        self._most = most
        self._most_given_up = most_given_up
        # Reading it takes no lock, because a signal handler may call `running`.
        self._running: set[_Call] = set()
        self._warned: set[str] = set()
        self.forget()

    async def call(self, function: Callable[[], T], name: str) -> T:
        """Run a function in a thread, in the caller's context, and return its value.

        If the caller is cancelled meanwhile, the function is given up: it runs until it returns,
        and no caller waits for it. If it still waits for a thread, it does not run.

        Raises:
            RuntimeError: too many functions were given up and still run, or no thread can start.
        """
        loop = asyncio.get_running_loop()
        call = _Call(function, name)
        with self._lock:
            if (queue := self._queues.get(loop)) is None:
                # A function that returned after its loop was closed left its answer in the queue,
                # and the answer refers to the loop.
                for closed in [one for one in self._queues if one.is_closed()]:
                    del self._queues[closed]
                queue = self._queues[loop] = _LoopQueue()
            has_place = queue.num_threads < self._most
            if has_place:
                self._hand_over(queue, call)
            else:
                queue.waiting.append(call)
        call.count(waiting=not has_place, running=has_place)
        try:
            return cast("T", await call.answer)
        except asyncio.CancelledError:
            self._leave(queue, call)
            raise
        finally:
            call.count()

    def running(self) -> list[str]:
        """Return the names of all functions that run in threads now."""
        return sorted(call.name for call in list(self._running))

    def wait(self, limit_s: float) -> list[str]:
        """Wait at most `limit_s` seconds until no function runs in a thread.

        Return the names of functions that still run then.
        """
        end_s = time.monotonic() + limit_s
        while (running := self.running()) and (left_s := end_s - time.monotonic()) > 0:
            time.sleep(min(0.01, left_s))
        return running

    def forget(self) -> None:
        """Forget all running functions: a forked process does not have its parent's threads."""
        self._running.clear()
        # New ones, because the parent's may have been locked at the fork.
        self._lock = threading.Lock()
        self._handed_over: SimpleQueue[tuple[_LoopQueue, _Call]] = SimpleQueue()
        self._queues: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopQueue] = WeakKeyDictionary()
        self._num_threads = 0
        self._num_busy = 0

    def _hand_over(self, queue: _LoopQueue, call: _Call) -> None:
        """Give a call to an idle thread, or to a new one. The caller of this method holds the lock.

        Raises RuntimeError if no thread can be used.
        """
        hanging = [one.name for one in self._running if one.is_given_up]
        if len(hanging) > self._most_given_up:
            raise RuntimeError(
                f"no thread is left for {call.name}: {len(hanging)} plain functions that were given"
                f" up still run ({', '.join(sorted(set(hanging)))}); set a time limit for what they"
                " wait for, or write them as `async def`"
            )
        if self._num_busy == self._num_threads:
            thread = threading.Thread(target=self._serve, name="plain-function", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise RuntimeError(
                    f"no thread is left for {call.name}: the system cannot start more threads;"
                    " raise its process limit (`ulimit -u`, pids), or write plain functions as"
                    " `async def`"
                ) from error
            self._num_threads += 1
        self._num_busy += 1
        queue.num_threads += 1
        self._running.add(call)
        self._handed_over.put((queue, call))

    def _leave(self, queue: _LoopQueue, call: _Call) -> None:
        """Take a call out of its queue, or give its function up and replace the thread."""
        with self._lock:
            if call in queue.waiting:
                queue.waiting.remove(call)
            if call not in self._running:
                return
            call.is_given_up = True
            queue.num_threads -= 1
            while queue.waiting:
                try:
                    self._hand_over(queue, queue.waiting[0])
                except RuntimeError as error:
                    if queue.num_threads:
                        break  # the queue's other threads will run them
                    queue.waiting.popleft().resolve(None, error)
                else:
                    queue.waiting.popleft()
                    break
        self._note_given_up(call)

    def _note_given_up(self, call: _Call) -> None:
        names = GIVEN_UP.get()
        if names is not None:
            names.append(call.name)
        # Once for each name: one bad function may be given up in every rollout.
        if call.name not in self._warned:
            self._warned.add(call.name)
            _LOGGER.warning(
                "plain function %s was given up, because its caller was cancelled or reached a time"
                " limit. The function continues in its thread until it returns, and a new thread"
                " replaces this one (at most %d threads are replaced). Set a time limit inside the"
                " function, or write it as `async def`",
                call.name,
                self._most_given_up,
            )

    def _serve(self) -> None:
        while True:
            # Not assigned to names, which would keep queue and call alive until the next call.
            self._run_all(*self._handed_over.get())

    def _run_all(self, queue: _LoopQueue, call: _Call | None) -> None:
        """Run a call, and then the calls that wait in its queue."""
        while call is not None:
            call = self._run(queue, call)

    def _run(self, queue: _LoopQueue, call: _Call) -> _Call | None:
        """Run a call, and return the call that its thread runs next."""
        loop = call.answer.get_loop()
        if call.limits:
            queue.call_in_loop(loop, call.begin)
        value: object = None
        error: BaseException | None = None
        try:
            value = call.context.run(call.function)
        except BaseException as raised:  # any error is raised in the caller
            error = raised
        following = None
        # Before the answer, so that the caller's next call finds this thread free.
        with self._lock:
            self._running.discard(call)
            if queue.waiting and not call.is_given_up:
                following = queue.waiting.popleft()
                self._running.add(following)
            else:
                self._num_busy -= 1
                queue.num_threads -= not call.is_given_up
        queue.call_in_loop(loop, partial(call.resolve, value, error))
        return following


THREADS = Threads(min(32, (os.cpu_count() or 1) + 4))
"""This process's threads for plain (not asynchronous) reward functions and tools."""
os.register_at_fork(after_in_child=THREADS.forget)


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
