"""One `object_{n}` entry of a response, and a reader for entries as models mostly write them (DESIGN 7.2).

A *plain* entry has a key without escapes, one `desc` and one array of coord tokens, in any field order and spacing: one match reads it whole.
What it finds is what `scanner` and `members` find; everything else, and everything that turns out to be no valid object, is theirs.

Every pattern is possessive or atomic, so that a match that fails has looked at each byte a bounded number of times. A repeated group is atomic,
`(?>(?:...)*)`, and not possessive, `(?:...)*+`: Python 3.11.2, which Debian 12 has, leaves the match behind the last attempt of a possessive
group, even where that failed.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from shared.records import GeometryKind

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
_POLY = rb'"poly"' + _COLON + rb"(\[" + SPACE + rb"(?:" + _POINTS + rb"|" + _COORDS + rb")" + SPACE + rb"\])"
_VALUE = rb"(\{" + SPACE + rb"(?:" + _DESC + _COMMA + rb")?(?:" + _BOX + rb"|" + _POLY + rb")(?:" + _COMMA + _DESC + rb")?" + SPACE + rb"\})"
_ENTRY = SPACE + rb'"' + KEY_INDEX + rb'"' + _COLON + _VALUE
_FIRST_ENTRY = re.compile(_ENTRY)
_NEXT_ENTRY = re.compile(SPACE + rb"," + _ENTRY)
# Groups of the two.
_INDEX, _BRACES, _DESC_BEFORE, _BOX_ARRAY, _POLY_ARRAY, _DESC_BEHIND = range(1, 7)
_KEY_START = len(b'"object_')


# Named tuples, because one of each is made for every entry, and a frozen dataclass takes longer to make.
class PlainFields(NamedTuple):
    """What a plain entry has. Spans are half-open, in bytes."""

    kind: GeometryKind
    desc: tuple[int, int]
    """Between the quotes, escapes and all."""
    array: tuple[int, int]
    """`[...]` of the geometry: characters of coord tokens, of which nobody knows yet whether they are tokens."""


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
        kind, array = (GeometryKind.BBOX, _BOX_ARRAY) if found.start(_BOX_ARRAY) >= 0 else (GeometryKind.POLY, _POLY_ARRAY)
        before, behind = found.start(_DESC_BEFORE) >= 0, found.start(_DESC_BEHIND) >= 0
        if before == behind:
            break
        plain = PlainFields(kind, found.span(_DESC_BEFORE if before else _DESC_BEHIND), found.span(array))
        number = int(found[_INDEX])
        entries.append(Entry(f"object_{number}", number, found.start(_INDEX) - _KEY_START, found.span(_BRACES), True, plain))
        position, pattern = found.end(), _NEXT_ENTRY
    return entries, position


def unescape(raw: bytes) -> str:
    """The text of a JSON string, given the `STRING_CHARACTERS` between its quotes. Lone surrogates become U+FFFD, and so does what is not UTF-8."""
    text = raw.decode(errors="replace")
    if "\\" not in text:
        return text
    unescaped: str = json.loads(f'"{text}"')
    return unescaped.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
