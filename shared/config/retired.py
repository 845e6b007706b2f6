"""The keys that were removed or moved (DESIGN 5, decision 3). A table; `shared.config.load` reads
it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Retired:
    """A key that is no longer part of the schema; with everything under it."""

    pattern: str
    """Dotted; `[]` stands for every element of a list, `*` for every key."""
    wrong: str
    remedy: str
    successor: str | None = None
    """The path that takes its place; what follows the pattern follows this path too."""


def _moved(pattern: str, successor: str) -> Retired:
    return Retired(pattern, "was removed", f"use {successor}", successor)


def _gone(pattern: str, remedy: str) -> Retired:
    return Retired(pattern, "was removed", remedy)


def _unknown(pattern: str, remedy: str) -> Retired:
    return Retired(pattern, "is not a known key", remedy)


def _aliases(module: str, names: dict[str, str]) -> tuple[Retired, ...]:
    # The module is named because the alias may stand in the entry of another one, where its
    # successor is no key either.
    config = "rollout_matching.pipeline.objective[].config"
    return tuple(
        Retired(
            f"{config}.{alias}",
            f"was removed: the key of {module} has another name",
            f"use {config}.{name}",
            f"{config}.{name}",
        )
        for alias, name in names.items()
    )


_SERVERS = (
    "list servers as rollout_matching.vllm.server.servers[], each with base_url and group_port"
)

RETIRED: tuple[Retired, ...] = (
    _moved("custom.extra.rollout_matching", "rollout_matching"),
    _moved("custom.extra.stage2_ab", "stage2_ab"),
    _unknown(
        "custom.extra",
        "remove it: rollout settings are keys of rollout_matching, those of the channels keys of"
        " stage2_ab",
    ),
    _gone(
        "custom.coord_soft_ce_w1",
        "declare a coord_reg entry in rollout_matching.pipeline.objective, with soft_ce_weight and"
        " w1_weight in its config",
    ),
    _moved("model.attn_implementation", "model.attention"),
    _moved("template.max_length", "global_max_length"),
    _moved("training.packing_length", "global_max_length"),
    _moved("stage2_ab.pipeline", "rollout_matching.pipeline"),
    _moved("stage2_ab.channel_b.decode_batch_size", "rollout_matching.decode_batch_size"),
    _moved("rollout_matching.rollout_generate_batch_size", "rollout_matching.decode_batch_size"),
    _moved("rollout_matching.rollout_infer_batch_size", "rollout_matching.decode_batch_size"),
    _gone(
        "rollout_matching.post_rollout_pack_scope",
        "remove it: which rollouts share rows follows from custom.trainer_variant",
    ),
    _gone(
        "rollout_matching.rollout_buffer",
        "remove it: rollouts are used once; to overlap rollout and learning set"
        " stage2_ab.channel_b.enable_pipeline",
    ),
    _moved("rollout_matching.temperature", "rollout_matching.decoding.temperature"),
    _moved("rollout_matching.top_p", "rollout_matching.decoding.top_p"),
    _moved("rollout_matching.top_k", "rollout_matching.decoding.top_k"),
    _gone("rollout_matching.vllm.server.base_url", _SERVERS),
    _gone("rollout_matching.vllm.server.group_port", _SERVERS),
    *_aliases(
        "bbox_geo", {"bbox_smoothl1_weight": "smoothl1_weight", "bbox_ciou_weight": "ciou_weight"}
    ),
    *_aliases(
        "coord_reg",
        {
            "coord_soft_ce_weight": "soft_ce_weight",
            "coord_w1_weight": "w1_weight",
            "gate_weight": "coord_gate_weight",
            "coord_text_gate_weight": "text_gate_weight",
            "coord_temperature": "temperature",
            "coord_target_sigma": "target_sigma",
            "coord_target_truncate": "target_truncate",
            "soft_ce_sigma": "target_sigma",
            "soft_ce_truncate": "target_truncate",
        },
    ),
)
"""Of two patterns that name a key, the first has the say."""


def moved_under(above: str) -> dict[str, str]:
    """The retired keys of a section that have a successor elsewhere, each with its path. `above`:
    the section's dotted path.
    """
    return {
        retired.pattern.rpartition(".")[2]: retired.successor
        for retired in RETIRED
        if retired.successor is not None and retired.pattern.rpartition(".")[0] == above
    }
