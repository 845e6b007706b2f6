"""Keys that were removed or moved: each is refused by name, with what to write instead.

See decision 3.
"""

from __future__ import annotations

from typing import Any

from shared.config.base import Problem

_LIST_SERVERS = (
    "list servers as rollout_matching.vllm.server.servers[], with base_url and group_port"
)
_RETIRED = {
    "custom.extra": (
        "move rollout_matching and stage2_ab out of it, to the top level, and remove the rest"
    ),
    "custom.coord_soft_ce_w1": (
        "declare a coord_reg entry in rollout_matching.pipeline.objective, with soft_ce_weight and"
        " w1_weight"
    ),
    "model.attn_implementation": "use model.attention",
    "template": "use global_max_length",
    "training.packing_length": "use global_max_length",
    "stage2_ab.pipeline": "use rollout_matching.pipeline",
    "stage2_ab.channel_b.decode_batch_size": "use rollout_matching.decode_batch_size",
    "rollout_matching.rollout_generate_batch_size": "use rollout_matching.decode_batch_size",
    "rollout_matching.rollout_infer_batch_size": "use rollout_matching.decode_batch_size",
    "rollout_matching.temperature": "use rollout_matching.decoding.temperature",
    "rollout_matching.top_p": "use rollout_matching.decoding.top_p",
    "rollout_matching.top_k": "use rollout_matching.decoding.top_k",
    "rollout_matching.post_rollout_pack_scope": "remove it: custom.trainer_variant decides it",
    "rollout_matching.rollout_buffer": (
        "remove it; to overlap rollout and learning set stage2_ab.channel_b.enable_pipeline"
    ),
    "rollout_matching.vllm.sync.transport": (
        "remove it: where learner and engines are placed decides how weights travel"
    ),
    "rollout_matching.vllm.server.base_url": _LIST_SERVERS,
    "rollout_matching.vllm.server.group_port": _LIST_SERVERS,
}
"""Dotted path to the remedy, for the path and all keys under it."""
RENAMED = {
    "bbox_smoothl1_weight": "smoothl1_weight",
    "bbox_ciou_weight": "ciou_weight",
    "coord_soft_ce_weight": "soft_ce_weight",
    "coord_w1_weight": "w1_weight",
    "gate_weight": "coord_gate_weight",
    "coord_text_gate_weight": "text_gate_weight",
    "coord_temperature": "temperature",
    "coord_target_sigma": "target_sigma",
    "coord_target_truncate": "target_truncate",
    "soft_ce_sigma": "target_sigma",
    "soft_ce_truncate": "target_truncate",
}
"""Old names of keys in the `config` of a pipeline entry: the report of an unknown key uses them."""


def take_retired(config: dict[str, Any]) -> list[Problem]:
    """Remove every retired key from `config`, with all keys under it, and return the problems.

    Example: of {"training": {"packing_length": 512}} the problem reads
    "training.packing_length: was removed; use global_max_length".
    """
    return [
        Problem(path, "was removed", remedy)
        for path, remedy in _RETIRED.items()
        if _remove(config, path)
    ]


def _remove(section: Any, path: str) -> bool:
    """Remove a key, and the sections that are empty without it; return whether it was there."""
    key, _, below = path.partition(".")
    if not isinstance(section, dict) or key not in section:
        return False
    if below and not _remove(section[key], below):
        return False
    if not below or not section[key]:
        del section[key]
    return True
