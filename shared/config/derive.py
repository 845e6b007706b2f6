"""What follows from the configuration: how a step's samples are divided over rounds, actors, ranks and rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from shared.chunking import chunk_size, rank_rounds, rank_share, split_over
from shared.config.custom import TrainerVariant
from shared.config.run import RunConfig
from shared.config.server import ServerSection


class EnginePlace(StrEnum):
    """Where a run's rollouts are generated."""

    RANKS = "ranks"
    """In each learner rank's own process, which generates what it learns: the two alternate."""
    ACTORS = "actors"
    """In Ray actors of the run, on devices of their own."""
    SERVERS = "servers"
    """In servers that were launched elsewhere."""

    @property
    def engine_noun(self) -> str:
        """What one that generates is called in texts."""
        match self:
            case EnginePlace.RANKS:
                return "engine"
            case EnginePlace.ACTORS:
                return "actor"
            case EnginePlace.SERVERS:
                return "server"


class RowRule(StrEnum):
    """How the segments of a step come to rows (DESIGN 5, decision 7)."""

    SEGMENT = "segment"
    """No packing: each segment is a row."""
    STEP = "step"
    """Packed, and every segment of a step is learned in it."""
    CARRY = "carry"
    """One row per micro-step; the segments left wait for a later one, in this step or the next."""


@dataclass(frozen=True, slots=True)
class BatchAlgebra:
    """The sizes of one run, all of them known before it starts. Only how many rows a step has where the row rule is STEP, and how full rows are, depends on
    what is generated."""

    is_rollout_aligned: bool
    """`stage2_rollout_aligned`: every step is channel B, and its rollouts are those of its micro-steps."""
    learner_world_size: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    """Micro-steps per update and rank."""
    effective_batch_size: int
    """Samples per update over all ranks where micro-steps count them: on channel A, and on the channel B of `stage2_rollout_aligned`.

    At least the number asked for, since accumulation steps are rounded up.
    """
    raw_rollouts_per_step: int
    """Rollouts per channel-B update over all ranks; 0 where the variant uses none."""
    share_per_rank: tuple[int, ...]
    """Rollouts per channel-B update of each rank; they sum to `raw_rollouts_per_step`."""
    engine_noun: str
    """What a rollout engine is called: actor, server, or engine where it lives in a learner rank."""
    engine_devices: tuple[int, ...]
    """Rollout devices of each engine."""
    decode_batch_size: int
    """Most sequences a rollout device decodes at a time."""
    chunk: int
    """Most rollouts of one learner rank in a round."""
    rank_rounds: tuple[tuple[int, ...], ...]
    """Rollouts of each learner rank in each round of a channel-B step, `rank_rounds[round][rank]`."""
    shares: tuple[tuple[int, ...], ...]
    """Rollouts of each engine in each round, `shares[round][engine]`."""
    packing_length: int
    """Capacity of a row in tokens."""
    row_rule: RowRule
    packing_window: int | None
    """Rollouts after which rows are taken; None where the row rule is another one than STEP."""
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
        return tuple(map(sum, self.rank_rounds))

    def describe(self) -> tuple[str, ...]:
        """The algebra in lines to print before the start."""
        factors = (_counted(self.learner_world_size, "learner rank"), _counted(self.gradient_accumulation_steps, "accumulation step"))
        micro_steps = " x ".join((f"{self.per_device_train_batch_size} per micro-step", *factors))
        if self.is_rollout_aligned:
            lines = [f"updates         {self.updates}, one per step, all channel B", *self._describe_rounds(f" = {micro_steps},")]
        else:
            updates = f"{self.updates} = {self.a_steps} channel A ({self.warmup_steps} of them warm-up) + {self.b_steps} channel B, one per step"
            lines = [f"updates         {updates}", f"channel-A step  {_counted(self.effective_batch_size, 'sample')} = {micro_steps}"]
            lines += self._describe_rounds() if self.raw_rollouts_per_step else ()
        return (*lines, f"rows            {self._describe_rows()}")

    def _describe_rounds(self, micro_steps: str = "") -> tuple[str, str]:
        rounds = f"{_counted(len(self.round_sizes), 'round')} ({' + '.join(map(str, self.round_sizes))})"
        devices = f"{_counted(len(self.engine_devices), self.engine_noun)} of {_devices(self.engine_devices)}"
        bounds = f"at most {_counted(self.round_capacity, 'rollout')} over {devices}, at most {self.decode_batch_size} per device at a time"
        return (
            f"channel-B step  {_counted(self.raw_rollouts_per_step, 'raw rollout')}{micro_steps} in {rounds}; per learner rank {_joined(self.share_per_rank)}",
            f"round           {bounds}; shares per {self.engine_noun} {' | '.join(map(_joined, self.shares))}",
        )

    def _describe_rows(self) -> str:
        match self.row_rule:
            case RowRule.SEGMENT:
                return f"one segment each, of at most {self.packing_length} tokens"
            case RowRule.STEP:
                return f"packed to at most {self.packing_length} tokens, taken after every {self.packing_window} rollouts and at the step's end"
            case RowRule.CARRY:
                return f"one per micro-step of at most {self.packing_length} tokens, leftovers carried"


