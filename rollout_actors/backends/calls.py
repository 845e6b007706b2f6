"""The queue of an environment's model calls to the engine, between two threads of one process.

    rollouts, on an event loop  -- generate -->  EngineCalls  -- take -->  the learner's thread
                                <-------------- answer -----------------   with the engine

This module imports neither torch nor vllm, because environments import it too.
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
"""Seconds to wait for a model call until the engine's thread checks whether the run is ending."""
QUIET_S = 1.0
"""Seconds without a new model call after which the waiting calls are answered together."""


class ServingBackend(RolloutBackend, Protocol):
    """A backend in a learner rank's process that also answers an environment's model calls."""

    def serve(self, calls: EngineCalls, begin: Callable[[], None]) -> None:
        """Answer model calls until the environment's round (a set of rollouts) ends.

        Raises RolloutError. If the run is ending, the learner rank raises its own exception here.

        `begin`: called once, when the backend is ready to answer calls.
        """
        ...


@dataclass(eq=False, slots=True)
class Asker:
    """Counts the unanswered model calls of one rollout, to know whether it may make another call.

    A rollout that is done, or that waits for an answer, is not expected to make another call: it is
    not at work.
    Example: a rollout that awaits two calls at once has `num_waiting` 2, and is not at work.
    """

    num_waiting: int = 0
    """Number of the rollout's model calls that have no answer yet."""
    is_done: bool = False

    @property
    def is_at_work(self) -> bool:
        return not self.is_done and self.num_waiting == 0


ASKERS: ContextVar[list[Asker] | None] = ContextVar("askers", default=None)
"""List to which an environment adds an `Asker` for each rollout that it begins; None: no list."""
ASKER: ContextVar[Asker | None] = ContextVar("asker", default=None)
"""The `Asker` of the rollout that the current task works for; None: no rollout is tracked."""


@dataclass(eq=False, slots=True)
class Call:
    """One model call of an environment: a request that waits for its answer."""

    request: RolloutRequest
    answer: asyncio.Future[Rollout]
    asker: Asker | None
    started: StartTime = field(default_factory=StartTime.now)
    is_counted: bool = False
    """Whether `asker.num_waiting` counts this call."""

    @property
    def is_given_up(self) -> bool:
        """Return whether the environment's rollout was cancelled, so that no answer is needed."""
        return self.answer.cancelled()


class EngineCalls:
    """The queue of an environment's model calls to the engine in the same process.

    An environment's thread calls `generate`, and the engine's thread takes and answers the calls.
    Calls are accepted only during a round (rollouts that are requested together): between `open`
    and `close`.
    """

    def __init__(self, name: str) -> None:
        """`name` is the engine's name, for errors."""
        self._name = name
        # Thread-safe: rollouts call on their event loop, and the learner's thread answers.
        self._queue: SimpleQueue[Call] = SimpleQueue()
        # Both threads count the waiting calls.
        self._lock = threading.Lock()
        self.is_open = False
        """Whether a round is running, so that calls are answered."""
        self.askers: list[Asker] = []
        """One for each rollout of the round, if the round's task has set `ASKERS` to this list."""

    def open(self) -> None:
        """Begin a round of rollouts: from now on, model calls are accepted."""
        self.askers = []
        self.take()  # drop what an earlier round left
        self.is_open = True

    def close(self) -> None:
        """End the round of rollouts: from now on, model calls are refused.

        Closing a closed queue has no effect.
        """
        self.is_open = False

    # Methods for the event loop

    def __len__(self) -> int:
        return 1

    async def generate(self, engine: int, request: RolloutRequest) -> Rollout:  # noqa: ARG002
        """Queue a request for the engine and wait for its rollout, without a time limit.

        Raises the engine's RolloutError, or a RolloutError if no round is running.
        """
        if not self.is_open:
            message = f"sample {request.sample_id} was requested outside of a round of rollouts"
            raise RolloutError(message, actor=self._name, phase="generate")
        asker = ASKER.get()
        call = Call(request, asyncio.get_running_loop().create_future(), asker)
        with self._lock:
            # In this order: a thread that sees the rollout wait must also find the call.
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

    # Methods for the engine

    def take(self, *, wait_s: float = 0.0) -> list[Call]:
        """Return the queued calls. Wait at most `wait_s` seconds for the first one."""
        calls: list[Call] = []
        with suppress(Empty):
            if wait_s:
                calls.append(self._queue.get(timeout=wait_s))
            while True:
                calls.append(self._queue.get_nowait())
        return calls

    def take_together(self, raise_if_stopping: Callable[[], None]) -> list[Call]:
        """Wait until no rollout of the environment can add a call, and return all queued calls.

        Return an empty list if the round has ended. The calls are sorted by `request.position`, so
        that a round always has the same batches. The wait also ends after `QUIET_S` without a new
        call.
        """
        calls: list[Call] = []
        changed_s = time.monotonic()
        while self.is_open:
            raise_if_stopping()
            is_quiet = time.monotonic() - changed_s >= QUIET_S
            # Checked before the queue is read.
            is_ready = bool(calls) and (is_quiet or not any(one.is_at_work for one in self.askers))
            if new := self.take(wait_s=0.0 if is_ready else POLL_S):
                calls += new
                changed_s = time.monotonic()
            # A cancelled rollout would take a place in the batch for nothing.
            calls = [call for call in calls if not call.is_given_up]
            if is_ready and calls:
                return sorted(calls, key=lambda call: (call.request.position, call.request.seed))
        return []

    def answer(self, answers: Sequence[tuple[Call, Rollout | RolloutError]]) -> None:
        """Return to each waiting call its rollout, or raise the given error in the call."""
        # Counted here and not at delivery, because the next batch waits for the next calls of these
        # rollouts. All at once: when the first rollout calls again, the others are at work.
        self._waits_no_more([call for call, _ in answers])
        # A future may only be set in the thread of its event loop.
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Call, Rollout | RolloutError]]] = {}
        for call, answer in answers:
            by_loop.setdefault(call.answer.get_loop(), []).append((call, answer))
        for loop, of_loop in by_loop.items():
            with suppress(RuntimeError):  # the loop is closed, so no task waits
                loop.call_soon_threadsafe(self._deliver, of_loop)

    @staticmethod
    def _deliver(answers: Sequence[tuple[Call, Rollout | RolloutError]]) -> None:
        for call, answer in answers:
            # Cancelled in the meantime: setting it would raise, and drop the other answers.
            if call.answer.done():
                continue
            if isinstance(answer, RolloutError):
                call.answer.set_exception(answer)
            else:
                call.answer.set_result(answer)
