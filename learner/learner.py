"""The learner: owns the data iterator, the model and the optimizer; turns rollouts into one update
per step.

    next_requests -> accumulate (per round) -> finish_step

What is drawn, asked for and made of the answers is the business of a `Algorithm`: samples with
ground truth, or an environment's examples. A channel-A step is a step without requests: its targets
need no rollouts, so `finish_step` makes and learns them.

With several ranks every rank is such a learner, and every method of it is called on all of them, in
the same order: each draws the same samples and keeps its `rank_share`, whose positions in the step
are contiguous. What a rank has nothing of (requests, answers of a round) is an empty list.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from learner.algorithms.base import Algorithm, AlgorithmStep
from learner.algorithms.rollout_matching import RolloutMatching
from learner.algorithms.trajectories import Trajectories
from learner.model.loading import LoadedModel
from learner.model.optimizer import Optimizer
from learner.model.ranks import LearnerDevice, Ranks, RankTopology, Rendezvous, join_ranks
from learner.model.sharding import load_parallel
from learner.packing import Row, row_policy
from learner.segments import Segment
from learner.step import RowLearner
from learner.step_metrics import StepMetrics
from learner.weight_sync.canary import Canary
from learner.weight_sync.publisher import WeightPublisher, make_senders
from shared.config import RunConfig
from shared.config.algorithm import TrainerVariant
from shared.config.derive import is_sharded, rank_name, resolved_sync_mode
from shared.config.pipeline import Channel
from shared.errors import CollectiveError, LearnerError, RolloutError
from shared.grounding.evaluation import Outcome
from shared.metrics import RankReport
from shared.rollouts import DecodeSettings
from shared.run_files import Span
from shared.schedule import StepPlan
from shared.trajectory import ExampleCounts

# A step between `next_requests` and `finish_step`: its work, its numbers and where its time went.


@dataclass(slots=True)
class StepInProgress:
    """One rank's part of a step."""

    plan: StepPlan
    work: AlgorithmStep
    tally: StepMetrics
    track: str
    """Of the rank's spans."""
    generate_s: float = 0.0
    learn_s: float = 0.0
    spans: list[Span] = field(default_factory=list)

    def add_generation(self, answers: Sequence[Any]) -> None:
        """Of one round."""
        if answers:
            spans = self.work.generation_spans(answers)
            self.spans += spans
            self.generate_s += max(span.end_s for span in spans) - min(
                span.start_s for span in spans
            )

    def mark(self, name: str, started_s: float, **args: int) -> None:
        """This rank's own work, from then until now."""
        span = Span(self.track, name, started_s, time.time(), {"step": self.plan.number, **args})
        self.learn_s += span.duration_s
        self.spans.append(span)

    def report(
        self,
        version: int,
        step_metrics: Mapping[str, float],
        waits: Sequence[Span],
        *,
        denominator: int,
        num_carried: int,
    ) -> RankReport:
        """At the step's end, once. `waits` lie within what was marked."""
        totals = self.tally.totals
        self.tally.finish(denominator)
        totals.add("packing/num_carried", num_carried)
        totals.add_max("time/learn_s", self.learn_s)
        if waits:
            totals.add_max("time/reduce_s", sum(wait.duration_s for wait in waits))
        self.spans += [replace(wait, args={"step": self.plan.number}) for wait in waits]
        if self.plan.channel is Channel.B:
            totals.add_max("time/generate_s", self.generate_s)
        return RankReport(
            self.plan.step, self.plan.channel, version, totals, step_metrics, tuple(self.spans)
        )


# Of the canary's response: enough to pass every layer and the head, little enough to cost one short
# prefill per sync.
_CANARY_TOKENS = 32


