"""One pass over a response's bytes: where the container opens and closes, and where its entries lie (DESIGN 7.2).

Only strings, braces and what stands between entries are looked at; an entry's inside is the business of `members`. Every pattern is
possessive or atomic (`entries` says in which form) and every offset only grows, so the pass is linear whatever the response holds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shared.grounding.entries import KEY_INDEX, SPACE, STRING_CHARACTERS, Entry, plain_entries, unescape

_STRING = rb'"(?>(?:[^"\\]++|\\.)*)"'  # as delimited by quotes; what is between them need not be allowed

_OPENING = re.compile(SPACE + rb"(\{)")
_LEXEME = re.compile(SPACE + rb"(?:(" + _STRING + rb')|([{}\[\]:,])|[^ \t\n\r"{}\[\]:,]++)', re.DOTALL)
_TO_BRACE = re.compile(rb'[^"{}]*+(?>(?:' + _STRING + rb'[^"{}]*+)*)([{}])', re.DOTALL)
_NO_BRACE = re.compile(rb'[^"{}]*+(?>(?:' + _STRING + rb'[^"{}]*+)*)', re.DOTALL)
_COLON_FOLLOWS = re.compile(SPACE + rb":")
_ALLOWED = re.compile(STRING_CHARACTERS)
_OBJECT_KEY = re.compile(KEY_INDEX)
_KEY_OR_STRING = re.compile(rb'"' + KEY_INDEX + rb'"' + SPACE + rb":|" + _STRING, re.DOTALL)

# What can stand at the container's top level, beside punctuation that stands for itself.
_OBJECT_VALUE = b"{}"
_TEXT_STRING = b'"'
_ENTRY_KEY = b"key"
_OTHER = b"other"


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
    scan = _Scan(text, opening.start(1))
    return Container(tuple(scan.entries), scan.closed)


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


class _Scan:
    """A scan from the container's opening brace to its end, and where it stands."""

    def __init__(self, text: bytes, opening: int) -> None:
        self.entries: list[Entry] = []
        self.closed = False
        self._text = text
        self._position = opening + 1
        self._earlier, self._last = b"", b"{"  # the last two symbols
        self._awaited: Entry | None = None  # has its key, not yet its value
        self._brackets = 0  # open `[` since the last key: commas and strings inside them belong to an array
        while not self.closed and self._step():
            pass

    def _step(self) -> bool:
        """Takes the plain entries and the one symbol that follow; False at the end of the text."""
        if self._awaited is None and self._last in (b"{", _OBJECT_VALUE):
            self._take_plain_entries()
        lexeme = _lexeme(self._text, self._position)
        if lexeme is None:
            return False
        symbol, start, self._position = lexeme
        index = _object_index(self._text[start + 1 : self._position - 1]) if symbol == _TEXT_STRING and self._last != b":" else None
        if index is not None and self._is_key():
            symbol = _ENTRY_KEY
        self._end_awaited(symbol, start)
        if index is not None and symbol == _ENTRY_KEY:
            self._awaited = Entry(f"object_{index}", index, start, None, self._is_separated())
            self._brackets = 0
        elif symbol == b"[":
            self._brackets += 1
        elif symbol == b"]":
            self._brackets = max(self._brackets - 1, 0)
        self._earlier, self._last = self._last, symbol
        self.closed = symbol == b"}"
        return True

    def _take_plain_entries(self) -> None:
        plain, end = plain_entries(self._text, self._position, first=self._last == b"{")
        if plain:
            self.entries += plain
            self._brackets, self._earlier, self._last = 0, b":", _OBJECT_VALUE
            self._position = end

    def _is_key(self) -> bool:
        """Whether a string `object_{n}` that was just read is one: it stands where a key belongs, or has a colon behind it."""
        return (self._last in (b"{", b",", _OBJECT_VALUE) and not self._brackets) or _COLON_FOLLOWS.match(self._text, self._position) is not None

    def _is_separated(self) -> bool:
        """Whether one separator stands directly in front of a key that was just read.

        What lies before it, other members that may be damaged included, is not asked.
        """
        return self._last == b"{" or (self._last == b"," and self._earlier not in (b"{", b","))

    def _end_awaited(self, symbol: bytes, start: int) -> None:
        """Reports the entry whose value is awaited where `symbol` is that value, or shows that there is none."""
        if self._awaited is None:
            return
        if symbol == _OBJECT_VALUE and not self._brackets:
            colon = (self._earlier, self._last) == (_ENTRY_KEY, b":")
            self.entries.append(self._awaited._replace(value=(start, self._position), separated=self._awaited.separated and colon))
            self._awaited = None
        elif symbol in (_ENTRY_KEY, b"}") or (symbol == b"," and not self._brackets):
            self.entries.append(self._awaited)
            self._awaited = None


def _lexeme(text: bytes, position: int) -> tuple[bytes, int, int] | None:
    """The symbol of the container that follows, and its half-open span; a nested object is one. None where the text ends before it does."""
    found = _LEXEME.match(text, position)
    if found is None:
        return None
    if found.end(1) > 0:
        return _TEXT_STRING, *found.span(1)
    if found[2] is None:
        return _OTHER, found.end(), found.end()
    if found[2] != b"{":
        return found[2], *found.span(2)
    end, depth = _follow_braces(text, found.end())
    return None if depth else (_OBJECT_VALUE, found.start(2), end)


def _follow_braces(text: bytes, position: int) -> tuple[int, int]:
    """From inside an object: behind the brace that closes it and 0, or behind the last brace there is and the depth that is left open."""
    depth = 1
    while depth and (brace := _TO_BRACE.match(text, position)) is not None:
        position = brace.end()
        depth += 1 if brace[1] == b"{" else -1
    return position, depth


def _object_index(raw: bytes) -> int | None:
    """The n of a key, given what is between its quotes; None where it is another string."""
    if b"\\" in raw:
        raw = unescape(raw).encode() if _ALLOWED.fullmatch(raw) else b""
    match = _OBJECT_KEY.fullmatch(raw)
    return None if match is None else int(match[1])
