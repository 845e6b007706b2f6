"""An algorithm: which rollouts a step asks for, and which segments their answers become."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from learner.segments import Segment
from learner.step_metrics import StepMetrics
from shared.records import ImageRef
from shared.rollouts import Rollout
from shared.run_files import Span
from shared.schedule import StepPlan
from shared.trajectory import EnvironmentRollout


class AlgorithmStep(Protocol):
    """One rank's part of one step: what it asks for, and what is learned of the answers.

    Everything is in the order of positions. What becomes of the answers is counted in `metrics`.

    Example (rollout matching, channel B, positions 4..7): `requests()` -> 4 RolloutRequests;
    `segments(2 rollouts)` twice -> 2 Segments each; `ground_truth()` -> nothing.
    """

    @property
    def plan(self) -> StepPlan: ...
    @property
    def metrics(self) -> StepMetrics: ...

    def requests(self) -> list[Any]:
        """Return the requests to the engines or environments; none on channel A."""
        ...

    def become_current(self) -> None:
        """Note that no earlier step is in progress any more."""
        ...

    def generation_spans(self, answers: Sequence[Any]) -> list[Span]:
        """Return who generated these answers, and when."""
        ...

    def segments(self, answers: Sequence[Any], *, version: int) -> Iterator[Segment]:
        """Yield the segments of the next answers; `version` is of the weights that learn.

        Raises RolloutError where engine and learner disagree.
        """
        ...

    def ground_truth(self) -> Iterator[Segment]:
        """Yield the segments that need no answers: all of a channel-A step, none of others."""
        ...

    def require_complete(self) -> None:
        """Check that every position was answered, before the rows of `finish_step`.

        Raises RolloutError where nothing came of any, on any rank: every rank calls it once.
        """
        ...


class Algorithm(Protocol):
    """The source of a rank's steps. Every rank has the same one, and takes its share."""

    @property
    def fixed(self) -> Segment:
        """A segment that stays the same.

        Every weight sync is proved by it, and a rank without a row runs it beside the others.
        """
        ...

    @property
    def fixed_images(self) -> tuple[ImageRef, ...]:
        """The images of the fixed segment's prompt."""
        ...

    def begin_step(self, plan: StepPlan, metrics: StepMetrics) -> AlgorithmStep:
        """Draw the step's samples or examples."""
        ...

    def held_out_requests(self, step: int) -> list[Any]:
        """Return this rank's share of the held-out requests, in order."""
        ...

    def score(self, answers: Sequence[Any]) -> list[Any]:
        """Score the answers to them: `shared.grounding.evaluation.Outcome`s, in order."""
        ...

    def require_same(self) -> None:
        """Raise ConfigError where the ranks do not have the same data. A collective."""
        ...

    def close(self) -> None:
        """End the log of rollouts."""
        ...


def generation_span(
    actor: str,
    name: str,
    step: int,
    rollouts: Sequence[Rollout] | Sequence[EnvironmentRollout],
    **counts: int,
) -> Span:
    """Return from when to when `actor` generated these rollouts, for the timeline."""
    start_s = min(rollout.started_s for rollout in rollouts)
    end_s = max(rollout.started_s + rollout.generate_s for rollout in rollouts)
    first = rollouts[0].position
    last = rollouts[-1].position
    args = {"step": step, "first_position": first, "last_position": last, **counts}
    return Span(actor, name, start_s, end_s, args)
