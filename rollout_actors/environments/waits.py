"""Times and limits of a rollout without its waits: for its turn at an engine, and for a thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from contextvars import ContextVar


class Stopwatch:
    """The time in which at least one of several is under way. From any thread."""

    _lock = threading.Lock()
    """One lock for all stopwatches: there are thousands at a time, and each holds it for a microsecond."""

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


class Limit:
    """A limit of time whose clock stands still while all that its task has in threads waits for one.

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


LIMITS: ContextVar[tuple[Limit, ...]] = ContextVar("limits", default=())
"""The limits of the task and of the tasks around it, the outermost first."""


_NO_LIMIT = nullcontext()


def within(limit_s: float | None, late: str, remedy: str) -> AbstractAsyncContextManager[None]:
    """Cancel the block where it is not done by then, and raise TimeoutError for it, also where the block has kept that to itself.

    Args:
        limit_s: None: there is no limit.
        late: the beginning of the error, up to the limit's name.
    """
    return _NO_LIMIT if limit_s is None else _within(limit_s, late, remedy)


@asynccontextmanager
async def _within(limit_s: float, late: str, remedy: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(limit_s) as timeout:
            limit = Limit(timeout)
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
