"""From a mapping to a validated `RunConfig`, or to every problem the mapping has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from shared.config.base import Problem, Section, dotted, plain
from shared.config.checks.general import cross_check, overlaps
from shared.config.explain import (
    MISSING,
    KeyPath,
    explain,
    locate,
    meant,
    remove_or_choose,
    sections_in,
    shown,
)
from shared.config.retired import RETIRED, Retired
from shared.config.run import RunConfig
from shared.errors import ConfigError

# Retired keys of a configuration: each is refused by name, with what to write instead (DESIGN 5,
# decision 3).


Keys = tuple[str | int, ...]


def take_retired(config: dict[str, Any]) -> tuple[list[Problem], set[str]]:
    """Remove every retired key from `config` (in place), one problem for each.

    Returns the problems and the paths of their successors, about which nothing else should be said:
    their values are on their way.
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
    """What to say about the retired key at `keys`: its successor in full or, where that is retired
    too, what is said about that.
    """
    if retired.successor is None:
        return retired
    depth = len(retired.pattern.split(".")) + retired.pattern.count("[]")
    above, remedy = retired.successor, retired.remedy
    for index in (key for key in keys[:depth] if isinstance(key, int)):
        above, remedy = above.replace("[]", f"[{index}]", 1), remedy.replace("[]", f"[{index}]", 1)
    under = dotted(keys[depth:])
    successor = f"{above}.{under}" if under else above
    further = next(
        (other for other in RETIRED if f"{successor}.".startswith(f"{other.pattern}.")), None
    )
    if further is not None:
        return _at(tuple(successor.split(".")), further)
    return _no_key(successor, retired) or replace(
        retired, remedy=f"{remedy}.{under}" if under else remedy, successor=successor
    )


def _no_key(successor: str, retired: Retired) -> Retired | None:
    """What to say where the successor is no key of the schema; None where it is one."""
    keys = successor.split(".")
    sections: tuple[type[Section], ...] = (RunConfig,)
    for depth, key in enumerate(keys):
        name, above = key.partition("[")[0], ".".join(keys[:depth])
        known = {
            name: field for section in sections for name, field in section.model_fields.items()
        }
        if name not in known:
            target = meant(above, name, known)
            remedy = (
                remove_or_choose(known, f"the keys of {above} are")
                if target is None
                else f"did you mean '{target}'?"
            )
            return replace(
                retired,
                wrong=f"was removed, and is not a known key of {above} either",
                remedy=remedy,
                successor=target,
            )
        fields = [
            section.model_fields[name] for section in sections if name in section.model_fields
        ]
        sections = tuple(section for field in fields for section in sections_in(field.annotation))
    return None


def _find(node: Any, pattern: str, above: Keys = ()) -> Iterator[Keys]:
    """The keys of everything in `node` that the pattern names; where that is a mapping, of each of
    its leaves.
    """
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
    """Delete one key, and all that is empty for it (an emptied `custom.extra` is not a problem of
    its own). What stays in a list keeps its index.
    """
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


def load_config(mapping: Mapping[str, Any]) -> RunConfig:
    """The configuration of a run (DESIGN section 10).

    Files it names are not opened here. Raises ConfigError with all problems at once, one per line:
    unknown keys, retired keys, wrong types and values, and contradictions between values that are
    sound in themselves.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(
            f"configuration: must be a mapping of sections, got {shown(mapping)}; start from an"
            " experiment of conf/experiment"
        )
    config = plain(mapping)
    problems, moving = take_retired(config)
    _fill_absent_sections(config)
    try:
        run = RunConfig.model_validate(config)
        unsound: set[str] = set()
    except ValidationError as error:
        errors = error.errors(include_url=False)
        problems += (
            problem
            for problem in (explain(RunConfig, one) for one in errors)
            if not _is_moving(problem, moving)
        )
        unsound = _repaired(config, errors)
        run = RunConfig.model_validate(config)
    problems += cross_check(run, unsound | moving)
    if problems:
        raise ConfigError([str(problem) for problem in problems])
    return run


def _fill_absent_sections(config: dict[str, Any]) -> None:
    """An absent section is an empty one, so that the report names the keys it must have."""
    for name, field in RunConfig.model_fields.items():
        if field.is_required() and sections_in(field.annotation):
            config.setdefault(name, {})


def _is_moving(problem: Problem, moving: set[str]) -> bool:
    """Whether a key is missing only because its value still stands under a retired name, which is
    reported already.
    """
    return problem.wrong == MISSING and any(overlaps(problem.path, path) for path in moving)


def _repaired(config: dict[str, Any], errors: Sequence[ErrorDetails]) -> set[str]:
    """Make every place of an error valid in `config` (in place), so that all the rest can still be
    checked.

    Returns the paths whose values can no longer be trusted.
    """
    unknown = [
        locate(RunConfig, error["loc"]) for error in errors if error["type"] == "extra_forbidden"
    ]
    wrong = [
        locate(RunConfig, error["loc"]) for error in errors if error["type"] != "extra_forbidden"
    ]
    # Unknown keys first: a replacement may take away the lists that hold them.
    return {_without(config, place) for place in unknown} | _replaced(config, wrong)


def _without(config: dict[str, Any], place: KeyPath) -> str:
    """Delete an unknown key. Returns the path of the key that was meant, as far as one can tell."""
    *above, key = place.keys
    del _node(config, above)[key]
    return place.meant or place.path


def _replaced(config: dict[str, Any], places: Iterable[KeyPath]) -> set[str]:
    """Put the schema's default or example in place of each wrong or missing value, or of the
    nearest thing around it that has one.
    """
    done: set[tuple[str | int, ...]] = set()
    for place in places:
        field, keys = next(
            (field, place.keys[:depth])
            for depth, field in reversed(list(enumerate(place.fields, start=1)))
            if field is not None and (depth == 1 or field.examples or not field.is_required())
        )
        # What lies in something that was replaced went with it.
        if any(keys[: len(wider)] == wider for wider in done):
            continue
        done.add(keys)
        holder = _node(config, keys[:-1])
        holder.pop(keys[-1], None)
        if field.is_required():
            holder[keys[-1]] = plain(_example(field))
    return {dotted(keys) for keys in done}


def _example(field: FieldInfo) -> Any:
    """A valid value of a required field; of a section, the examples of what it requires."""
    if field.examples:
        return field.examples[0]
    (section,) = sections_in(field.annotation)
    return {
        name: _example(inner) for name, inner in section.model_fields.items() if inner.is_required()
    }


def _node(config: dict[str, Any], keys: Sequence[str | int]) -> Any:
    node: Any = config
    for key in keys:
        node = node[key]
    return node
