"""Threads for plain (not asynchronous) functions, and time limits that know of them.

A thread cannot be ended from outside. If the caller of a function reaches a time limit or is
cancelled, the thread is given up: it runs until its function returns, and another thread takes its
place.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from queue import SimpleQueue
from typing import TypeVar, cast
from weakref import WeakKeyDictionary

_LOGGER = logging.getLogger(__name__)
T = TypeVar("T")


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
        # First, so that a callback that comes from now on wakes the loop again.
        self._is_woken = False
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
