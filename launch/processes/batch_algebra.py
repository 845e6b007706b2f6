"""The division of a step's samples over rounds, engines, ranks and rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.chunking import rank_rounds, rank_share, round_chunk, split_over
from shared.config.rollout import RolloutMatchingSection
from shared.config.run import RowRule, RunConfig
from shared.schedule import RunSchedule


@dataclass(frozen=True, slots=True)
class BatchAlgebra:
    """The sizes of a run's rounds, shares and rows, computed from its configuration.

    Example (32 rollouts a step, 3 actors of 1 device, decode_batch_size 6, one learner rank):
    chunk 18, round_sizes (16, 16), shares ((6, 6, 4), (6, 6, 4)).
    """

    is_rollout_aligned: bool
    """Whether the variant is `stage2_rollout_aligned`: every step learns from rollouts (channel B),
    and its micro-steps count rollouts.
    """
    learner_world_size: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    """Micro-steps per optimizer update and learner rank."""
    effective_batch_size: int
    """Samples per update: ranks x `per_device_train_batch_size` x `gradient_accumulation_steps`."""
    raw_rollouts_per_step: int
    """Rollouts per channel-B step over all learner ranks; 0 if the trainer variant uses no
    rollouts.
    """
    share_per_rank: tuple[int, ...]
    engine_noun: str
    """Name of an engine in printed lines: actor, server, or engine (in a learner rank)."""
    engine_devices: tuple[int, ...]
    """Number of devices of each rollout engine."""
    decode_batch_size: int
    """Maximum number of sequences that a rollout device decodes at a time."""
    chunk: int
    """Maximum number of rollouts of one learner rank in a round."""
    group_size: int
    """Number of rollouts of one example of an environment. They are learned by one rank, in one
    round. 1: there are no groups.
    """
    refill_rounds: int
    """Maximum number of times that a step's rollout groups without learning signal are replaced."""
    rounds: tuple[tuple[range, ...], ...]
    """`[round][rank]`: positions, in a channel-B step, of the rollouts that the rank learns."""
    shares: tuple[tuple[int, ...], ...]
    """`[round][engine]`: number of rollouts that the engine generates in the round."""
    packing_length: int
    """Capacity of a packed row in tokens."""
    row_rule: RowRule
    packing_window: int | None
    """Number of rollouts (with groups: segments) after which packed rows are built. None unless
    `row_rule` is STEP.
    """
    updates: int
    """Optimizer updates of the run."""
    updates_per_step: int
    warmup_steps: int
    """Supervised steps (channel A) before the schedule mixes both channels."""
    a_steps: int
    b_steps: int

    @property
    def round_capacity(self) -> int:
        """Maximum number of rollouts that all engines together generate at a time."""
        return self.chunk * self.learner_world_size

    @property
    def round_sizes(self) -> tuple[int, ...]:
        """Rollouts of each round of a channel-B step, in order."""
        return tuple(sum(map(len, round_)) for round_ in self.rounds)

    def describe(self) -> tuple[str, ...]:
        """Return lines about these sizes, to print before the run starts."""
        micro_steps = (
            f"{self.per_device_train_batch_size} per micro-step x"
            f" {_counted(self.learner_world_size, 'learner rank')} x"
            f" {_counted(self.gradient_accumulation_steps, 'accumulation step')}"
        )
        if self.is_rollout_aligned or self.group_size > 1:
            factors = micro_steps
            if not self.is_rollout_aligned:
                examples = _counted(self.raw_rollouts_per_step // self.group_size, "example")
                factors = f"{examples} x {self.group_size} rollouts"
            often = "one" if self.updates_per_step == 1 else f"{self.updates_per_step}"
            all_b = f"updates         {self.updates}, {often} per step, all channel B"
            lines = [all_b, *self._describe_rounds(f" = {factors},")]
        else:
            samples = _counted(self.effective_batch_size, "sample")
            a_steps = f"{self.a_steps} channel A ({self.warmup_steps} of them warm-up)"
            steps = f"{a_steps} + {self.b_steps} channel B"
            lines = [
                f"updates         {self.updates} = {steps}, one per step",
                f"channel-A step  {samples} = {micro_steps}",
            ]
            if self.raw_rollouts_per_step:
                lines += self._describe_rounds("")
        if self.refill_rounds:
            most = _counted(self.refill_rounds, "time")
            lines.append(f"refill          groups without signal are drawn again, at most {most}")
        return (*lines, f"rows            {self._describe_rows()}")

    def _describe_rounds(self, factors: str) -> tuple[str, str]:
        rollouts = _counted(self.raw_rollouts_per_step, "raw rollout")
        rounds = _counted(len(self.round_sizes), "round")
        sizes = " + ".join(map(str, self.round_sizes))
        devices = f"{_joined(self.engine_devices)} devices"
        if len(set(self.engine_devices)) == 1:
            devices = _counted(self.engine_devices[0], "device")
        engines = _counted(len(self.engine_devices), self.engine_noun)
        step = (
            f"channel-B step  {rollouts}{factors} in {rounds} ({sizes}); per learner rank"
            f" {_joined(self.share_per_rank)}"
        )
        round_ = (
            f"round           at most {_counted(self.round_capacity, 'rollout')} over {engines} of"
            f" {devices}, at most {self.decode_batch_size} per device at a time; shares per"
            f" {self.engine_noun} {' | '.join(map(_joined, self.shares))}"
        )
        return step, round_

    def _describe_rows(self) -> str:
        most = f"at most {self.packing_length} tokens"
        match self.row_rule:
            case RowRule.SEGMENT:
                return f"one segment each, of {most}"
            case RowRule.STEP:
                noun = "segments" if self.group_size > 1 else "rollouts"
                often = f"every {self.packing_window} {noun}"
                return f"packed to {most}, taken after {often} and at the step's end"
            case RowRule.CARRY:
                return f"one per micro-step of {most}, leftovers carried"


def batch_algebra(run: RunConfig, devices: Sequence[int] | None = None) -> BatchAlgebra:
    """Compute the sizes of a run's rounds, shares and rows.

    Args:
        devices: number of devices of each rollout engine, as the servers report it; None: as
            configured.

    Raises:
        ValueError: `decode_batch_size` is too small for a rollout per learner rank and round.
    """
    world_size = run.learner.world_size
    decode_batch_size = run.rollout_matching.decode_batch_size
    devices = run.engine_devices if devices is None else devices
    assert devices is not None, "devices are known when the engines are placed"
    rollouts = run.raw_rollouts_per_step
    together = run.group_size
    shares = [
        rank_share(rollouts, world_size, rank, together=together) for rank in range(world_size)
    ]
    share_per_rank = tuple(map(len, shares))
    chunk = round_chunk(decode_batch_size, devices, world_size, together=together)
    rounds = [
        tuple(share[part.start : part.stop] for share, part in zip(shares, parts, strict=True))
        for parts in rank_rounds(share_per_rank, chunk, together=together)
    ]
    rows = run.row_rule
    b_steps = run.num_b_steps
    return BatchAlgebra(
        is_rollout_aligned=run.algorithm.carries_segments,
        learner_world_size=world_size,
        per_device_train_batch_size=run.training.per_device_train_batch_size,
        gradient_accumulation_steps=run.accumulation_steps,
        effective_batch_size=run.effective_batch_size,
        raw_rollouts_per_step=rollouts,
        share_per_rank=share_per_rank,
        engine_noun=run.rollout_matching.backend.location.engine_noun,
        engine_devices=tuple(devices),
        decode_batch_size=decode_batch_size,
        chunk=chunk,
        group_size=together,
        refill_rounds=RunSchedule(run).refill_rounds,
        rounds=tuple(rounds),
        shares=tuple(
            _engine_shares(run.rollout_matching, together, one, devices) for one in rounds
        ),
        packing_length=run.global_max_length,
        row_rule=rows,
        packing_window=run.training.packing_window if rows is RowRule.STEP else None,
        updates=run.training.num_steps * run.training.updates_per_batch,
        updates_per_step=run.training.updates_per_batch,
        warmup_steps=run.warmup_steps,
        a_steps=run.training.num_steps - b_steps,
        b_steps=b_steps,
    )


def _engine_shares(
    section: RolloutMatchingSection,
    group_size: int,
    round_: Sequence[range],
    devices: Sequence[int],
) -> tuple[int, ...]:
    if section.in_learner:  # each rank's engine generates what the rank learns
        return tuple(map(len, round_))
    if group_size > 1:
        # Environments send single calls to the engines in turn.
        positions = [position for part in round_ for position in part]
        return tuple(
            sum(position % len(devices) == engine for position in positions)
            for engine in range(len(devices))
        )
    return tuple(map(len, split_over(sum(map(len, round_)), devices)))


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _joined(counts: tuple[int, ...]) -> str:
    return "+".join(map(str, counts))
