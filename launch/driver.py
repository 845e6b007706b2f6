"""The run's loop: how learner and rollout engines make one run (decision 41).

One step of channel B with two rounds, pipelined; time runs to the right::

    learner  | requests |         | learn 1 | learn 2 | update | send weights    |
    engines             | round 1 | round 2 |                  | receive weights |

A step of channel A has no rounds: the learner learns the ground truth in `finish_step`. There it
also learns the rounds again, where `training.updates_per_batch` asks for more than one update.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from launch.pipeline import Queue, RoundStream
from launch.runtime.checkpoints import Checkpoints
from launch.runtime.learner_client import LearnerClient
from launch.runtime.replacements import Replacement
from launch.runtime.resume import ResumePoint
from launch.runtime.telemetry import Telemetry
from shared.errors import LostRoundError
from shared.grounding.evaluation import Evaluation
from shared.protocols import PerRank
from shared.schedule import RunSchedule, StepPlan
from shared.weight_sync.phases import ReceivingEngines, sync_weights


class HeldOutClient(Protocol):
    """The held-out samples as the driver sees them."""

    def held_out_requests(self, step: int) -> PerRank: ...
    def score(self, done: PerRank) -> list[Any]: ...


class GeneratingEngines(ReceivingEngines, Protocol):
    """The engines, or the environments before them, as the driver sees them."""

    version: int
    """The version that every engine serves; 0 before the first sync."""

    def split(self, requests: PerRank) -> list[PerRank]: ...
    def generate(self, round_: PerRank) -> Future[PerRank]: ...
    def pop_replaced(self) -> list[Replacement]:
        """Return the replacements that have joined since the last call."""


@dataclass(frozen=True, slots=True)
class _Round:
    """A round in production. Where everybody who could answer it is lost it is asked once more."""

    rollouts: GeneratingEngines
    requests: PerRank
    future: Future[PerRank]
    version: int
    """Version of the weights when it was submitted."""
    sync_again: Callable[[], None]
    """Sends the present weights once more, to new engines."""

    def result(self) -> PerRank:
        """Wait for the answers. The learner has to be idle: new engines may need its weights.

        Raises LostRoundError where the learner has no such weights any more, or for a second time.
        """
        try:
            return self.future.result()
        except LostRoundError as error:
            if self.rollouts.version != self.version:
                why = "and the weights that it was asked of are gone (max_staleness)"
                raise LostRoundError(
                    f"{error.message}; all are lost, {why}", actor=error.actor, phase=error.phase
                ) from error
        self.sync_again()
        try:
            return self.rollouts.generate(self.requests).result()
        except LostRoundError as error:
            raise LostRoundError(
                f"{error.message}; all are lost for the second time in a round",
                actor=error.actor,
                phase=error.phase,
            ) from error


def train(
    learner: LearnerClient,
    rollouts: GeneratingEngines,
    schedule: RunSchedule,
    queue: Queue,
    telemetry: Telemetry,
    checkpoints: Checkpoints,
    point: ResumePoint | None = None,
) -> None:
    """Run every step, of a resumed run those behind its point.

    Engines take weights while nothing is generated: `sync_weights` first waits
    (`RolloutClient.wait_idle`) for a round that `max_staleness` lets run beside an update.
    """
    first_step = 0
    answers_ahead: PerRank | None = None
    if point is not None:
        first_step = point.step
        if point.state.has_answers_ahead:
            # A round of the first step, generated before the run ended by weights that are gone.
            answers_ahead = learner.answers_ahead()

    def rounds_of(plan: StepPlan) -> list[PerRank]:
        rounds = rollouts.split(learner.next_requests(plan))
        if plan.step == first_step and answers_ahead is not None:
            rounds.insert(0, answers_ahead)
        return rounds

    def refills_of(_plan: StepPlan) -> list[PerRank]:
        return rollouts.split(learner.refill_requests())

    def generate(round_: PerRank) -> _Round:
        future = done_before if round_ is answers_ahead else rollouts.generate(round_)
        return _Round(rollouts, round_, future, rollouts.version, sync_again)

    def sync_again() -> None:
        telemetry.sync(sync_weights(learner, rollouts, again=True))

    def report_held_out(step: int) -> None:
        telemetry.waits_for("the held-out report")
        evaluation = evaluate(learner, rollouts, step, queue, generate)
        checkpoints.after_report(step, telemetry.evaluation(evaluation))

    done_before: Future[PerRank] = Future()
    if answers_ahead is not None:
        done_before.set_result(answers_ahead)
        checkpoints.round_ahead(first_step, done_before)
    telemetry.waits_for("the first weight sync")
    sync = sync_weights(learner, rollouts)
    telemetry.sync(sync)
    if first_step and not telemetry.has_written(first_step):
        # The run ended between the update and its line.
        plan = schedule.plan(first_step - 1)
        telemetry.write_step(plan, learner.last_report(), sync if plan.sync_after else None)
    # Windows are single steps; with `max_staleness` 1, channel-B steps in a row.
    for window in schedule.windows(first_step):
        rounds = RoundStream(queue, generate, rounds_of, window)
        for plan in window:
            if plan.evaluate_before:
                report_held_out(plan.step)
            with telemetry.step(plan) as record:
                refills = [
                    RoundStream(queue, generate, refills_of, [plan])
                    for _ in range(schedule.refill_rounds)
                ]
                streams = (rounds, *refills)
                for stream in streams:
                    telemetry.waits_for("rollouts")
                    for done in stream.of_next_step():
                        telemetry.waits_for("the learner")
                        learner.accumulate(done)
                        telemetry.waits_for("rollouts")
                telemetry.waits_for("the learner")
                record.queue_wait_s = sum(stream.pop_wait_s() for stream in streams)
                # From here on the update may be over.
                ahead: _Round | None = rounds.ahead
                checkpoints.round_ahead(plan.number, None if ahead is None else ahead.future)
                record.report = learner.finish_step()
                if plan.sync_after:
                    telemetry.waits_for("the weight sync")
                    record.sync = sync_weights(learner, rollouts)
                record.replaced = rollouts.pop_replaced()
            telemetry.waits_for("a checkpoint")
            checkpoints.after_step(plan.number)
    # Saved before the last report: what can go wrong there must not cost the run.
    telemetry.waits_for("the last checkpoint")
    checkpoints.at_end(schedule.max_steps)
    if schedule.evaluates_before(schedule.max_steps):
        report_held_out(schedule.max_steps)


def evaluate(
    held_out: HeldOutClient,
    rollouts: GeneratingEngines,
    step: int,
    queue: Queue,
    generate: Callable[[PerRank], Any] | None = None,
) -> Evaluation[Any]:
    """Generate and score the held-out samples with the weights that the engines have now.

    `generate` begins a round; None: `rollouts.generate`.
    """
    outcomes: list[Any] = []
    started_s = time.monotonic()
    rounds = rollouts.split(held_out.held_out_requests(step))
    for done in queue(generate or rollouts.generate, rounds):
        outcomes += held_out.score(done)
    return Evaluation(
        step,
        rollouts.version,
        tuple(sorted(outcomes, key=lambda outcome: outcome.position)),
        wall_s=time.monotonic() - started_s,
    )
