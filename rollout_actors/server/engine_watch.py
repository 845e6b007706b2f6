"""A look at the engine behind a server that still answers, which may be stuck."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from rollout_actors.server.service import RolloutService
from shared.errors import RolloutError

QUIET_S = 5.0
"""Seconds without a token after which the engine is asked whether it is alive."""


class EngineWatch:
    """Notices an engine that neither samples nor answers.

    An engine answers between two steps, so it may be asked whatever it is doing. Time does not
    count in which it waits for others: in two phases of a sync, within limits of the offer. One
    that answers and schedules nothing is not noticed here, only by who waits for its tokens.
    """

    def __init__(
        self,
        service: RolloutService,
        limit_s: float | None,
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`limit_s`: seconds without a sign of life; None: it is not watched."""
        self._service = service
        self._limit_s = limit_s
        self._clock_s = clock_s
        self._looked_s = self._alive_s = clock_s()
        self._num_tokens = 0
        self._answer: asyncio.Task[None] | None = None

    def look(self) -> None:
        """Look once, without waiting; in the server's loop, every second or sooner.

        Raises RolloutError where the limit is over.
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
            # An error is an answer; of an engine that is dead it is told elsewhere.
            self._answer.exception()
            self._answer = None
        num_tokens = engine.num_tokens
        if num_tokens != self._num_tokens or has_answered:
            self._num_tokens = num_tokens
            self._alive_s = now_s
        # It waits for others, or nobody looked, as where this process was stopped: that says
        # nothing of the engine. It is no sign of life either, or syncs that fail would hide for
        # good that it is stuck.
        elif away_s > QUIET_S or self._service.num_joined:
            self._alive_s += away_s
        quiet_s = now_s - self._alive_s
        # One question at a time: a stuck engine would collect them without an end.
        if quiet_s >= QUIET_S and self._answer is None:
            self._answer = asyncio.create_task(engine.check_alive())
        if quiet_s >= limit_s:
            raise RolloutError(
                f"the engine has sampled no token and answered nothing for stall_s = {limit_s:g} s;"
                " check whether its process or the GPU hangs, and start the server again; where one"
                " step of it takes that long, raise stall_s",
                actor=self._service.name,
                phase="serve",
            )
