"""Find the container and entries of an answer, in one pass over its bytes (decision 32).

The container is the answer's JSON object or list; each of its elements is an entry.
The scan reads only strings, braces and the text between entries. `shared.grounding.validation`
reads the inside of an entry. Most entries are *plain*: a key without escapes, one `desc` and one
array of coordinate tokens, in any field order and spacing. One regular expression reads a plain
entry, with the same result as scan and validation, which read all other entries.

Every pattern is possessive or atomic, and every offset only grows, so the pass is linear for any
answer. A repeated group is atomic, `(?>(?:...)*)`, not possessive, `(?:...)*+`: in Python 3.11.2
(Debian 12) a possessive group keeps the position after its last attempt, even a failed one.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import NamedTuple

from shared.records import GeometryKind

SPACE = rb"[ \t\n\r]*+"
STRING_CHARACTERS = rb'(?>(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*)'
"""A pattern for the characters that JSON allows between the quotes of a string."""
KEY_INDEX = rb"object_(0|[1-9][0-9]{0,8})"
COORD_START = b"<|coord_"

_COMMA = SPACE + rb"," + SPACE
_COLON = SPACE + rb":" + SPACE
_COORD = rb'(?:"<\|coord_[0-9]{1,3}\|>"|<\|coord_[0-9]{1,3}\|>)'
_COORDS = rb"%b(?>(?:%b%b)*)" % (_COORD, _COMMA, _COORD)
_POINT = rb"\[" + SPACE + _COORD + _COMMA + _COORD + SPACE + rb"\]"
_POINTS = rb"%b(?>(?:%b%b)*)" % (_POINT, _COMMA, _POINT)
_DESC = rb'"desc"%b"(%b)"' % (_COLON, STRING_CHARACTERS)
_BOX = rb'"bbox_2d"%b(\[%b%b%b\])' % (_COLON, SPACE, _COORDS, SPACE)
_POLY = rb'"poly"%b(\[%b(?:%b|%b)%b\])' % (_COLON, SPACE, _POINTS, _COORDS, SPACE)
_MEMBERS = rb"(?:%b%b)?(?:%b|%b)(?:%b%b)?" % (_DESC, _COMMA, _BOX, _POLY, _COMMA, _DESC)
_VALUE = rb"(\{" + SPACE + _MEMBERS + SPACE + rb"\})"
_ENTRY = SPACE + rb'"' + KEY_INDEX + rb'"' + _COLON + _VALUE
_FIRST_ENTRY = re.compile(_ENTRY)
_NEXT_ENTRY = re.compile(SPACE + rb"," + _ENTRY)
# Groups of both patterns.
_INDEX, _BRACES, _DESC_BEFORE, _BOX_ARRAY, _POLY_ARRAY, _DESC_BEHIND = range(1, 7)
_KEY_START = len(b'"object_')


# Named tuples, because one is made for every entry, and a frozen dataclass takes longer to make.
class PlainFields(NamedTuple):
    """The places of name and coordinates in a plain entry of an answer, or in a phrase's box.

    Spans are half-open, in bytes.
    """

    kind: GeometryKind
    desc: tuple[int, int]
    """Span of the name between its quotes, with escapes; in a phrase list, of the phrase's name."""
    array: tuple[int, int]
    """Span of the array `[...]` of coordinates; in a phrase list, of a box's coordinates.

    The text looks like coordinate tokens, but other tokens may have written it.
    """


class Entry(NamedTuple):
    """The place of one entry in an answer's text. Offsets count bytes, spans are half-open."""

    key: str
    """The entry's key: `object_{n}`, or `[n]` in a list or a phrase list."""
    number: int
    """The number n in `key`."""
    start: int
    """Offset of the key's opening quote, or of the phrase; in a list, offset of the value."""
    value: tuple[int, int] | None
    """Span of the entry's object `{...}`; None if its value is not an object.

    In a phrase list: the span of a box's coordinates; for a phrase's first box, it begins at the
    name.
    """
    separated: bool
    """Whether exactly one separator precedes the entry and one colon follows its key."""
    plain: PlainFields | None = None
    """Places of name and coordinates in a plain entry; None if the entry is not plain."""


def plain_entries(text: bytes, position: int, *, first: bool) -> tuple[list[Entry], int]:
    """Return the plain entries that begin at `position`, and the offset of their end.

    A plain entry has a key without escapes, one `desc` and one array of coordinate tokens.
    `position` is after the container's opening bracket if `first` is true, else after an entry.
    """
    entries: list[Entry] = []
    pattern = _FIRST_ENTRY if first else _NEXT_ENTRY
    while (found := pattern.match(text, position)) is not None:
        kind = GeometryKind.BBOX
        array = _BOX_ARRAY
        if found.start(_BOX_ARRAY) < 0:
            kind = GeometryKind.POLY
            array = _POLY_ARRAY
        has_desc_before = found.start(_DESC_BEFORE) >= 0
        if has_desc_before == (found.start(_DESC_BEHIND) >= 0):
            break
        desc = found.span(_DESC_BEFORE if has_desc_before else _DESC_BEHIND)
        plain = PlainFields(kind, desc, found.span(array))
        number = int(found[_INDEX])
        start = found.start(_INDEX) - _KEY_START
        entries.append(Entry(f"object_{number}", number, start, found.span(_BRACES), True, plain))
        position = found.end()
        pattern = _NEXT_ENTRY
    return entries, position


