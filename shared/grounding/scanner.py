"""One pass over a response's bytes: where the container opens and closes, and where its entries lie
(DESIGN 7.2).

Only strings, braces and what stands between entries are looked at; an entry's inside is the
business of `members`. Every pattern is possessive or atomic (`entries` says in which form) and
every offset only grows, so the pass is linear whatever the response holds.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import NamedTuple

from shared.records import GeometryKind

# One `object_{n}` entry of a response, and a reader for entries as models mostly write them (DESIGN
# 7.2).
#
# A *plain* entry has a key without escapes, one `desc` and one array of coord tokens, in any field
# order and spacing: one match reads it whole. What it finds is what `scanner` and `members` find;
# everything else, and everything that turns out to be no valid object, is theirs.
#
# Every pattern is possessive or atomic, so that a match that fails has looked at each byte a
# bounded number of times. A repeated group is atomic, `(?>(?:...)*)`, and not possessive,
# `(?:...)*+`: Python 3.11.2, which Debian 12 has, leaves the match behind the last attempt of a
# possessive group, even where that failed.


SPACE = rb"[ \t\n\r]*+"
STRING_CHARACTERS = rb'(?>(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*)'
"""What JSON allows between the quotes of a string."""
KEY_INDEX = rb"object_(0|[1-9][0-9]{0,8})"
COORD_START = b"<|coord_"

_COMMA = SPACE + rb"," + SPACE
_COLON = SPACE + rb":" + SPACE
_COORD = rb'(?:"<\|coord_[0-9]{1,3}\|>"|<\|coord_[0-9]{1,3}\|>)'
_COORDS = _COORD + rb"(?>(?:" + _COMMA + _COORD + rb")*)"
_POINT = rb"\[" + SPACE + _COORD + _COMMA + _COORD + SPACE + rb"\]"
_POINTS = _POINT + rb"(?>(?:" + _COMMA + _POINT + rb")*)"
_DESC = rb'"desc"' + _COLON + rb'"(' + STRING_CHARACTERS + rb')"'
_BOX = rb'"bbox_2d"' + _COLON + rb"(\[" + SPACE + _COORDS + SPACE + rb"\])"
_POLY = (
    rb'"poly"'
    + _COLON
    + rb"(\["
    + SPACE
    + rb"(?:"
    + _POINTS
    + rb"|"
    + _COORDS
    + rb")"
    + SPACE
    + rb"\])"
)
_VALUE = (
    rb"(\{"
    + SPACE
    + rb"(?:"
    + _DESC
    + _COMMA
    + rb")?(?:"
    + _BOX
    + rb"|"
    + _POLY
    + rb")(?:"
    + _COMMA
    + _DESC
    + rb")?"
    + SPACE
    + rb"\})"
)
_ENTRY = SPACE + rb'"' + KEY_INDEX + rb'"' + _COLON + _VALUE
_FIRST_ENTRY = re.compile(_ENTRY)
_NEXT_ENTRY = re.compile(SPACE + rb"," + _ENTRY)
# Groups of the two.
_INDEX, _BRACES, _DESC_BEFORE, _BOX_ARRAY, _POLY_ARRAY, _DESC_BEHIND = range(1, 7)
_KEY_START = len(b'"object_')


# Named tuples, because one of each is made for every entry, and a frozen dataclass takes longer to
# make.
class PlainFields(NamedTuple):
    """What a plain entry has. Spans are half-open, in bytes."""

    kind: GeometryKind
    desc: tuple[int, int]
    """Between the quotes, escapes and all."""
    array: tuple[int, int]
    """`[...]` of the geometry: characters of coord tokens, of which nobody knows yet whether they
    are tokens.
    """


class Entry(NamedTuple):
    """One `object_{n}` entry of the container. Offsets count bytes, spans are half-open."""

    key: str
    number: int
    """The n of `object_{n}`."""
    start: int
    """Of the key's opening quote."""
    value: tuple[int, int] | None
    """Span of `{...}`; None where the value is not an object."""
    separated: bool
    """One separator directly in front of the key and one colon behind it."""
    plain: PlainFields | None = None
    """None where the entry is not plain."""


