"""The queue of rounds (parts of a step's rollouts) between engines and learner.

The engines generate at most one round ahead of the learner.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Protocol, TypeVar

from launch.processes.replacements import Replacement
from launch.processes.rounds import Round
from shared.protocols import PerRank
from shared.schedule import StepPlan
from shared.weight_sync.phases import ReceivingEngines

RoundT = TypeVar("RoundT")
DoneT = TypeVar("DoneT")
DoneT_co = TypeVar("DoneT_co", covariant=True)


class Handle(Protocol[DoneT_co]):
    """Handle of work in progress, such as a `Round` or a future."""

    def result(self) -> DoneT_co:
        """Wait for the work to end, and return its result."""


class Queue(Protocol):
    """Interface of functions that order generation and learning: `one_ahead`, `one_at_a_time`."""

    def __call__(
        self, submit: Callable[[RoundT], Handle[DoneT]], rounds: Iterable[RoundT], /
    ) -> Iterator[DoneT]: ...


def one_ahead(
    submit: Callable[[RoundT], Handle[DoneT]], rounds: Iterable[RoundT]
) -> Iterator[DoneT]:
    """Yield each round's rollouts while the engines already generate the next round.

    At most one round is generated while the consumer, the learner, uses another.

    `submit`: starts to generate a round and returns a handle whose `result()` waits for it.
    """
    pending = None
    for round_ in rounds:
        if pending is None:
            pending = submit(round_)
            continue
        # Wait before submitting the next round, so that no engine ever holds two.
        done = pending.result()
        pending = submit(round_)
        yield done
    if pending is not None:
        yield pending.result()


def one_at_a_time(
    submit: Callable[[RoundT], Handle[DoneT]], rounds: Iterable[RoundT]
) -> Iterator[DoneT]:
    """Yield each round's rollouts before the next is submitted: engines and learner alternate."""
    for round_ in rounds:
        yield submit(round_).result()


class GeneratingEngines(ReceivingEngines, Protocol):
    """The driver's interface to engines, or to environment actors that use engines.

    They generate rollouts, and receive weights.
    """

    version: int
    """The weight version that every engine uses; 0 before the first weight sync."""

    def split(self, requests: PerRank) -> list[PerRank]:
        """Cut a step's rollout requests into rounds, which are generated one after another."""

    def generate(self, round_: PerRank) -> Round: ...
    def pop_replaced(self) -> list[Replacement]:
        """Return the replacements of lost actors that became ready since the last call."""


class RoundStream:
    """Yields the finished rounds of rollouts of consecutive steps, which go through one queue.

    With several steps and `one_ahead`, the learner uses a step's last round while the engines
    already generate the first round of the next step.

    Example: steps 7 and 8 with two rounds each, and `one_ahead`; 7.1 is the first round of step 7.
    Submit 7.1, 7.2; yield 7.1; submit 8.1; yield 7.2, which ends step 7; submit 8.2; yield 8.1.
    While the learner uses 7.2, `_left` is [0, 2].
    """

    def __init__(
        self,
        queue: Queue,
        engines: GeneratingEngines,
        requests_of: Callable[[StepPlan], PerRank],
        steps: Iterable[StepPlan],
        ahead: Round | None = None,
    ) -> None:
        """Create the stream; `requests_of(step)` returns the requests of a step for rollouts.

        It is called once for each step, when the first round of the step can be submitted. `ahead`
        is the first round of the first step, if a checkpoint holds it; it is not generated again.
        """
        self._engines = engines
        self._requests_of = requests_of
        self._steps = steps
        self._ahead = [] if ahead is None else [ahead]
        self._left: list[int] = []
        """Number of rounds still to yield, for each step that has begun and not ended."""
        self._handles: deque[Round] = deque()
        """Rounds that were submitted but not yet yielded, at most two."""
        self._results = queue(self._submit_next, self._rounds())
        self._waited_s = 0.0

    @property
    def ahead(self) -> Future[PerRank] | None:
        """Future of the next step's first round, if that is generated ahead; else None.

        Read it only after all rounds of a step were yielded.
        """
        return self._handles[0].future if self._handles else None

    def of_next_step(self) -> Iterator[PerRank]:
        """Yield the rollouts of each round of the next step.

        Exhaust this iterator before you call the method for another step.
        """
        while not self._left or self._left[0]:
            started = time.perf_counter()
            try:
                done = next(self._results)
            except StopIteration:  # the last step, and it has no rounds
                break
            self._waited_s += time.perf_counter() - started
            assert self._left[0], "each of several consecutive steps has rounds"
            self._left[0] -= 1
            self._handles.popleft()
            yield done
        del self._left[0]

    def pop_wait_s(self) -> float:
        """Return the seconds that the learner waited for these rounds since the last call."""
        waited_s = self._waited_s
        self._waited_s = 0.0
        return waited_s

    def _submit_next(self, round_: PerRank | Round) -> Round:
        handle = round_ if isinstance(round_, Round) else self._engines.generate(round_)
        self._handles.append(handle)
        return handle

    def _rounds(self) -> Iterator[PerRank | Round]:
        ahead = self._ahead
        for step in self._steps:
            rounds = self._engines.split(self._requests_of(step))
            self._left.append(len(rounds) + len(ahead))
            yield from ahead
            yield from rounds
            ahead = []
