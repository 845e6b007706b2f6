"""One pass over a response's bytes: where the container opens and closes, and where its entries lie (DESIGN 7.2).

Only strings, braces and what stands between entries are looked at; an entry's inside is the business of `members`. Every pattern is
possessive or atomic and every offset only grows, so the pass is linear whatever the response holds.

A repeated group is atomic, `(?>(?:...)*)`, and not possessive, `(?:...)*+`: Python 3.11.2, which Debian 12 has, leaves the match behind the last
attempt of a possessive group, even where that failed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

SPACE = rb"[ \t\n\r]*+"
STRING_CHARACTERS = rb'(?>(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*)'
"""What JSON allows between the quotes of a string."""
_STRING = rb'"(?>(?:[^"\\]++|\\.)*)"'  # as delimited by quotes; what is between them need not be allowed

_OPENING = re.compile(SPACE + rb"\{")
_LEXEME = re.compile(SPACE + rb"(?:(" + _STRING + rb')|([{}\[\]:,])|[^ \t\n\r"{}\[\]:,]++)', re.DOTALL)
_TO_BRACE = re.compile(rb'[^"{}]*+(?>(?:' + _STRING + rb'[^"{}]*+)*)([{}])', re.DOTALL)
_NO_BRACE = re.compile(rb'[^"{}]*+(?>(?:' + _STRING + rb'[^"{}]*+)*)', re.DOTALL)
_COLON_FOLLOWS = re.compile(SPACE + rb":")
_ALLOWED = re.compile(STRING_CHARACTERS)
_OBJECT_KEY = re.compile(rb"object_(0|[1-9][0-9]{0,8})")
_KEY_OR_STRING = re.compile(rb'"object_(0|[1-9][0-9]{0,8})"' + SPACE + rb":|" + _STRING, re.DOTALL)

# What can stand at the container's top level, beside punctuation that stands for itself.
_OBJECT_VALUE = b"{}"
_TEXT_STRING = b'"'
_ENTRY_KEY = b"key"
_OTHER = b"other"


@dataclass(frozen=True, slots=True)
class Entry:
    """One `object_{n}` entry of the container. Offsets count bytes."""

    key: str
    index: int
    start: int
    """Of the key's opening quote."""
    value: tuple[int, int] | None
    """Half-open span of `{...}`; None where the value is not an object."""
    well_formed: bool
    """One separator in front of the key and one colon behind it."""


@dataclass(frozen=True, slots=True)
class Container:
    entries: tuple[Entry, ...]
    """Complete ones, in order of appearance."""
    closed: bool


def scan_container(text: bytes) -> Container | None:
    """The entries of the top-level object; None where `text` does not begin with one.

    An entry ends with the brace that closes its value, by string-aware brace depth alone. One whose value is not an object ends
    before the next comma, the next key or the container's end. An entry that the text ends in is not reported.
    """
    opening = _OPENING.match(text)
    if opening is None:
        return None
    entries: list[Entry] = []
    key: tuple[int, int, bool] | None = None  # index, start and separation of the entry whose value is awaited
    earlier, last = b"", b"{"
    brackets = 0  # open `[` since the last key: commas and strings inside them belong to an array
    for symbol, start, end in _top_level(text, opening.end()):
        index = _object_index(text[start + 1 : end - 1]) if symbol == _TEXT_STRING and last != b":" else None
        if index is not None and ((last in (b"{", b",", _OBJECT_VALUE) and not brackets) or _COLON_FOLLOWS.match(text, end)):
            symbol = _ENTRY_KEY
        if key is not None:
            if symbol == _OBJECT_VALUE and not brackets:
                entries.append(_entry(key, (start, end), colon=(earlier, last) == (_ENTRY_KEY, b":")))
                key = None
            elif symbol in (_ENTRY_KEY, b"}") or (symbol == b"," and not brackets):
                entries.append(_entry(key, None, colon=False))
                key = None
        if symbol == b"}":
            return Container(tuple(entries), closed=True)
        if symbol == _ENTRY_KEY:
            assert index is not None
            # A comma counts once: not behind the opening brace, not behind another comma.
            key = index, start, last == b"{" or (last == b"," and earlier not in (b"{", b","))
            brackets = 0
        elif symbol == b"[":
            brackets += 1
        elif symbol == b"]":
            brackets = max(brackets - 1, 0)
        earlier, last = last, symbol
    return Container(tuple(entries), closed=False)


def object_indices(text: bytes) -> list[int]:
    """The n of every `object_{n}` key in `text`, at any depth: a string with a colon behind it that is not part of another string."""
    return [int(index) for index in _KEY_OR_STRING.findall(text) if index]


def is_open_container(text: bytes) -> bool:
    """Whether more entries can be written at the end of `text`: an object was opened, not closed, and no string or object in it is open."""
    opening = _OPENING.match(text)
    if opening is None:
        return False
    position, depth = _follow_braces(text, opening.end())
    return depth == 1 and _NO_BRACE.fullmatch(text, position) is not None


def unescape(raw: bytes) -> str:
    """The text of a JSON string, given the `STRING_CHARACTERS` between its quotes. Lone surrogates become U+FFFD, and so does what is not UTF-8."""
    text = raw.decode(errors="replace")
    if "\\" not in text:
        return text
    unescaped: str = json.loads(f'"{text}"')
    return unescaped.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _top_level(text: bytes, position: int) -> Iterator[tuple[bytes, int, int]]:
    """The lexemes of the container with their half-open spans, nested objects as one; ends with the container or where the text is cut off."""
    while (lexeme := _LEXEME.match(text, position)) is not None:
        string_start, string_end = lexeme.span(1)
        start, position = lexeme.start(2), lexeme.end()
        if string_end > 0:
            yield _TEXT_STRING, string_start, string_end
        elif lexeme[2] is None:
            yield _OTHER, position, position
        elif lexeme[2] != b"{":
            yield lexeme[2], start, position
            if lexeme[2] == b"}":
                return
        else:
            position, depth = _follow_braces(text, position)
            if depth:
                return
            yield _OBJECT_VALUE, start, position


def _follow_braces(text: bytes, position: int) -> tuple[int, int]:
    """From inside an object: behind the brace that closes it and 0, or behind the last brace there is and the depth that is left open."""
    depth = 1
    while depth and (brace := _TO_BRACE.match(text, position)) is not None:
        position = brace.end()
        depth += 1 if brace[1] == b"{" else -1
    return position, depth


def _entry(key: tuple[int, int, bool], value: tuple[int, int] | None, *, colon: bool) -> Entry:
    index, start, separated = key
    return Entry(f"object_{index}", index, start, value, separated and colon)


def _object_index(raw: bytes) -> int | None:
    """The n of a key, given what is between its quotes; None where it is another string."""
    if b"\\" in raw:
        raw = unescape(raw).encode() if _ALLOWED.fullmatch(raw) else b""
    match = _OBJECT_KEY.fullmatch(raw)
    return None if match is None else int(match[1])
