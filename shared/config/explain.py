"""Convert pydantic's errors about a configuration to problems with path, fault and remedy."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from shared.config.base import LIST_TAG, MISSING, PATH_TAG, Problem, Section, dotted
from shared.config.pipeline import IMPORTED

_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "path_type": "a path",
    "tuple_type": "a list",
    "model_type": "a mapping of keys",
    "model_attributes_type": "a mapping of keys",
    "dict_type": "a mapping of keys",
}
_BOUNDS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


@dataclass(frozen=True, slots=True)
class KeyPath:
    """The place of an error in the configuration: the key's path, and its place in the schema.

    Example: for `("training", "sed")` the path is `training.sed`, and the parent TrainingSection.
    """

    path: str
    key: str | int
    field: FieldInfo | None
    """The schema's field of the path's last key. For `channels[1]` it is the field `channels`."""
    parent: type[Section]
    sections: tuple[type[Section], ...]
    """The section classes that the value may be of; several for an entry with a wrong name."""


def locate(root: type[Section], loc: Sequence[str | int]) -> KeyPath:
    """Return the place in the configuration that a pydantic error is about.

    `root` is the class of the whole configuration, `loc` the error's location. In `loc`, pydantic
    adds the tag of a discriminated union. The tag is not a key, and is left out of the path.
    """
    keys: list[str | int] = []
    field: FieldInfo | None = None
    parent = root
    inside = sections_in(root)
    for part in loc:
        if isinstance(part, int):
            keys.append(part)
        elif part in (PATH_TAG, LIST_TAG):
            continue
        elif len(inside) > 1:
            inside = tuple(section for section in inside if _tag(section) == part)
        else:
            parent = inside[0] if inside else parent
            field = parent.model_fields.get(part)
            keys.append(part)
            inside = () if field is None else sections_in(field.annotation)
    return KeyPath(dotted(tuple(keys)), keys[-1], field, parent, inside)


def explain(root: type[Section], error: ErrorDetails) -> Problem:
    """Convert one pydantic error to a problem: full path, what is wrong, what to do."""
    at = locate(root, error["loc"])
    kind = error["type"]
    value = error["input"]
    context = error.get("ctx", {})
    if kind == "extra_forbidden":
        remedy = _instead(str(at.key), at.parent.model_fields, "the keys here are")
        return Problem(at.path, "is not a known key", remedy)
    if kind == "refused":
        path = at.path if context["key"] is None else f"{at.path}.{context['key']}"
        return Problem(path, context["wrong"], context["remedy"])
    if kind.startswith("union_tag"):
        modules = tuple(map(_tag, at.sections))
        if kind == "union_tag_not_found":
            return Problem(f"{at.path}.name", MISSING, f"choose one of {', '.join(modules)}")
        wrong = f"{context['tag']!r} is not an objective module"
        return Problem(f"{at.path}.name", wrong, _instead(context["tag"], modules))

    field = at.field
    assert field is not None, "the other errors lie at known keys"
    remedy = _change(field)
    if kind == "missing":
        wrong = MISSING
        remedy = _add(str(at.key), field)
    elif kind in ("literal_error", "enum"):
        options = _options(field.annotation)
        wrong = f"must be {_one_of(options)}, got {shown(value)}"
        remedy = _instead(str(value), options)
    elif kind == "finite_number":
        wrong = f"must be a finite number, got {value}"
        remedy = "write an ordinary number"
    elif kind == "string_too_short":
        wrong = "must not be empty"
    elif kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        bound = context[key]
        text = f"{bound:g}" if isinstance(bound, float) else bound
        wrong = f"must be {words} {text}, got {shown(value)}"
    elif kind in _EXPECTED:
        wrong = f"must be {_EXPECTED[kind]}, got {shown(value)}"
        remedy = _convert(at, field, kind, value)
    else:
        wrong = error["msg"][0].lower() + error["msg"][1:]
    return Problem(at.path, wrong, remedy)


def sections_in(annotation: Any) -> tuple[type[Section], ...]:
    """Return the section classes that a field with this type annotation can hold."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return (annotation,)
    return tuple(section for part in get_args(annotation) for section in sections_in(part))


