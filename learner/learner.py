"""The learner: owns data, model and optimizer, and turns a step's rollouts into one optimizer
update (or `training.updates_per_batch` updates). Rollouts arrive in several rounds per step.

    next_requests -> accumulate (per round) -> finish_step

Example (channel B, 12 rollouts in rounds of 6, `packing_window` 4, rows of at most 2048 tokens):

    next_requests(plan)     draws 12 samples, returns 12 requests
    accumulate(6 rollouts)  6 segments; after the 4th, rows that can be filled: forward, backward
    accumulate(6 rollouts)  6 segments; after the 8th and 12th, more rows
    finish_step()           remaining rows; gradient / 12; one optimizer update; the report

An `Algorithm` decides which samples are drawn, which requests are sent and which targets are
learned. A channel-A step sends no requests: `finish_step` learns its ground truth.

With several ranks, each rank has its own learner. The driver calls every method on all ranks in the
same order. Each rank draws the same samples and keeps its `rank_share`, whose positions in the step
are contiguous. A rank without requests or rollouts gets an empty list.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from learner.algorithms.base import Algorithm, AlgorithmStep
from learner.algorithms.rollout_matching import RolloutMatching
from learner.algorithms.trajectories import Trajectories, TrajectoryBatch
from learner.checks import LogprobTolerance
from learner.collate import PackedRow
from learner.model.attention import use_flash_attention_3
from learner.model.compiled_blocks import (
    check_compiled_blocks,
    has_compiled_blocks,
    use_compiled_blocks,
)
from learner.model.loading import DTYPES
from learner.model.optimizer.adamw import Optimizer, update_metrics, whole_tensor
from learner.model.packed_rows import check_packed_rows
from learner.model.ranks import LearnerDevice, RankTopology, Rendezvous, join_ranks
from learner.model.sharding import load_parallel, load_reference
from learner.packing import Row, packing_policy
from learner.run_state import RandomState, RankState
from learner.saving import Saving, checksum
from learner.segments import Segment
from learner.step import RowResult, RowTrainer, loss_of_row
from learner.step_metrics import StepMetrics
from learner.weight_sync.publisher import WeightPublisher
from shared.config import RunConfig
from shared.config.derive import rank_name
from shared.config.pipeline import Channel
from shared.errors import CollectiveError, LearnerError, RolloutError
from shared.metrics import RankReport
from shared.run_files import Span
from shared.schedule import RunSchedule, StepPlan
from shared.trajectory import ExampleCounts


class Learner:
    """The training side of one learner rank: it requests rollouts and learns from them.

    The module docstring gives the order of calls. `stop` can be called at any time and from any
    thread.

    With `rollout_matching.max_staleness` a step may begin before the previous one has ended:
    `next_requests` begins the newest step, `accumulate` and `finish_step` work on the oldest.
    """

    def __init__(
        self,
        config: RunConfig,
        place: RankTopology,
        rendezvous: Rendezvous | None = None,
        examples: ExampleCounts | None = None,
    ) -> None:
        """Load model and data. With several ranks, return when all ranks have loaded them.

        Args:
            place: the rank's number, device and addresses.
            rendezvous: the key-value store that connects the ranks; None except on rank 0 of
                several ranks. `place.rendezvous` is the store's address.
            examples: number of rows of the run's environment; None without an environment.

        Raises:
            ConfigError, RecordError: model or data cannot be used, or the ranks' data differ.
            LearnerError: the ranks loaded different weights, or a rank is lost (CollectiveError).
            StorageError: a checkpoint or a rollout log cannot be written to the run folder.
        """
        self._config = config
        device = _device_of(config, place)
        self._ranks = join_ranks(
            place,
            rendezvous,
            device,
            timeout_s=config.timeouts.learn_s,
            num_shards=config.learner.num_shards,
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
            assert examples is not None, "a run with an environment passes its number of rows"
            self.algorithm = Trajectories(config, self.loaded, decode, self._ranks, examples)
        else:
            self.algorithm = RolloutMatching(config, self.loaded, decode, self._ranks)
        self._trainer = RowTrainer(
            config.rollout_matching.pipeline,
            self._logprob_tolerance,
            self.loaded,
            self.parallel,
            decode,
            self.reference,
            dtype=DTYPES[config.model.dtype],
            share_prompts=config.training.share_prompts,
        )
        with self._ranks.of_phase("start"):
            # First: ranks with other data may have another fixed row, and shards need equal ones.
            self.algorithm.require_same()
            self.findings = self._check_rows()
        """What the checks of this model's rows have found, one line each."""
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
        """Number of finished steps. The weights are the result of their optimizer updates."""
        self.steps: deque[AlgorithmStep] = deque()
        """Steps that have begun and not ended, oldest first."""
        self._rounds: list[list[Row]] = []
        """Rows of the current step by round; empty lists if `training.updates_per_batch` is 1."""
        self._stopping = threading.Event()
        self._fingerprints_of_start: dict[str, str] = {}
        """The cached result of `_fingerprints`."""
        self.answers_ahead: tuple[Any, ...] = ()
        """Rollouts from the resumed checkpoint for the first positions of the next step. Empty
        after `next_requests` has requested the other positions of that step."""
        self._saving = Saving(self.name, self.publisher, self.optimizer)
        self.state: RankState
        """The state after the last update, or the state of the resumed checkpoint."""
        with self._ranks.of_phase("start"):
            if config.resume.checkpoint is not None:
                self._restore(config.resume.checkpoint)
            else:
                self.state = self._state_now(None)

    def _check_rows(self) -> tuple[str, ...]:
        """Check rows before the optimizer exists. Return a line about each check.

        Raises ConfigError if the model computes wrong rows.
        """
        config = self._config
        model = self.loaded.model
        found = []
        if has_compiled_blocks(model):
            fixed = self.algorithm.fixed
            row = self._trainer.collate([fixed, fixed.without_images()], Channel.A, version=0)
            loss = partial(loss_of_row, model, row)
            found.append(
                check_compiled_blocks(config, model, self.parallel.forward, self._ranks, loss)
            )
            if self.reference is not None and self.reference.copy is not None:
                use_compiled_blocks(self.reference.copy, use=has_compiled_blocks(model))
        # The project's tests check families that read images, so a run does not.
        if self.loaded.is_text:
            difference = check_packed_rows(
                model,
                config.model.path,
                config.model.dtype,
                self.parallel.forward,
                shares_prompts=config.training.share_prompts,
            )
            found.append(
                f"a packed row equals its segments, computed separately, within {difference:.1e}"
            )
        return tuple(found)

    def next_requests(self, plan: StepPlan) -> list[Any]:
        """Draw the step's samples and return this rank's requests for rollouts.

        The list is empty on channel A (supervised steps).
        """
        assert len(self.steps) <= self._config.rollout_matching.max_staleness, (
            "finish_step ends a step before the next begins"
        )
        started_s = time.time()
        training = self._config.training
        # Without packing, a row of one segment does not count as underfilled.
        metrics = StepMetrics(
            plan,
            self.name,
            capacity=self._config.global_max_length,
            min_fill_ratio=training.packing_min_fill_ratio if training.packing else 0.0,
            keeps_digests=self._config.telemetry.ledger,
        )
        step = self.algorithm.begin_step(plan, metrics)
        self.steps.append(step)
        # Otherwise an older step is still in progress, and its log stays open until it ends.
        if len(self.steps) == 1:
            self._begin_log()
        # The first positions already have answers, from before the run was resumed.
        requests = step.requests()[len(self.answers_ahead) :]
        self.answers_ahead = ()
        metrics.mark("draw samples", started_s)
        return requests

    def refill_requests(self, plan: StepPlan) -> list[Any]:
        """Return requests for new groups, in place of this rank's groups without signal.

        A group is the rollouts of one prompt. If all its rewards are equal, it has no signal for a
        policy gradient. In a step the driver calls this at most `environment.refill_rounds` times,
        each time after all rollouts so far are learned.
        """
        step = self._current
        assert step.plan == plan, "only the oldest unfinished step can be refilled"
        assert isinstance(step, TrajectoryBatch), "only steps with an environment have groups"
        started_s = time.time()
        requests = step.refill_requests()
        step.metrics.mark("draw again", started_s)
        return requests

    def accumulate(self, answers: Sequence[Any]) -> None:
        """Check this rank's rollouts of one round, and train on the packed rows that are ready.

        `answers` are in the order of positions. Segments whose row is not ready wait for a later
        round or `finish_step`.

        Raises:
            RolloutError: engine and learner disagree on tokens or log-probabilities.
            LearnerError: `stop` was called, or another rank ended early (CollectiveError).
        """
        with self._ranks.of_phase("accumulate"):
            step = self._current
            started_s = time.time()
            step.metrics.add_generation(step.generation_spans(answers))
            self._rounds.append([])
            # A lazy iterator: a thread prepares the next segments while rows are trained.
            segments = step.segments(answers, version=self.publisher.version)
            if not self._train_rows(self._rows_of(segments), last=False):
                raise self._left("accumulate")
            step.metrics.mark("learn round", started_s, answers=len(answers))

    def finish_step(self) -> RankReport:
        """Train on the step's remaining rows, and take `training.updates_per_batch` updates.

        Return this rank's metrics and time spans of the step.

        Raises RolloutError and LearnerError as `accumulate` does, and LearnerError if too many
        successive gradients are not finite.
        """
        # After the first update, `stop` no longer interrupts the step: its weights would be between
        # two steps, and such weights cannot be saved as a checkpoint.
        with self._ranks.of_phase("finish_step"):
            step = self._current
            started_s = time.time()
            self._rounds.append([])
            self._train_last_rows(self._last_rows())
            # Without a carry buffer, the divisor is the number of samples that the step drew. With
            # one, it is the number of learned segments, known only now (decisions 6 and 7).
            denominator = step.plan.num_samples
            if self._packing.carries:
                denominator = self._ranks.sum(step.metrics.num_segments)
            if self._config.rollout_matching.pipeline.divides_by_tokens:
                # Each token was learned with weight 1, because the total was not known yet. If no
                # rank has a token, the gradient is 0.
                denominator = max(1, self._ranks.sum(step.metrics.num_credited))
            updates = [self.optimizer.update(step.plan.step, denominator)]
            while len(updates) < self._config.training.updates_per_batch:
                # After a skipped update the weights are unchanged: the rows would give the same
                # gradient again.
                if updates[-1].skipped:
                    break
                # All ranks have the same rounds. They meet after each, which keeps waits short.
                for rows in self._rounds:
                    self._train_last_rows(iter(rows), again=True)
                updates.append(self.optimizer.update(step.plan.step, denominator))
            self._rounds = []
            weights: str | None = None
            if self._config.telemetry.ledger:
                # Not the checksum of a weight sync: some steps have no sync, and its buckets depend
                # on the transport.
                weights = self._saving.digest_of_weights()
            step.metrics.mark("finish step", started_s)
            # Only now: a checkpoint written after an interruption contains only finished updates.
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
            # Last, so that a checkpoint saved after a failed log write belongs to one update.
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
        """Save a checkpoint with everything that a resumed run needs. A collective of all ranks.

        Args:
            folder: the checkpoint's folder, shared by all ranks.
            run: the driver's part of the checkpoint, as JSON.
            answers_ahead: rollouts of the next step's first positions that older weights have
                already generated.
            background: copy the checkpoint to host memory and write it during the next steps;
                `finish_save` says when it is complete.

        Returns:
            Why the checkpoint was not written in the background although `background` was set; else
            None.

        Raises:
            StorageError: the checkpoint cannot be written. No part of it remains, and all ranks can
                try again.
            LearnerError: another rank could not write its part, or the ranks' weights differ.
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
        """Complete a checkpoint saved in the background. A collective; see `Saving.finish_save`."""
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
        """Restore the state that the run had when `checkpoint` was saved."""
        state = self._saving.load(checkpoint, self._fingerprints(), allow=self._config.resume.allow)
        self.num_updates = state.step
        self._packing.carry(state.carried)
        schedule = RunSchedule(self._config)
        self.algorithm.move_to(schedule.num_samples_before(state.step))
        # The first weight sync raises this to the version that the step begins with.
        self.publisher.version = schedule.version_before(state.step) - 1
        self.publisher.offers_adapter = self.publisher.offers_adapter and state.offers_adapter
        self.answers_ahead = state.answers_ahead
        self.state = state
        state.random.restore(self.loaded.device)

    def _fingerprints(self) -> dict[str, str]:
        """Return values that a resumed run must share, by the configuration key that sets them.

        The first call is a collective.
        """
        # Digests of the data and of the frozen weights, and the number of threads, because sums
        # are split by threads.
        if not self._fingerprints_of_start:
            parameters = [*self.loaded.model.parameters()]
            if self.reference is not None and self.reference.copy is not None:
                parameters += self.reference.copy.parameters()
            # Whole and, but for packed ones, in float32: the same for all numbers of shards.
            frozen = (
                whole.float() if whole.is_floating_point() else whole
                for whole in (
                    whole_tensor(one.detach()) for one in parameters if not one.requires_grad
                )
            )
            with self._ranks.of_phase("fingerprints"):
                self._fingerprints_of_start = {
                    **self.algorithm.fingerprints(),
                    "model.path": f"{checksum(frozen):x}",
                    "learner.cpu_threads": str(torch.get_num_threads()),
                }
        return self._fingerprints_of_start

    def stop(self) -> None:
        """Make `accumulate` or `finish_step` raise LearnerError after the row that is in progress.

        The step then takes no optimizer update. After the first update of a step, `stop` does not
        interrupt this step: it is finished.
        """
        self._stopping.set()

    @property
    def is_told_to_stop(self) -> bool:
        return self._stopping.is_set()

    def close(self) -> None:
        """Close the rollout log and the process groups that send weights to engines."""
        self.publisher.close()
        self.algorithm.close()

    def _logprob_tolerance(self) -> LogprobTolerance:
        config = self._config
        tolerance = LogprobTolerance.of(config.model.dtype, config.logprob_tolerance)
        if config.rollout_matching.logprob_tolerance is not None:
            return tolerance
        return tolerance.raised_by(self.publisher.canary.noise)

    def _begin_log(self) -> None:
        if self.algorithm.log is not None:
            self.algorithm.log.begin(self._current.plan.number)

    @property
    def _current(self) -> AlgorithmStep:
        assert self.steps, "next_requests must begin a step first"
        return self.steps[0]

    def _rows_of(self, segments: Iterator[Segment]) -> Iterator[Row]:
        """Pack these segments, and yield each row as soon as it is ready to be trained."""
        for segment in segments:
            yield from self._packing.add(segment)

    def _last_rows(self) -> Iterator[Row]:
        """Yield the remaining rows of the current step, after all rollouts have arrived."""
        step = self._current
        yield from self._rows_of(step.ground_truth())
        step.require_complete()
        yield from self._packing.finish_step()

    def _train_last_rows(self, rows: Iterator[Row], *, again: bool = False) -> None:
        """Train on the last rows before an update. If one rank fails, no rank takes the update."""
        # A failing rank joins the other ranks' collective before it raises.
        try:
            learned = self._train_rows(rows, last=True, again=again)
        except RolloutError:
            self._ranks.meet(True)
            raise
        if self._ranks.meet(not learned):
            raise self._left("finish_step")

    def _train_rows(self, rows: Iterator[Row], *, last: bool, again: bool = False) -> bool:
        """Train on these rows. Return False if `stop` interrupted the training.

        If the model is sharded, the ranks of a copy train at the same time, and stop if one must
        stop. Until the `last` rows of a step, some may wait (`Parallel.rows_of_all_ranks`).
        """
        channel = self._current.plan.channel
        prepared = self._prepared(rows, last=last)
        following = next(prepared, None)
        while following is not None:
            segments, row = following
            try:
                # The other ranks' rows need this rank's shard of the weights, also without a row.
                weight = 0.0 if segments is None else 1.0
                result = self._trainer.queue(row, channel, weight=weight)
                try:
                    # While a GPU computes the row, the host prepares the next one.
                    following = next(prepared, None)
                finally:  # an error of the next row must not hide an error of this one
                    if segments is not None:
                        self._take(segments, row, result(), again=again)
            except RolloutError:
                # Raised after the row's backward, when the other ranks have reached this point too.
                self.parallel.any_of_row(True)
                raise
            # Checked after every row, so that all ranks stop after the same row.
            if self.parallel.any_of_row(self.is_told_to_stop and not again):
                return False
        return True

    def _prepared(
        self, rows: Iterator[Row], *, last: bool
    ) -> Iterator[tuple[Row | None, PackedRow]]:
        """Pack the rows, and yield each with its segments.

        If the model is sharded, yield None with a dummy row for each further row of other ranks.
        """
        channel = self._current.plan.channel
        version = self.publisher.version
        fixed = self.algorithm.fixed
        shared = self.parallel.rows_of_all_ranks(
            rows, lambda row: any(len(one.prompt.image_grid_I3) for one in row), last=last
        )
        for segments, joins_images in shared:
            if segments is None:
                idle = fixed if joins_images else fixed.without_images()
                yield None, self._trainer.collate([idle], channel, version=version)
            else:
                beside = fixed if joins_images else None
                row = self._trainer.collate(segments, channel, version=version, beside=beside)
                yield segments, row

    def _take(self, segments: Row, row: PackedRow, result: RowResult, *, again: bool) -> None:
        """Compare and count a trained row. Raises RolloutError if its log-probabilities differ."""
        metrics = self._current.metrics
        # `again`: a pass after the first update. The rows were already counted and compared.
        if again:
            metrics.add_losses(row, result)
            return
        channel = self._current.plan.channel
        metrics.compared = self._trainer.compare(row, result, channel, metrics.compared)
        metrics.add_row(row, result)
        if self._config.training.updates_per_batch > 1:
            self._rounds[-1].append(segments)

    def _left(self, phase: str) -> LearnerError:
        """Return the error for a step that ended before its first optimizer update."""
        if self.is_told_to_stop:
            return LearnerError("stopped because the run is ending", phase=phase)
        return CollectiveError(
            "another learner rank ended this step early; look at that rank's error", phase=phase
        )


def _device_of(config: RunConfig, place: RankTopology) -> LearnerDevice:
    """Return the rank's device, with the kernels that the configuration asks for."""
    device = LearnerDevice(torch.device(place.device))
    device.use_full_float32()
    if config.training.deterministic:
        device.use_deterministic_kernels()
    if config.model.attention == "auto" and config.model.dtype == "bfloat16":
        use_flash_attention_3(device.device)
    return device
