"""The page: how learner and rollout actors make one run (DESIGN 2)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from launch.telemetry import Telemetry
from shared.evaluation import Evaluation, Scene
from shared.reports import StepReport
from shared.schedule import RunSchedule, StepPlan
from shared.weight_sync import SendsWeights, TakesWeights, sync_weights

Queue = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]
"""`one_ahead` or `one_at_a_time`."""


class HoldsOut(Protocol):
    """Who has the held-out samples; requests and rollouts are references."""

    def held_out_requests(self, step: int) -> list[Any]: ...
    def score(self, done: Any) -> list[Scene]: ...


class DrivesLearner(HoldsOut, SendsWeights, Protocol):
    """The learner as the driver sees it; requests and rollouts are references."""

    def next_requests(self, plan: StepPlan) -> list[Any]: ...
    def accumulate(self, done: Any) -> None: ...
    def finish_step(self) -> StepReport: ...
    def save(self, folder: Path) -> None: ...


class DrivesRollouts(TakesWeights, Protocol):
    """The rollout actors as the driver sees them."""

    @property
    def version(self) -> int: ...
    def split(self, requests: list[Any]) -> list[list[Any]]: ...
    def generate(self, round_: list[Any]) -> Any: ...


def train(
    learner: DrivesLearner, rollouts: DrivesRollouts, schedule: RunSchedule, queue: Queue, telemetry: Telemetry, *, checkpoint: Path | None = None
) -> None:
    """Every step of the run. Nothing is generated between a step's update and the sync that follows it. None: no checkpoint."""
    telemetry.sync(sync_weights(learner, rollouts))
    for plan in schedule.plans():
        if plan.evaluate_before:
            telemetry.evaluation(evaluate(learner, rollouts, plan.step, queue))
        with telemetry.step(plan) as record:
            rounds = rollouts.split(learner.next_requests(plan))
            for done in queue(rollouts.generate, rounds):
                learner.accumulate(done)
            record.report = learner.finish_step()
            if plan.sync_after:
                record.sync = sync_weights(learner, rollouts)
    if checkpoint is not None:
        # Before the last report: what can go wrong there must not cost the run.
        learner.save(checkpoint)
        telemetry.saved(checkpoint)
    if schedule.evaluates_before(schedule.max_steps):
        telemetry.evaluation(evaluate(learner, rollouts, schedule.max_steps, queue))


def evaluate(held_out: HoldsOut, rollouts: DrivesRollouts, step: int, queue: Queue) -> Evaluation:
    """What the actors find on the held-out samples with the weights that they serve now."""
    scenes: list[Scene] = []
    started_s = time.monotonic()
    for done in queue(rollouts.generate, rollouts.split(held_out.held_out_requests(step))):
        scenes += held_out.score(done)
    return Evaluation(step, rollouts.version, tuple(scenes), wall_s=time.monotonic() - started_s)
