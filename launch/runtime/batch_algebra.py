"""How a step's samples are divided over rounds, engines, ranks and rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.chunking import rank_rounds, rank_share, round_chunk, split_over
from shared.config.algorithm import TrainerVariant
from shared.config.derive import (
    EngineLocation,
    RowRule,
    accumulation_steps,
    effective_batch_size,
    engine_devices,
    engines_in,
    group_size,
    num_b_steps,
    raw_rollouts_per_step,
    row_rule,
    warmup_steps,
)
from shared.config.run import RunConfig


@dataclass(frozen=True, slots=True)
class BatchAlgebra:
    """The sizes of one run, all of them known before it starts. Only how many rows a step has where
    the row rule is STEP, and how full rows are, depends on what is generated."""

    is_rollout_aligned: bool
    """`stage2_rollout_aligned`: every step is channel B, and its rollouts are those of its
    micro-steps.
    """
    learner_world_size: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    """Micro-steps per update and rank."""
    effective_batch_size: int
    """Samples per update over all ranks where micro-steps count them: on channel A, and on the
    channel B of `stage2_rollout_aligned`.

    At least the number asked for, since accumulation steps are rounded up.
    """
    raw_rollouts_per_step: int
    """Rollouts per channel-B update over all ranks; 0 where the variant uses none."""
    share_per_rank: tuple[int, ...]
    """Rollouts per channel-B update of each rank; they sum to `raw_rollouts_per_step`."""
    engine_noun: str
    """What a rollout engine is called: actor, server, or engine where it lives in a learner rank.
    """
    engine_devices: tuple[int, ...]
    """Rollout devices of each engine."""
    decode_batch_size: int
    """Most sequences a rollout device decodes at a time."""
    chunk: int
    """Most rollouts of one learner rank in a round."""
    group_size: int
    """Rollouts that stay together in rounds and ranks, those of one example of an environment; 1:
    each is by itself.
    """
    rounds: tuple[tuple[range, ...], ...]
    """Positions of a channel-B step that each learner rank learns in each round,
    `rounds[round][rank]`.
    """
    shares: tuple[tuple[int, ...], ...]
    """Rollouts of each engine in each round, `shares[round][engine]`."""
    packing_length: int
    """Capacity of a row in tokens."""
    row_rule: RowRule
    packing_window: int | None
    """Rollouts, or of environments segments, after which rows are taken; None where the row rule is
    another one than STEP.
    """
    updates: int
    """Optimizer updates of the run, one per step."""
    warmup_steps: int
    """Channel-A steps before the schedule's ratio applies."""
    a_steps: int
    b_steps: int

    @property
    def round_capacity(self) -> int:
        """Most rollouts that all engines together generate at a time."""
        return self.chunk * self.learner_world_size

    @property
    def round_sizes(self) -> tuple[int, ...]:
        """Rollouts of each round of a channel-B step, in order."""
        return tuple(sum(map(len, round_)) for round_ in self.rounds)

    def describe(self) -> tuple[str, ...]:
        """The algebra in lines to print before the start."""
        factors = (
            _counted(self.learner_world_size, "learner rank"),
            _counted(self.gradient_accumulation_steps, "accumulation step"),
        )
        micro_steps = " x ".join((f"{self.per_device_train_batch_size} per micro-step", *factors))
        if self.is_rollout_aligned:
            lines = [
                f"updates         {self.updates}, one per step, all channel B",
                *self._describe_rounds(f" = {micro_steps},"),
            ]
        elif self.group_size > 1:
            examples = (
                f" = {_counted(self.raw_rollouts_per_step // self.group_size, 'example')} x"
                f" {self.group_size} rollouts,"
            )
            lines = [
                f"updates         {self.updates}, one per step, all channel B",
                *self._describe_rounds(examples),
            ]
        else:
            updates = (
                f"{self.updates} = {self.a_steps} channel A ({self.warmup_steps} of them warm-up) +"
                f" {self.b_steps} channel B, one per step"
            )
            lines = [
                f"updates         {updates}",
                f"channel-A step  {_counted(self.effective_batch_size, 'sample')} = {micro_steps}",
            ]
            lines += self._describe_rounds() if self.raw_rollouts_per_step else ()
        return (*lines, f"rows            {self._describe_rows()}")

    def _describe_rounds(self, micro_steps: str = "") -> tuple[str, str]:
        rounds = (
            f"{_counted(len(self.round_sizes), 'round')} ({' + '.join(map(str, self.round_sizes))})"
        )
        devices = (
            f"{_counted(len(self.engine_devices), self.engine_noun)} of"
            f" {_devices(self.engine_devices)}"
        )
        bounds = (
            f"at most {_counted(self.round_capacity, 'rollout')} over {devices}, at most"
            f" {self.decode_batch_size} per device at a time"
        )
        return (
            (
                "channel-B step "
                f" {_counted(self.raw_rollouts_per_step, 'raw rollout')}{micro_steps} in {rounds};"
                f" per learner rank {_joined(self.share_per_rank)}"
            ),
            (
                f"round           {bounds}; shares per {self.engine_noun}"
                f" {' | '.join(map(_joined, self.shares))}"
            ),
        )

    def _describe_rows(self) -> str:
        match self.row_rule:
            case RowRule.SEGMENT:
                return f"one segment each, of at most {self.packing_length} tokens"
            case RowRule.STEP:
                window = (
                    f"{self.packing_window} {'segments' if self.group_size > 1 else 'rollouts'}"
                )
                return (
                    f"packed to at most {self.packing_length} tokens, taken after every {window}"
                    " and at the step's end"
                )
            case RowRule.CARRY:
                return (
                    f"one per micro-step of at most {self.packing_length} tokens, leftovers carried"
                )


