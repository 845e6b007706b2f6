"""The engine of a rollout server: its own thread and event loop, and a check that it is not stuck.

The server's own event loop can answer `/health/` while the engine loads or decodes images, or
while it is stuck.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TypeVar

from rollout_actors.server.service import RolloutService, ServedEngine
from shared.errors import RolloutError
from shared.protocols import CLOSED_S
from shared.rollouts import Rollout, RolloutRequest, SyncReport, WeightOffer
from shared.tokens.repeat_guard import RepeatGuardSettings
from shared.weight_sync.phases import SyncPhase

T = TypeVar("T")

QUIET_S = 5.0
"""Seconds without a sampled token until a test call checks whether the engine is alive."""


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


class EngineWatch:
    """Detects that a rollout server's engine neither samples tokens nor answers test calls.

    An engine can answer a test call between any two of its steps. In two phases of a weight sync
    (`rendezvous` and `wire`) the engine waits for other processes. That time does not count; the
    sync has limits for it. An engine that answers but schedules no requests is detected only by the
    clients that wait for tokens.
    """

    def __init__(
        self,
        service: RolloutService,
        limit_s: float | None,
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`limit_s`: permitted seconds without a token or an answer; None: nothing is checked."""
        self._service = service
        self._limit_s = limit_s
        self._clock_s = clock_s
        self._looked_s = self._alive_s = clock_s()
        self._num_tokens = 0
        self._answer: asyncio.Task[None] | None = None

    def look(self) -> None:
        """Raise RolloutError if the engine has been stuck for longer than the limit.

        Does not wait. Call it in the server's event loop at least once per second.
        """
        limit_s = self._limit_s
        if limit_s is None or not self._service.is_up:
            return
        engine = self._service.engine
        now_s = self._clock_s()
        away_s = now_s - self._looked_s
        self._looked_s = now_s
        has_answered = self._answer is not None and self._answer.done()
        if has_answered:
            assert self._answer is not None
            # An error counts as an answer. Other code reports the error of a dead engine.
            self._answer.exception()
            self._answer = None
        num_tokens = engine.num_tokens
        if num_tokens != self._num_tokens or has_answered:
            self._num_tokens = num_tokens
            self._alive_s = now_s
        # The engine waited for other processes, or this process did not run (for example it was
        # stopped). Such time does not count. It is not a sign of life either: otherwise repeated
        # failing syncs would hide a stuck engine forever.
        elif away_s > QUIET_S or self._service.num_joined:
            self._alive_s += away_s
        quiet_s = now_s - self._alive_s
        # One question at a time, because a stuck engine would collect them without limit.
        if quiet_s >= QUIET_S and self._answer is None:
            self._answer = asyncio.create_task(engine.check_alive())
        if quiet_s >= limit_s:
            raise RolloutError(
                f"the engine has sampled no token and answered nothing for stall_s = {limit_s:g} s;"
                " check whether its process or the GPU hangs, and start the server again; if one"
                " step of the engine takes that long, raise stall_s",
                actor=self._service.name,
                phase="serve",
            )
