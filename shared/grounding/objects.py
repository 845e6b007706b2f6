"""The objects of an answer, as values (decision 32)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from shared.records import GeometryKind


class DropReason(StrEnum):
    """The first reason, in this order, why a complete entry is not a valid object."""

    MALFORMED = "malformed"
    """Invalid JSON (except unquoted coordinate tokens), not an object, or not after exactly one
    comma."""
    KEY_INVALID = "key_invalid"
    """A key that is not allowed, `desc` twice, two geometries, or a nested object."""
    UNKNOWN_GEOM = "unknown_geom"
    """One unknown key whose value is an array."""
    MISSING_DESC = "missing_desc"
    """`desc` (`label` in a list) is absent, not a string, empty or blank."""
    MISSING_GEOM = "missing_geom"
    """No geometry key has an array as its value."""
    NON_COORD_TOKEN = "non_coord_token"
    """The geometry has something other than coordinate tokens (or digits of numbers in range)."""
    WRONG_ARITY = "wrong_arity"
    """A wrong number of coordinates, or the geometry twice."""
    BBOX_INVALID = "bbox_invalid"
    """x1 > x2 or y1 > y2."""
    POLY_UNSUPPORTED = "poly_unsupported"
    """A valid polygon, but only boxes are wanted."""


@dataclass(frozen=True, slots=True)
class ParsedObject:
    """One valid object. Positions count tokens of `ParsedRollout.prefix_token_ids`.

    Example: the first object of an answer is `ParsedObject("object_1", 1, GeometryKind.BBOX,
    desc="cat", bins=(10, 20, 300, 400), coord_positions=(14, 18, 22, 26), span=(4, 29))`.
    """

    key: str
    """`object_{n}`; `[n]` in a list or a phrase list."""
    index: int
    """The n of its key."""
    kind: GeometryKind
    desc: str
    """Unescaped, as written: not stripped."""
    bins: tuple[int, ...]
    """0..999: (x1, y1, x2, y2), x, y per polygon vertex, or (x, y) of a point."""
    coord_positions: tuple[int, ...]
    """Positions of the tokens that write the bins, ascending: one per bin, or more in digits."""
    span: tuple[int, int]
    """Half-open range of the tokens that overlap `value`."""
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
    """An entry of the kept prefix that is not a valid object."""

    key: str
    reason: DropReason


@dataclass(frozen=True, slots=True)
class ParsedRollout:
    """The usable part of an answer: an open container to which objects can be appended."""

    prefix_token_ids: tuple[int, ...]
    prefix_text: str
    """Text of the prefix; bytes that are not UTF-8 are U+FFFD."""
    objects: tuple[ParsedObject, ...]
    """In order of appearance."""
    dropped: tuple[DroppedObject, ...]
    """Complete entries of the prefix that are not valid objects, in order of appearance."""
    max_object_index: int | None
    """The largest n of an `object_{n}` key in the prefix; None if no such key exists."""
    truncated: bool
    """No container was closed: the answer ended too early, or has none (prose, an empty answer)."""
    fallback: bool
    """Nothing could be kept: the prefix is `{`, `[` in a list, or empty in a phrase list."""
    num_unchanged: int = 0
    """Number of leading prefix tokens taken unchanged from the answer. The replaced end of a fused
    token and the fallback's bracket do not count."""
    num_behind: int = 0
    """Number of objects after the container's end, for example in a second list. They are not read,
    only their geometry keys are counted."""
