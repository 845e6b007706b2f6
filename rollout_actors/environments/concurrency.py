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
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from contextvars import ContextVar
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

from rollout_actors.environments.failures import called_exit, staying

# Functions of users: reward functions and tools.


def bare(function: Callable[..., Any]) -> Callable[..., Any]:
    """Without what `update_wrapper` notes on a partial, by which its signature would be that of
    what it wraps, with what it binds.
    """
    return (
        partial(bare(function.func), *function.args, **function.keywords)
        if isinstance(function, partial)
        else function
    )


def name_of(function: Callable[..., Any]) -> str:
    """Its own, or of a partial without one that of what it wraps, or else that of its class."""
    given: str | None = getattr(function, "__name__", None)
    if given is None:
        return name_of(function.func) if isinstance(function, partial) else type(function).__name__
    return given


# Times and limits of a rollout without its waits: for its turn at an engine, and for a thread.


class Stopwatch:
    """The time in which at least one of several is under way. From any thread."""

    _lock = threading.Lock()
    """One lock for all stopwatches: there are thousands at a time, and each holds it for a
    microsecond.
    """

    def __init__(self) -> None:
        self._running = 0
        self._since_s = 0.0
        self.total_s = 0.0
        """Without what is under way now."""

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

    def so_far_s(self) -> float:
        """Return the time with what is under way now, such as a thread that was given up."""
        with self._lock:
            return self.total_s + (time.perf_counter() - self._since_s if self._running else 0.0)


WAITED: ContextVar[Stopwatch | None] = ContextVar("waited", default=None)
"""Of the task's rollout; None where nobody asks."""


def waiting() -> AbstractContextManager[None]:
    """Around a wait that is not to be in `timing`."""
    watch = WAITED.get()
    return nullcontext() if watch is None else watch.running()


class PausableTimeout:
    """A limit of time whose clock stands still while all that its task has in threads waits for
    one.

    What runs in a thread is not stopped by what waits: two calls of a task can both have hung.
    """

    def __init__(self, timeout: asyncio.Timeout) -> None:
        self._timeout = timeout
        self._waiting = self._running = 0
        self._left_s: float | None = None
        """Seconds left on a clock that stands still; None while it goes."""
        self.is_over = False

    def count(self, *, waiting: int, running: int) -> None:
        """Change the numbers of calls that wait for a thread, and that have one."""
        self._waiting += waiting
        self._running += running
        stands_still = self._waiting > 0 and not self._running
        if self.is_over or self._timeout.expired() or stands_still == (self._left_s is not None):
            return
        now_s = asyncio.get_running_loop().time()
        if stands_still:
            when_s = self._timeout.when()
            assert when_s is not None, "a clock that goes has an end"
            self._left_s = when_s - now_s
            self._timeout.reschedule(None)
        else:
            assert self._left_s is not None, "it stood still"
            self._timeout.reschedule(now_s + self._left_s)
            self._left_s = None


LIMITS: ContextVar[tuple[PausableTimeout, ...]] = ContextVar("limits", default=())
"""The limits of the task and of the tasks around it, the outermost first."""


_NO_LIMIT = nullcontext()


def within(limit_s: float | None, late: str, remedy: str) -> AbstractAsyncContextManager[None]:
    """Cancel the block where it is not done by then, and raise TimeoutError for it, also where the
    block has kept that to itself.

    Args:
        limit_s: None: there is no limit.
        late: the beginning of the error, up to the limit's name.
    """
    return _NO_LIMIT if limit_s is None else _within(limit_s, late, remedy)


