"""Names of a run's processes, and remarks on a configuration that is legal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shared.chunking import chunk_size
from shared.config.base import Section
from shared.config.run import RunConfig
from shared.tokens.fresh import FILE, FreshTokens


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
    if matching.vllm.server is not None and matching.servers is None:
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
    if matching.vllm.sync.mode == "auto" and (reason := run.why_full_sync) is not None:
        found.append(f"rollout_matching.vllm.sync.mode: auto is full, because {reason}")
    if run.algorithm.uses_environment:
        idle = ", ".join(path for path in _changed(run) if path.startswith(_OF_SAMPLES))
        if idle:
            variant = run.custom.trainer_variant
            found.append(f"{idle}: no effect under {variant}, which learns from an environment")
        size = matching.decode_batch_size
        ranks = run.learner.world_size
        devices = run.engine_devices
        if devices is not None and chunk_size(size, devices, ranks) < run.group_size:
            found.append(
                f"rollout_matching.decode_batch_size: {size} x {sum(devices)} rollout devices"
                " decode fewer rollouts at a time than one example for each learner rank has,"
                f" {run.group_size} x {ranks}, so they take turns"
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