def batch_algebra(run: RunConfig, devices: Sequence[int] | None = None) -> BatchAlgebra:
    """The sizes of a run. `devices` are those of each rollout engine, where servers had to be asked for them.

    ValueError where not every learner rank could have a rollout of each round (names `decode_batch_size`).
    """
    world_size, variant, rows = run.learner.world_size, run.custom.trainer_variant, row_rule(run)
    decode_batch_size = run.rollout_matching.decode_batch_size
    devices = engine_devices(run) if devices is None else devices
    assert devices is not None, "they are known when the engines are placed"
    rollouts = raw_rollouts_per_step(run)
    share_per_rank = tuple(len(rank_share(rollouts, world_size, rank)) for rank in range(world_size))
    chunk = chunk_size(decode_batch_size, devices, world_size)
    rounds = tuple(tuple(map(len, round_)) for round_ in rank_rounds(share_per_rank, chunk))
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
        rank_rounds=rounds,
        # An engine in a learner rank generates what that rank learns; engines of their own share out the whole round.
        shares=tuple(sizes if engines_in(run) is EnginePlace.RANKS else tuple(map(len, split_over(sum(sizes), devices))) for sizes in rounds),
        packing_length=run.global_max_length,
        row_rule=rows,
        packing_window=run.training.packing_window if rows is RowRule.STEP else None,
        updates=run.training.max_steps,
        warmup_steps=warmup_steps(run),
        a_steps=run.training.max_steps - b_steps,
        b_steps=b_steps,
    )


def engines_in(run: RunConfig) -> EnginePlace:
    """Where this run's rollouts are generated: what `rollout_backend` and `vllm.mode` come to."""
    if run.rollout_matching.rollout_backend == "hf":
        return EnginePlace.RANKS
    match run.rollout_matching.vllm.mode:
        case "colocate":
            return EnginePlace.RANKS
        case "actors":
            return EnginePlace.ACTORS
        case "server":
            return EnginePlace.SERVERS


def rollout_servers(run: RunConfig) -> ServerSection | None:
    """The servers that generate; None where others do."""
    return run.rollout_matching.vllm.server if engines_in(run) is EnginePlace.SERVERS else None


def is_sharded(run: RunConfig) -> bool:
    """Whether every learner rank holds a part of the model's parameters only."""
    return run.learner.world_size > 1 and run.learner.parallel == "fsdp"


def rank_name(rank: int, world_size: int) -> str:
    """What a learner rank is called: its actor, its track on the timeline, and whatever generates in it."""
    return "learner" if world_size == 1 else f"learner-{rank}"


def actor_name(index: int) -> str:
    """What a rollout actor of the run is called."""
    return f"rollout-actor-{index}"


def server_name(index: int) -> str:
    """What the actor that reaches a rollout server is called, and the server with it."""
    return f"server-{index}"


