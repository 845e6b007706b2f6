"""Retired keys of a configuration: each is refused by name, with what to write instead (DESIGN 5, decision 3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shared.config.base import Problem, Section, dotted
from shared.config.explain import meant, remove_or_choose, sections_in
from shared.config.retired_keys import RETIRED, Retired
from shared.config.run import RunConfig

Keys = tuple[str | int, ...]


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
    return _no_key(successor, retired) or replace(retired, remedy=f"{remedy}.{under}" if under else remedy, successor=successor)


def _no_key(successor: str, retired: Retired) -> Retired | None:
    """What to say where the successor is no key of the schema; None where it is one."""
    keys = successor.split(".")
    sections: tuple[type[Section], ...] = (RunConfig,)
    for depth, key in enumerate(keys):
        name, above = key.partition("[")[0], ".".join(keys[:depth])
        known = {name: field for section in sections for name, field in section.model_fields.items()}
        if name not in known:
            target = meant(above, name, known)
            remedy = remove_or_choose(known, f"the keys of {above} are") if target is None else f"did you mean '{target}'?"
            return replace(retired, wrong=f"was removed, and is not a known key of {above} either", remedy=remedy, successor=target)
        fields = [section.model_fields[name] for section in sections if name in section.model_fields]
        sections = tuple(section for field in fields for section in sections_in(field.annotation))
    return None


def _find(node: Any, pattern: str, above: Keys = ()) -> Iterator[Keys]:
    """The keys of everything in `node` that the pattern names; where that is a mapping, of each of its leaves."""
    head, _, rest = pattern.partition(".")
    name = head.removesuffix("[]")
    if not isinstance(node, dict):
        return
    for key in node if name == "*" else [name] if name in node else ():
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
    """Delete one key, and all that is empty for it (an emptied `custom.extra` is not a problem of its own). What stays in a list keeps its index."""
    nodes: list[Any] = [config]
    for key in keys[:-1]:
        nodes.append(nodes[-1][key])
    for node, key in zip(reversed(nodes), reversed(keys), strict=True):
        if isinstance(node, list):
            is_empty = not any(node)
        else:
            del node[key]
            is_empty = not node
        if not is_empty:
            return
