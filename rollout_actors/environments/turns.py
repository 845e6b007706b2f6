"""Turns at scoring: how many rollouts are scored at a time, how long each of them runs, and plain functions in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
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
    """A plain function's value, without holding up the event loop. A StopIteration comes as RuntimeError, as out of a coroutine: no future can hold one, and
    who waits for it would do so for ever. So does `exit()`. Where the caller is cancelled, the thread is given up (`Threads.call`)."""
    turn, name = _TURN.get(), name_of(function)
    call = partial(_called, turn, function, arguments)
    if turn is None:
        return await THREADS.call(call, name)
    turn.end()  # it runs while the function does, and waits for a thread until then
    try:
        return await THREADS.call(call, name)
    finally:
        turn.begin()


def _called(turn: Turn | None, function: Callable[..., T], arguments: dict[str, Any]) -> T:
    if turn is not None:
        turn.begin()
    try:
        return function(**arguments)
    except StopIteration as error:
        raise RuntimeError("a plain function raised StopIteration; give next() a default").with_traceback(error.__traceback__) from error
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
