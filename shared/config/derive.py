"""What follows from the configuration: where rollouts are generated, what a process is called, and
how much a step takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Literal

from shared.chunking import chunk_size
from shared.config.algorithm import TrainerVariant
from shared.config.base import Section
from shared.config.rollout import ServerSection
from shared.config.run import RunConfig
from shared.tokens.fresh import FILE, FreshTokens


class EngineLocation(StrEnum):
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
            case EngineLocation.RANKS:
                return "engine"
            case EngineLocation.ACTORS:
                return "actor"
            case EngineLocation.SERVERS:
                return "server"


class RowRule(StrEnum):
    """How the segments of a step come to rows (DESIGN 5, decision 7)."""

    SEGMENT = "segment"
    """No packing: each segment is a row."""
    STEP = "step"
    """Packed, and every segment of a step is learned in it."""
    CARRY = "carry"
    """One row per micro-step; the segments left wait for a later one, in this step or the next."""


def engines_in(run: RunConfig) -> EngineLocation:
    """Where this run's rollouts are generated: what `rollout_backend` and `vllm.mode` come to."""
    if run.rollout_matching.rollout_backend == "hf":
        return EngineLocation.RANKS
    match run.rollout_matching.vllm.mode:
        case "colocate":
            return EngineLocation.RANKS
        case "actors":
            return EngineLocation.ACTORS
        case "server":
            return EngineLocation.SERVERS


def rollout_servers(run: RunConfig) -> ServerSection | None:
    """The servers that generate; None where others do."""
    return run.rollout_matching.vllm.server if engines_in(run) is EngineLocation.SERVERS else None


def is_sharded(run: RunConfig) -> bool:
    """Whether every learner rank holds a part of the model's parameters only."""
    return run.learner.world_size > 1 and run.learner.parallel == "fsdp"


def rank_name(rank: int, world_size: int) -> str:
    """What a learner rank is called: its actor, its track on the timeline, and whatever generates
    in it.
    """
    return "learner" if world_size == 1 else f"learner-{rank}"


def actor_name(index: int) -> str:
    """What a rollout actor of the run is called."""
    return f"rollout-actor-{index}"


def server_name(index: int) -> str:
    """What the actor that reaches a rollout server is called, and the server with it."""
    return f"server-{index}"


def engine_devices(run: RunConfig) -> tuple[int, ...] | None:
    """Rollout devices of each engine, in the order in which rounds are split; None where servers
    have to be asked, or the cluster for its GPUs.
    """
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


def tokens_beside_adapter(run: RunConfig) -> FreshTokens | None:
    """Return the checkpoint's fresh tokens where they are trained with the run's adapter.

    vLLM takes no adapter that has rows of embeddings, so they are sent in full weights.
    """
    return None if run.model.adapter is None else FreshTokens.of(Path(run.model.path))


def resolved_sync_mode(run: RunConfig) -> Literal["full", "adapter"]:
    """What a sync sends (spec: weight sync modes): `auto` is `adapter` where the engines serve the
    learner's adapters and can (LoRA, one rank).
    """
    vllm = run.rollout_matching.vllm
    if vllm.sync.mode != "auto":
        return vllm.sync.mode
    can = _serves_lora(run) and tokens_beside_adapter(run) is None
    return "adapter" if can else "full"


def _serves_lora(run: RunConfig) -> bool:
    adapter = run.model.adapter
    return run.rollout_matching.vllm.enable_lora and adapter is not None and adapter.kind == "lora"


def may_send_full(run: RunConfig) -> bool:
    """Whether a sync of this run may be of full weights: each is, or the first one behind an
    adapter that failed.
    """
    return resolved_sync_mode(run) == "full" or run.rollout_matching.vllm.sync.fallback_to_full


def remarks(run: RunConfig) -> tuple[str, ...]:
    """What is allowed, since a run that was shortened to try it out or has left its servers has it,
    and hardly meant in a whole one.
    """
    found = []
    warm, steps = run.training.lr_warmup_steps, run.training.max_steps
    if warm >= steps:
        found.append(
            f"training.lr_warmup_steps: {warm} of {steps} steps, so the learning rate only rises"
            " and the schedule after it never comes"
        )
    if run.rollout_matching.vllm.server is not None and rollout_servers(run) is None:
        found.append(
            "rollout_matching.vllm.server: no effect, because the learner generates itself; servers"
            " need rollout_backend: vllm and vllm.mode: server"
        )
    if run.rollout_matching.offload.enabled and not (
        run.rollout_matching.rollout_backend == "vllm"
        and run.rollout_matching.vllm.mode == "colocate"
    ):
        found.append(
            "rollout_matching.offload: no effect, because nothing shares the learner's device; only"
            " rollout_backend: vllm with vllm.mode: colocate has it"
        )
    decoding = run.rollout_matching.decoding
    if decoding.effective_temperature != decoding.temperature:
        found.append(
            f"rollout_matching.decoding.temperature: {decoding.temperature:g} is sampled at"
            f" {decoding.effective_temperature:g}, vLLM's lowest"
        )
    tokens = FreshTokens.of(Path(run.model.path))
    if (
        tokens is not None
        and run.model.adapter is None
        and run.training.parts.language_model.frozen
    ):
        found.append(
            f"training.parts.language_model.frozen: the embeddings of {tokens.count:,} tokens in "
            f"{run.model.path} were made and not learned ({FILE}), and stay so; unfreeze the part, "
            "or set model.adapter"
        )
    if tokens is not None and _serves_lora(run) and run.rollout_matching.vllm.sync.mode == "auto":
        found.append(
            "rollout_matching.vllm.sync.mode: auto is full, because the fresh embeddings of "
            f"{tokens.count:,} tokens in {run.model.path} ({FILE}) are trained with the adapter, "
            "and vLLM takes no adapter with such rows"
        )
    if run.environment is not None:
        idle = ", ".join(path for path in _changed(run) if path.startswith(_OF_SAMPLES))
        if idle:
            found.append(
                f"{idle}: no effect under {run.custom.trainer_variant}, which learns from an"
                " environment"
            )
        devices, size, ranks = (
            engine_devices(run),
            run.rollout_matching.decode_batch_size,
            run.learner.world_size,
        )
        if devices is not None and chunk_size(size, devices, ranks) < group_size(run):
            found.append(
                f"rollout_matching.decode_batch_size: {size} x {sum(devices)} rollout devices"
                " decode fewer rollouts at a time than one example for each learner rank has,"
                f" {group_size(run)} x {ranks}, so they take turns"
            )
    return tuple(found)


