"""The learner: owns data, model and optimizer, and turns rollouts into one update per step, or
into `training.updates_per_batch`.

    next_requests -> accumulate (per round) -> finish_step

Example (channel B, 12 rollouts in rounds of 6, `packing_window` 4, rows of at most 2048 tokens):

    next_requests(plan)     draws 12 samples, returns 12 requests
    accumulate(6 rollouts)  6 segments; after the 4th, rows that can be filled: forward, backward
    accumulate(6 rollouts)  6 segments; after the 8th and 12th, more rows
    finish_step()           the rows that are left; gradient / 12; one optimizer update; the report

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
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from learner.algorithms.base import Algorithm, AlgorithmStep
from learner.algorithms.rollout_matching import RolloutMatching
from learner.algorithms.trajectories import Trajectories, TrajectoryBatch
from learner.checks import LogprobTolerance
from learner.model.optimizer import Optimizer, update_metrics
from learner.model.ranks import LearnerDevice, RankTopology, Rendezvous, join_ranks
from learner.model.sharding import load_parallel, load_reference
from learner.packing import Row, packing_policy
from learner.run_state import RandomState, RankState
from learner.saving import Saving, checksum
from learner.segments import Segment
from learner.step import RowTrainer
from learner.step_metrics import StepMetrics
from learner.weight_sync.publisher import WeightPublisher
from shared.config import RunConfig
from shared.config.derive import rank_name
from shared.errors import CollectiveError, LearnerError, RolloutError
from shared.metrics import RankReport
from shared.run_files import Span
from shared.schedule import RunSchedule, StepPlan
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
            sums_in_backward=config.learner.is_sharded,
        )
        self.name = rank_name(place.rank, place.world_size)
        with self._ranks.of_phase("start"):
            self.loaded, self.parallel = load_parallel(config, device.device, self._ranks)
            self.reference = load_reference(config, self.loaded, self.parallel, self._ranks)
        decode = config.rollout_matching.decode_settings(
            stop_token_ids=self.loaded.stop_token_ids,
            banned_token_ids=self.loaded.banned_token_ids,
        )
        self.algorithm: Algorithm
        if config.algorithm.uses_environment:
            assert examples is not None, "whoever starts the learner has loaded the environment"
            self.algorithm = Trajectories(config, self.loaded, decode, self._ranks, examples)
        else:
            self.algorithm = RolloutMatching(config, self.loaded, decode, self._ranks)
        self._trainer = RowTrainer(
            config.rollout_matching.pipeline,
            LogprobTolerance.of(config.model.dtype, config.logprob_tolerance),
            self.loaded,
            self.parallel,
            decode,
            self.reference,
        )
        self._packing = packing_policy(config.row_rule, config.training, config.global_max_length)
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
        self.publisher.try_save(config.telemetry.run_dir)
        self.num_updates = 0
        """Steps whose updates are all finished: the weights are theirs."""
        self.steps: deque[AlgorithmStep] = deque()
        """Steps that have begun and not ended, oldest first."""
        self._rounds: list[list[Row]] = []
        """Rows of the step in progress, where they are learned more than once, by round."""
        self._stopping = threading.Event()
        self._fingerprints_of_start: dict[str, str] = {}
        """The result of `_fingerprints`, once it was needed."""
        self.answers_ahead: tuple[Any, ...] = ()
        """Answers of a resumed run's first positions, in order, until the others are asked for."""
        self._saving = Saving(self.name, self.publisher, self.optimizer)
        self.state: RankState
        """The state after the last update, or of the checkpoint that was resumed."""
        with self._ranks.of_phase("start"):
            self.algorithm.require_same()
            if config.resume.checkpoint is not None:
                self._restore(config.resume.checkpoint)
            else:
                self.state = self._state_now(None)

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
            keeps_digests=self._config.telemetry.ledger,
        )
        step = self.algorithm.begin_step(plan, metrics)
        self.steps.append(step)
        # Otherwise a stale step is still being learned, and its log stays open until it ends.
        if len(self.steps) == 1:
            self._begin_log()
        # Those that the run had answers of before it was resumed are not asked again.
        requests = step.requests()[len(self.answers_ahead) :]
        self.answers_ahead = ()
        metrics.mark("draw samples", started_s)
        return requests

    def refill_requests(self, plan: StepPlan) -> list[Any]:
        """Return requests in the place of this rank's groups without signal, for one more round.

        Asked at most `environment.refill_rounds` times, when every group so far is learned.
        """
        step = self._current
        assert step.plan == plan, "a step is refilled before it ends"
        assert isinstance(step, TrajectoryBatch), "no other step has groups of an environment"
        started_s = time.time()
        requests = step.refill_requests()
        step.metrics.mark("draw again", started_s)
        return requests

    def accumulate(self, answers: Sequence[Any]) -> None:
        """Check this rank's answers of one round, in position order, and learn from them.

        Raises RolloutError when engine and learner disagree.
        """
        with self._ranks.of_phase("accumulate"):
            step = self._current
            started_s = time.time()
            step.metrics.add_generation(step.generation_spans(answers))
            self._rounds.append([])
            # Lazy: rows are trained while the following segments are prepared in a thread.
            segments = step.segments(answers, version=self.publisher.version)
            if not self._train_rows(self._rows_of(segments)):
                raise self._left("accumulate")
            step.metrics.mark("learn round", started_s, answers=len(answers))

    def finish_step(self) -> RankReport:
        """Learn what is left and take the optimizer update, or `training.updates_per_batch`."""
        # After the first update `stop` no longer leaves the step: its weights would be between two
        # steps, of which there can be no checkpoint.
        with self._ranks.of_phase("finish_step"):
            step = self._current
            started_s = time.time()
            self._rounds.append([])
            self._train_last_rows(self._last_rows())
            # A step without carrying learns every sample it drew; one that carries knows only now
            # what it learned (decisions 6 and 7).
            denominator = step.plan.num_samples
            if self._packing.carries:
                denominator = self._ranks.sum(step.metrics.num_segments)
            if self._config.rollout_matching.pipeline.divides_by_tokens:
                # Rows were learned with weight 1 a token before the step's last rollout came; 0 of
                # all ranks' tokens have a gradient of 0.
                denominator = max(1, self._ranks.sum(step.metrics.num_credited))
            updates = [self.optimizer.update(step.plan.step, denominator)]
            while len(updates) < self._config.training.updates_per_batch:
                # One that is skipped leaves the weights, of which the same rows have the same
                # gradient.
                if updates[-1].skipped:
                    break
                # Ranks meet after each round, as they did: none waits for a whole pass of another.
                for rows in self._rounds:
                    self._train_last_rows(iter(rows), again=True)
                updates.append(self.optimizer.update(step.plan.step, denominator))
            self._rounds = []
            weights: str | None = None
            if self._config.telemetry.ledger:
                # Not a sync's: not every step has one, and its buckets are the transport's.
                weights = self._saving.digest_of_weights()
            step.metrics.mark("finish step", started_s)
            # Only now: a checkpoint that is written after an interruption is of finished updates.
            self.num_updates = step.plan.step + 1
            self.steps.popleft()
            report = step.metrics.report(
                self.publisher.version,
                update_metrics(updates),
                self._ranks.pop_spans(),
                denominator=denominator * len(updates),
                num_carried=self._packing.num_carried,
                weights=weights,
            )
            self.state = self._state_now(report)
            # Last: where its log cannot be written, what is saved then is all of one update.
            if self.steps:
                self._begin_log()
            return report

    def save(
        self,
        folder: Path,
        run: str,
        answers_ahead: Sequence[Any] = (),
        *,
        background: bool = False,
    ) -> str | None:
        """Save the last update's checkpoint, with all that a resumed run needs. A collective.

        Args:
            run: the driver's part of it, as JSON.
            answers_ahead: answers of the next step's first positions that were generated already,
                by weights that no longer exist.
            background: copy it to host memory and write it beside the next steps; `finish_save`
                tells when it is there.

        Returns:
            Why it was not written in the background although that was wanted.

        Raises:
            StorageError: it cannot be written. Nothing is left of it then, and every rank can try
                again.
        """
        state: RankState | None = None
        if self._config.checkpoint.full:
            state = replace(
                self.state,
                answers_ahead=tuple(answers_ahead),
                offers_adapter=self.publisher.offers_adapter,
                fingerprints=self._fingerprints(),
            )
        return self._saving.save(folder, run, state, background=background)

    def finish_save(self, *, wait: bool) -> list[Span] | None:
        """Finish the save in the background, as `Saving.finish_save` does. A collective."""
        return self._saving.finish_save(wait=wait)

    def _state_now(self, report: RankReport | None) -> RankState:
        return RankState(
            self.num_updates,
            RandomState.capture(self.loaded.device),
            carried=self._packing.carried,
            num_skipped=self.optimizer.num_skipped,
            report=report,
        )

    def _restore(self, checkpoint: Path) -> None:
        """Go back to the state after a checkpoint's last update."""
        state = self._saving.load(checkpoint, self._fingerprints(), allow=self._config.resume.allow)
        self.num_updates = state.step
        self._packing.carry(state.carried)
        schedule = RunSchedule(self._config)
        self.algorithm.move_to(schedule.num_samples_before(state.step))
        # The first sync makes it the version that the step begins with.
        self.publisher.version = schedule.version_before(state.step) - 1
        self.publisher.offers_adapter = self.publisher.offers_adapter and state.offers_adapter
        self.answers_ahead = state.answers_ahead
        self.state = state
        state.random.restore(self.loaded.device)

    def _fingerprints(self) -> dict[str, str]:
        """Return what must be the same on resume although no key says so, by the nearest key."""
        # Digests of the data and of the weights that are not trained, and the number of threads,
        # by which a sum is split.
        if not self._fingerprints_of_start:
            parameters = [*self.loaded.model.parameters()]
            if self.reference is not None and self.reference.copy is not None:
                parameters += self.reference.copy.parameters()
            frozen = (parameter for parameter in parameters if not parameter.requires_grad)
            self._fingerprints_of_start = {
                **self.algorithm.fingerprints(),
                "model.path": f"{checksum(frozen):x}",
                "learner.cpu_threads": str(torch.get_num_threads()),
            }
        return self._fingerprints_of_start

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

    def _begin_log(self) -> None:
        if self.algorithm.log is not None:
            self.algorithm.log.begin(self._current.plan.number)

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

    def _train_last_rows(self, rows: Iterator[Row], *, again: bool = False) -> None:
        """Train on the last rows before an update, which all ranks take or none does."""
        # A rank that leaves its rows comes to the others before it ends.
        try:
            learned = self._train_rows(rows, again=again)
        except RolloutError:
            self._ranks.meet(True)
            raise
        if self._ranks.meet(not learned):
            raise self._left("finish_step")

    def _train_rows(self, rows: Iterator[Row], *, again: bool = False) -> bool:
        """Train on the rows, in step with the other ranks; False if a rank left after a row."""
        # `again`, after an update: the rows were counted and compared with the engine before it.
        keeps_rows = not again and self._config.training.updates_per_batch > 1
        channel = self._current.plan.channel
        metrics = self._current.metrics
        version = self.publisher.version
        fixed = self.algorithm.fixed
        for segments, joins_images in self.parallel.rows_of_all_ranks(rows, _shows_images):
            try:
                if segments is None:
                    # The other ranks' rows need this one's part of the weights.
                    idle = fixed if joins_images else fixed.without_images()
                    dummy = self._trainer.collate([idle], channel, version=version)
                    self._trainer.train(dummy, channel, weight=0.0)
                else:
                    row = self._trainer.collate(
                        segments, channel, version=version, beside=fixed if joins_images else None
                    )
                    result = self._trainer.train(row, channel)
                    if again:
                        metrics.add_losses(result)
                    else:
                        so_far = metrics.compared
                        metrics.compared = self._trainer.compare(row, result, channel, so_far)
                        metrics.add_row(row, result)
                    if keeps_rows:
                        self._rounds[-1].append(segments)
            except RolloutError:
                # Found after the row's backward, where the other ranks are too.
                self.parallel.any_of_row(True)
                raise
            # Asked after every row, so that all ranks leave after the same one.
            if self.parallel.any_of_row(self.is_told_to_stop and not again):
                return False
        return True

    def _left(self, phase: str) -> LearnerError:
        """Say why a step was left before its update."""
        if self.is_told_to_stop:
            return LearnerError("told to stop, because the run is being ended", phase=phase)
        return CollectiveError(
            "another learner rank left the step; check the rank that failed first", phase=phase
        )


def _shows_images(row: Row) -> bool:
    return any(len(segment.prompt.image_grid_I3) for segment in row)
