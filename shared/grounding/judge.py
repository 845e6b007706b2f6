"""Whether a complete entry is an object, and the first reason why it is none (DESIGN 7.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shared.grounding.entries import COORD_START, Entry, PlainFields, unescape
from shared.grounding.members import Leaf, Members, Value, read_members
from shared.grounding.objects import DropReason
from shared.grounding.response import Response
from shared.records import ALL_GEOMETRY, GeometryKind

_NUM_BOX_COORDS = 4
_MIN_POLY_COORDS = 6


class ValidValue(NamedTuple):
    """Of an object: its geometry and where things lie. The desc span is bytes, the positions are tokens."""

    kind: GeometryKind
    desc: str
    desc_span: tuple[int, int]
    coord_positions: tuple[int, ...]
    bins: tuple[int, ...]


def judge(entry: Entry, response: Response, geometry: frozenset[GeometryKind]) -> ValidValue | DropReason:
    """What a complete entry holds, or the first reason why it is no object. `geometry`: the kinds that are wanted."""
    shape = None if entry.plain is None else _plain_shape(entry.plain, response)
    found = shape or _judge_members(entry, response)
    return DropReason.POLY_UNSUPPORTED if isinstance(found, ValidValue) and found.kind not in geometry else found


def _plain_shape(plain: PlainFields, response: Response) -> ValidValue | None:
    """What a plain entry holds; None where it is no object after all."""
    raw = response.text[slice(*plain.desc)]
    coords = response.coords_in(plain.array)
    positions, bins = response.coord_positions[coords], response.coord_bins[coords]
    if not (raw.isascii() or _is_utf8(raw)) or len(positions) != response.text.count(COORD_START, *plain.array):
        return None
    desc = unescape(raw)
    if not desc.strip() or not _fits(plain.kind, len(bins)) or (plain.kind is GeometryKind.BBOX and not _is_box(bins)):
        return None
    return ValidValue(plain.kind, desc, plain.desc, tuple(positions), tuple(bins))


def _judge_members(entry: Entry, response: Response) -> ValidValue | DropReason:
    """The same for any entry; whether its kind is wanted is not asked here."""
    if entry.value is None or not entry.separated:
        return DropReason.MALFORMED
    raw = response.text[slice(*entry.value)]
    members = read_members(raw, response.coord_spans(entry.value)) if _is_utf8(raw) else None
    if members is None:
        return DropReason.MALFORMED
    reason = _judge_keys(members)
    if reason is not None:
        return reason

    # `desc` comes at most once now, and all geometry keys are the same one.
    leaf = next((value for key, value in members.fields if key == "desc"), None)
    if not isinstance(leaf, Leaf) or not leaf.quoted:
        return DropReason.MISSING_DESC
    desc_span = entry.value[0] + leaf.start, entry.value[0] + leaf.end
    desc = unescape(response.text[slice(*desc_span)])
    if not desc.strip():
        return DropReason.MISSING_DESC
    shapes = [(key, value) for key, value in members.fields if key in ALL_GEOMETRY]
    arrays = [value for _, value in shapes if isinstance(value, list)]
    if not arrays:
        return DropReason.MISSING_GEOM
    kind = GeometryKind(shapes[0][0])
    if not all(_holds_only_coords(array, nested=kind is GeometryKind.POLY) for array in arrays):
        return DropReason.NON_COORD_TOKEN
    coords = _coords(arrays[0])
    if coords is None or len(shapes) > 1 or not _fits(kind, len(coords)):
        return DropReason.WRONG_ARITY
    bins = [response.coord_bins[coord] for coord in coords]
    if kind is GeometryKind.BBOX and not _is_box(bins):
        return DropReason.BBOX_INVALID
    return ValidValue(kind, desc, desc_span, tuple([response.coord_positions[coord] for coord in coords]), tuple(bins))


def _judge_keys(members: Members) -> DropReason | None:
    """`key_invalid` and `unknown_geom`: what can be said from the keys and the kind of their values."""
    keys = [key for key, _ in members.fields]
    unknown = [value for key, value in members.fields if key != "desc" and key not in ALL_GEOMETRY]
    lone_array = len(unknown) == 1 and isinstance(unknown[0], list)
    two_geometries = ALL_GEOMETRY.issubset(keys)
    if members.nested or keys.count("desc") > 1 or two_geometries or (unknown and not lone_array):
        return DropReason.KEY_INVALID
    return DropReason.UNKNOWN_GEOM if unknown else None


def _holds_only_coords(array: list[Value], *, nested: bool) -> bool:
    """Whether every leaf is a coord token; arrays inside are allowed one level deep where `nested`."""
    return all(value.coord is not None if isinstance(value, Leaf) else nested and _holds_only_coords(value, nested=False) for value in array)


def _coords(array: list[Value]) -> list[int] | None:
    """The leaves of a geometry that holds only coord tokens; None where some are grouped into points and others are not."""
    rows = [value for value in array if isinstance(value, list)]
    if rows and (len(rows) < len(array) or any(len(row) != 2 for row in rows)):
        return None
    leaves = [leaf for row in rows for leaf in row] if rows else array
    return [leaf.coord for leaf in leaves if isinstance(leaf, Leaf) and leaf.coord is not None]


def _fits(kind: GeometryKind, num_coords: int) -> bool:
    return num_coords == _NUM_BOX_COORDS if kind is GeometryKind.BBOX else num_coords >= _MIN_POLY_COORDS and num_coords % 2 == 0


def _is_box(bins: Sequence[int]) -> bool:
    return bins[0] <= bins[2] and bins[1] <= bins[3]


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