def engine_devices(run: RunConfig) -> tuple[int, ...] | None:
    """Rollout devices of each engine, in the order in which rounds are split; None where servers have to be asked, or the cluster for its GPUs."""
    matching = run.rollout_matching
    if matching.rollout_backend == "hf":
        return (1,) * run.learner.world_size
    match matching.vllm.mode:
        case "colocate":
            size = matching.vllm.tensor_parallel_size
            return None if size is None else (size,) * run.learner.world_size
        case "actors":
            return (matching.vllm.actors.tensor_parallel_size,) * matching.vllm.actors.num_actors
        case "server":
            return None


def resolved_sync_mode(run: RunConfig) -> Literal["full", "adapter"]:
    """What a sync sends (spec: weight sync modes): `auto` is `adapter` where the engines serve the learner's adapters and can (LoRA, one rank)."""
    adapter, vllm = run.model.adapter, run.rollout_matching.vllm
    if vllm.sync.mode != "auto":
        return vllm.sync.mode
    return "adapter" if vllm.enable_lora and adapter is not None and adapter.kind == "lora" else "full"


def remarks(run: RunConfig) -> tuple[str, ...]:
    """What is allowed, since a run that was shortened to try it out or has left its servers has it, and hardly meant in a whole one."""
    found = []
    warm, steps = run.training.lr_warmup_steps, run.training.max_steps
    if warm >= steps:
        found.append(f"training.lr_warmup_steps: {warm} of {steps} steps, so the learning rate only rises and the schedule after it never comes")
    if run.rollout_matching.vllm.server is not None and rollout_servers(run) is None:
        found.append("rollout_matching.vllm.server: no effect, because the learner generates itself; servers need rollout_backend: vllm and vllm.mode: server")
    return tuple(found)


def row_rule(run: RunConfig) -> RowRule:
    """How the segments of the run's steps come to rows."""
    if not run.training.packing:
        return RowRule.SEGMENT
    return RowRule.CARRY if run.custom.trainer_variant is TrainerVariant.STAGE2_ROLLOUT_ALIGNED else RowRule.STEP


def num_b_steps(run: RunConfig) -> int:
    """How many steps of the run are channel B: by the schedule where the variant has two channels, else all or none."""
    if run.custom.trainer_variant is TrainerVariant.STAGE2_TWO_CHANNEL:
        return run.stage2_ab.schedule.num_b_steps(run.training.max_steps)
    return run.training.max_steps if run.custom.trainer_variant.uses_rollouts else 0


def warmup_steps(run: RunConfig) -> int:
    """Channel-A steps before the schedule's ratio applies."""
    is_two_channel = run.custom.trainer_variant is TrainerVariant.STAGE2_TWO_CHANNEL
    return min(run.stage2_ab.schedule.warmup_steps, run.training.max_steps) if is_two_channel else 0


def effective_batch_size(run: RunConfig) -> int:
    """Samples per update over all ranks where micro-steps count them; see `BatchAlgebra.effective_batch_size`."""
    return run.training.per_device_train_batch_size * run.learner.world_size * accumulation_steps(run)


def raw_rollouts_per_step(run: RunConfig) -> int:
    """Rollouts per channel-B update over all ranks: as given, or the effective batch size. 0 where the variant uses none."""
    if not run.custom.trainer_variant.uses_rollouts:
        return 0
    return run.stage2_ab.channel_b.rollouts_per_step or effective_batch_size(run)


def accumulation_steps(run: RunConfig) -> int:
    """Micro-steps per update: as given, or as many as `effective_batch_size` needs (rounded up), or 1."""
    training = run.training
    if training.gradient_accumulation_steps is not None:
        return training.gradient_accumulation_steps
    return 1 if training.effective_batch_size is None else needed_accumulation_steps(run, training.effective_batch_size)


def needed_accumulation_steps(run: RunConfig, num_samples: int) -> int:
    """The fewest micro-steps that give at least `num_samples` samples over all ranks."""
    return -(-num_samples // (run.training.per_device_train_batch_size * run.learner.world_size))


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _devices(devices: tuple[int, ...]) -> str:
    return _counted(devices[0], "device") if len(set(devices)) == 1 else f"{_joined(devices)} devices"


def _joined(counts: tuple[int, ...]) -> str:
    return "+".join(map(str, counts))
