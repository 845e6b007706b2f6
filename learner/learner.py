"""The learner: owns data, model and optimizer, and turns rollouts into one update per step.

    next_requests -> accumulate (per round) -> finish_step

Example (channel B, 12 rollouts in rounds of 6, rows of at most 2048 tokens):

    next_requests(plan)     draws 12 samples, returns 12 requests
    accumulate(6 rollouts)  6 segments; two full rows fall due: forward, backward
    accumulate(6 rollouts)  6 segments; one more row
    finish_step()           the row that is left; gradient / 12; one optimizer update; the report

What is drawn, asked for and learned is the business of an `Algorithm`. A channel-A step asks for
nothing: `finish_step` learns its ground truth.

With several ranks every rank is such a learner, and every method is called on all of them in the
same order. Each draws the same samples and keeps its `rank_share`, whose positions in the step are
contiguous; a rank without requests or rollouts gets an empty list.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from learner.algorithms.base import Algorithm, AlgorithmStep
from learner.algorithms.rollout_matching import RolloutMatching
from learner.algorithms.trajectories import Trajectories
from learner.model.optimizer import Optimizer
from learner.model.ranks import LearnerDevice, RankTopology, Rendezvous, join_ranks
from learner.model.sharding import load_parallel
from learner.packing import Row, packing_policy
from learner.segments import Segment
from learner.step import RowTrainer
from learner.step_metrics import StepMetrics
from learner.weight_sync.publisher import WeightPublisher
from shared.config import RunConfig
from shared.config.derive import is_sharded, rank_name
from shared.errors import CollectiveError, LearnerError, RolloutError
from shared.grounding.evaluation import Outcome
from shared.metrics import RankReport
from shared.schedule import StepPlan
from shared.trajectory import ExampleCounts


class Learner:
    """One rank. Its methods are called in the order of the module's first lines; `stop` at any
    time, from any thread.

    With `rollout_matching.max_staleness` a step may begin before the one in progress has ended:
    `next_requests` begins the youngest step, `accumulate` and `finish_step` work on the oldest.
    """

    def __init__(
        self,
        config: RunConfig,
        place: RankTopology,
        rendezvous: Rendezvous | None = None,
        examples: ExampleCounts | None = None,
    ) -> None:
        """Load model and data. With several ranks it returns when all have come this far.

        Args:
            rendezvous: on rank 0 of several ranks, the one that `place` names.
            examples: rows of the run's environment; None for a run without one.

        Raises:
            ConfigError, RecordError: model or data are wrong, or differ between the ranks.
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
        self.name = rank_name(place.rank, place.world_size)
        with self._ranks.of_phase("start"):
            self.loaded, self.parallel = load_parallel(config, device.device, self._ranks)
        decode = config.rollout_matching.decode_settings(
            stop_token_ids=(self.loaded.codec.eos_token_id,),
            banned_token_ids=self.loaded.banned_token_ids,
        )
        self.algorithm: Algorithm
        if config.algorithm.uses_environment:
            assert examples is not None, "whoever starts the learner has loaded the environment"
            self.algorithm = Trajectories(config, self.loaded, decode, self._ranks, examples)
        else:
            self.algorithm = RolloutMatching(config, self.loaded, decode, self._ranks)
        self._trainer = RowTrainer(config, self.loaded, self.parallel, decode)
        self._packing = packing_policy(config)
        self.optimizer = Optimizer(self.loaded.model, config.training, self._ranks)
        self.publisher = WeightPublisher.from_config(
            config,
            place,
            self._ranks,
            device,
            self.loaded,
            self.parallel,
            self.algorithm.fixed,
            self.algorithm.fixed_images,
        )
        self.num_updates = 0
        """Finished updates: the weights are theirs."""
        self.steps: deque[AlgorithmStep] = deque()
        """Steps that have begun and not ended, oldest first."""
        self._stopping = threading.Event()
        with self._ranks.of_phase("start"):
            self.algorithm.require_same()

    def next_requests(self, plan: StepPlan) -> list[Any]:
        """Draw the step's samples and return this rank's requests: none on channel A."""
        assert len(self.steps) <= self._config.rollout_matching.max_staleness, (
            "finish_step ends a step before the next begins"
        )
        started_s = time.time()
        training = self._config.training
        # A row of one segment is not underfilled where nothing is packed.
        metrics = StepMetrics(
            plan,
            self.name,
            capacity=self._config.global_max_length,
            min_fill_ratio=training.packing_min_fill_ratio if training.packing else 0.0,
        )
        step = self.algorithm.begin_step(plan, metrics)
        self.steps.append(step)
        # Otherwise a stale step is still being learned, and its log stays open until it ends.
        if len(self.steps) == 1:
            step.become_current()
        requests = step.requests()
        metrics.mark("draw samples", started_s)
        return requests

    def accumulate(self, answers: Sequence[Any]) -> None:
        """Check this rank's answers of one round, in position order, and learn from them.

        Raises RolloutError when engine and learner disagree.
        """
        with self._ranks.of_phase("accumulate"):
            step = self._current
            started_s = time.time()
            step.metrics.add_generation(step.generation_spans(answers))
            # Lazy: rows are trained while the following segments are prepared in a thread.
            segments = step.segments(answers, version=self.publisher.version)
            if not self._train_rows(self._rows_of(segments)):
                raise self._left("accumulate")
            step.metrics.mark("learn round", started_s, answers=len(answers))

    def finish_step(self) -> RankReport:
        """Learn what is left and take exactly one optimizer update."""
        with self._ranks.of_phase("finish_step"):
            step = self._current
            started_s = time.time()
            # All ranks take the update or none does: one that leaves its rows comes to the others
            # before it ends.
            try:
                learned = self._train_rows(self._last_rows())
            except RolloutError:
                self._ranks.meet(True)
                raise
            if self._ranks.meet(not learned):
                raise self._left("finish_step")
            # A step without carrying learns every sample it drew; one that carries knows only now
            # what it learned (decisions 6 and 7).
            denominator = step.plan.num_samples
            if self._packing.carries:
                denominator = self._ranks.sum(step.metrics.num_segments)
            update = self.optimizer.update(step.plan.step, denominator)
            step.metrics.mark("finish step", started_s)
            # Only now: a checkpoint that is written after an interruption is of finished updates.
            self.num_updates = step.plan.step + 1
            self.steps.popleft()
            if self.steps:
                self._current.become_current()
            return step.metrics.report(
                self.publisher.version,
                update.metrics(),
                self._ranks.pop_spans(),
                denominator=denominator,
                num_carried=self._packing.num_carried,
            )

    def held_out_requests(self, step: int) -> list[Any]:
        """Return this rank's share of the held-out requests, in order."""
        return self.algorithm.held_out_requests(step)

    def score(self, answers: Sequence[Any]) -> list[Outcome]:
        """Score this rank's answers to the held-out requests, in order."""
        return self.algorithm.score(answers)

    def stop(self) -> None:
        """Leave the round or step after the present row, with a LearnerError; weights stay."""
        self._stopping.set()

    @property
    def is_told_to_stop(self) -> bool:
        return self._stopping.is_set()

    def close(self) -> None:
        """Leave the groups of the weight sync, and end the log of rollouts."""
        self.publisher.close()
        self.algorithm.close()

    @property
    def _current(self) -> AlgorithmStep:
        assert self.steps, "next_requests begins a step"
        return self.steps[0]

    def _rows_of(self, segments: Iterator[Segment]) -> Iterator[Row]:
        """Yield the rows that fall due with these segments."""
        for segment in segments:
            yield from self._packing.add(segment)

    def _last_rows(self) -> Iterator[Row]:
        """Yield the rows that fall due at the end of the step in progress."""
        step = self._current
        yield from self._rows_of(step.ground_truth())
        step.require_complete()
        yield from self._packing.finish_step()

    def _train_rows(self, rows: Iterator[Row]) -> bool:
        """Train on the rows, in step with the other ranks; False where a rank left after a row."""
        channel = self._current.plan.channel
        metrics = self._current.metrics
        version = self.publisher.version
        for segments in self.parallel.rows_of_all_ranks(rows):
            try:
                if segments is None:
                    # The other ranks' rows need this one's part of the weights.
                    dummy = self._trainer.collate([self.algorithm.fixed], channel, version=version)
                    self._trainer.train(dummy, channel, weight=0.0)
                else:
                    row = self._trainer.collate(segments, channel, version=version)
                    result = self._trainer.train(row, channel)
                    metrics.compared = self._trainer.compare(row, result, channel, metrics.compared)
                    metrics.add_row(row, result)
            except RolloutError:
                # Found after the row's backward, where the other ranks are too.
                self.parallel.any_of_row(True)
                raise
            # Asked after every row, so that all ranks leave after the same one.
            if self.parallel.any_of_row(self.is_told_to_stop):
                return False
        return True

    def _left(self, phase: str) -> LearnerError:
        """Say why a step was left before its update."""
        if self.is_told_to_stop:
            return LearnerError("told to stop, because the run is being ended", phase=phase)
        return CollectiveError(
            "another learner rank left the step; check the rank that failed first", phase=phase
        )
