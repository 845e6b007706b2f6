"""Turns at scoring: how many rollouts are scored at a time, how long each of them runs, and plain functions in threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar, cast

from rollout_actors.environments.failures import called_exit, staying
from rollout_actors.environments.functions import name_of
from rollout_actors.environments.threads import THREADS
from rollout_actors.environments.waits import Stopwatch

T = TypeVar("T")

_TURN: ContextVar[Turn | None] = ContextVar("turn", default=None)


class Turn(Stopwatch):
    """At scoring, of one rollout, or of all those of an example where a rubric compares them.

    Its time is that in which any of its functions ran, without the wait for a place or for a thread.

    It holds one of the places there are. Where functions are called for many of its rollouts at once, each of those calls takes a place of its own and this
    one is given back meanwhile, so that never more rollouts are scored at a time than there are places.
    """

    def __init__(self, places: asyncio.Semaphore | None) -> None:
        """`places`: None: any number."""
        super().__init__()
        self._places = places

    async def __aenter__(self) -> None:
        # (Thousands may wait for a place at a time, and a generator for each is more for Python's collector to look at.)
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

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        if self._places is not None:
            await self._places.acquire()
        try:
            with self.running():
                yield
        finally:
            if self._places is not None:
                self._places.release()

    async def each(self, works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """As `each`."""

        async def placed(work: Coroutine[Any, Any, T]) -> T:
            try:
                async with self._place():
                    return await work
            finally:
                work.close()  # it may not have begun when this was cancelled

        if self._places is not None:
            self._places.release()
        try:
            with self.waits():
                return await _gathered([placed(work) for work in works])
        finally:
            if self._places is not None:
                await self._places.acquire()

    @contextmanager
    def waits(self) -> Iterator[None]:
        """What runs meanwhile says so itself."""
        self.end()
        try:
            yield
        finally:
            self.begin()

    def in_its_thread(self, function: Callable[..., T], arguments: dict[str, Any]) -> T:
        with self.running():
            return function(**arguments)


async def each(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All at once, as far as there are places, and when none runs any more, the first error."""
    turn = _TURN.get()
    return await _gathered(works) if turn is None or len(works) == 1 else await turn.each(works)


async def in_thread(function: Callable[..., T], **arguments: Any) -> T:
    """A plain function's value, without holding up the event loop. A StopIteration comes as RuntimeError, as out of a coroutine: no future can hold one, and
    who waits for it would do so for ever. So does `exit()`. Where the caller is cancelled, the thread is given up (`Threads.call`)."""
    turn, name = _TURN.get(), name_of(function)
    if turn is None:
        return await THREADS.call(partial(_called, function, arguments), name)
    with turn.waits():
        return await THREADS.call(partial(_called, turn.in_its_thread, {"function": function, "arguments": arguments}), name)


def _called(function: Callable[..., T], arguments: dict[str, Any]) -> T:
    try:
        return function(**arguments)
    except StopIteration as error:
        raise RuntimeError("a plain function raised StopIteration; give next() a default").with_traceback(error.__traceback__) from error
    except SystemExit as error:
        raise called_exit(error) from error


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
