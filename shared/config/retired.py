"""Keys that were removed or moved: each is refused by name, with what to write instead.

See decision 3.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from shared.config.base import Problem

_ENTRY_CONFIG = "rollout_matching.pipeline.objective[].config"
_RENAMED_IN = {
    "bbox_geo": {"bbox_smoothl1_weight": "smoothl1_weight", "bbox_ciou_weight": "ciou_weight"},
    "coord_reg": {
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
}
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
_LIST_SERVERS = (
    "list servers as rollout_matching.vllm.server.servers[], with base_url and group_port"
)
_GONE = {
    "custom.coord_soft_ce_w1": (
        "declare a coord_reg entry in rollout_matching.pipeline.objective, with soft_ce_weight and"
        " w1_weight"
    ),
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


@dataclass(frozen=True, slots=True)
class Retired:
    """A key that left the schema, with everything under it."""

    pattern: str
    """Dotted; `[]` stands for the index of any list element."""
    wrong: str = "was removed"
    remedy: str | None = None
    """What to do; None: use the successor."""
    successor: str | None = None
    """The path that takes its place; what follows the pattern follows this path too."""

    def successor_of(self, path: str) -> str | None:
        """Return the path that takes the place of this one, which the pattern names."""
        if self.successor is None:
            return None
        template = self.successor.replace("[]", r"[\1]")
        return re.sub(self.regex, template, path, count=1)

    @property
    def regex(self) -> str:
        return "^" + re.escape(self.pattern).replace(r"\[\]", r"\[(\d+)\]") + r"(?=\.|$)"


RETIRED: tuple[Retired, ...] = (
    *(Retired(old, successor=new) for old, new in _MOVED.items()),
    *(Retired(old, remedy=remedy) for old, remedy in _GONE.items()),
    *(
        # The module is named: the old key may stand in the entry of another one, where the new
        # one is unknown too.
        Retired(
            f"{_ENTRY_CONFIG}.{old}",
            f"was removed: the key of {module} has another name",
            successor=f"{_ENTRY_CONFIG}.{new}",
        )
        for module, names in _RENAMED_IN.items()
        for old, new in names.items()
    ),
    Retired(
        "custom.extra",
        "is not a known key",
        "remove it: its settings are keys of rollout_matching and stage2_ab",
    ),
)
"""The first that fits a path counts."""


def moved_under(section: str) -> dict[str, str]:
    """Return the retired keys of a section, each with the path of its successor elsewhere."""
    return {
        retired.pattern.rpartition(".")[2]: retired.successor
        for retired in RETIRED
        if retired.pattern.rpartition(".")[0] == section and retired.successor is not None
    }


def take_retired(config: dict[str, Any]) -> list[Problem]:
    """Take every retired key out of `config`, in place, and put its value where it belongs.

    There the value is checked like any other, so that moving the key is all that is left to do.

    Example: {"training": {"packing_length": 512}} becomes {"global_max_length": 512}; the problem
    reads "training.packing_length: was removed; use global_max_length".
    """
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    _take_from(config, "", problems, values)
    for path, value in values.items():
        _put(config, path, value)
    return problems


def _take_from(node: Any, path: str, problems: list[Problem], values: dict[str, Any]) -> None:
    """Take retired leaves out of a mapping or list; what is empty without them goes too."""
    if isinstance(node, list):
        for index, item in enumerate(node):
            _take_from(item, f"{path}[{index}]", problems, values)
    if not isinstance(node, dict):
        return
    for key in list(node):
        child = node[key]
        below = f"{path}.{key}".removeprefix(".")
        has_keys = isinstance(child, dict) and len(child) > 0
        retired = None if has_keys else _retired_at(below)
        if retired is None:
            _take_from(child, below, problems, values)
            if has_keys and not child:
                del node[key]
            continue
        del node[key]
        successor = retired.successor_of(below)
        while successor is not None and (further := _retired_at(successor)) is not None:
            retired = further
            successor = further.successor_of(successor)
        remedy = f"use {successor}" if retired.remedy is None else retired.remedy
        problems.append(Problem(below, retired.wrong, remedy))
        if successor is not None:
            values[successor] = child


def _retired_at(path: str) -> Retired | None:
    return next((retired for retired in RETIRED if re.match(retired.regex, path)), None)


def _put(config: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path, unless the path has one or leads through a value."""
    *above, last = path.split(".")
    node: Any = config
    for part in above:
        key, *indices = re.findall(r"[^\[\]]+", part)
        if not isinstance(node, dict):
            return
        node = node.setdefault(key, {})
        for index in indices:
            node = node[int(index)]
    if isinstance(node, dict):
        node.setdefault(last, value)