def suggestion(word: str, known: Collection[str]) -> str | None:
    """Return the known word that `word` probably misspells; None if no known word is similar."""
    # Prefer the key without a prefix: `coord_soft_ce_weight` also resembles `coord_ce_weight`.
    ends = [key for key in known if word.endswith(f"_{key}")]
    close = ends or difflib.get_close_matches(word, tuple(known), n=1, cutoff=0.6)
    return max(close, key=len, default=None)


def shown(value: object) -> str:
    """Return a value as a message shows it: as YAML, on one line of at most 80 characters."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    text = f"the text {value!r}" if isinstance(value, str) else as_yaml(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def as_yaml(value: object) -> str:
    """Return a value in YAML's flow style."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case Mapping():
            return "{" + ", ".join(f"{key}: {as_yaml(item)}" for key, item in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(as_yaml, value)) + "]"
        case _:
            return str(value)


def _tag(section: type[Section]) -> str:
    """Return the only valid `name` of an entry; for an imported entry, the form of its names."""
    names = get_args(section.model_fields["name"].annotation)
    return str(names[0]) if names else IMPORTED


def _options(annotation: Any) -> tuple[str, ...]:
    """List the valid values of an annotation with a fixed set of values."""
    if get_origin(annotation) is Literal:
        return tuple(map(as_yaml, get_args(annotation)))
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return tuple(annotation)
    return tuple(option for part in get_args(annotation) for option in _options(part))


def _one_of(options: Sequence[str]) -> str:
    return options[0] if len(options) == 1 else f"one of {', '.join(options)}"


def _instead(word: str, known: Collection[str], introduction: str = "choose one of") -> str:
    """Suggest the known word that resembles this one, or list all of them."""
    close = suggestion(word, known)
    if close is not None:
        return f"did you mean '{close}'?"
    if not known:
        return "remove it, because there are no keys here"
    return f"{introduction} {', '.join(known)}" if len(known) > 1 else f"write {next(iter(known))}"


def _doc(field: FieldInfo) -> str:
    """Return the first sentence of a field's docstring, without its full stop."""
    text = " ".join((field.description or "").split())
    return text.split(". ")[0].rstrip(".")


def _add(key: str, field: FieldInfo) -> str:
    options = _options(field.annotation)
    if options:
        return f"add it, {_one_of(options)} ({_doc(field)})"
    example = f", for example `{key}: {as_yaml(field.examples[0])}`" if field.examples else ""
    return f"add it{example} ({_doc(field)})"


def _change(field: FieldInfo) -> str:
    default = "" if field.is_required() else f"; without the key it is {as_yaml(field.default)}"
    return f"change it ({_doc(field)}{default})"


def _convert(at: KeyPath, field: FieldInfo, kind: str, value: object) -> str:
    """Return a remedy for a value of the wrong type; if possible, the value in the right type."""
    if isinstance(value, str) and kind in ("int_type", "float_type"):
        try:
            number = int(value) if kind == "int_type" else float(value)
        except ValueError:
            return _change(field)
        return f"write {number} without quotes"
    if isinstance(value, str) and kind == "bool_type" and value.lower() in ("true", "false"):
        return f"write {value.lower()} without quotes"
    if isinstance(value, float) and kind in ("int_type", "int_from_float") and value.is_integer():
        return f"write {value:.0f} without a decimal point"
    if at.sections and kind != "path_type":
        keys = ", ".join(at.sections[0].model_fields)
        if not keys:
            return "write {}, because it has no keys"
        return f"write its keys ({keys})" + ("" if field.is_required() else ", or remove it")
    if value is None and not field.is_required():
        return f"remove the key for the default, {as_yaml(field.default)}"
    return _change(field)
