"""Calls of an environment to the engine in another thread of its process, and their answers.

    rollouts, on an event loop  -- generate -->  EngineCalls  -- take -->  the learner's thread
                                <-------------- answer -----------------   with the engine

No torch and no vllm here: environments import this module too.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Protocol

from rollout_actors.engine.completion import StartTime
from shared.errors import RolloutError
from shared.protocols import RolloutBackend
from shared.rollouts import Rollout, RolloutRequest

POLL_S = 0.02
"""Longest wait for a call before the engine's thread looks whether the run is ending."""
QUIET_S = 1.0
"""Without a new call for so long, those that wait are answered though others may still come."""


class ServingBackend(RolloutBackend, Protocol):
    """A backend in the learner's process that also answers single calls, as they come."""

    def serve(self, calls: EngineCalls, begin: Callable[[], None]) -> None:
        """Answer calls while they are open. Raises what the host raises, and RolloutError.

        Args:
            begin: called once, as soon as calls would be answered.
        """
        ...


@dataclass(eq=False, slots=True)
class Asker:
    """A rollout that may ask the model, as an engine sees it that waits for all such rollouts.

    Example: one that awaits two calls at once has `num_waiting` 2, and is not at work.
    """

    num_waiting: int = 0
    """Calls of it that have no answer yet."""
    is_done: bool = False

    @property
    def is_at_work(self) -> bool:
        return not self.is_done and self.num_waiting == 0


ASKERS: ContextVar[list[Asker] | None] = ContextVar("askers", default=None)
"""Where `generate` notes the rollouts that it begins; None: nobody wants to know."""
ASKER: ContextVar[Asker | None] = ContextVar("asker", default=None)
"""The noted rollout that a task belongs to, also through rollouts inside it."""


@dataclass(eq=False, slots=True)
class Call:
    """One request that waits for its rollout."""

    request: RolloutRequest
    answer: asyncio.Future[Rollout]
    asker: Asker | None
    started: StartTime = field(default_factory=StartTime.now)
    is_counted: bool = False
    """Whether it is one of its asker's `num_waiting`."""

    @property
    def is_given_up(self) -> bool:
        """Its rollout was cancelled, so nobody reads an answer."""
        return self.answer.cancelled()


class EngineCalls:
    """The calls of an environment to the engine of its process, round by round.

    To environments it is the `Engines` of the run, of which there is one.
    """

    def __init__(self, name: str) -> None:
        """`name`: the engine's, for errors."""
        self._name = name
        # Thread-safe: rollouts ask on their event loop, the engine answers in the learner's thread.
        self._queue: SimpleQueue[Call] = SimpleQueue()
        # Both threads count the calls that wait.
        self._lock = threading.Lock()
        self.is_open = False
        """Whether a round is under way, in which calls are answered."""
        self.askers: list[Asker] = []
        """The rollouts of the round, noted where its task has set `ASKERS` to this list."""

    def open(self) -> None:
        """Begin a round."""
        self.askers = []
        self.take()  # what an earlier one has left behind
        self.is_open = True

    def close(self) -> None:
        """End the round. Twice is harmless."""
        self.is_open = False

    # The event loop's side

    def __len__(self) -> int:
        return 1

    async def generate(self, engine: int, request: RolloutRequest) -> Rollout:  # noqa: ARG002
        """Ask the engine. The driver's limit of the round is the only one.

        Raises RolloutError: the engine's own, or where no round is under way.
        """
        if not self.is_open:
            message = f"sample {request.sample_id} was asked for outside of a round"
            raise RolloutError(message, actor=self._name, phase="generate")
        asker = ASKER.get()
        call = Call(request, asyncio.get_running_loop().create_future(), asker)
        with self._lock:
            # In this order: whoever sees its rollout wait finds the call.
            self._queue.put(call)
            if asker is not None:
                asker.num_waiting += 1
                call.is_counted = True
        try:
            return await call.answer
        except asyncio.CancelledError:
            self._waits_no_more([call])
            raise

    def _waits_no_more(self, calls: Sequence[Call]) -> None:
        with self._lock:
            for call in calls:
                if call.asker is not None and call.is_counted:
                    call.asker.num_waiting -= 1
                    call.is_counted = False

    # The engine's side

    def take(self, *, wait_s: float = 0.0) -> list[Call]:
        """Return the calls that have come; `wait_s`: the longest wait for the first of them."""
        calls: list[Call] = []
        with suppress(Empty):
            if wait_s:
                calls.append(self._queue.get(timeout=wait_s))
            while True:
                calls.append(self._queue.get_nowait())
        return calls

    def take_together(self, raise_if_stopping: Callable[[], None]) -> list[Call]:
        """Return all calls as soon as no rollout may add one; none: the round is over.

        They are in the order of positions: a round has the same batches, however long each rollout
        is at work. Where one is for `QUIET_S`, or waits for another, the batch begins without it.
        """
        calls: list[Call] = []
        changed_s = time.monotonic()
        while self.is_open:
            raise_if_stopping()
            is_quiet = time.monotonic() - changed_s >= QUIET_S
            # Asked before the queue is.
            is_ready = bool(calls) and (is_quiet or not any(one.is_at_work for one in self.askers))
            if new := self.take(wait_s=0.0 if is_ready else POLL_S):
                calls += new
                changed_s = time.monotonic()
            # A cancelled rollout's place in the batch would be decoded for nothing.
            calls = [call for call in calls if not call.is_given_up]
            if is_ready and calls:
                return sorted(calls, key=lambda call: (call.request.position, call.request.seed))
        return []

    def answer(self, answers: Sequence[tuple[Call, Rollout | RolloutError]]) -> None:
        """Give these calls their rollouts, or the reasons why they have none."""
        # Here, not when they are delivered: the next batch waits for what these rollouts ask next.
        # All at once: when the first of them asks again, the others are at work.
        self._waits_no_more([call for call, _ in answers])
        # A future belongs to its event loop: another thread may not set it.
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Call, Rollout | RolloutError]]] = {}
        for call, answer in answers:
            by_loop.setdefault(call.answer.get_loop(), []).append((call, answer))
        for loop, of_loop in by_loop.items():
            with suppress(RuntimeError):  # it was closed, and nobody waits on it
                loop.call_soon_threadsafe(self._deliver, of_loop)

    @staticmethod
    def _deliver(answers: Sequence[tuple[Call, Rollout | RolloutError]]) -> None:
        for call, answer in answers:
            # Cancelled since: to set it would raise, and the other answers would be lost.
            if call.answer.done():
                continue
            if isinstance(answer, RolloutError):
                call.answer.set_exception(answer)
            else:
                call.answer.set_result(answer)
