"""From pydantic's errors to problems a user can act on."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from shared.config.base import Problem, Section, dotted
from shared.config.retired import moved_under

MISSING = "is required, and missing"
"""What is wrong with an absent key."""

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
    """Where in the configuration an error lies."""

    keys: tuple[str | int, ...]
    """Keys and list indices from the root."""
    fields: tuple[FieldInfo | None, ...]
    """The schema's field at each key; None at list indices and at unknown keys."""
    parent: type[Section]
    """The section that holds the last key."""
    sections: tuple[type[Section], ...]
    """What the place itself may be, where it is a section: more than one where it is an entry of
    several kinds, and its kind is not known.
    """

    @property
    def path(self) -> str:
        return dotted(self.keys)

    @property
    def above(self) -> str:
        """The path of the section that holds the last key."""
        return dotted(self.keys[:-1])

    @property
    def meant(self) -> str | None:
        """The path of the key that was probably meant, where the last one is unknown."""
        return meant(self.above, str(self.keys[-1]), self.parent.model_fields)

    @property
    def modules(self) -> tuple[str, ...]:
        """The names an entry may have here."""
        return tuple(map(_tag, self.sections))

    @property
    def field(self) -> FieldInfo:
        """The field of the last key that is one: for `channels[1]` that of `channels`."""
        return next(field for field in reversed(self.fields) if field is not None)


def locate(root: type[Section], loc: Sequence[str | int]) -> KeyPath:
    """The place of a pydantic error. Tags that discriminated unions put into `loc` are no keys, and
    are left out.
    """
    keys: list[str | int] = []
    fields: list[FieldInfo | None] = []
    parent, inside = root, sections_in(root)
    for part in loc:
        if isinstance(part, int):
            keys.append(part)
            fields.append(None)
        elif len(inside) > 1:
            inside = tuple(section for section in inside if _tag(section) == part)
        else:
            parent = inside[0] if inside else parent
            field = parent.model_fields.get(part)
            keys.append(part)
            fields.append(field)
            inside = () if field is None else sections_in(field.annotation)
    return KeyPath(tuple(keys), tuple(fields), parent, inside)


def explain(root: type[Section], error: ErrorDetails) -> Problem:
    """One pydantic error as a problem: full path, what is wrong, what to do."""
    place, kind, value = locate(root, error["loc"]), error["type"], error["input"]
    context = error.get("ctx", {})
    match kind:
        case "missing":
            return Problem(place.path, MISSING, _add(place))
        case "extra_forbidden":
            return Problem(place.path, "is not a known key", _another_key(place))
        case "refused":
            return Problem(_under(place, context["key"]), context["wrong"], context["remedy"])
        case "literal_error" | "enum":
            options = _options(place.field.annotation)
            return Problem(
                place.path,
                f"must be {_one_of(options)}, got {shown(value)}",
                _instead(str(value), options, "choose one of"),
            )
        case "union_tag_invalid":
            return Problem(
                _under(place, "name"),
                f"{context['tag']!r} is not an objective module",
                _instead(context["tag"], place.modules, "choose one of"),
            )
        case "union_tag_not_found":
            return Problem(
                _under(place, "name"), MISSING, f"choose one of {', '.join(place.modules)}"
            )
        case "finite_number":
            return Problem(
                place.path, f"must be a finite number, got {value}", "write an ordinary number"
            )
        case "string_too_short":
            return Problem(place.path, "must not be empty", _fill(place))
        case _ if kind in _BOUNDS:
            words, key = _BOUNDS[kind]
            bound = context[key]
            return Problem(
                place.path,
                f"must be {words} {f'{bound:g}' if isinstance(bound, float) else bound}, got"
                f" {shown(value)}",
                _fill(place),
            )
        case _ if kind in _EXPECTED:
            return Problem(
                place.path,
                f"must be {_EXPECTED[kind]}, got {shown(value)}",
                _convert(place, kind, value),
            )
        case _:
            return Problem(place.path, error["msg"][0].lower() + error["msg"][1:], _fill(place))