def unescape(raw: bytes) -> str:
    """Decode a JSON string, given the bytes between its quotes.

    Lone surrogates and bytes that are not UTF-8 become U+FFFD.
    """
    text = raw.decode(errors="replace")
    if "\\" not in text:
        return text
    unescaped: str = json.loads(f'"{text}"')
    return unescaped.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# Delimited by quotes; the characters between them may be illegal in JSON.
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

# Symbols of the container's top level, in addition to punctuation, which is its own symbol.
OBJECT_VALUE = b"{}"
_TEXT_STRING = b'"'
_ENTRY_KEY = b"key"
_OTHER = b"other"


@dataclass(frozen=True, slots=True)
class Container:
    """The JSON object or list that an answer consists of; in a phrase list, the whole answer."""

    entries: tuple[Entry, ...]
    """The complete entries, in order of appearance."""
    closed: bool
    end: int = 0
    """Offset after the container's closing bracket, if it is closed."""


def scan_container(text: bytes) -> Container | None:
    """Find the entries of the JSON object at the beginning of an answer; None if there is none.

    An entry ends at the brace that closes its value; braces inside strings do not count. An entry
    whose value is not an object ends before the next comma, the next key or the container's end. An
    entry that is still incomplete at the end of the text is not reported.
    """
    opening = _OPENING.match(text)
    if opening is None:
        return None
    scan = _Scan(text, opening.start(1))
    return Container(tuple(scan.entries), scan.closed, scan.position)


def object_indices(text: bytes) -> list[int]:
    """Return the number n of every key `object_{n}` in an answer, at any depth.

    A key is a string that a colon follows and that is not part of another string.
    """
    return [int(index) for index in _KEY_OR_STRING.findall(text) if index]


def is_open_container(text: bytes) -> bool:
    """Return whether entries can be appended to this beginning of an answer.

    Its top-level JSON object must be open, and no string or object inside it may be open.
    """
    opening = _OPENING.match(text)
    if opening is None:
        return False
    position, depth = _follow_braces(text, opening.end())
    return depth == 1 and _NO_BRACE.fullmatch(text, position) is not None


class _Scan:
    """The state of a scan from the container's opening brace to its end."""

    def __init__(self, text: bytes, opening: int) -> None:
        self.entries: list[Entry] = []
        self.closed = False
        self._text = text
        self.position = opening + 1
        # the last two symbols
        self._earlier = b""
        self._last = b"{"
        self._awaited: Entry | None = None  # its key is read, its value is not
        # number of open `[` since the last key: commas and strings inside belong to an array
        self._brackets = 0
        while not self.closed and self._step():
            pass

    def _step(self) -> bool:
        """Read the next plain entries and symbol. Return False at the end of the text."""
        if self._awaited is None and self._last in (b"{", OBJECT_VALUE):
            self._take_plain_entries()
        lexeme = read_lexeme(self._text, self.position)
        if lexeme is None:
            return False
        symbol, start, self.position = lexeme
        index = (
            _object_index(self._text[start + 1 : self.position - 1])
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
        self._earlier = self._last
        self._last = symbol
        self.closed = symbol == b"}"
        return True

    def _take_plain_entries(self) -> None:
        plain, end = plain_entries(self._text, self.position, first=self._last == b"{")
        if plain:
            self.entries += plain
            self._brackets = 0
            self._earlier = b":"
            self._last = OBJECT_VALUE
            self.position = end

    def _is_key(self) -> bool:
        """Return whether the string `object_{n}` just read is a key.

        It is a key if it is at a key's position or a colon follows it.
        """
        if self._last in (b"{", b",", OBJECT_VALUE) and not self._brackets:
            return True
        return _COLON_FOLLOWS.match(self._text, self.position) is not None

    def _is_separated(self) -> bool:
        """Return whether one separator directly precedes the key just read.

        Text before the separator, such as damaged members, does not matter.
        """
        return self._last == b"{" or (self._last == b"," and self._earlier not in (b"{", b","))

    def _end_awaited(self, symbol: bytes, start: int) -> None:
        """Add the awaited entry if `symbol` is its value or shows that it has no value."""
        if self._awaited is None:
            return
        if symbol == OBJECT_VALUE and not self._brackets:
            colon = (self._earlier, self._last) == (_ENTRY_KEY, b":")
            self.entries.append(
                self._awaited._replace(
                    value=(start, self.position), separated=self._awaited.separated and colon
                )
            )
            self._awaited = None
        elif symbol in (_ENTRY_KEY, b"}") or (symbol == b"," and not self._brackets):
            self.entries.append(self._awaited)
            self._awaited = None


def read_lexeme(text: bytes, position: int) -> tuple[bytes, int, int] | None:
    """Return the next JSON symbol of a text and its half-open span.

    A nested object counts as one symbol. Return None if the text ends before the symbol does.
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
    return None if depth else (OBJECT_VALUE, found.start(2), end)


def _follow_braces(text: bytes, position: int) -> tuple[int, int]:
    """Follow braces from inside an object to its closing brace, or to the last brace.

    Returns the position after that brace and the number of objects still open.
    """
    depth = 1
    while depth and (brace := _TO_BRACE.match(text, position)) is not None:
        position = brace.end()
        depth += 1 if brace[1] == b"{" else -1
    return position, depth


def _object_index(raw: bytes) -> int | None:
    """Return the n of an `object_{n}` key without its quotes; None for any other string."""
    if b"\\" in raw:
        raw = unescape(raw).encode() if _ALLOWED.fullmatch(raw) else b""
    match = _OBJECT_KEY.fullmatch(raw)
    return None if match is None else int(match[1])
