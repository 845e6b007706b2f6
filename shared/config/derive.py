"""Facts that follow from the configuration: names of processes, devices, sizes of a step."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Literal

from shared.chunking import chunk_size
from shared.config.base import Section
from shared.config.rollout import EngineLocation, ServerSection
from shared.config.run import RunConfig
from shared.model_families import ModelPart
from shared.tokens.fresh import FILE, FreshTokens


class RowRule(StrEnum):
    """The way in which the segments of a step come to rows (decision 7)."""

    SEGMENT = "segment"
    """No packing: each segment is a row."""
    STEP = "step"
    """Packed, and every segment of a step is learned in it."""
    CARRY = "carry"
    """One row per micro-step; the segments left wait for a later one, in this step or the next."""


def engines_in(run: RunConfig) -> EngineLocation:
    """Say where this run's rollouts are generated."""
    return run.rollout_matching.backend.location


def rollout_servers(run: RunConfig) -> ServerSection | None:
    """Return the servers that generate; None where the run's own processes do."""
    return run.rollout_matching.vllm.server if engines_in(run) is EngineLocation.SERVERS else None


def is_sharded(run: RunConfig) -> bool:
    """Tell whether every learner rank holds only a part of the model's parameters."""
    return run.learner.world_size > 1 and run.learner.parallel == "fsdp"


def rank_name(rank: int, world_size: int) -> str:
    """Name a learner rank: its actor, its track on the timeline, the engine in it."""
    return "learner" if world_size == 1 else f"learner-{rank}"


def actor_name(index: int) -> str:
    """Name a rollout actor of the run."""
    return f"rollout-actor-{index}"


def server_name(index: int) -> str:
    """Name a rollout server, and the actor that reaches it."""
    return f"server-{index}"


def environment_name(index: int) -> str:
    """Name an actor that environments run in."""
    return f"environment-{index}"


def engine_devices(run: RunConfig) -> tuple[int, ...] | None:
    """Return the devices of each engine, in the order in which rounds are split.

    None where servers have to be asked, or the cluster for its GPUs.

    Example: three actors with `tensor_parallel_size: 2` are `(2, 2, 2)`.
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
    if ModelPart.LANGUAGE_MODEL not in adapted_parts(run):
        return None
    return FreshTokens.of(Path(run.model.path))


def adapted_parts(run: RunConfig) -> tuple[ModelPart, ...]:
    """Return the parts that the run's adapter is in; none without one."""
    return () if run.model.adapter is None else run.training.parts.adapted


def adapts_vision(run: RunConfig) -> bool:
    """Tell whether the run's adapter is in the vision tower or the aligner.

    Engines are sent such an adapter in full weights: vLLM calls its own way of serving it
    experimental, and nobody has compared that with the learner here.
    """
    return any(part is not ModelPart.LANGUAGE_MODEL for part in adapted_parts(run))


def is_quantized(run: RunConfig) -> bool:
    """Tell whether the run's adapter is trained on weights in 4 bits.

    Engines hold other weights, those of the checkpoint, until they are sent full ones.
    """
    return run.model.adapter is not None and run.model.adapter.quantize is not None


def resolved_sync_mode(run: RunConfig) -> Literal["full", "adapter"]:
    """Resolve `sync.mode`: `auto` is `adapter` where the engines can take one (LoRA)."""
    mode = run.rollout_matching.vllm.sync.mode
    if mode != "auto":
        return mode
    return "adapter" if _why_full(run) is None else "full"


def _why_full(run: RunConfig) -> str | None:
    """Return the reason for which an adapter cannot travel without its base; None: it can."""
    adapter = run.model.adapter
    if adapter is None:
        return "the learner trains no adapter (model.adapter)"
    if adapter.kind == "dora":
        return "vLLM serves DoRA only merged (model.adapter.kind)"
    if not run.rollout_matching.vllm.enable_lora:
        return "engines serve no adapter (rollout_matching.vllm.enable_lora: false)"
    merged = (
        "which engines serve merged alone; set rollout_matching.vllm.enable_lora: false, which"
        " they do without"
    )
    if adapts_vision(run):
        return f"the adapter is in the vision tower or the aligner too (training.parts), {merged}"
    if is_quantized(run):
        return f"the adapter is of weights in 4 bits (model.adapter.quantize), {merged}"
    if (tokens := tokens_beside_adapter(run)) is not None:
        return (
            f"vLLM takes no adapter with the fresh embeddings of {tokens.count:,} tokens in"
            f" {run.model.path} ({FILE})"
        )
    return None


def may_send_full(run: RunConfig) -> bool:
    """Tell whether a sync may be of full weights: always, or after an adapter sync failed."""
    return resolved_sync_mode(run) == "full" or run.rollout_matching.vllm.sync.fallback_to_full


def row_rule(run: RunConfig) -> RowRule:
    """Say how the segments of the run's steps come to rows."""
    if not run.training.packing:
        return RowRule.SEGMENT
    return RowRule.CARRY if run.algorithm.carries_segments else RowRule.STEP


def num_b_steps(run: RunConfig) -> int:
    """Count the run's channel-B steps."""
    if run.algorithm.is_scheduled:
        return run.stage2_ab.schedule.num_b_steps(run.training.max_steps)
    return run.training.max_steps if run.algorithm.uses_rollouts else 0


def warmup_steps(run: RunConfig) -> int:
    """Count the channel-A steps before the schedule's ratio applies."""
    if not run.algorithm.is_scheduled:
        return 0
    return min(run.stage2_ab.schedule.warmup_steps, run.training.max_steps)


