"""The objects of a response, as values (decision 32)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from shared.records import GeometryKind


class DropReason(StrEnum):
    """The first reason, in this order, why a complete entry is not an object."""

    MALFORMED = "malformed"
    """Not JSON apart from unquoted coord tokens, no object, or without one comma before it."""
    KEY_INVALID = "key_invalid"
    """A key that does not belong there, `desc` twice, two geometries, or a nested object."""
    UNKNOWN_GEOM = "unknown_geom"
    """One unknown key, and its value is an array."""
    MISSING_DESC = "missing_desc"
    """`desc` (`label` in a list) is absent, not a string, empty or blank."""
    MISSING_GEOM = "missing_geom"
    """No geometry key whose value is an array."""
    NON_COORD_TOKEN = "non_coord_token"
    """Something besides coord tokens in the geometry; besides numbers in range, in digits."""
    WRONG_ARITY = "wrong_arity"
    """The wrong number of coord tokens, or the geometry twice."""
    BBOX_INVALID = "bbox_invalid"
    """x1 > x2 or y1 > y2."""
    POLY_UNSUPPORTED = "poly_unsupported"
    """A sound polygon where only boxes are wanted."""


@dataclass(frozen=True, slots=True)
class ParsedObject:
    """One valid object. Positions count tokens of `ParsedRollout.prefix_token_ids`.

    Example: the first object of an answer is `ParsedObject("object_1", 1, GeometryKind.BBOX,
    desc="cat", bins=(10, 20, 300, 400), coord_positions=(14, 18, 22, 26), span=(4, 29))`.
    """

    key: str
    """`object_{n}`, or `[n]` in a list or behind a phrase."""
    index: int
    """The n of its key."""
    kind: GeometryKind
    desc: str
    """Unescaped, as written: not stripped."""
    bins: tuple[int, ...]
    """0..999: (x1, y1, x2, y2), x, y per polygon vertex, or (x, y) of a point."""
    coord_positions: tuple[int, ...]
    """Tokens that write the bins, ascending: one per entry of `bins`, or more of digits."""
    span: tuple[int, int]
    """Half-open range of the tokens that overlap `value`."""
    value: tuple[int, int] = (0, 0)
    """Half-open range of the prefix's bytes that the value `{...}` takes; of a box behind a phrase
    its coordinates, and of the phrase's first box what stands behind `<|object_ref_start|>`."""
    desc_value: tuple[int, int] = (0, 0)
    """Half-open range of the prefix's bytes that the value of `desc` takes, between its quotes; the
    name of a phrase may stand in front of `value`."""
    coord_spans: tuple[tuple[int, int], ...] = ()
    """Half-open ranges of the prefix's bytes that the digits of each bin take; empty where bins are
    coord tokens."""
    numbers: tuple[int, ...] = ()
    """The numbers that the digits write, in the answer format's own units; empty if bins are coord
    tokens."""


@dataclass(frozen=True, slots=True)
class DroppedObject:
    """An entry of the kept prefix that is no valid object."""

    key: str
    reason: DropReason


@dataclass(frozen=True, slots=True)
class ParsedRollout:
    """A response as far as it can be used: an open container that objects can be appended to."""

    prefix_token_ids: tuple[int, ...]
    prefix_text: str
    """Text of the prefix; bytes that are not UTF-8 are U+FFFD."""
    objects: tuple[ParsedObject, ...]
    """In order of appearance."""
    dropped: tuple[DroppedObject, ...]
    """Complete entries of the prefix that are not valid objects, in order of appearance."""
    max_object_index: int | None
    """The largest n of an `object_{n}` key in the prefix; None where it has none."""
    truncated: bool
    """No container closed: the response ended before, or it held none (prose, an empty answer)."""
    fallback: bool
    """Nothing could be kept: the prefix is `{`, `[` of a list, or empty where nothing encloses an
    answer."""
    num_unchanged: int = 0
    """Leading prefix tokens that are the response's own; the replaced end of a fused token, and the
    fallback's bracket, are not."""
    num_behind: int = 0
    """Objects after the container's close, as in a second list: keys of a geometry, counted without
    being read."""
