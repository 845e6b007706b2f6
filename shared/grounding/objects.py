"""The objects that the parser finds in a model's answer, valid or not (decision 32).

An answer's container is its JSON object or list; each element of the container is an entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from shared.records import GeometryKind


class DropReason(StrEnum):
    """Why a complete entry of an answer is not a valid object.

    If several reasons apply, it is the first of them in this order.
    """

    MALFORMED = "malformed"
    """The entry is invalid JSON or not an object, or not exactly one comma precedes it.

    Coordinate tokens may be unquoted.
    """
    KEY_INVALID = "key_invalid"
    """The entry has a key that is not allowed, `desc` twice, two geometries or a nested object."""
    UNKNOWN_GEOM = "unknown_geom"
    """The entry has one unknown key, whose value is an array."""
    MISSING_DESC = "missing_desc"
    """`desc` (`label` in a list) is absent, not a string, empty or blank."""
    MISSING_GEOM = "missing_geom"
    """No geometry key has an array as its value."""
    NON_COORD_TOKEN = "non_coord_token"
    """The geometry contains something other than coordinate tokens.

    In a format with digits: something other than numbers in range.
    """
    WRONG_ARITY = "wrong_arity"
    """The geometry has a wrong number of coordinates, or the geometry key occurs twice."""
    BBOX_INVALID = "bbox_invalid"
    """The box has x1 > x2 or y1 > y2."""
    POLY_UNSUPPORTED = "poly_unsupported"
    """The entry is a valid polygon, but the run does not learn polygons."""


@dataclass(frozen=True, slots=True)
class ParsedObject:
    """One valid object of a model's answer, with the places of its parts in the answer.

    Positions count tokens of `ParsedRollout.prefix_token_ids`, the prefix.

    Example: the first object of an answer is `ParsedObject("object_1", 1, GeometryKind.BBOX,
    desc="cat", bins=(10, 20, 300, 400), coord_positions=(14, 18, 22, 26), span=(4, 29))`.
    """

    key: str
    """The object's key: `object_{n}`, or `[n]` in a list or a phrase list."""
    index: int
    """The number n in `key`."""
    kind: GeometryKind
    desc: str
    """The object's name, with JSON escapes decoded and white space kept."""
    bins: tuple[int, ...]
    """Coordinates 0..999: (x1, y1, x2, y2), x, y per polygon vertex, or (x, y) of a point."""
    coord_positions: tuple[int, ...]
    """Positions of the tokens that write the bins, ascending: one per bin, or more in digits."""
    span: tuple[int, int]
    """Half-open range of the tokens that overlap the bytes in `value`."""
    value: tuple[int, int] = (0, 0)
    """Half-open byte range of the value `{...}` in the prefix. In a phrase list: the coordinates of
    a box; for a phrase's first box, everything after `<|object_ref_start|>`."""
    desc_value: tuple[int, int] = (0, 0)
    """Half-open byte range of the value of `desc` in the prefix, without quotes. In a phrase list
    the name may be before `value`."""
    coord_spans: tuple[tuple[int, int], ...] = ()
    """Half-open byte ranges of the digits of each bin in the prefix; empty if bins are coordinate
    tokens."""
    numbers: tuple[int, ...] = ()
    """The numbers as written in digits, in the answer format's units; empty if bins are coordinate
    tokens."""


@dataclass(frozen=True, slots=True)
class DroppedObject:
    """An entry in the kept prefix of an answer that is not a valid object, and the reason."""

    key: str
    reason: DropReason


@dataclass(frozen=True, slots=True)
class ParsedRollout:
    """The parsed answer: its valid objects, and the prefix of the answer that training keeps.

    The prefix is an open container, to which objects can be appended.
    """

    prefix_token_ids: tuple[int, ...]
    prefix_text: str
    """Text of the prefix; bytes that are not UTF-8 are U+FFFD."""
    objects: tuple[ParsedObject, ...]
    """The valid objects, in order of appearance."""
    dropped: tuple[DroppedObject, ...]
    """Complete entries of the prefix that are not valid objects, in order of appearance."""
    max_object_index: int | None
    """The largest n of an `object_{n}` key in the prefix; None if no such key exists."""
    truncated: bool
    """Whether the answer's container was not closed, or the answer has none (prose, or empty)."""
    fallback: bool
    """Whether nothing was kept: the prefix is `{`, `[` in a list, or empty in a phrase list."""
    num_unchanged: int = 0
    """Number of tokens at the start of the prefix that are as the engine sampled them.

    The other tokens replace a token that the end of the prefix divides, or are the opening bracket
    of a fallback.
    """
    num_behind: int = 0
    """Number of objects after the container's end, for example in a second list.

    They are not read; only their geometry keys are counted.
    """