class Learner:
    """One rank. Its methods are called in the order of the module's first lines, `stop` alone from
    any thread at any time.

    With `rollout_matching.max_staleness` the next step may begin before the one in progress has
    ended: `next_requests` begins the youngest step, `accumulate` and `finish_step` belong to the
    oldest.
    """

    def __init__(
        self,
        config: RunConfig,
        place: RankTopology,
        rendezvous: Rendezvous | None = None,
        examples: ExampleCounts | None = None,
    ) -> None:
        """With several ranks it returns when all have come this far; rank 0 brings the rendezvous
        that `place` names. `examples` are those of the run's environment, where it has one.

        Raises ConfigError and RecordError for what is wrong with model and data, also where the
        ranks do not have the same.
        """
        self._config = config
        device = LearnerDevice(torch.device(place.device))
        device.use_full_float32()
        self._ranks = join_ranks(
            place,
            rendezvous,
            device,
            timeout_s=config.timeouts.learn_s,
            sums_in_backward=is_sharded(config),
        )
        self._track = rank_name(place.rank, place.world_size)
        with self._ranks.of_phase("start"):
            self.loaded, self.parallel = load_parallel(config, device.device, self._ranks)
        decode = config.rollout_matching.decode_settings(
            stop_token_ids=(self.loaded.codec.eos_token_id,),
            banned_token_ids=self.loaded.banned_token_ids,
        )
        self.work = _work(config, self.loaded, decode, self._ranks, examples)
        self._row_learner = RowLearner(config, self.loaded, self.parallel, decode)
        self._rows = row_policy(config)
        self.updater = Optimizer(self.loaded.model, config.training, self._ranks)
        fixed = self.work.fixed
        response = fixed.target.token_ids[:_CANARY_TOKENS]
        senders = make_senders(config, place, self.loaded, self.parallel)
        canary = Canary(
            self.loaded,
            fixed.prompt,
            self.work.fixed_images,
            response,
            tolerance=config.canary_tolerance,
            proves_adapter=resolved_sync_mode(config) == "adapter",
            run_dir=config.telemetry.run_dir,
        )
        self.publisher = WeightPublisher(
            self._ranks, device, self.loaded, self.parallel, senders, canary
        )
        self.num_updates = 0
        """Finished updates: what the weights are of."""
        self.steps: deque[StepInProgress] = deque()
        """Begun and not ended, oldest first."""
        self._told_to_stop = threading.Event()
        with self._ranks.of_phase("start"):
            self.work.require_same()

    # One step

    def next_requests(self, plan: StepPlan) -> list[Any]:
        """Draw the step's samples and ask for the rollouts of this rank's share, in position order;
        channel A asks for nothing.
        """
        assert len(self.steps) <= self._config.rollout_matching.max_staleness, (
            "finish_step ends a step before the next begins"
        )
        started_s = time.time()
        # A row of one segment is not underfilled where nothing is packed.
        min_fill_ratio = (
            self._config.training.packing_min_fill_ratio if self._config.training.packing else 0.0
        )
        tally = StepMetrics(
            plan.step, capacity=self._config.global_max_length, min_fill_ratio=min_fill_ratio
        )
        step = StepInProgress(plan, self.work.begin_step(plan, tally), tally, self._track)
        self.steps.append(step)
        if len(self.steps) == 1:
            step.work.become_current()
        requests = step.work.requests()
        step.mark("draw samples", started_s)
        return requests

    def accumulate(self, answers: Sequence[Any]) -> None:
        """Check and learn from this rank's answers of a round, in position order. Raises
        RolloutError when engine and learner disagree.
        """
        with self._ranks.of_phase("accumulate"):
            step, started_s = self._current, time.time()
            step.add_generation(answers)
            if not self._learn_rows(
                self._rows_of(step.work.segments(answers, version=self.publisher.version))
            ):
                raise self._left("accumulate")
            step.mark("learn round", started_s, answers=len(answers))

    def finish_step(self) -> RankReport:
        """Learn what is left and take exactly one optimizer update."""
        with self._ranks.of_phase("finish_step"):
            step, started_s = self._current, time.time()
            # All ranks take the update or none does: one that leaves its rows comes to the others
            # before it ends.
            try:
                learned = self._learn_rows(self._last_rows())
            except RolloutError:
                self._ranks.meet(True)
                raise
            if self._ranks.meet(not learned):
                raise self._left("finish_step")
            # Step mode learns every sample it drew; carrying, what was learned is known only now
            # (DESIGN 5, decisions 6 and 7).
            denominator = (
                self._ranks.sum(step.tally.num_segments)
                if self._rows.carries
                else step.plan.num_samples
            )
            update = self.updater.update(step.plan.step, denominator)
            step.mark("finish step", started_s)
            self.num_updates = step.plan.step + 1
            self.steps.popleft()
            if self.steps:
                self._current.work.become_current()
            waits = self._ranks.pop_spans()
            return step.report(
                self.publisher.version,
                update.metrics(),
                waits,
                denominator=denominator,
                num_carried=self._rows.num_carried,
            )

    def stop(self) -> None:
        """The run is being ended: leave a round or a step after the row that is being learned, with
        a LearnerError. The weights stay those of `num_updates`.
        """
        self._told_to_stop.set()

    @property
    def is_told_to_stop(self) -> bool:
        return self._told_to_stop.is_set()

    def close(self) -> None:
        """Leave the groups of the weight sync, and end the log of rollouts."""
        self.publisher.close()
        self.work.close()

    @property
    def name(self) -> str:
        """Of this rank."""
        return self._track

    # The held-out report

    def held_out_requests(self, step: int) -> list[Any]:
        """This rank's share of them, in order."""
        return self.work.held_out_requests(step)

    def score(self, answers: Sequence[Any]) -> list[Outcome]:
        return self.work.score(answers)

    # Inside

    @property
    def _current(self) -> StepInProgress:
        assert self.steps, "next_requests begins a step"
        return self.steps[0]

    def _rows_of(self, segments: Iterator[Segment]) -> Iterator[Row]:
        """The rows that fall due with these segments."""
        for segment in segments:
            yield from self._rows.add(segment)

    def _last_rows(self) -> Iterator[Row]:
        """The rows that fall due at the end of the step in progress."""
        work = self._current.work
        yield from self._rows_of(work.ground_truth())
        work.require_complete()
        yield from self._rows.finish_step()

    def _learn_rows(self, rows: Iterator[Row]) -> bool:
        """False where a rank of a row left behind it: it was told to stop, or the row's rollouts
        contradict the learner.
        """
        channel, tally = self._current.plan.channel, self._current.tally
        for row in self.parallel.rows_of_all_ranks(rows):
            try:
                if row is None:
                    self._row_learner.compute_beside(self.work.fixed, channel)
                else:
                    self._row_learner.learn(row, channel, tally, version=self.publisher.version)
            except RolloutError:
                # Found behind the row's backward, where the others are too.
                self.parallel.any_of_row(True)
                raise
            if self.parallel.any_of_row(self.is_told_to_stop):
                return False
        return True

    def _left(self, phase: str) -> LearnerError:
        """Why a step was left before its update."""
        if self.is_told_to_stop:
            return LearnerError("told to stop, because the run is being ended", phase=phase)
        return CollectiveError(
            "another learner rank left the step; check the rank that failed first", phase=phase
        )


def _work(
    config: RunConfig,
    loaded: LoadedModel,
    decode: DecodeSettings,
    ranks: Ranks,
    examples: ExampleCounts | None,
) -> Algorithm:
    if config.custom.trainer_variant is not TrainerVariant.TRAJECTORY_PG:
        return RolloutMatching(config, loaded, decode, ranks)
    assert examples is not None, "whoever starts the learner has loaded the environment"
    return Trajectories(config, loaded, decode, ranks, examples)
