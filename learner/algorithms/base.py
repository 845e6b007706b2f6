"""What a learner rank learns from, whatever it is: samples with ground truth
(`learner.algorithms.rollout_matching`), or trajectories (`learner.algorithms.trajectories`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from learner.segments import Segment
from learner.step_metrics import StepMetrics
from shared.records import ImageRef
from shared.run_files import Span
from shared.schedule import StepPlan


class AlgorithmStep(Protocol):
    """One rank's part of one step. Everything is in the order of positions."""

    def requests(self) -> list[Any]:
        """What the rollout engines, or the environments before them, are asked for; nothing on
        channel A.
        """
        ...

    def become_current(self) -> None:
        """No step before this one is in progress any more."""
        ...

    def generation_spans(self, answers: Sequence[Any]) -> list[Span]:
        """Who generated these answers, and when."""
        ...

    def segments(self, answers: Sequence[Any], *, version: int) -> Iterator[Segment]:
        """What is learned of the next answers. `version` is of the weights that learn. RolloutError
        where engine and learner disagree.
        """
        ...

    def ground_truth(self) -> Iterator[Segment]:
        """What is learned without answers: all of a channel-A step, nothing of others."""
        ...

    def require_complete(self) -> None:
        """Every position has had its turn. RolloutError where nothing came of any, on any rank.
        Perhaps a collective: every rank calls it once in a step, before it learns the rows of
        `finish_step`."""
        ...


class Algorithm(Protocol):
    """Where a rank's steps come from. Every rank has the same, and takes its share."""

    @property
    def fixed(self) -> Segment:
        """A sequence that stays the same: every weight sync is proved by it, and a rank without a
        row computes it beside the others' rows.
        """
        ...

    @property
    def fixed_images(self) -> tuple[ImageRef, ...]:
        """Of its prompt."""
        ...

    def begin_step(self, plan: StepPlan, tally: StepMetrics) -> AlgorithmStep:
        """Draw the step's samples or examples; what becomes of them is counted in `tally`."""
        ...

    def held_out_requests(self, step: int) -> list[Any]:
        """This rank's share of them, in order."""
        ...

    def score(self, answers: Sequence[Any]) -> list[Any]:
        """What the answers to them are worth: `shared.grounding.evaluation.Outcome`s, in order."""
        ...

    def require_same(self) -> None:
        """ConfigError where the ranks do not have the same data. A collective."""
        ...

    def close(self) -> None:
        """End the log of rollouts."""
        ...
