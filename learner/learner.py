"""The learner: owns the data iterator, the model and the optimizer; turns rollouts into one update per step.

    next_requests -> accumulate (per round) -> finish_step

A channel-A step is a step without requests: its targets need no rollouts, so `finish_step` makes and learns them.

With several ranks every rank is such a learner, and every method of it is called on all of them, in the same order: each draws the same samples and keeps its
`rank_share`, whose positions in the step are contiguous. What a rank has nothing of (requests, rollouts of a round) is an empty list.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from learner.canary import Canary
from learner.checks import check_prompt, check_weight_versions
from learner.counters import StepTally
from learner.data import LearnerData
from learner.optimizer import Updater
from learner.parallel import load_parallel
from learner.place import LearnerPlace
from learner.progress import StepInProgress
from learner.publisher import WeightPublisher, make_senders
from learner.rendezvous import Rendezvous, join_ranks
from learner.rollout_log import RolloutLog
from learner.row_learner import RowLearner
from learner.rows import Row, row_policy
from learner.rules import target_rules
from learner.segments import EncodedPrompt, Segment
from learner.targets import Target, ground_truth_target, rollout_target
from shared.chunking import rank_share
from shared.config import RunConfig
from shared.config.derive import is_sharded, rank_name, resolved_sync_mode
from shared.config.pipeline import Channel
from shared.errors import CollectiveError, LearnerError, RolloutError
from shared.evaluation import Scene
from shared.reports import RankReport
from shared.rollouts import Rollout, RolloutRequest
from shared.schedule import StepPlan

# Of the canary's response: enough to pass every layer and the head, little enough to cost one short prefill per sync.
_CANARY_TOKENS = 32


class Learner:
    """One rank. Its methods are called in the order of the module's first lines, `stop` alone from any thread at any time.

    With `rollout_matching.max_staleness` the next step may begin before the one in progress has ended: `next_requests` begins the youngest step, `accumulate`
    and `finish_step` belong to the oldest.
    """

    def __init__(self, config: RunConfig, place: LearnerPlace, rendezvous: Rendezvous | None = None) -> None:
        """With several ranks it returns when all have come this far; rank 0 brings the rendezvous that `place` names.

        Raises ConfigError and RecordError for what is wrong with model and data, also where the ranks do not have the same.
        """
        self._config = config
        self._ranks = join_ranks(place, rendezvous, timeout_s=config.timeouts.learn_s, sums_in_backward=is_sharded(config))
        self._track = rank_name(place.rank, place.world_size)
        with self._ranks.of_phase("start"):
            self.loaded, self.parallel = load_parallel(config, torch.device(place.device), self._ranks)
        self.rules = target_rules(config)
        self._data = LearnerData(config, self.loaded)
        self.encoder = self._data.encoder
        self._decode = config.rollout_matching.decode_settings(stop_token_ids=(self.loaded.codec.eos_token_id,), banned_token_ids=self.loaded.banned_token_ids)
        self._row_learner = RowLearner(config, self.loaded, self.parallel, self._decode)
        self._rows = row_policy(config)
        self._log = RolloutLog(config.telemetry.run_dir / "rollouts", self.loaded.codec, rank=place.rank) if config.telemetry.rollouts else None
        self.updater = Updater(self.loaded.model, config.training, self._ranks)
        # The learner's fixed sequence: it proves a sync, and a rank without a row of its own computes it beside the others' rows.
        first = self._data.train[0]
        self._fixed = Segment(0, self.encoder.encode(first), ground_truth_target(first, self.loaded.codec, self.rules))
        response = self._fixed.target.token_ids[:_CANARY_TOKENS]
        tolerance, proves_adapter = config.canary_tolerance, resolved_sync_mode(config) == "adapter"
        canary = Canary(self.loaded, self._fixed.prompt, first.images, response, tolerance=tolerance, proves_adapter=proves_adapter)
        self.publisher = WeightPublisher(self._ranks, self.loaded, self.parallel, make_senders(config, place, self.loaded, self.parallel), canary)
        self.num_updates = 0
        """Finished updates: what the weights are of."""
        self.steps: deque[StepInProgress] = deque()
        """Begun and not ended, oldest first."""
        self._told_to_stop = threading.Event()
        with self._ranks.of_phase("start"):
            self._data.require_same(self._ranks)

    # One step

    def next_requests(self, plan: StepPlan) -> list[RolloutRequest]:
        """Draw the step's samples and ask for the rollouts of this rank's share, in position order; channel A asks for nothing."""
        assert len(self.steps) <= self._config.rollout_matching.max_staleness, "finish_step ends a step before the next begins"
        started_s = time.time()
        share = rank_share(plan.num_samples, self._ranks.world_size, self._ranks.rank)
        samples = self._data.draw(plan.num_samples, share)
        # A row of one segment is not underfilled where nothing is packed.
        min_fill_ratio = self._config.training.packing_min_fill_ratio if self._config.training.packing else 0.0
        tally = StepTally(plan.step, capacity=self._config.global_max_length, min_fill_ratio=min_fill_ratio)
        step = StepInProgress(plan, share, samples, tally, self._track)
        self.steps.append(step)
        if len(self.steps) == 1:
            self._begin_log()
        requests = [] if plan.channel is Channel.A else [self._request(step, position) for position in share]
        step.mark("draw samples", started_s)
        return requests

    def accumulate(self, rollouts: Sequence[Rollout]) -> None:
        """Check, parse, match and learn from this rank's rollouts of a round, in position order. Raises RolloutError when engine and learner disagree."""
        with self._ranks.of_phase("accumulate"):
            step, started_s = self._current, time.time()
            step.add_generation(rollouts)
            if not self._learn_rows(self._rows_of_round(rollouts)):
                raise self._left("accumulate")
            step.mark("learn round", started_s, rollouts=len(rollouts))

    def finish_step(self) -> RankReport:
        """Learn what is left and take exactly one optimizer update."""
        with self._ranks.of_phase("finish_step"):
            step, started_s = self._current, time.time()
            # All ranks take the update or none does: one that leaves its rows comes to the others before it ends.
            try:
                learned = self._learn_rows(self._last_rows())
            except RolloutError:
                self._ranks.meet(True)
                raise
            if self._ranks.meet(not learned):
                raise self._left("finish_step")
            # Step mode learns every sample it drew; carrying, what was learned is known only now (DESIGN 5, decisions 6 and 7).
            denominator = self._ranks.sum(step.tally.num_segments) if self._rows.carries else step.plan.num_samples
            update = self.updater.update(step.plan.step, denominator)
            step.mark("finish step", started_s)
            self.num_updates = step.plan.step + 1
            self.steps.popleft()
            if self.steps:
                self._begin_log()
            waits = self._ranks.take_times()
            return step.report(self.publisher.version, update.metrics(), waits, denominator=denominator, num_carried=self._rows.num_carried)

    def stop(self) -> None:
        """The run is being ended: leave a round or a step after the row that is being learned, with a LearnerError. The weights stay those of `num_updates`."""
        self._told_to_stop.set()

    @property
    def is_told_to_stop(self) -> bool:
        return self._told_to_stop.is_set()

    def close(self) -> None:
        """Leave the groups of the weight sync, and end the log of rollouts."""
        self.publisher.close()
        if self._log is not None:
            self._log.close()

    @property
    def name(self) -> str:
        """Of this rank."""
        return self._track

    # The held-out report

    def held_out_requests(self, step: int) -> list[RolloutRequest]:
        """This rank's share of them, in order."""
        held_out = self._data.held_out
        assert held_out is not None, "there is a report only with data.val"
        return held_out.requests(step, rank_share(len(held_out.samples), self._ranks.world_size, self._ranks.rank))

    def score(self, rollouts: Sequence[Rollout]) -> list[Scene]:
        assert self._data.held_out is not None
        return self._data.held_out.score(rollouts)

    # Inside

    @property
    def _current(self) -> StepInProgress:
        assert self.steps, "next_requests begins a step"
        return self.steps[0]

    def _begin_log(self) -> None:
        if self._log is not None:
            self._log.begin(self._current.plan.step, self._current.plan.channel)

    def _request(self, step: StepInProgress, position: int) -> RolloutRequest:
        run_seed = self._config.training.seed
        return self.encoder.request(step.sample(position), self._decode, step=step.plan.step, position=position, run_seed=run_seed)

    def _rows_of_round(self, rollouts: Sequence[Rollout]) -> Iterator[Row]:
        """The rows that fall due with these rollouts. Whatever is wrong with a rollout is found in here, where no rank waits for this one."""
        step = self._current
        check_weight_versions(rollouts, self.publisher.version, max_staleness=self._config.rollout_matching.max_staleness)
        for rollout in rollouts:
            assert rollout.position == step.next_position, f"expected position {step.next_position}, got {rollout.position}: rounds arrive in order"
            sample = step.next_sample
            prompt = self.encoder.encode(sample)
            check_prompt(rollout, prompt)
            target = rollout_target(rollout, sample, self.loaded.codec, self.rules)
            assert target.reading is not None
            staleness = self.publisher.version - rollout.weight_version
            step.tally.add_rollout(rollout, target.reading, len(sample.objects), staleness=staleness)
            yield from self._take(prompt, target, rollout)

    def _last_rows(self) -> Iterator[Row]:
        """The rows that fall due at the end of the step in progress."""
        step = self._current
        if step.plan.channel is Channel.A:
            for sample in step.samples:
                yield from self._take(self.encoder.encode(sample), ground_truth_target(sample, self.loaded.codec, self.rules))
        assert step.num_targets == len(step.share), f"{step.num_targets} of {len(step.share)} samples came back"
        yield from self._rows.finish_step()

    def _take(self, prompt: EncodedPrompt, target: Target, rollout: Rollout | None = None) -> list[Row]:
        """Hand over the next position's target; the rows that are due."""
        step = self._current
        position, sample = step.next_position, step.next_sample
        step.num_targets += 1
        if self._log is not None:
            self._log.write(rollout, sample, target, self._row_learner.text_weights[step.plan.channel].of(target.roles), position)
        actor, version = (None, None) if rollout is None else (rollout.actor, rollout.weight_version)
        return self._rows.add(Segment(position, prompt, target, step.plan.step, actor, version))

    def _learn_rows(self, rows: Iterator[Row]) -> bool:
        """False where a rank of a row left behind it: it was told to stop, or the row's rollouts contradict the learner."""
        channel, tally = self._current.plan.channel, self._current.tally
        for row in self.parallel.rows_of_all_ranks(rows):
            try:
                if row is None:
                    self._row_learner.compute_beside(self._fixed, channel)
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
        return CollectiveError("another learner rank left the step; check the rank that failed first", phase=phase)