def plain_entries(text: bytes, position: int, *, first: bool) -> tuple[list[Entry], int]:
    """The plain entries that follow one another from `position` on, and where they end.

    `position` is behind the container's opening (`first`) or behind an entry.
    """
    entries: list[Entry] = []
    pattern = _FIRST_ENTRY if first else _NEXT_ENTRY
    while (found := pattern.match(text, position)) is not None:
        kind, array = (
            (GeometryKind.BBOX, _BOX_ARRAY)
            if found.start(_BOX_ARRAY) >= 0
            else (GeometryKind.POLY, _POLY_ARRAY)
        )
        before, behind = found.start(_DESC_BEFORE) >= 0, found.start(_DESC_BEHIND) >= 0
        if before == behind:
            break
        plain = PlainFields(
            kind, found.span(_DESC_BEFORE if before else _DESC_BEHIND), found.span(array)
        )
        number = int(found[_INDEX])
        entries.append(
            Entry(
                f"object_{number}",
                number,
                found.start(_INDEX) - _KEY_START,
                found.span(_BRACES),
                True,
                plain,
            )
        )
        position, pattern = found.end(), _NEXT_ENTRY
    return entries, position


def unescape(raw: bytes) -> str:
    """The text of a JSON string, given the `STRING_CHARACTERS` between its quotes. Lone surrogates
    become U+FFFD, and so does what is not UTF-8.
    """
    text = raw.decode(errors="replace")
    if "\\" not in text:
        return text
    unescaped: str = json.loads(f'"{text}"')
    return unescaped.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# as delimited by quotes; what is between them need not be allowed
_STRING = rb'"(?>(?:[^"\\]++|\\.)*)"'

_OPENING = re.compile(SPACE + rb"(\{)")
_LEXEME = re.compile(
    SPACE + rb"(?:(" + _STRING + rb')|([{}\[\]:,])|[^ \t\n\r"{}\[\]:,]++)', re.DOTALL
)
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

    An entry ends with the brace that closes its value, by string-aware brace depth alone. One whose
    value is not an object ends before the next comma, the next key or the container's end. An entry
    that the text ends in is not reported.
    """
    opening = _OPENING.match(text)
    if opening is None:
        return None
    scan = _Scan(text, opening.start(1))
    return Container(tuple(scan.entries), scan.closed)


def object_indices(text: bytes) -> list[int]:
    """The n of every `object_{n}` key in `text`, at any depth: a string with a colon behind it that
    is not part of another string.
    """
    return [int(index) for index in _KEY_OR_STRING.findall(text) if index]


def is_open_container(text: bytes) -> bool:
    """Whether more entries can be written at the end of `text`: an object was opened, not closed,
    and no string or object in it is open.
    """
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
        # open `[` since the last key: commas and strings inside them belong to an array
        self._brackets = 0
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
        index = (
            _object_index(self._text[start + 1 : self._position - 1])
            if symbol == _TEXT_STRING and self._last != b":"
            else None
        )
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
        """Whether a string `object_{n}` that was just read is one: it stands where a key belongs,
        or has a colon behind it.
        """
        return (
            self._last in (b"{", b",", _OBJECT_VALUE) and not self._brackets
        ) or _COLON_FOLLOWS.match(self._text, self._position) is not None

    def _is_separated(self) -> bool:
        """Whether one separator stands directly in front of a key that was just read.

        What lies before it, other members that may be damaged included, is not asked.
        """
        return self._last == b"{" or (self._last == b"," and self._earlier not in (b"{", b","))

    def _end_awaited(self, symbol: bytes, start: int) -> None:
        """Reports the entry whose value is awaited where `symbol` is that value, or shows that
        there is none.
        """
        if self._awaited is None:
            return
        if symbol == _OBJECT_VALUE and not self._brackets:
            colon = (self._earlier, self._last) == (_ENTRY_KEY, b":")
            self.entries.append(
                self._awaited._replace(
                    value=(start, self._position), separated=self._awaited.separated and colon
                )
            )
            self._awaited = None
        elif symbol in (_ENTRY_KEY, b"}") or (symbol == b"," and not self._brackets):
            self.entries.append(self._awaited)
            self._awaited = None


def _lexeme(text: bytes, position: int) -> tuple[bytes, int, int] | None:
    """The symbol of the container that follows, and its half-open span; a nested object is one.
    None where the text ends before it does.
    """
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
    """From inside an object: behind the brace that closes it and 0, or behind the last brace there
    is and the depth that is left open.
    """
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
