"""Names of a run's processes, and remarks about configurations that are valid but unusual."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shared.chunking import chunk_size
from shared.config.base import Section
from shared.config.run import RunConfig
from shared.tokens.fresh import FILE, FreshTokens


def rank_name(rank: int, world_size: int) -> str:
    """Return the name of a learner rank.

    Its Ray actor, its track in the timeline, and the engine in its process have this name too.
    """
    return "learner" if world_size == 1 else f"learner-{rank}"


def actor_name(index: int) -> str:
    return f"rollout-actor-{index}"


def server_name(index: int) -> str:
    """Return the name of a rollout server, and of the Ray actor that is its client."""
    return f"server-{index}"


def environment_name(index: int) -> str:
    return f"environment-{index}"


def remarks(run: RunConfig) -> tuple[str, ...]:
    """Return remarks about settings that are valid but probably not intended.

    These settings are not errors, because they may be deliberate, for example in a shortened run.
    """
    matching = run.rollout_matching
    tokens = FreshTokens.of(Path(run.model.path))
    warm = run.training.lr_warmup_steps
    steps = run.training.num_steps
    found = []
    if warm >= steps:
        found.append(
            f"training.lr_warmup_steps: {warm} of the run's {steps} steps, so the learning rate"
            " rises until the run ends; lower it"
        )
    if matching.vllm.server is not None and matching.servers is None:
        found.append(
            "rollout_matching.vllm.server: no effect, because the learner generates the rollouts;"
            " servers need rollout_backend: vllm and vllm.mode: server"
        )
    if matching.offload.enabled and matching.backend_name != "colocate":
        found.append(
            "rollout_matching.offload: no effect, because no engine shares the learner's device;"
            " it needs rollout_backend: vllm and vllm.mode: colocate"
        )
    decoding = matching.decoding
    if decoding.effective_temperature != decoding.temperature:
        found.append(
            f"rollout_matching.decoding.temperature: {decoding.temperature:g} is raised to"
            f" {decoding.effective_temperature:g}, the lowest temperature of vLLM"
        )
    is_frozen = run.training.parts.language_model.frozen
    if tokens is not None and run.model.adapter is None and is_frozen:
        found.append(
            f"training.parts.language_model.frozen: the embeddings of {tokens.count:,} tokens in"
            f" {run.model.path} are untrained ({FILE}), and this run does not train them; unfreeze"
            " the part, or set model.adapter"
        )
    if matching.vllm.sync.mode == "auto" and (reason := run.why_full_sync) is not None:
        found.append(f"rollout_matching.vllm.sync.mode: auto means full here, because {reason}")
    if run.algorithm.uses_environment:
        idle = ", ".join(path for path in _changed(run) if path.startswith(_OF_SAMPLES))
        if idle:
            variant = run.custom.trainer_variant
            found.append(f"{idle}: no effect under {variant}, which trains on an environment")
        size = matching.decode_batch_size
        ranks = run.learner.world_size
        devices = run.engine_devices
        if devices is not None and chunk_size(size, devices, ranks) < run.group_size:
            found.append(
                f"rollout_matching.decode_batch_size: {size} x {sum(devices)} rollout devices"
                " cannot decode one example for each learner rank at the same time"
                f" ({run.group_size} rollouts x {ranks}), so some rollouts wait"
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
"""Prefixes of keys that have no effect without samples with ground truth."""


def _changed(section: Section, above: str = "") -> Iterator[str]:
    """Yield the dotted paths of the keys that differ from their defaults."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _changed(value, f"{above}{name}.")
        elif value != field.default:
            yield f"{above}{name}"