_OF_SAMPLES = (
    *(
        f"data.{key}"
        for key in (
            "on_bad_row",
            "sort_objects",
            "check_images",
            "system_prompt",
            "user_prompt",
            "max_val_samples",
        )
    ),
    "custom.object_field_order",
    *(
        f"rollout_matching.{key}"
        for key in ("geometry", "candidate_top_k", "maskiou_", "fp_cost", "fn_cost", "ot_")
    ),
    "stage2_ab.schedule.",
    "evaluation.",
)
"""How the paths of keys begin that nobody reads where there are no samples with ground truth."""


def _changed(section: Section, above: str = "") -> Iterator[str]:
    """The dotted paths of the keys that have another value than the schema's default."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _changed(value, f"{above}{name}.")
        elif value != field.default:
            yield f"{above}{name}"


def row_rule(run: RunConfig) -> RowRule:
    """How the segments of the run's steps come to rows."""
    if not run.training.packing:
        return RowRule.SEGMENT
    return (
        RowRule.CARRY
        if run.custom.trainer_variant is TrainerVariant.STAGE2_ROLLOUT_ALIGNED
        else RowRule.STEP
    )


def num_b_steps(run: RunConfig) -> int:
    """How many steps of the run are channel B: by the schedule where the variant has two channels,
    else all or none.
    """
    if run.custom.trainer_variant is TrainerVariant.STAGE2_TWO_CHANNEL:
        return run.stage2_ab.schedule.num_b_steps(run.training.max_steps)
    return run.training.max_steps if run.custom.trainer_variant.uses_rollouts else 0


def warmup_steps(run: RunConfig) -> int:
    """Channel-A steps before the schedule's ratio applies."""
    is_two_channel = run.custom.trainer_variant is TrainerVariant.STAGE2_TWO_CHANNEL
    return min(run.stage2_ab.schedule.warmup_steps, run.training.max_steps) if is_two_channel else 0


def effective_batch_size(run: RunConfig) -> int:
    """Samples per update over all ranks where micro-steps count them; see
    `launch.runtime.batch_algebra`.
    """
    return (
        run.training.per_device_train_batch_size * run.learner.world_size * accumulation_steps(run)
    )


def raw_rollouts_per_step(run: RunConfig) -> int:
    """Rollouts per channel-B update over all ranks: as given, or the effective batch size. 0 where
    the variant uses none.
    """
    if not run.custom.trainer_variant.uses_rollouts:
        return 0
    return run.stage2_ab.channel_b.rollouts_per_step or effective_batch_size(run)


def group_size(run: RunConfig) -> int:
    """Rollouts of a step that stay together in rounds and shares: those of one example where they
    are compared with each other, else each by itself.
    """
    return 1 if run.environment is None else run.environment.rollouts_per_example


def has_held_out(run: RunConfig) -> bool:
    """Whether there is anything to make held-out reports on."""
    return (
        run.data.val is not None
        if run.environment is None
        else run.environment.num_eval_examples != 0
    )


def environment_name(index: int) -> str:
    """What an actor that environments run in is called."""
    return f"environment-{index}"


def accumulation_steps(run: RunConfig) -> int:
    """Micro-steps per update: as given, or as many as `effective_batch_size` needs (rounded up), or
    1.
    """
    training = run.training
    if training.gradient_accumulation_steps is not None:
        return training.gradient_accumulation_steps
    return (
        1
        if training.effective_batch_size is None
        else needed_accumulation_steps(run, training.effective_batch_size)
    )


def needed_accumulation_steps(run: RunConfig, num_samples: int) -> int:
    """The fewest micro-steps that give at least `num_samples` samples over all ranks."""
    return -(-num_samples // (run.training.per_device_train_batch_size * run.learner.world_size))