def sections_in(annotation: Any) -> tuple[type[Section], ...]:
    """Every section that a value of this annotation can be or hold."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return (annotation,)
    return tuple(section for part in get_args(annotation) for section in sections_in(part))


def suggestion(word: str, known: Sequence[str]) -> str | None:
    """The known word that `word` was probably meant to be."""
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=0.6)), None)


def meant(above: str, word: str, known: Iterable[str]) -> str | None:
    """The path of the key that an unknown one was probably meant to be: one of its section, or one
    that was moved out of it.

    `above` is the section's dotted path, `known` its keys.
    """
    paths = {name: f"{above}.{name}".removeprefix(".") for name in known} | moved_under(above)
    close = suggestion(word, tuple(paths))
    return None if close is None else paths[close]


def remove_or_choose(known: Collection[str], introduction: str) -> str:
    """The remedy where a word is none of the known ones, nor like one."""
    if not known:
        return "remove it, nothing is set here"
    return f"{introduction} {', '.join(known)}" if len(known) > 1 else f"write {next(iter(known))}"


def shown(value: object) -> str:
    """A value as its author wrote it, on one line and not too long."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    text = f"the text {value!r}" if isinstance(value, str) else as_yaml(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def as_yaml(value: object) -> str:
    """A value in YAML's flow style."""
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
    """The one legal `name` of an entry."""
    (tag,) = get_args(section.model_fields["name"].annotation)
    return str(tag)


def _options(annotation: Any) -> tuple[str, ...]:
    """The legal values of an annotation with finitely many of them."""
    if get_origin(annotation) is Literal:
        return tuple(map(str, get_args(annotation)))
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return tuple(annotation)
    return tuple(option for part in get_args(annotation) for option in _options(part))


def _under(place: KeyPath, key: str | None) -> str:
    return place.path if key is None else f"{place.path}.{key}"


def _one_of(options: Sequence[str]) -> str:
    return options[0] if len(options) == 1 else f"one of {', '.join(options)}"


def _instead(word: str, known: Sequence[str], otherwise: str) -> str:
    close = suggestion(word, known)
    return remove_or_choose(known, otherwise) if close is None else f"did you mean '{close}'?"


def _another_key(place: KeyPath) -> str:
    """The remedy for an unknown key."""
    path = place.meant
    if path is None:
        return remove_or_choose(place.parent.model_fields, "the keys here are")
    above, _, key = path.rpartition(".")
    return f"did you mean '{key if above == place.above else path}'?"


def _doc(field: FieldInfo) -> str:
    """The first sentence of a field's docstring, as the end of a sentence of ours."""
    text = " ".join((field.description or "").split())
    return text.split(". ")[0].rstrip(".")


def _add(place: KeyPath) -> str:
    options, field = _options(place.field.annotation), place.field
    if options:
        return f"add it, {_one_of(options)} ({_doc(field)})"
    example = (
        f", for example `{place.keys[-1]}: {as_yaml(field.examples[0])}`" if field.examples else ""
    )
    return f"add it{example} ({_doc(field)})"


def _fill(place: KeyPath) -> str:
    default = (
        ""
        if place.field.is_required()
        else f"; without the key it is {as_yaml(place.field.default)}"
    )
    return f"change it ({_doc(place.field)}{default})"


def _convert(place: KeyPath, kind: str, value: object) -> str:
    """The remedy for a value of the wrong type: how to write it where the meaning is plain."""
    readers: dict[str, Callable[[str], object]] = {"int_type": int, "float_type": float}
    if isinstance(value, str) and kind in readers:
        try:
            return f"write {readers[kind](value)} without quotes"
        except ValueError:
            return _fill(place)
    if isinstance(value, str) and kind == "bool_type" and value.lower() in ("true", "false"):
        return f"write {value.lower()} without quotes"
    if isinstance(value, float) and kind in ("int_type", "int_from_float") and value.is_integer():
        return f"write {value:.0f} without a decimal point"
    if place.sections:
        keys = ", ".join(place.sections[0].model_fields)
        if not keys:
            return "write {}, it has no keys"
        if place.field.is_required():
            return f"write its keys ({keys})"
        return f"write its keys ({keys}), or remove it" + (
            "" if place.field.default is None else " for the defaults"
        )
    if value is None and not place.field.is_required():
        return f"remove the key for the default, {as_yaml(place.field.default)}"
    return _fill(place)