def batch_algebra(run: RunConfig, devices: Sequence[int] | None = None) -> BatchAlgebra:
    """The sizes of a run. `devices` are those of each rollout engine, where servers had to be asked
    for them.

    ValueError where not every learner rank could have a rollout of each round (names
    `decode_batch_size`).
    """
    world_size, variant, rows = run.learner.world_size, run.custom.trainer_variant, row_rule(run)
    decode_batch_size = run.rollout_matching.decode_batch_size
    devices = engine_devices(run) if devices is None else devices
    assert devices is not None, "they are known when the engines are placed"
    rollouts = raw_rollouts_per_step(run)
    together = group_size(run)
    of_ranks = [
        rank_share(rollouts, world_size, rank, together=together) for rank in range(world_size)
    ]
    share_per_rank = tuple(map(len, of_ranks))
    chunk = round_chunk(decode_batch_size, devices, world_size, together=together)
    of_rounds = rank_rounds(share_per_rank, chunk, together=together)
    rounds = [
        [share[part.start : part.stop] for share, part in zip(of_ranks, round_, strict=True)]
        for round_ in of_rounds
    ]
    in_ranks = engines_in(run) is EngineLocation.RANKS
    is_aligned = variant is TrainerVariant.STAGE2_ROLLOUT_ALIGNED
    b_steps = num_b_steps(run)
    return BatchAlgebra(
        is_rollout_aligned=is_aligned,
        learner_world_size=world_size,
        per_device_train_batch_size=run.training.per_device_train_batch_size,
        gradient_accumulation_steps=accumulation_steps(run),
        effective_batch_size=effective_batch_size(run),
        raw_rollouts_per_step=rollouts,
        share_per_rank=share_per_rank,
        engine_noun=engines_in(run).engine_noun,
        engine_devices=tuple(devices),
        decode_batch_size=decode_batch_size,
        chunk=chunk,
        group_size=together,
        rounds=tuple(map(tuple, rounds)),
        shares=tuple(
            _shares(round_, devices, in_ranks=in_ranks, in_groups=together > 1) for round_ in rounds
        ),
        packing_length=run.global_max_length,
        row_rule=rows,
        packing_window=run.training.packing_window if rows is RowRule.STEP else None,
        updates=run.training.max_steps,
        warmup_steps=warmup_steps(run),
        a_steps=run.training.max_steps - b_steps,
        b_steps=b_steps,
    )


def _shares(
    round_: Sequence[range], devices: Sequence[int], *, in_ranks: bool, in_groups: bool
) -> tuple[int, ...]:
    """Rollouts of a round by engine. One in a learner rank generates what that rank learns; engines
    of their own share out the whole round: in order, or those of environments, which ask call by
    call, in turn."""
    if in_ranks:
        return tuple(map(len, round_))
    if in_groups:
        return tuple(
            sum(position % len(devices) == engine for part in round_ for position in part)
            for engine in range(len(devices))
        )
    return tuple(map(len, split_over(sum(map(len, round_)), devices)))


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _devices(devices: tuple[int, ...]) -> str:
    return (
        _counted(devices[0], "device") if len(set(devices)) == 1 else f"{_joined(devices)} devices"
    )


def _joined(counts: tuple[int, ...]) -> str:
    return "+".join(map(str, counts))
