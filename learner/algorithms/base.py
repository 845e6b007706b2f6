"""Interface of a training algorithm: the rollouts a step requests, and the segments made of them.

A thread (`Ahead`) prepares prompts and targets. They do not need the weights, and the results do
not depend on when they are made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, TypeVar

from learner.rollout_logs.writer import StepLog
from learner.segments import Segment
from learner.step_metrics import StepMetrics
from shared.grounding.evaluation import Outcome
from shared.records import ImageRef
from shared.rollouts import Rollout
from shared.run_files import Span
from shared.schedule import StepPlan
from shared.trajectory import EnvironmentRollout

S = TypeVar("S")
T = TypeVar("T")

NUM_AHEAD = 16
"""Number of items prepared in advance: twice the default of `training.packing_window`.
A prompt with an image of one megapixel takes 25 MB.
"""


class AlgorithmStep(ABC):
    """One rank's part of one step: its requests, and the segments made from the answers.

    Everything is in the order of positions. The step counts its answers in `metrics`.

    Example (rollout matching, channel B, positions 4..7): `requests()` -> 4 RolloutRequests;
    `segments(2 rollouts)` twice -> 2 Segments each; `ground_truth()` -> nothing.
    """

    def __init__(self, plan: StepPlan, metrics: StepMetrics) -> None:
        self.plan = plan
        self.metrics = metrics

    def requests(self) -> list[Any]:
        """Return the requests to the engines or environments. Channel A has no requests."""
        return []

    def generation_spans(self, answers: Sequence[Any]) -> list[Span]:  # noqa: ARG002
        """Return which actors generated these answers, and when, as timeline spans."""
        return []

    def segments(self, answers: Sequence[Any], *, version: int) -> Iterator[Segment]:  # noqa: ARG002
        """Yield the segments of the next answers. `version` is the learner's weight version.

        Raises RolloutError if engine and learner disagree.
        """
        return iter(())

    def ground_truth(self) -> Iterator[Segment]:
        """Yield the segments that need no answers: all segments of a step on channel A."""
        return iter(())

    @abstractmethod
    def require_complete(self) -> None:
        """Check that every position was answered. `finish_step` calls it before its last rows.

        Raises RolloutError if all rollouts of all ranks failed. A collective: every rank calls it.
        """


class Algorithm(ABC):
    """The source of a rank's steps. Every rank has the same algorithm and takes its share."""

    fixed: Segment
    """A segment that stays the same for the whole run.

    It is the canary of weight syncs. A rank without a row runs it while other ranks run theirs.
    """
    fixed_images: tuple[ImageRef, ...] = ()
    """The images of the fixed segment's prompt."""

    def __init__(self, log: StepLog | None = None) -> None:
        """`log` receives the rollouts. None: rollouts are not logged."""
        self.log = log
        self.ahead = Ahead()

    @abstractmethod
    def begin_step(self, plan: StepPlan, metrics: StepMetrics) -> AlgorithmStep:
        """Draw the step's samples or examples, and return the step."""

    @abstractmethod
    def move_to(self, num_samples: int) -> None:
        """Continue after the first `num_samples` of the run, which earlier steps drew."""

    @abstractmethod
    def fingerprints(self) -> dict[str, str]:
        """Return digests of the data, by configuration key."""

    def held_out_requests(self, step: int) -> list[Any]:  # noqa: ARG002
        """Return this rank's share of the held-out requests, in order."""
        return []

    def score(self, answers: Sequence[Any]) -> Sequence[Outcome]:  # noqa: ARG002
        """Score the answers to the held-out requests, in order."""
        return []

    def require_same(self) -> None:  # noqa: B027 - environments have their data elsewhere
        """Raise ConfigError if the ranks do not have the same data. A collective."""

    def close(self) -> None:
        """Stop the preparing thread and close the log of rollouts."""
        self.ahead.close()
        if self.log is not None:
            self.log.close()


def generation_span(
    actor: str,
    name: str,
    step: int,
    rollouts: Sequence[Rollout] | Sequence[EnvironmentRollout],
    **counts: int,
) -> Span:
    """Return the timeline span of `actor` generating these rollouts."""
    start_s = min(rollout.started_s for rollout in rollouts)
    end_s = max(rollout.started_s + rollout.generate_s for rollout in rollouts)
    first = rollouts[0].position
    last = rollouts[-1].position
    args = {"step": step, "first_position": first, "last_position": last, **counts}
    return Span(actor, name, start_s, end_s, args)


class Ahead:
    """A thread that prepares items in order while the learner's thread works."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prepare-rows")

    def map(self, prepare: Callable[[S], T], items: Iterable[S]) -> Iterator[T]:
        """Return `map(prepare, items)`, and start to prepare the first items immediately.

        An exception of `prepare` is raised by the `next` that asks for this item.

        Example:
            `prompts = ahead.map(encoder.encode, samples)` starts to encode 16 prompts.
            `next(prompts)` returns the first one and submits the 17th.
        """
        waiting = iter(items)
        pending = deque(self._thread.submit(prepare, item) for item in islice(waiting, NUM_AHEAD))
        return self._in_order(prepare, pending, waiting)

    def _in_order(
        self, prepare: Callable[[S], T], pending: deque[Future[T]], waiting: Iterator[S]
    ) -> Iterator[T]:
        # A separate generator, because `map` has to submit items before the first `next`.
        try:
            while pending:
                result = pending.popleft().result()
                pending.extend(self._thread.submit(prepare, item) for item in islice(waiting, 1))
                yield result
        finally:  # also if the step is abandoned
            for future in pending:
                future.cancel()

    def close(self) -> None:
        """Stop the thread and cancel the items that it has not begun."""
        self._thread.shutdown(wait=False, cancel_futures=True)
