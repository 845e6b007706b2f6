"""The threads in which plain (not asynchronous) reward functions and tools run.

No thread can be ended from outside. One whose caller has gone, because of a limit of time or a
cancellation, is given up: it runs until its function returns, and another takes its place.
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
from collections.abc import Callable
from contextvars import ContextVar
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

from rollout_actors.environments.waits import LIMITS

_LOGGER = logging.getLogger(__name__)
T = TypeVar("T")

MOST_GIVEN_UP = 256
"""Threads that are replaced; beyond these the pool shrinks, and at none its calls are refused."""

GIVEN_UP: ContextVar[list[str] | None] = ContextVar("given_up", default=None)
"""A rollout's list of the names of its functions that were given up; None where nobody asks."""


class _Answers:
    """On their way to an event loop, which is woken once for all that there are by then."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._is_woken = False

    def send(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Have the loop call this, after those that were sent before. From any thread."""
        self._waiting.append((callback, arguments))
        if not self._is_woken:
            self._is_woken = True
            # A loop that was closed has nobody who waits.
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._take_in)

    def _take_in(self) -> None:
        self._is_woken = False  # first: what is sent from now on may come too late for this time
        while self._waiting:
            callback, arguments = self._waiting.popleft()
            callback(*arguments)


class _Call:
    """A function on its way through a thread."""

    def __init__(self, function: Callable[[], Any], name: str, answers: _Answers) -> None:
        self.function, self.name, self.answers = function, name, answers
        self.context = contextvars.copy_context()
        self.answer: asyncio.Future[Any] = answers.loop.create_future()
        self.limits = LIMITS.get()
        self.is_queued = False
        """True while it waits for a thread, as the event loop knows it."""
        self.has_begun = self.is_left = False

    def starts(self) -> None:
        """Let the clocks of its limits go on: it has a thread now."""
        if self.is_queued:
            self.is_queued = False
            for limit in self.limits:
                limit.count(waiting=-1, running=1)

    def ends(self) -> None:
        for limit in self.limits:
            limit.count(waiting=-1 if self.is_queued else 0, running=0 if self.is_queued else -1)
        self.is_queued = False

    def settle(self, value: Any, error: BaseException | None) -> None:
        if self.answer.done():
            return
        if error is None:
            self.answer.set_result(value)
        else:
            self.answer.set_exception(error)


