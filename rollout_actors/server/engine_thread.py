"""An engine on an event loop of its own, so that a server's loop answers `/health/` while the
engine loads or decodes images.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from rollout_actors.server.openai_routes import OpenAIAnswer, OpenAIRoute, OpenAIServing
from rollout_actors.server.service import ServedEngine
from shared.protocols import CLOSED_S
from shared.rollouts import Rollout, RolloutRequest, SyncReport, WeightOffer
from shared.tokens.repeat_guard import RepeatGuardSettings
from shared.weight_sync.phases import SyncPhase

T = TypeVar("T")


class EngineThread:
    """A `ServedEngine` whose work happens in a thread. Its own methods belong to the loop that
    calls them; cancelling one cancels the work.
    """

    def __init__(self, make_engine: Callable[[], ServedEngine]) -> None:
        """`make_engine` is called in the thread, by `start`: it may import vllm, which takes
        seconds.
        """
        self._make_engine = make_engine
        self._engine: ServedEngine | None = None
        self._loop = asyncio.new_event_loop()
        # A daemon: an engine that is stuck does not hold the process.
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
        self._thread.start()

    async def start(self) -> int:
        return await self._there(self._start())

    async def run(self, work: Callable[[ServedEngine], Coroutine[Any, Any, T]]) -> T:
        """What else is done with the engine, in its thread. After `start`."""
        made = self._made

        async def there() -> T:
            return await work(made)

        return await self._there(there())

    async def guard_by(self, settings: RepeatGuardSettings | None) -> None:
        await self._there(self._made.guard_by(settings))

    async def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        return await self._there(self._made.generate(requests))

    async def run_sync_phase(self, phase: SyncPhase, offer: WeightOffer) -> SyncReport | None:
        return await self._there(self._made.run_sync_phase(phase, offer))

    @property
    def version(self) -> int:
        return 0 if self._engine is None else self._engine.version

    @property
    def shut(self) -> str:
        return "it is not running" if self._engine is None else self._engine.shut

    @property
    def num_tokens(self) -> int:
        return 0 if self._engine is None else self._engine.num_tokens

    @property
    def is_dead(self) -> bool:
        return self._engine is not None and self._engine.is_dead

    @property
    def why_dead(self) -> str:
        return self._made.why_dead

    def close(self, within_s: float = CLOSED_S) -> None:
        """End the engine and the thread; the thread goes on where it is stuck, or is making the
        engine for longer than that. Twice is harmless.
        """
        engine, self._engine = self._engine, None
        if engine is not None:
            self._loop.call_soon_threadsafe(engine.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(within_s)

    @property
    def _made(self) -> ServedEngine:
        assert self._engine is not None, "start comes first"
        return self._engine

    async def _start(self) -> int:
        self._engine = self._make_engine()
        return await self._engine.start()

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


# An `OpenAIServing` that lives on its engine's event loop, for a server on another one.


class OpenAIThread:
    def __init__(self, thread: EngineThread, make: Callable[[ServedEngine], OpenAIServing]) -> None:
        """`make` is called in the thread, by `start`."""
        self._thread, self._make = thread, make
        self._serving: OpenAIServing | None = None

    async def start(self) -> None:
        """After the engine's. Raises what `make` raises."""

        async def made(engine: ServedEngine) -> OpenAIServing:
            return self._make(engine)

        self._serving = await self._thread.run(made)

    async def answer(self, route: OpenAIRoute, call: dict[str, Any]) -> OpenAIAnswer:
        serving = self._serving
        assert serving is not None, "start comes first"
        answer = await self._thread.run(lambda _: serving.answer(route, call))
        content = answer.content
        return (
            answer
            if isinstance(content, dict)
            else OpenAIAnswer(answer.status, self._here(content))
        )

    async def _here(self, events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        # A generator that is at work cannot be closed: where the caller goes, what it waited for
        # has to end first.
        turn = asyncio.Lock()

        async def following(_: ServedEngine) -> str | None:
            async with turn:
                return await anext(events, None)

        async def close(_: ServedEngine) -> None:
            async with turn:
                await events.aclose()

        try:
            while (event := await self._thread.run(following)) is not None:
                yield event
        finally:
            await asyncio.shield(self._thread.run(close))
