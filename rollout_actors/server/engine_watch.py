"""Detection of a stuck engine in a rollout server that still answers HTTP calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from rollout_actors.server.service import RolloutService
from shared.errors import RolloutError

QUIET_S = 5.0
"""Seconds without a sampled token until a test call checks whether the engine is alive."""


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
