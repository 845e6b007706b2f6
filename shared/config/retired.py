"""Keys that were removed or moved: each is refused by name, with what to write instead.

See decision 3.
"""

from __future__ import annotations

from typing import Any

from shared.config.base import Problem

_MOVED = {
    "custom.extra.rollout_matching": "rollout_matching",
    "custom.extra.stage2_ab": "stage2_ab",
    "model.attn_implementation": "model.attention",
    "template.max_length": "global_max_length",
    "training.packing_length": "global_max_length",
    "stage2_ab.pipeline": "rollout_matching.pipeline",
    "stage2_ab.channel_b.decode_batch_size": "rollout_matching.decode_batch_size",
    "rollout_matching.rollout_generate_batch_size": "rollout_matching.decode_batch_size",
    "rollout_matching.rollout_infer_batch_size": "rollout_matching.decode_batch_size",
    "rollout_matching.temperature": "rollout_matching.decoding.temperature",
    "rollout_matching.top_p": "rollout_matching.decoding.top_p",
    "rollout_matching.top_k": "rollout_matching.decoding.top_k",
}
"""Old path to new path; the keys under the old path are now under the new one."""
_LIST_SERVERS = (
    "list servers as rollout_matching.vllm.server.servers[], with base_url and group_port"
)
_REMOVED = {
    "custom.coord_soft_ce_w1": (
        "declare a coord_reg entry in rollout_matching.pipeline.objective, with soft_ce_weight and"
        " w1_weight"
    ),
    "custom.extra": "remove it: its settings are keys of rollout_matching and stage2_ab",
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
"""Path to the remedy, for the path and all keys under it."""
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
    """Remove every retired key from `config`, and put the value of a moved one in its new place.

    There the value is checked like any other, so that moving the key is all that is left to do.

    Example: {"training": {"packing_length": 512}} becomes {"global_max_length": 512}; the problem
    reads "training.packing_length: was removed; use global_max_length".
    """
    problems: list[Problem] = []
    moved: dict[str, Any] = {}
    _take_from(config, "", problems, moved)
    for path, value in moved.items():
        _put(config, path, value)
    return problems


def _take_from(
    section: dict[str, Any], above: str, problems: list[Problem], moved: dict[str, Any]
) -> None:
    """Remove the retired keys of a section, and subsections that are empty without them."""
    for key, value in list(section.items()):
        path = f"{above}.{key}".removeprefix(".")
        if isinstance(value, dict) and value:
            _take_from(value, path, problems, moved)
            if not value:
                del section[key]
            continue
        new_path = _moved(path)
        if (old := _prefix_of(new_path, _REMOVED)) is not None:
            problems.append(Problem(path, "was removed", _REMOVED[old]))
        elif new_path != path:
            problems.append(Problem(path, "was removed", f"use {new_path}"))
            moved[new_path] = value
        else:
            continue
        del section[key]


def _moved(path: str) -> str:
    """Return where a key is now; some moved twice."""
    while (old := _prefix_of(path, _MOVED)) is not None:
        path = _MOVED[old] + path.removeprefix(old)
    return path


def _prefix_of(path: str, prefixes: dict[str, str]) -> str | None:
    return next((old for old in prefixes if f"{path}.".startswith(f"{old}.")), None)


def _put(config: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path, unless the path has one or leads through a value."""
    section, _, below = path.partition(".")
    if not below:
        config.setdefault(section, value)
    elif isinstance(inside := config.setdefault(section, {}), dict):
        _put(inside, below, value)
