"""One entry's value, read as strict JSON in which coord tokens may stand without quotes (DESIGN 7.2)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from shared.grounding.entries import SPACE, STRING_CHARACTERS, unescape

_LITERAL = rb"true|false|null|-?(?:0|[1-9][0-9]*+)(?>(?:\.[0-9]++)?)(?>(?:[eE][+-]?[0-9]++)?)"
_PUNCTUATION = SPACE + rb"([,\]}])"

_EMPTY = re.compile(rb"\{" + SPACE + rb"\}")
_KEY = re.compile(SPACE + rb'"(' + STRING_CHARACTERS + rb')"' + SPACE + rb":")
# A value that opens nothing comes with the punctuation behind it; the number of the last group says what it is.
_VALUE = re.compile(
    SPACE
    + rb"(?:"
    + (rb'"(' + STRING_CHARACTERS + rb')"' + _PUNCTUATION)
    + (rb"|(<\|coord_[0-9]{1,3}\|>)" + _PUNCTUATION)
    + (rb"|(" + _LITERAL + rb")" + _PUNCTUATION)
    + (rb"|(\[" + SPACE + rb"\])" + _PUNCTUATION)
    + (rb"|(\{" + SPACE + rb"\})" + _PUNCTUATION)
    + rb"|(\[)|(\{))"
)
_STRING, _COORD, _EMPTY_ARRAY, _EMPTY_OBJECT, _OPEN_ARRAY, _OPEN_OBJECT = 2, 4, 8, 10, 11, 12
_BEHIND = re.compile(_PUNCTUATION)


class Leaf(NamedTuple):
    """A string, a coord token, a number or a word. The span is half-open, in bytes of the object's text, without quotes."""

    start: int
    end: int
    quoted: bool
    coord: int | None
    """Which of the coord tokens in `coords` is the whole of this leaf, if one is."""


Value: TypeAlias = "Leaf | list[Value]"


@dataclass(frozen=True, slots=True)
class Members:
    fields: tuple[tuple[str, Value], ...]
    """Key and value of each member, in order; keys may repeat. A nested object is an empty list here, see `nested`."""
    nested: bool
    """There is an object inside, at any depth."""


def read_members(text: bytes, coords: Mapping[tuple[int, int], int]) -> Members | None:
    """The members of the object that `text` is; None where it is not JSON apart from unquoted coord tokens.

    `coords` maps the byte span of each coord token in it to a number of the caller's. The same characters spelled by other tokens are
    a string like any other between quotes, and not JSON without.
    """
    if _EMPTY.fullmatch(text):
        return Members((), nested=False)
    fields: list[tuple[str, Value]] = []
    nested = False
    opened: list[list[Value] | None] = [None]  # the containers around `position`, innermost last; None for an object
    position = 1
    while opened:
        array, name = opened[-1], b""
        if array is None:
            key = _KEY.match(text, position)
            if key is None:
                return None
            name, position = key[1], key.end()
        found = _VALUE.match(text, position)
        if found is None or found.lastindex is None:
            return None
        what, position = found.lastindex, found.end()
        value = _value(found, what, coords)
        if value is None:
            return None
        if array is not None:
            array.append(value)
        elif len(opened) == 1:
            fields.append((unescape(name), value))
        nested = nested or what in (_EMPTY_OBJECT, _OPEN_OBJECT)
        if what >= _OPEN_ARRAY:
            opened.append(value if what == _OPEN_ARRAY and isinstance(value, list) else None)
        elif found[what] != b",":
            behind = _close(text, position, found[what], opened)
            if behind is None:
                return None
            position = behind
    return Members(tuple(fields), nested) if position == len(text) else None


def _value(found: re.Match[bytes], what: int, coords: Mapping[tuple[int, int], int]) -> Value | None:
    """What a match of `_VALUE` holds, containers still empty; None for an unquoted coord token that is not a token."""
    if what >= _EMPTY_ARRAY:
        return []
    span = found.span(what - 1)
    coord = coords.get(span)
    return None if what == _COORD and coord is None else Leaf(*span, what == _STRING, coord)


def _close(text: bytes, position: int, punctuation: bytes, opened: list[list[Value] | None]) -> int | None:
    """Closes containers up to the next comma or the outermost brace; where reading goes on, or None where brackets do not pair."""
    while punctuation != b",":
        if (opened.pop() is None) != (punctuation == b"}"):
            return None
        if not opened:
            return position
        behind = _BEHIND.match(text, position)
        if behind is None:
            return None
        punctuation, position = behind[1], behind.end()
    return position
