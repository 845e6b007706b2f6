"""From a mapping to a validated `RunConfig`, or to every problem the mapping has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from shared.config.base import Problem, dotted, plain
from shared.config.checks import cross_check, overlaps
from shared.config.explain import MISSING, Place, explain, locate, sections_in, shown
from shared.config.retired import take_retired
from shared.config.run import RunConfig
from shared.errors import ConfigError


def load_config(mapping: Mapping[str, Any]) -> RunConfig:
    """The configuration of a run (DESIGN section 10).

    Files it names are not opened here. Raises ConfigError with all problems at once, one per line: unknown keys, retired keys, wrong
    types and values, and contradictions between values that are sound in themselves.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"configuration: must be a mapping of sections, got {shown(mapping)}; start from an experiment of conf/experiment")
    config = plain(mapping)
    problems, moving = take_retired(config)
    _fill_absent_sections(config)
    try:
        run = RunConfig.model_validate(config)
        unsound: set[str] = set()
    except ValidationError as error:
        errors = error.errors(include_url=False)
        problems += (problem for problem in (explain(RunConfig, one) for one in errors) if not _is_moving(problem, moving))
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
    """Whether a key is missing only because its value still stands under a retired name, which is reported already."""
    return problem.wrong == MISSING and any(overlaps(problem.path, path) for path in moving)


def _repaired(config: dict[str, Any], errors: Sequence[ErrorDetails]) -> set[str]:
    """Make every place of an error valid in `config` (in place), so that all the rest can still be checked.

    Returns the paths whose values can no longer be trusted.
    """
    unknown = [locate(RunConfig, error["loc"]) for error in errors if error["type"] == "extra_forbidden"]
    wrong = [locate(RunConfig, error["loc"]) for error in errors if error["type"] != "extra_forbidden"]
    # Unknown keys first: a replacement may take away the lists that hold them.
    return {_without(config, place) for place in unknown} | _replaced(config, wrong)


def _without(config: dict[str, Any], place: Place) -> str:
    """Delete an unknown key. Returns the path of the key that was meant, as far as one can tell."""
    *above, key = place.keys
    del _node(config, above)[key]
    return place.meant or place.path


def _replaced(config: dict[str, Any], places: Iterable[Place]) -> set[str]:
    """Put the schema's default or example in place of each wrong or missing value, or of the nearest thing around it that has one."""
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
    return {name: _example(inner) for name, inner in section.model_fields.items() if inner.is_required()}


def _node(config: dict[str, Any], keys: Sequence[str | int]) -> Any:
    node: Any = config
    for key in keys:
        node = node[key]
    return node
