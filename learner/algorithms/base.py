"""Interface of a training algorithm: which rollouts a step requests, and what it learns from them.

A thread (`Ahead`) prepares prompts and targets in advance. They do not depend on the weights or on
the time at which they are prepared.
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
"""Number of prompts or targets that a thread prepares in advance.

It is twice the default of `training.packing_window`. A prompt with an image of one megapixel takes
25 MB of host memory.
"""


class AlgorithmStep(ABC):
    """One learner rank's part of one training step: requests for rollouts, and segments to learn.

    Requests, rollouts and segments are in the order of their positions. The step counts its
    rollouts in `metrics`.

    Example (rollout matching, channel B, positions 4..7): `requests()` -> 4 RolloutRequests;
    `segments(2 rollouts)` twice -> 2 Segments each; `ground_truth()` -> nothing.
    """

    def __init__(self, plan: StepPlan, metrics: StepMetrics) -> None:
        self.plan = plan
        self.metrics = metrics

    def requests(self) -> list[Any]:
        """Return the step's requests for rollouts; an empty list on channel A (supervised)."""
        return []

    def generation_spans(self, answers: Sequence[Any]) -> list[Span]:  # noqa: ARG002
        """Return timeline spans that show which actors generated these rollouts, and when."""
        return []

    def segments(self, answers: Sequence[Any], *, version: int) -> Iterator[Segment]:  # noqa: ARG002
        """Yield the segments to learn from the next rollouts (`answers`) of the step.

        `version` is the learner's weight version. Raises RolloutError if an engine used other
        prompt tokens or other weights than the learner expects.
        """
        return iter(())

    def ground_truth(self) -> Iterator[Segment]:
        """Yield the segments that are made from the ground truth, without rollouts (channel A)."""
        return iter(())

    @abstractmethod
    def require_complete(self) -> None:
        """Check that the step has received a rollout for every position.

        Raises RolloutError if all rollouts of all ranks failed. A collective: all ranks call it
        together.
        """


class Algorithm(ABC):
    """Decides for one learner rank what each step requests from engines, and what it learns.

    All ranks draw the same samples, and each keeps its share of them.
    """

    fixed: Segment
    """A segment that stays the same for the whole run.

    Weight syncs use it as the canary. In a sharded model, a rank that has no packed row left runs
    it while other ranks train their rows.
    """
    fixed_images: tuple[ImageRef, ...] = ()
    """The images of the fixed segment's prompt."""

    def __init__(self, log: StepLog | None = None) -> None:
        """`log` is the rollout log to write to; None: rollouts are not logged."""
        self.log = log
        self.ahead = Ahead()

    @abstractmethod
    def begin_step(self, plan: StepPlan, metrics: StepMetrics) -> AlgorithmStep:
        """Draw the samples (or environment examples) of the step that `plan` describes."""

    @abstractmethod
    def move_to(self, num_samples: int) -> None:
        """Skip the first `num_samples` samples, which the run drew before it was resumed."""

    @abstractmethod
    def fingerprints(self) -> dict[str, str]:
        """Return digests of the data, by configuration key. They must be equal in a resumed run."""

    def held_out_requests(self, step: int) -> list[Any]:  # noqa: ARG002
        """Return this rank's requests of the held-out evaluation after `step` steps, in order."""
        return []

    def score(self, answers: Sequence[Any]) -> Sequence[Outcome]:  # noqa: ARG002
        """Score the answers to the held-out requests; return one outcome per sample, in order."""
        return []

    def require_same(self) -> None:  # noqa: B027 - environments have their data elsewhere
        """Raise ConfigError if the learner ranks have read different data. A collective."""

    def close(self) -> None:
        """Stop the thread that prepares prompts and targets, and close the rollout log."""
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
    """Return a timeline span: when `actor` generated these rollouts of `step`.

    `counts`: further numbers to show at the span.
    """
    start_s = min(rollout.started_s for rollout in rollouts)
    end_s = max(rollout.started_s + rollout.generate_s for rollout in rollouts)
    first = rollouts[0].position
    last = rollouts[-1].position
    args = {"step": step, "first_position": first, "last_position": last, **counts}
    return Span(actor, name, start_s, end_s, args)


class Ahead:
    """A thread that prepares prompts and targets in order, while the learner trains."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prepare-rows")

    def map(self, prepare: Callable[[S], T], items: Iterable[S]) -> Iterator[T]:
        """Return an iterator like `map(prepare, items)`; a thread computes its items in advance.

        The thread starts with the first `NUM_AHEAD` items immediately. An exception of `prepare` is
        raised when the iterator reaches the item that caused it.

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
        """Stop the thread. Items that it has not begun are never prepared."""
        self._thread.shutdown(wait=False, cancel_futures=True)