def maskiou_gate(run: RunConfig, step: int) -> float:
    """Return the mask IoU under which pairs cannot match in a step (from 0).

    Example: with `maskiou_gate: 0.3` and the schedule `{start: 0.1, steps: 100}`, behind 20 steps
    of warm-up, it is 0.1 up to step 20, 0.2 at step 70, and 0.3 from step 120 on.
    """
    gate = run.rollout_matching.maskiou_gate
    schedule = run.rollout_matching.maskiou_gate_schedule
    since_warmup = max(0, step - warmup_steps(run))
    if schedule is None or since_warmup >= schedule.steps:
        return gate
    return schedule.start + (gate - schedule.start) * since_warmup / schedule.steps


def effective_batch_size(run: RunConfig) -> int:
    """Count the samples per update over all ranks, where micro-steps count them."""
    ranks = run.learner.world_size
    return run.training.per_device_train_batch_size * ranks * accumulation_steps(run)


def raw_rollouts_per_step(run: RunConfig) -> int:
    """Count the rollouts per channel-B update over all ranks; 0 where the variant has none."""
    if not run.algorithm.uses_rollouts:
        return 0
    return run.stage2_ab.channel_b.rollouts_per_step or effective_batch_size(run)


def group_size(run: RunConfig) -> int:
    """Count the rollouts that stay together in rounds and shares.

    Those of one example of an environment are compared with each other; others stand alone.
    """
    return 1 if run.environment is None else run.environment.rollouts_per_example


def has_held_out(run: RunConfig) -> bool:
    """Tell whether there is anything to make held-out reports on."""
    if run.environment is None:
        return run.data.val is not None
    return run.environment.num_eval_examples != 0


def accumulation_steps(run: RunConfig) -> int:
    """Count the micro-steps per update: as written, as `effective_batch_size` needs, or 1."""
    training = run.training
    if training.gradient_accumulation_steps is not None:
        return training.gradient_accumulation_steps
    if training.effective_batch_size is None:
        return 1
    return needed_accumulation_steps(run, training.effective_batch_size)


def needed_accumulation_steps(run: RunConfig, num_samples: int) -> int:
    """Return the fewest micro-steps that give at least `num_samples` samples over all ranks.

    Example: 33 samples by 2 ranks that take 4 each are 5 micro-steps, of 40 samples.
    """
    return -(-num_samples // (run.training.per_device_train_batch_size * run.learner.world_size))


def remarks(run: RunConfig) -> tuple[str, ...]:
    """List what is legal and probably not meant.

    It is no error because a run that was shortened, or taken off its servers, has it on purpose.
    """
    matching = run.rollout_matching
    tokens = FreshTokens.of(Path(run.model.path))
    warm = run.training.lr_warmup_steps
    steps = run.training.max_steps
    found = []
    if warm >= steps:
        found.append(
            f"training.lr_warmup_steps: {warm} of {steps} steps, so the learning rate only rises"
        )
    if matching.vllm.server is not None and rollout_servers(run) is None:
        found.append(
            "rollout_matching.vllm.server: no effect, because the learner generates itself; servers"
            " need rollout_backend: vllm and vllm.mode: server"
        )
    if matching.offload.enabled and matching.backend_name != "colocate":
        found.append(
            "rollout_matching.offload: no effect, because nothing shares the learner's device;"
            " only rollout_backend: vllm with vllm.mode: colocate does"
        )
    decoding = matching.decoding
    if decoding.effective_temperature != decoding.temperature:
        found.append(
            f"rollout_matching.decoding.temperature: {decoding.temperature:g} is sampled at"
            f" {decoding.effective_temperature:g}, vLLM's lowest"
        )
    is_frozen = run.training.parts.language_model.frozen
    if tokens is not None and run.model.adapter is None and is_frozen:
        found.append(
            f"training.parts.language_model.frozen: the embeddings of {tokens.count:,} tokens in"
            f" {run.model.path} were never learned ({FILE}), and stay so; unfreeze the part, or"
            " set model.adapter"
        )
    if matching.vllm.sync.mode == "auto" and (reason := _why_full(run)) is not None:
        found.append(f"rollout_matching.vllm.sync.mode: auto is full, because {reason}")
    if run.environment is not None:
        idle = ", ".join(path for path in _changed(run) if path.startswith(_OF_SAMPLES))
        if idle:
            variant = run.custom.trainer_variant
            found.append(f"{idle}: no effect under {variant}, which learns from an environment")
        size = matching.decode_batch_size
        ranks = run.learner.world_size
        devices = engine_devices(run)
        if devices is not None and chunk_size(size, devices, ranks) < group_size(run):
            found.append(
                f"rollout_matching.decode_batch_size: {size} x {sum(devices)} rollout devices"
                " decode fewer rollouts at a time than one example for each learner rank has,"
                f" {group_size(run)} x {ranks}, so they take turns"
            )
    return tuple(found)


_OF_SAMPLES = (
    "data.on_bad_row",
    "data.sort_objects",
    "data.check_images",
    "data.answer_format",
    "data.augment.",
    "data.system_prompt",
    "data.user_prompt",
    "data.prompts",
    "data.max_val_samples",
    "custom.object_field_order",
    "rollout_matching.geometry",
    "rollout_matching.candidate_top_k",
    "rollout_matching.maskiou_",
    "rollout_matching.fp_cost",
    "rollout_matching.fn_cost",
    "rollout_matching.ot_",
    "rollout_matching.trim_trailing_false_positives",
    "rollout_matching.supervise_separators",
    "stage2_ab.schedule.",
    "stage2_ab.channel_b.reward.",
    "evaluation.",
)
"""Beginnings of the paths of keys that have no effect without samples with ground truth."""


def _changed(section: Section, above: str = "") -> Iterator[str]:
    """Yield the dotted paths of the keys that differ from the schema's default."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _changed(value, f"{above}{name}.")
        elif value != field.default:
            yield f"{above}{name}"
