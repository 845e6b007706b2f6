"""Event loops whose seconds are counted or skipped, not waited for: a bound, an order or a latency
is the same on every machine, however busy it is.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

from rollout_actors.threads import THREADS

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            ready = super().select(20)
            assert ready, "nothing is due, and nobody is waited for"
            return ready
        self.now_s += max(0.0, timeout)
        return super().select(0)


class CountedTime(asyncio.SelectorEventLoop):
    """A loop whose clock goes on to the next timer where nothing is ready. What would run in a
    thread runs in the loop itself, and takes no time.
    """

    def __init__(self) -> None:
        self.selector = _Selector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now_s

    def run_in_executor(
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done


async def _at_once(function: Callable[[], T], name: str) -> T:
    return function()


def counted(work: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """Return the work's result, and the seconds that it would have taken. Its own
    `time.perf_counter` is counted too.
    """
    with (
        mock.patch.object(THREADS, "call", _at_once),
        asyncio.Runner(loop_factory=CountedTime) as runner,
        mock.patch("time.perf_counter", runner.get_loop().time),
    ):
        done = runner.run(work)
        return done, runner.get_loop().time()


@contextmanager
def later(seconds: float) -> Iterator[None]:
    """Put the clock of the running loop forward for the block: limits that were set before elapse,
    and those that are set in it last as long as ever.
    """
    loop = asyncio.get_running_loop()
    now_s = loop.time
    loop.time = lambda: now_s() + seconds  # type: ignore[method-assign]
    try:
        yield
    finally:
        loop.time = now_s  # type: ignore[method-assign]
