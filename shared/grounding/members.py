"""One entry's value, read as strict JSON in which coord tokens may stand without quotes (DESIGN 7.2)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from shared.grounding.scanner import SPACE, STRING_CHARACTERS, unescape

_LITERAL = rb"true|false|null|-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][+-]?[0-9]++)?+"

_EMPTY = re.compile(rb"\{" + SPACE + rb"\}")
_KEY = re.compile(SPACE + rb'"(' + STRING_CHARACTERS + rb')"' + SPACE + rb":")
# A value that opens no container comes with the punctuation behind it: 1 string, 2 coord token, 3 number or word, 4 empty array,
# 5 empty object, 6 the punctuation. 7 opens a container that is not empty.
_VALUE = re.compile(
    SPACE
    + rb'(?:(?:"('
    + STRING_CHARACTERS
    + rb')"|(<\|coord_[0-9]{1,3}\|>)|('
    + _LITERAL
    + rb")|(\["
    + SPACE
    + rb"\])|(\{"
    + SPACE
    + rb"\}))"
    + SPACE
    + rb"([,\]}])|([\[{]))"
)
_BEHIND = re.compile(SPACE + rb"([,\]}])")


class Leaf(NamedTuple):
    """A string, a coord token, a number or a word. The span is half-open, in bytes, without quotes."""

    start: int
    end: int
    quoted: bool
    coord_position: int | None
    """The token that is the whole of this leaf, where that is a coord token."""


Value: TypeAlias = "Leaf | list[Value]"


@dataclass(frozen=True, slots=True)
class Members:
    fields: tuple[tuple[str, Value], ...]
    """Key and value of each member, in order; keys may repeat. A nested object is an empty list here, see `nested`."""
    nested: bool
    """There is an object inside, at any depth."""


def read_members(text: bytes, span: tuple[int, int], coords: Mapping[tuple[int, int], int]) -> Members | None:
    """The members of the object at `span` of `text`; None where it is not JSON apart from unquoted coord tokens.

    `coords` maps the byte span of each coord token of the response to its position. The same characters spelled by other tokens are
    a string like any other between quotes, and not JSON without.
    """
    start, end = span
    if _EMPTY.fullmatch(text, start, end):
        return Members((), nested=False)
    fields: list[tuple[str, Value]] = []
    nested = False
    opened: list[list[Value] | None] = [None]  # the containers around `position`, innermost last; None for an object
    position = start + 1
    while opened:
        array, name = opened[-1], b""
        if array is None:
            key = _KEY.match(text, position, end)
            if key is None:
                return None
            name, position = key[1], key.end()
        found = _VALUE.match(text, position, end)
        if found is None:
            return None
        position = found.end()
        value = _value(found, coords)
        if value is None:
            return None
        if array is not None:
            array.append(value)
        elif len(opened) == 1:
            fields.append((unescape(name), value))
        nested = nested or found[5] is not None or found[7] == b"{"
        if found[7] is not None:
            opened.append(value if found[7] == b"[" and isinstance(value, list) else None)
            continue
        behind = _close(text, position, end, found[6], opened)
        if behind is None:
            return None
        position = behind
    return Members(tuple(fields), nested) if position == end else None


def _value(found: re.Match[bytes], coords: Mapping[tuple[int, int], int]) -> Value | None:
    """What a match of `_VALUE` holds; None for an unquoted coord token that is not a token."""
    for group in (1, 2, 3):
        start, end = found.span(group)
        if start >= 0:
            position = coords.get((start, end))
            return None if group == 2 and position is None else Leaf(start, end, group == 1, position)
    return []


def _close(text: bytes, position: int, end: int, punctuation: bytes, opened: list[list[Value] | None]) -> int | None:
    """Closes containers up to the next comma or the outermost brace; where reading goes on, or None where brackets do not pair."""
    while punctuation != b",":
        if (opened.pop() is None) != (punctuation == b"}"):
            return None
        if not opened:
            return position
        behind = _BEHIND.match(text, position, end)
        if behind is None:
            return None
        punctuation, position = behind[1], behind.end()
    return position