@asynccontextmanager
async def _within(limit_s: float, late: str, remedy: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(limit_s) as timeout:
            limit = PausableTimeout(timeout)
            token = LIMITS.set((*LIMITS.get(), limit))
            try:
                yield
            finally:
                limit.is_over = True
                LIMITS.reset(token)
    except TimeoutError:
        if not timeout.expired():
            raise
    if timeout.expired():
        raise TimeoutError(f"{late} = {limit_s:g} s; {remedy}")


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
        # Of a kind that a signal's handler may take again in the middle of `call`: it asks what
        # runs.
        self._lock = threading.RLock()
        self._queue: SimpleQueue[_Call] = SimpleQueue()
        self._num_queued = 0
        """Calls that no thread has taken. (A thread takes a call out of the queue before it says
        so.)
        """
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
            if (
                self._num_threads >= self.most
                or self._num_threads + len(self._given_up) >= self.most + self.most_given_up
            ):
                return
            try:
                threading.Thread(target=self._work, name="plain-function", daemon=True).start()
            except RuntimeError:  # the system has no more; those that there are take the queue
                _LOGGER.warning(
                    "no further thread can be started beside %d; raise the limit of processes"
                    " (`ulimit -u`, pids)",
                    self._num_threads,
                )
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
            reason = (
                "the system starts no more threads; raise its limit of processes (`ulimit -u`,"
                " pids), or write plain functions as `async def`"
            )
        with contextlib.suppress(Empty):
            while True:
                call = self._queue.get_nowait()
                self._num_queued -= 1
                call.answers.send(
                    call.settle, None, RuntimeError(f"no thread is left for {call.name}: {reason}")
                )

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
                "plain function %s was given up, because its caller was cancelled or had reached"
                " its limit of time: its thread runs until it returns, and another takes its place"
                " (%d were given up so far, %d of them still run, at most %d are replaced); give"
                " what it waits for a limit of its own, or write it as `async def`",
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


# Turns at scoring: how many rollouts are scored at a time, how long each of them runs, and plain
# functions in threads.


_TURN: ContextVar[ScoringSlot | None] = ContextVar("turn", default=None)


class ScoringSlot(Stopwatch):
    """At scoring, of one rollout, or of all those of an example where a rubric compares them.

    Its time is that in which any of its functions ran, without the wait for a place or for a
    thread.

    It holds one of the places there are. Where functions are called for many of its rollouts at
    once, each of those calls takes a place of its own and this one is given back meanwhile, so that
    never more rollouts are scored at a time than there are places.
    """

    def __init__(self, places: asyncio.Semaphore | None) -> None:
        """`places`: None: any number."""
        super().__init__()
        self._places = places

    async def __aenter__(self) -> None:
        # (Thousands may wait for a place at a time, and a generator for each is more for Python's
        # collector to look at.)
        if self._places is not None:
            await self._places.acquire()
        self._before = _TURN.get()
        _TURN.set(self)
        self.begin()

    async def __aexit__(self, *error: object) -> None:
        self.end()
        if self._places is not None:
            self._places.release()
        _TURN.set(self._before)

    async def each(self, works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """As `each`."""

        async def placed(work: Coroutine[Any, Any, T]) -> T:
            try:
                if self._places is not None:
                    await self._places.acquire()
                try:
                    with self.running():
                        return await work
                finally:
                    if self._places is not None:
                        self._places.release()
            finally:
                work.close()  # it may not have begun when this was cancelled

        if self._places is not None:
            self._places.release()
        self.end()
        try:
            return await _gathered([placed(work) for work in works])
        finally:
            self.begin()
            if self._places is not None:
                await self._places.acquire()


async def each(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All at once, as far as there are places, and when none runs any more, the first error."""
    turn = _TURN.get()
    return await _gathered(works) if turn is None or len(works) == 1 else await turn.each(works)


async def in_thread(function: Callable[..., T], **arguments: Any) -> T:
    """A plain function's value, without holding up the event loop. A StopIteration comes as
    RuntimeError, as out of a coroutine: no future can hold one, and who waits for it would do so
    for ever. So does `exit()`. Where the caller is cancelled, the thread is given up
    (`Threads.call`)."""
    turn, name = _TURN.get(), name_of(function)
    call = partial(_called, turn, function, arguments)
    if turn is None:
        return await THREADS.call(call, name)
    turn.end()  # it runs while the function does, and waits for a thread until then
    try:
        return await THREADS.call(call, name)
    finally:
        turn.begin()


def _called(turn: ScoringSlot | None, function: Callable[..., T], arguments: dict[str, Any]) -> T:
    if turn is not None:
        turn.begin()
    try:
        return function(**arguments)
    except StopIteration as error:
        raise RuntimeError(
            "a plain function raised StopIteration; give next() a default"
        ).with_traceback(error.__traceback__) from error
    except SystemExit as error:
        raise called_exit(error) from error
    finally:
        if turn is not None:
            turn.end()


async def _gathered(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    try:
        values = await asyncio.gather(*(staying(work) for work in works), return_exceptions=True)
    finally:
        for work in works:
            work.close()  # it may not have begun when this was cancelled
    for value in values:
        if isinstance(value, BaseException):
            raise value
    return cast("list[T]", values)