class Threads:
    """A bounded pool of daemon threads, so that none keeps the process from ending."""

    def __init__(self, most: int, most_given_up: int = MOST_GIVEN_UP) -> None:
        """
        Args:
            most: functions that run at a time, without those that were given up.
            most_given_up: of those, how many get a substitute while they still run.
        """
        self.most, self.most_given_up = most, most_given_up
        self.reset()

    def reset(self) -> None:
        """Begin without a thread, as a forked process does."""
        # Of a kind that a signal's handler may take again in the middle of `call`: it asks what runs.
        self._lock = threading.RLock()
        self._queue: SimpleQueue[_Call] = SimpleQueue()
        self._num_queued = 0
        """Calls that no thread has taken. (A thread takes a call out of the queue before it says so.)"""
        self._running: set[_Call] = set()
        self._given_up: set[_Call] = set()
        self._num_threads = 0
        """Threads at work or idle; those that were given up are not among them."""
        self._num_idle = 0
        self.num_given_up = 0
        """All that ever were."""
        self._answers: _Answers | None = None

    async def call(self, function: Callable[[], T], name: str) -> T:
        """Return the function's value, once a thread has run it in the caller's context.

        A caller that is cancelled meanwhile gives the thread up. RuntimeError where so many were
        given up that none is left.
        """
        loop, answers = asyncio.get_running_loop(), self._answers
        if answers is None or answers.loop is not loop:
            answers = self._answers = _Answers(loop)
        call = _Call(function, name, answers)
        with self._lock:
            self._queue.put(call)
            self._num_queued += 1
            if self._num_queued > self._num_idle:
                self._add_threads()
                self._refuse_if_none_is_left()
                call.is_queued = self._num_queued > self._num_idle
        for limit in call.limits:
            limit.count(waiting=int(call.is_queued), running=int(not call.is_queued))
        try:
            return cast("T", await call.answer)
        except asyncio.CancelledError:
            self._leave(call)
            raise
        finally:
            call.ends()

    def running(self) -> list[str]:
        """Return the names of the functions that run now, given up or not."""
        with self._lock:
            return sorted(call.name for call in self._running)

    def wait(self, limit_s: float) -> list[str]:
        """Wait until no function runs, and return the names of those that still do at the limit."""
        end_s = time.monotonic() + limit_s
        while (running := self.running()) and (left_s := end_s - time.monotonic()) > 0:
            time.sleep(min(0.01, left_s))
        return running

    def _add_threads(self) -> None:
        """Start the threads that the queue needs and the bounds allow. The lock is held."""
        while self._num_queued > self._num_idle:
            if self._num_threads >= self.most or self._num_threads + len(self._given_up) >= self.most + self.most_given_up:
                return
            try:
                threading.Thread(target=self._work, name="plain-function", daemon=True).start()
            except RuntimeError:  # the system has no more; those that there are take the queue
                _LOGGER.warning("no further thread can be started beside %d; raise the limit of processes (`ulimit -u`, pids)", self._num_threads)
                return
            # Counted as idle at once: it takes one of the queue.
            self._num_threads += 1
            self._num_idle += 1

    def _refuse_if_none_is_left(self) -> None:
        """The lock is held."""
        if self._num_threads:
            return
        if self._given_up:
            names = ", ".join(sorted({call.name for call in self._given_up}))
            reason = (
                f"{len(self._given_up)} plain functions that were given up still run ({names}); "
                "give what they wait for a limit of its own, or write them as `async def`"
            )
        else:
            reason = "the system starts no more threads; raise its limit of processes (`ulimit -u`, pids), or write plain functions as `async def`"
        with contextlib.suppress(Empty):
            while True:
                call = self._queue.get_nowait()
                self._num_queued -= 1
                call.answers.send(call.settle, None, RuntimeError(f"no thread is left for {call.name}: {reason}"))

    def _leave(self, call: _Call) -> None:
        """Nobody waits for this one any more."""
        with self._lock:
            if not call.has_begun:
                call.is_left = True  # whoever takes it from the queue drops it
                return
            if call not in self._running:
                return  # its value came at the same moment
            self._given_up.add(call)
            self._num_threads -= 1
            self.num_given_up += 1
            number, still = self.num_given_up, len(self._given_up)
            self._add_threads()
            self._refuse_if_none_is_left()
        noted = GIVEN_UP.get()
        if noted is not None:
            noted.append(call.name)
        if number & (number - 1) == 0:
            # The first, the second, the fourth, ...: a thousand of them are ten lines.
            _LOGGER.warning(
                "plain function %s was given up, because its caller was cancelled or had reached its limit of time: its thread runs until it returns, "
                "and another takes its place (%d were given up so far, %d of them still run, at most %d are replaced); give what it waits for a "
                "limit of its own, or write it as `async def`",
                call.name,
                number,
                still,
                self.most_given_up,
            )

    def _work(self) -> None:
        while True:
            call = self._queue.get()
            with self._lock:
                self._num_queued -= 1
                call.has_begun = not call.is_left
                if call.has_begun:
                    self._num_idle -= 1
                    self._running.add(call)
            if call.has_begun and not self._run(call):
                return
            # What it was called with is not kept until the next one comes.
            del call

    def _run(self, call: _Call) -> bool:
        """Return whether this thread goes on: it was not given up."""
        if call.is_queued and call.limits:
            call.answers.send(call.starts)
        value, error = None, None
        try:
            value = call.context.run(call.function)
        except BaseException as raised:  # of whatever kind, it is the caller's
            error = raised
        with self._lock:
            self._running.discard(call)
            goes_on = call not in self._given_up
            if goes_on:
                self._num_idle += 1
            else:
                self._given_up.discard(call)
                self._add_threads()
        if goes_on:
            call.answers.send(call.settle, value, error)
        del error  # whose traceback has this frame
        return goes_on


THREADS = Threads(min(32, (os.cpu_count() or 1) + 4))
"""This process's pool."""
os.register_at_fork(after_in_child=THREADS.reset)
