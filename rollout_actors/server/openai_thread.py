"""An `OpenAIServing` that lives on its engine's event loop, for a server on another one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from rollout_actors.server.engine_thread import EngineThread
from rollout_actors.server.openai_routes import OpenAIAnswer, OpenAIRoute, OpenAIServing
from rollout_actors.server.service import ServedEngine


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
        return answer if isinstance(content, dict) else OpenAIAnswer(answer.status, self._here(content))

    async def _here(self, events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        # A generator that is at work cannot be closed: where the caller goes, what it waited for has to end first.
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
