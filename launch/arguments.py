"""`key=value` arguments of the commands that are not a run, read as a closed section of the configuration would be."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import ValidationError

from shared.config.base import Section
from shared.config.explain import as_yaml, explain
from shared.errors import ConfigError

Options = TypeVar("Options", bound=Section)


def read_arguments(schema: type[Options], arguments: Sequence[str]) -> Options:
    """The arguments as one `schema`; `--help` prints its keys and exits. ConfigError with every problem: no `=`, a key given twice, and
    what the schema refuses.

    Values are YAML scalars (`8`, `true`, `null`), anything else is text. For text and paths every value is text, `5` too; `null` is none where the
    schema knows none.
    """
    if {"-h", "--help"} & set(arguments):
        print("\n".join(_help(schema)))
        sys.exit(0)
    problems: list[str] = []
    values: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals:
            problems.append(f"{argument}: is not key=value; the keys are {', '.join(schema.model_fields)}")
        elif key in values:
            problems.append(f"{key}: is given twice; keep one")
        else:
            values[key] = _value(schema, key, text)
    try:
        options = schema.model_validate(values)
    except ValidationError as error:
        problems += (str(explain(schema, one)) for one in error.errors(include_url=False))
        raise ConfigError(problems) from None
    if problems:
        raise ConfigError(problems)
    return options


def _help(schema: type[Section]) -> list[str]:
    """A line per key: its default (`...` where it is required), and what it means."""
    given = {key: f"{key}={'...' if field.is_required() else as_yaml(field.default)}" for key, field in schema.model_fields.items()}
    width = max(map(len, given.values()))
    return [f"{given[key]:<{width}}  {' '.join((field.description or '').split())}" for key, field in schema.model_fields.items()]


def _value(schema: type[Section], key: str, text: str) -> bool | int | float | str | None:
    types = _types(schema.model_fields[key].annotation) if key in schema.model_fields else set()
    if types & {str, Path}:
        return None if text == "null" and NoneType in types else text
    return _scalar(text)


def _types(annotation: Any) -> set[Any]:
    """What a value may be, without what is said about it: `Annotated[str, ...] | None` is str or NoneType."""
    if get_origin(annotation) is Annotated:
        return _types(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return {kind for part in get_args(annotation) for kind in _types(part)}
    return {annotation}


def _scalar(text: str) -> bool | int | float | str | None:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return value if value is None or isinstance(value, bool | int | float) else text
