"""The training loop, which coordinates the learner and the engines
(docs/explanation/decisions.md, 41).

One step of channel B with two rounds, pipelined; time runs to the right::

    learner  | requests |         | learn 1 | learn 2 | update | send weights    |
    engines             | round 1 | round 2 |                  | receive weights |

A step of channel A has no rounds: the learner trains on the ground truth in `finish_step`. In a
step of channel B, `finish_step` trains on the rounds again if `training.updates_per_batch` is more
than 1.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol, TypeVar

from launch.pipeline import GeneratingEngines, Queue, RoundStream
from launch.processes.learner_client import LearnerClient
from launch.processes.rounds import Round
from launch.run_folder.checkpoints import Checkpoints
from launch.run_folder.console import Wait
from launch.run_folder.resume import ResumePoint
from launch.run_folder.telemetry import Telemetry
from shared.grounding.evaluation import Evaluation, Outcome
from shared.protocols import PerRank
from shared.schedule import RunSchedule
from shared.weight_sync.phases import sync_weights

OutcomeT = TypeVar("OutcomeT", bound=Outcome)
OutcomeT_co = TypeVar("OutcomeT_co", bound=Outcome, covariant=True)


class HeldOutClient(Protocol[OutcomeT_co]):
    """Interface that gives `evaluate` the requests of the held-out set, and scores the rollouts."""

    def held_out_requests(self, step: int) -> PerRank: ...
    def score(self, done: PerRank) -> Sequence[OutcomeT_co]: ...


def train(
    learner: LearnerClient,
    rollouts: GeneratingEngines,
    schedule: RunSchedule,
    queue: Queue,
    telemetry: Telemetry,
    checkpoints: Checkpoints,
    point: ResumePoint | None = None,
) -> None:
    """Run the training loop: all optimizer steps, or the remaining steps of a resumed run."""
    first_step = 0 if point is None else point.step
    ahead = round_ahead(learner, checkpoints, point)
    sync = sync_weights(learner, rollouts)
    telemetry.sync(sync)
    if first_step and not telemetry.has_written(first_step):
        # The run ended after the update, but before the step's line was written.
        plan = schedule.plan(first_step - 1)
        telemetry.write_step(plan, learner.last_report(), sync if plan.sync_after else None)
    # A window is a single step or, with `max_staleness` 1, consecutive channel-B steps.
    for window in schedule.windows(first_step):
        rounds = RoundStream(queue, rollouts, learner.next_requests, window, ahead)
        ahead = None
        for plan in window:
            if plan.evaluate_before:
                report_held_out(learner, rollouts, plan.step, queue, telemetry, checkpoints)
            with telemetry.step(plan) as record:
                streams = [rounds]
                for _ in range(schedule.refill_rounds):
                    streams.append(RoundStream(queue, rollouts, learner.refill_requests, [plan]))
                for stream in streams:
                    for done in stream.of_next_step():
                        learner.accumulate(done)
                record.queue_wait_s = sum(stream.pop_wait_s() for stream in streams)
                # After this line a run that ends early may already have taken the update.
                checkpoints.round_ahead(plan.number, rounds.ahead)
                record.report = learner.finish_step()
                if plan.sync_after:
                    record.sync = sync_weights(learner, rollouts)
                record.replaced = rollouts.pop_replaced()
            checkpoints.after_step(plan.number)
    # Save before the last report, so that an error in the report does not lose the run.
    checkpoints.at_end(schedule.max_steps)
    if schedule.evaluates_before(schedule.max_steps):
        report_held_out(learner, rollouts, schedule.max_steps, queue, telemetry, checkpoints)


def round_ahead(
    learner: LearnerClient, checkpoints: Checkpoints, point: ResumePoint | None
) -> Round | None:
    """Return the round of rollouts in the checkpoint of a resumed run; None if there is none.

    It is the first round of the step after the checkpoint. The engines had generated it ahead, when
    the checkpoint was saved.
    """
    if point is None or not point.state.has_answers_ahead:
        return None
    ahead = Round.answered(learner.answers_ahead())
    checkpoints.round_ahead(point.step, ahead.future)
    return ahead


def report_held_out(
    learner: LearnerClient,
    rollouts: GeneratingEngines,
    step: int,
    queue: Queue,
    telemetry: Telemetry,
    checkpoints: Checkpoints,
) -> None:
    """Evaluate the current weights on the held-out set; save them if their score is a best one.

    `step`: number of finished steps. `checkpoint.keep_best` is the number of best scores.
    """
    with telemetry.waits_for("the held-out report"):
        evaluation = evaluate(learner, rollouts, step, queue)
        checkpoints.after_report(step, telemetry.evaluation(evaluation))


def evaluate(
    held_out: HeldOutClient[OutcomeT], rollouts: GeneratingEngines, step: int, queue: Queue
) -> Evaluation[OutcomeT]:
    """Generate answers to the held-out samples with the engines' weights, and score them.

    `step`: number of finished steps.
    """
    outcomes: list[OutcomeT] = []
    started_s = time.monotonic()
    rounds = rollouts.split(held_out.held_out_requests(step))
    for number, done in enumerate(queue(rollouts.generate, rounds), 1):
        outcomes += held_out.score(done)
        if number < len(rounds):
            Wait.count("held out", number, len(rounds), "rounds are scored")
    return Evaluation(
        step,
        rollouts.version,
        tuple(sorted(outcomes, key=lambda outcome: outcome.position)),
        wall_s=time.monotonic() - started_s,
    )
