"""The strict check of one entry of an answer: is it a valid object, or why not (decision 32)?

An entry's value is read as strict JSON in which coordinate tokens may also be unquoted.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from shared.grounding.objects import DropReason
from shared.grounding.scanner import (
    COORD_START,
    SPACE,
    STRING_CHARACTERS,
    Entry,
    PlainFields,
    unescape,
)
from shared.model_families import END_OF_TURN
from shared.records import DEFAULT_GEOMETRY, GeometryKind
from shared.tokens.vocabulary import TokenCodec

_LITERAL = rb"true|false|null|-?(?:0|[1-9][0-9]*+)(?>(?:\.[0-9]++)?)(?>(?:[eE][+-]?[0-9]++)?)"
_PUNCTUATION = SPACE + rb"([,\]}])"

_EMPTY = re.compile(rb"\{" + SPACE + rb"\}")
_KEY = re.compile(SPACE + rb'"(' + STRING_CHARACTERS + rb')"' + SPACE + rb":")
# A value that opens no container is matched with the punctuation after it; the number of the last
# group gives its type.
_VALUE = re.compile(
    SPACE
    + rb"(?:"
    + (rb'"(' + STRING_CHARACTERS + rb')"' + _PUNCTUATION)
    + (rb"|(<\|coord_[0-9]{1,3}\|>)" + _PUNCTUATION)
    + (rb"|(" + _LITERAL + rb")" + _PUNCTUATION)
    + (rb"|(\[" + SPACE + rb"\])" + _PUNCTUATION)
    + (rb"|(\{" + SPACE + rb"\})" + _PUNCTUATION)
    + rb"|(\[)|(\{))"
)
_STRING = 2
_COORD = 4
_EMPTY_ARRAY = 8
_EMPTY_OBJECT = 10
_OPEN_ARRAY = 11
_OPEN_OBJECT = 12
_BEHIND = re.compile(_PUNCTUATION)


class Leaf(NamedTuple):
    """A JSON value that is not an array or object: string, coordinate token, number or literal.

    `start` and `end` are its half-open span in the text of the JSON object that contains it. The
    span counts bytes and does not include quotes.
    """

    start: int
    end: int
    quoted: bool
    """Whether the value is a JSON string."""
    coord: int | None
    """Index of the coordinate token if the value is exactly one coordinate token, else None."""


Value: TypeAlias = "Leaf | list[Value]"


@dataclass(frozen=True, slots=True)
class Fields:
    """The keys and values of one JSON object in an answer."""

    fields: tuple[tuple[str, Value], ...]
    """Key and value of each member, in order. Keys may repeat. Nested objects are empty lists."""
    nested: bool
    """Whether the object contains another object, at any depth."""


def read_fields(text: bytes, coords: Mapping[tuple[int, int], int]) -> Fields | None:
    """Read the keys and values of a JSON object; None if it is not JSON.

    Coordinate tokens may be unquoted.

    Args:
        coords: index of each coordinate token by its byte span. If other tokens spell the same
            characters, they are an ordinary string between quotes, and invalid JSON without quotes.
    """
    if _EMPTY.fullmatch(text):
        return Fields((), nested=False)
    fields: list[tuple[str, Value]] = []
    nested = False
    # The containers around `position`, innermost last; None for an object.
    opened: list[list[Value] | None] = [None]
    position = 1
    while opened:
        array = opened[-1]
        name = b""
        if array is None:
            key = _KEY.match(text, position)
            if key is None:
                return None
            name = key[1]
            position = key.end()
        found = _VALUE.match(text, position)
        if found is None or found.lastindex is None:
            return None
        what = found.lastindex
        position = found.end()
        value = _value(found, what, coords)
        if value is None:
            return None
        if array is not None:
            array.append(value)
        elif len(opened) == 1:
            fields.append((unescape(name), value))
        nested = nested or what in (_EMPTY_OBJECT, _OPEN_OBJECT)
        if what >= _OPEN_ARRAY:
            opened.append(value if what == _OPEN_ARRAY and isinstance(value, list) else None)
        elif found[what] != b",":
            behind = _close(text, position, found[what], opened)
            if behind is None:
                return None
            position = behind
    return Fields(tuple(fields), nested) if position == len(text) else None


def _value(
    found: re.Match[bytes], what: int, coords: Mapping[tuple[int, int], int]
) -> Value | None:
    """Return the value of a `_VALUE` match; containers are still empty.

    Returns None for an unquoted coordinate token that other tokens spell.
    """
    if what >= _EMPTY_ARRAY:
        return []
    span = found.span(what - 1)
    coord = coords.get(span)
    return None if what == _COORD and coord is None else Leaf(*span, what == _STRING, coord)


def _close(
    text: bytes, position: int, punctuation: bytes, opened: list[list[Value] | None]
) -> int | None:
    """Close containers up to the next comma or outermost brace; return the position after it.

    Returns None if brackets do not match.
    """
    while punctuation != b",":
        if (opened.pop() is None) != (punctuation == b"}"):
            return None
        if not opened:
            return position
        behind = _BEHIND.match(text, position)
        if behind is None:
            return None
        punctuation = behind[1]
        position = behind.end()
    return position


_NUM_BOX_COORDS = 4
_NUM_POINT_COORDS = 2
_MIN_POLY_COORDS = 6


class ValidValue(NamedTuple):
    """A valid object that an entry describes: name, coordinates, and their places in the answer.

    The span of the name (`desc`) counts bytes, positions count tokens.
    """

    kind: GeometryKind
    desc: str
    desc_span: tuple[int, int]
    coord_positions: tuple[int, ...]
    bins: tuple[int, ...]
    coord_spans: tuple[tuple[int, int], ...] = ()
    """Byte span of the digits of each coordinate; empty if coordinates are coordinate tokens."""
    numbers: tuple[int, ...] = ()
    """The coordinates as written in digits; empty if coordinates are coordinate tokens."""


def validate_entry(
    entry: Entry, response: Response, geometry: frozenset[GeometryKind]
) -> ValidValue | DropReason:
    """Return the object that a complete entry describes, or the first reason why it is invalid.

    Args:
        response: the answer as tokens and bytes.
        geometry: the kinds of shapes that are kept.
    """
    value = None if entry.plain is None else _plain_value(entry.plain, response)
    found = value or _validate_members(entry, response, geometry | DEFAULT_GEOMETRY)
    if isinstance(found, ValidValue) and found.kind not in geometry:
        return DropReason.POLY_UNSUPPORTED
    return found


def _plain_value(plain: PlainFields, response: Response) -> ValidValue | None:
    """Return the object of a plain entry; None if only `_validate_members` can decide."""
    raw = response.text[slice(*plain.desc)]
    coords = response.coords_in(plain.array)
    positions = response.coord_positions[coords]
    bins = response.coord_bins[coords]
    # Other tokens may spell the characters of a coordinate token; they do not count as one.
    num_written = response.text.count(COORD_START, *plain.array)
    if not (raw.isascii() or is_utf8(raw)) or len(positions) != num_written:
        return None
    desc = unescape(raw)
    if not desc.strip() or not fits(plain.kind, len(bins)):
        return None
    if plain.kind is GeometryKind.BBOX and not is_box(bins):
        return None
    return ValidValue(plain.kind, desc, plain.desc, tuple(positions), tuple(bins))


def _validate_members(
    entry: Entry, response: Response, known: frozenset[GeometryKind]
) -> ValidValue | DropReason:
    """Validate an entry, plain or not; `known` are the kinds of shapes whose keys are allowed."""
    if entry.value is None or not entry.separated:
        return DropReason.MALFORMED
    raw = response.text[slice(*entry.value)]
    members = read_fields(raw, response.coord_spans(entry.value)) if is_utf8(raw) else None
    if members is None:
        return DropReason.MALFORMED
    reason = find_wrong_keys(members, "desc", known)
    if reason is not None:
        return reason

    # From here on `desc` appears at most once, and all geometry keys are equal.
    leaf = next((value for key, value in members.fields if key == "desc"), None)
    if not isinstance(leaf, Leaf) or not leaf.quoted:
        return DropReason.MISSING_DESC
    desc_span = entry.value[0] + leaf.start, entry.value[0] + leaf.end
    desc = unescape(response.text[slice(*desc_span)])
    if not desc.strip():
        return DropReason.MISSING_DESC
    shapes = [(key, value) for key, value in members.fields if key in known]
    arrays = [value for _, value in shapes if isinstance(value, list)]
    if not arrays:
        return DropReason.MISSING_GEOM
    kind = GeometryKind(shapes[0][0])
    if not all(_holds_only_coords(array, nested=kind is GeometryKind.POLY) for array in arrays):
        return DropReason.NON_COORD_TOKEN
    coords = _coords(arrays[0])
    if coords is None or len(shapes) > 1 or not fits(kind, len(coords)):
        return DropReason.WRONG_ARITY
    bins = [response.coord_bins[coord] for coord in coords]
    if kind is GeometryKind.BBOX and not is_box(bins):
        return DropReason.BBOX_INVALID
    positions = tuple([response.coord_positions[coord] for coord in coords])
    return ValidValue(kind, desc, desc_span, positions, tuple(bins))


def find_wrong_keys(
    members: Fields, desc_key: str, known: frozenset[GeometryKind]
) -> DropReason | None:
    """Return `key_invalid` or `unknown_geom` if the keys of an object are wrong, else None.

    Args:
        members: the keys and values of the object.
        desc_key: the key of the object's name.
        known: the kinds of shapes whose keys are allowed.
    """
    keys = [key for key, _ in members.fields]
    unknown = [value for key, value in members.fields if key != desc_key and key not in known]
    lone_array = len(unknown) == 1 and isinstance(unknown[0], list)
    two_geometries = len(known.intersection(keys)) > 1
    if members.nested or keys.count(desc_key) > 1 or two_geometries or (unknown and not lone_array):
        return DropReason.KEY_INVALID
    return DropReason.UNKNOWN_GEOM if unknown else None


def _holds_only_coords(array: list[Value], *, nested: bool) -> bool:
    """Return whether all leaves are coordinate tokens; `nested` allows one level of arrays."""
    for value in array:
        if isinstance(value, Leaf):
            if value.coord is None:
                return False
        elif not nested or not _holds_only_coords(value, nested=False):
            return False
    return True


def _coords(array: list[Value]) -> list[int] | None:
    """List the coordinate tokens of a geometry; None if only some are grouped into points."""
    rows = [value for value in array if isinstance(value, list)]
    if rows and (len(rows) < len(array) or any(len(row) != 2 for row in rows)):
        return None
    leaves = [leaf for row in rows for leaf in row] if rows else array
    return [leaf.coord for leaf in leaves if isinstance(leaf, Leaf) and leaf.coord is not None]


def fits(kind: GeometryKind, num_coords: int) -> bool:
    """Return whether a shape of this kind can have `num_coords` coordinates."""
    if kind is GeometryKind.BBOX:
        return num_coords == _NUM_BOX_COORDS
    if kind is GeometryKind.POINT:
        return num_coords == _NUM_POINT_COORDS
    return num_coords >= _MIN_POLY_COORDS and num_coords % 2 == 0


def is_box(bins: Sequence[float]) -> bool:
    return bins[0] <= bins[2] and bins[1] <= bins[3]


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Response:
    """A model's answer as tokens and as bytes, with a mapping from bytes back to tokens.

    The answer ends before `<|im_end|>`. The lists `coord_...` have one element per coordinate
    token, at any place in the answer.
    """

    token_ids: list[int]
    text: bytes
    ends: list[int]
    """For each token: the offset after its bytes, ascending."""
    coord_positions: list[int]
    """For each coordinate token: its position in `token_ids`, ascending."""
    coord_ends: list[int]
    """For each coordinate token: the offset after its bytes."""
    coord_bins: list[int]
    """For each coordinate token: its bin, 0..999."""

    @classmethod
    def read(cls, token_ids: Sequence[int], codec: TokenCodec) -> Response:
        """Read an answer up to `<|im_end|>`, which may be one token or spelled by other tokens."""
        kept = list(token_ids)
        if codec.eos_token_id in kept:
            del kept[kept.index(codec.eos_token_id) :]
        # Call the codec once per distinct token: an answer repeats a few tokens many times.
        pieces = {token_id: codec.piece_bytes(token_id) for token_id in set(kept)}
        all_bins = {token_id: codec.coord_bin(token_id) for token_id in pieces}
        bins = {token_id: bin for token_id, bin in all_bins.items() if bin is not None}
        parts = list(map(pieces.__getitem__, kept))
        ends = list(accumulate(map(len, parts)))
        positions = [position for position, token_id in enumerate(kept) if token_id in bins]
        text, _, _ = b"".join(parts).partition(END_OF_TURN.encode())
        coord_ends = [ends[position] for position in positions]
        coord_bins = [bins[kept[position]] for position in positions]
        return cls(kept, text, ends, positions, coord_ends, coord_bins)

    def coords_in(self, span: tuple[int, int]) -> slice:
        """Return the slice of the lists `coord_...` for the coordinate tokens that end in a span.

        `span` is a half-open byte span of the answer.
        """
        return slice(bisect_right(self.coord_ends, span[0]), bisect_right(self.coord_ends, span[1]))

    def coord_spans(self, span: tuple[int, int]) -> dict[tuple[int, int], int]:
        """Return which coordinate tokens end in the byte span `span`.

        Keys are byte spans of tokens, relative to the start of `span`. Values are indices of tokens
        in the lists `coord_...`.
        """
        spans: dict[tuple[int, int], int] = {}
        coords = self.coords_in(span)
        for coord in range(coords.start, coords.stop):
            position = self.coord_positions[coord]
            start = self.ends[position - 1] if position else 0
            spans[start - span[0], self.ends[position] - span[0]] = coord
        return spans
