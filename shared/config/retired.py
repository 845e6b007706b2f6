"""Keys that were removed, moved, or are not in this version: each is refused by name, with what to write instead (DESIGN 5, decision 3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from shared.config.base import Problem, dotted

Keys = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Retired:
    """A key that is no longer, or not yet, part of the schema; with everything under it."""

    pattern: str
    """Dotted; `[]` stands for every element of a list."""
    wrong: str
    remedy: str
    successor: str | None = None
    """The path that takes its place; what follows the pattern follows this path too."""


def _moved(pattern: str, successor: str) -> Retired:
    return Retired(pattern, "was removed", f"use {successor}", successor)


def _gone(pattern: str, remedy: str) -> Retired:
    return Retired(pattern, "was removed", remedy)


def _later(pattern: str, remedy: str) -> Retired:
    return Retired(pattern, "is not in this version", remedy)


def _unknown(pattern: str, remedy: str) -> Retired:
    return Retired(pattern, "is not a known key", remedy)


def _aliases(module: str, names: dict[str, str]) -> tuple[Retired, ...]:
    # The module is named because the alias may stand in the entry of another one, where its successor is no key either.
    config = "rollout_matching.pipeline.objective[].config"
    return tuple(
        Retired(f"{config}.{alias}", f"was removed: the key of {module} has another name", f"use {config}.{name}", f"{config}.{name}")
        for alias, name in names.items()
    )


_SERVERS = "servers are listed in rollout_matching.vllm.server.servers[], which is not in this version: set rollout_matching.vllm.mode: actors"

RETIRED: tuple[Retired, ...] = (
    _moved("custom.extra.rollout_matching", "rollout_matching"),
    _moved("custom.extra.stage2_ab", "stage2_ab"),
    _unknown("custom.extra", "remove it: rollout settings are keys of rollout_matching, those of the channels keys of stage2_ab"),
    _gone("custom.coord_soft_ce_w1", "declare a coord_reg entry in rollout_matching.pipeline.objective, with soft_ce_weight and w1_weight in its config"),
    _moved("template.max_length", "global_max_length"),
    _moved("training.packing_length", "global_max_length"),
    _moved("stage2_ab.pipeline", "rollout_matching.pipeline"),
    _moved("stage2_ab.channel_b.decode_batch_size", "rollout_matching.decode_batch_size"),
    _moved("rollout_matching.rollout_generate_batch_size", "rollout_matching.decode_batch_size"),
    _moved("rollout_matching.rollout_infer_batch_size", "rollout_matching.decode_batch_size"),
    _gone("rollout_matching.post_rollout_pack_scope", "remove it: which rollouts share rows follows from custom.trainer_variant"),
    _gone("rollout_matching.rollout_buffer", "remove it: rollouts are used once; to overlap rollout and learning set stage2_ab.channel_b.enable_pipeline"),
    _moved("rollout_matching.temperature", "rollout_matching.decoding.temperature"),
    _moved("rollout_matching.top_p", "rollout_matching.decoding.top_p"),
    _moved("rollout_matching.top_k", "rollout_matching.decoding.top_k"),
    _gone("rollout_matching.vllm.server.base_url", _SERVERS),
    _gone("rollout_matching.vllm.server.group_port", _SERVERS),
    *_aliases("bbox_geo", {"bbox_smoothl1_weight": "smoothl1_weight", "bbox_ciou_weight": "ciou_weight"}),
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
    _later("rollout_matching.vllm.server", "remove it and set rollout_matching.vllm.mode: actors"),
    _later("rollout_matching.vllm.tensor_parallel_size", "remove it; actors have rollout_matching.vllm.actors.tensor_parallel_size"),
    _later("rollout_matching.vllm.enable_lora", "remove it: weights are synced in full"),
    _later("rollout_matching.offload", "remove it: rollout actors have devices of their own"),
    _later("rollout_matching.repeat_terminate", "remove it; max_new_tokens bounds a response"),
    _later("environment", "remove the section: this version has no environments"),
)


def take_retired(config: dict[str, Any]) -> tuple[list[Problem], set[str]]:
    """Remove every retired key from `config` (in place), one problem for each.

    Returns the problems and the paths of their successors, about which nothing else should be said: their values are on their way.
    """
    problems: list[Problem] = []
    successors: set[str] = set()
    for retired in RETIRED:
        for keys in list(_find(config, retired.pattern)):
            _delete(config, keys)
            final = _at(keys, retired)
            problems.append(Problem(dotted(keys), final.wrong, final.remedy))
            if final.successor is not None:
                successors.add(final.successor)
    return problems, successors


def _at(keys: Keys, retired: Retired) -> Retired:
    """What to say about the retired key at `keys`: its successor in full or, where that is retired too, what is said about that."""
    if retired.successor is None:
        return retired
    depth = len(retired.pattern.split(".")) + retired.pattern.count("[]")
    above, remedy = retired.successor, retired.remedy
    for index in (key for key in keys[:depth] if isinstance(key, int)):
        above, remedy = above.replace("[]", f"[{index}]", 1), remedy.replace("[]", f"[{index}]", 1)
    under = dotted(keys[depth:])
    successor = f"{above}.{under}" if under else above
    further = next((other for other in RETIRED if f"{successor}.".startswith(f"{other.pattern}.")), None)
    if further is not None:
        return _at(tuple(successor.split(".")), further)
    return replace(retired, remedy=f"{remedy}.{under}" if under else remedy, successor=successor)


def _find(node: Any, pattern: str, above: Keys = ()) -> Iterator[Keys]:
    """The keys of everything in `node` that the pattern names; where that is a mapping, of each of its leaves."""
    head, _, rest = pattern.partition(".")
    key = head.removesuffix("[]")
    if not isinstance(node, dict) or key not in node:
        return
    if not rest:
        yield from _leaves(node[key], (*above, key))
    elif head.endswith("[]"):
        for index, item in enumerate(node[key]) if isinstance(node[key], list) else ():
            yield from _find(item, rest, (*above, key, index))
    else:
        yield from _find(node[key], rest, (*above, key))


def _leaves(node: Any, keys: Keys) -> Iterator[Keys]:
    if isinstance(node, dict) and node:
        for name, item in node.items():
            yield from _leaves(item, (*keys, name))
    else:
        yield keys


def _delete(config: dict[str, Any], keys: Keys) -> None:
    """Delete one key, and every mapping that is empty for it (an emptied `custom.extra` is not a problem of its own)."""
    nodes: list[Any] = [config]
    for key in keys[:-1]:
        nodes.append(nodes[-1][key])
    for node, key in zip(reversed(nodes), reversed(keys), strict=True):
        if isinstance(key, int):
            return
        del node[key]
        if node:
            return
