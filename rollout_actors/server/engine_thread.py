"""The engine of a rollout server in its own thread, with its own event loop.

The server's own event loop can answer `/health/` while the engine loads or decodes images.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import TypeVar

from rollout_actors.server.service import ServedEngine
from shared.protocols import CLOSED_S
from shared.rollouts import Rollout, RolloutRequest, SyncReport, WeightOffer
from shared.tokens.repeat_guard import RepeatGuardSettings
from shared.weight_sync.phases import SyncPhase

T = TypeVar("T")


class EngineThread:
    """A rollout server's engine (`ServedEngine`) that works in its own thread.

    Call its methods from the server's event loop; cancelling a call cancels the work. `start` makes
    the engine inside the thread, because it may import vllm for seconds.
    """

    def __init__(self, make_engine: Callable[[], ServedEngine]) -> None:
        self._make_engine = make_engine
        self._engine: ServedEngine | None = None
        self._loop = asyncio.new_event_loop()
        # A daemon thread, so that a stuck engine does not keep the process alive.
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
        self._thread.start()

    async def start(self) -> int:
        async def start_in_thread() -> int:
            self._engine = self._make_engine()
            return await self._engine.start()

        return await self._in_thread(start_in_thread())

    async def guard_by(self, settings: RepeatGuardSettings | None) -> None:
        await self._in_thread(self._started.guard_by(settings))

    async def check_alive(self) -> None:
        await self._in_thread(self._started.check_alive())

    async def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        return await self._in_thread(self._started.generate(requests))

    async def run_sync_phase(self, phase: SyncPhase, offer: WeightOffer) -> SyncReport | None:
        return await self._in_thread(self._started.run_sync_phase(phase, offer))

    # Read without the thread, so that a stuck engine does not delay `/health/`.

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
        return self._started.why_dead

    def close(self, within_s: float = CLOSED_S) -> None:
        """Shut down the engine and wait at most `within_s` seconds for the end of its thread.

        A second call has no effect.
        """
        # Cleared first, so that later calls see that the engine is not running.
        engine = self._engine
        self._engine = None
        if engine is not None:
            self._loop.call_soon_threadsafe(engine.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(within_s)

    @property
    def _started(self) -> ServedEngine:
        assert self._engine is not None, "start comes first"
        return self._engine

    async def _in_thread(self, work: Coroutine[object, None, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
