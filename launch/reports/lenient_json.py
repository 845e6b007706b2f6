"""Reads malformed JSON objects in models' answers, in a linear pass without recursion."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from shared.tokens.vocabulary import parse_coord_token


class Leniency(StrEnum):
    """A rule of the answer format that must be relaxed to read an object."""

    TEXT_BEFORE = "text_before"
    """Text or an unknown fence before the first list of the answer."""
    NO_LIST = "no_list"
    """No list (or no object of objects) around the object."""
    SECOND_LIST = "second_list"
    """The object follows the end of the first list."""
    SEPARATOR = "separator"
    """No or several commas before the object, an extra comma in it, or an unknown entry key."""
    QUOTES = "quotes"
    """Single quotes, a key without quotes, or a string that is not valid JSON."""
    OTHER_KEY = "other_key"
    """Box or name under another key than the format's."""
    EXTRA_KEY = "extra_key"
    """Additional keys, which are ignored."""
    NO_NAME = "no_name"
    NUMBER = "number"
    """A number that is a float or a string, or has a sign or a leading zero."""
    NESTED = "nested"
    """Lists in the list of numbers, or mappings with x and y."""
    CORNERS = "corners"
    """Corners of the box in another order."""
    CLAMPED = "clamped"
    """A number outside the image."""


_DEEPEST = 3
_MOST_NUMBERS = 4096
_LEXEME = re.compile(
    r"\s*+(?:"
    r'"(?P<double>(?:[^"\\]|\\.){0,4096})"'
    # A single quote before punctuation closes the string; any other is an apostrophe. The limit is
    # short because such a string may be read again from every brace in it.
    r"|'(?P<single>(?:[^'\\]|\\.|'(?!\s{0,9}[:,}\]])){0,128})'(?=\s{0,9}[:,}\]])"
    r"|(?P<coord><\|coord_[0-9]{1,3}\|>)"
    r"|(?P<number>[+-]?(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][+-]?[0-9]++)?)(?![\w.])"
    r"|(?P<word>[A-Za-z_]\w{0,63})"
    r"|(?P<mark>[\[\](){}:,]))",
    re.DOTALL,
)
_PLAIN_NUMBER = re.compile(r"0|[1-9][0-9]*")
_PLACE = re.compile(
    r"""\s*\{\s*["']?x["']?\s*:\s*([0-9.]{1,20})\s*,\s*["']?y["']?\s*:\s*([0-9.]{1,20})\s*\}"""
)
_FLAT_OBJECT = re.compile(r"\s*\{[^{}]{0,512}\}")


@dataclass(slots=True)
class Members:
    """The members (keys and values) of a JSON object, and the relaxed rules they needed."""

    strings: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[list[WrittenLeaf]]] = field(default_factory=dict)
    """Numbers by key, in rows. A list that is not nested is one row."""
    nested: set[str] = field(default_factory=set)
    """Keys of the nested lists."""
    keys: list[str] = field(default_factory=list)
    needed: set[Leniency] = field(default_factory=set)
    closed: bool = False
    """Whether the object's closing brace was found."""
    end: int = 0
    """Offset after the object in the text. If the object could not be read, the search for the next
    object starts here."""


class WrittenLeaf(NamedTuple):
    written: str
    is_plain: bool
    """True for an unquoted JSON integer and for a coord token."""


def read_members(text: str, start: int) -> Members:
    """Read the JSON object whose opening brace is at `start`.

    If the object cannot be read, `Members.end` is before the last lexeme (but after the opening
    brace). Another object may begin inside that lexeme if a quote is missing.
    """
    members = Members(end=start + 1)
    position = start + 1
    after_comma = False
    while (lexeme := _LEXEME.match(text, position)) is not None:
        if lexeme["mark"] == "}":
            if after_comma:
                members.needed.add(Leniency.SEPARATOR)
            members.closed = True
            members.end = lexeme.end()
            return members
        key = _string(lexeme, members)
        members.end = max(lexeme.start(), start + 1)
        colon = _LEXEME.match(text, lexeme.end())
        if key is None or colon is None or colon["mark"] != ":":
            return members
        members.keys.append(key)
        position = _read_value(text, colon.end(), key, members)
        if position < 0:
            return members
        comma = _LEXEME.match(text, position)
        after_comma = comma is not None and comma["mark"] == ","
        if comma is not None and after_comma:
            position = comma.end()
        elif comma is None or comma["mark"] != "}":
            return members
    return members


def _read_value(text: str, position: int, key: str, members: Members) -> int:
    """Read the value of `key` at offset `position` into `members`.

    Returns the offset after the value, or -1 if it cannot be read.
    """
    lexeme = _LEXEME.match(text, position)
    if lexeme is None:
        return -1
    members.end = lexeme.start()
    if lexeme["mark"] in ("[", "("):
        return _read_array(text, lexeme.end(), key, members)
    if lexeme["mark"] == "{":
        if place := _PLACE.match(text, position):
            members.arrays.setdefault(
                key, [[WrittenLeaf(number, True) for number in place.groups()]]
            )
            members.nested.add(key)
            return place.end()
        # Skip an inner object if the box is already known; otherwise it may hold the box.
        skipped = _FLAT_OBJECT.match(text, position) if members.arrays else None
        return -1 if skipped is None else skipped.end()
    if lexeme["mark"] is not None:
        return -1
    if lexeme["double"] is not None or lexeme["single"] is not None:
        members.strings.setdefault(key, _string(lexeme, members) or "")
    return lexeme.end()


def _read_array(text: str, position: int, key: str, members: Members) -> int:
    """Read the array whose opening bracket ends at `position` into `members`.

    Returns the offset after the array, or -1 if it is invalid.
    """
    rows: list[list[WrittenLeaf]] = [[]]
    depth = 1
    num_leaves = 0
    after_comma = False
    while depth:
        lexeme = _LEXEME.match(text, position)
        if lexeme is None:
            return -1
        members.end = lexeme.start()
        position = lexeme.end()
        mark = lexeme["mark"]
        if mark in ("[", "("):
            depth += 1
            rows.append([])
            members.nested.add(key)
        elif mark in ("]", ")"):
            if after_comma:
                members.needed.add(Leniency.SEPARATOR)
            depth -= 1
            rows.append([])
        elif mark is None:
            written = lexeme["double"] or lexeme["single"] or lexeme[0].strip()
            is_coord = parse_coord_token(written) is not None
            is_plain = lexeme["number"] is not None and _PLAIN_NUMBER.fullmatch(written) is not None
            rows[-1].append(WrittenLeaf(written, is_plain or is_coord))
            num_leaves += 1
        elif mark != ",":
            return -1
        after_comma = mark == ","
        if depth > _DEEPEST or num_leaves > _MOST_NUMBERS:
            return -1
    members.arrays.setdefault(key, [row for row in rows if row])
    return position


def _string(lexeme: re.Match[str], members: Members) -> str | None:
    """Return the text of a string or an unquoted key; None for any other lexeme."""
    double = lexeme["double"]
    if double is not None:
        try:
            text: str = json.loads(f'"{double}"')
        except ValueError:
            members.needed.add(Leniency.QUOTES)
            return double
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if lexeme["single"] is not None:
        members.needed.add(Leniency.QUOTES)
        return lexeme["single"].replace("\\'", "'").replace('\\"', '"')
    if lexeme["word"] is not None:
        members.needed.add(Leniency.QUOTES)
    return lexeme["word"]
