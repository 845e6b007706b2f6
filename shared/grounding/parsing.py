"""Token ids of a response to the objects it names and the prefix that is kept of it (DESIGN 7.2).

The bytes of the tokens are scanned as one text; offsets lead back to tokens, so nothing is decoded and encoded again except the end
of one fused token. A malformed response is data: nothing here raises on account of what a model wrote.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from shared.grounding.members import Leaf, Members, Value, read_members
from shared.grounding.objects import DroppedObject, DropReason, ParsedObject, ParsedRollout
from shared.grounding.scanner import Container, Entry, object_indices, scan_container, unescape
from shared.records import ALL_GEOMETRY, GeometryKind
from shared.tokens.vocabulary import END_OF_TURN, TokenCodec

_NUM_BOX_COORDS = 4
_MIN_POLY_COORDS = 6


@dataclass(frozen=True, slots=True)
class _Response:
    """A response up to its hard stop."""

    token_ids: list[int]
    text: bytes
    ends: list[int]
    """[token]: offset behind each token's bytes, ascending."""
    coords: Mapping[tuple[int, int], int]
    """Byte span of each coord token to its position."""

    @classmethod
    def read(cls, token_ids: Sequence[int], codec: TokenCodec) -> _Response:
        kept = list(token_ids)
        if codec.eos_token_id in kept:
            del kept[kept.index(codec.eos_token_id) :]
        pieces = [codec.piece_bytes(token_id) for token_id in kept]
        ends = list(accumulate(map(len, pieces)))
        coords = {(ends[i] - len(pieces[i]), ends[i]): i for i, token_id in enumerate(kept) if codec.coord_bin(token_id) is not None}
        text, _, _ = b"".join(pieces).partition(END_OF_TURN.encode())
        return cls(kept, text, ends, coords)


@dataclass(frozen=True, slots=True)
class _Prefix:
    token_ids: list[int]
    ends: list[int]
    """[token]: offset behind each token's bytes."""
    num_unchanged: int
    cut: int
    """Bytes of the response that are kept; 0 in the fallback."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """A valid value: its geometry and where things lie. The desc span is bytes, the positions are tokens."""

    kind: GeometryKind
    desc: str
    desc_span: tuple[int, int]
    coord_positions: tuple[int, ...]
    bins: tuple[int, ...]


def parse_rollout(token_ids: Sequence[int], codec: TokenCodec, *, geometry: frozenset[GeometryKind] = ALL_GEOMETRY) -> ParsedRollout:
    """The valid objects of a response and the prefix to append to. Linear in the response's bytes; never raises on its content.

    `token_ids` is the response, with or without its stop token. `geometry` says which kinds are wanted; boxes always are, and without
    `poly` every sound polygon is dropped. ValueError for a set without boxes.
    """
    if GeometryKind.BBOX not in geometry:
        raise ValueError(f"geometry {sorted(geometry)} lacks {GeometryKind.BBOX}; boxes are always read, add {GeometryKind.BBOX}")
    response = _Response.read(token_ids, codec)
    container = scan_container(response.text) or Container((), closed=bool(response.text.strip()))
    prefix = _prefix(response, container.entries, codec)
    objects: list[ParsedObject] = []
    dropped: list[DroppedObject] = []
    for entry in container.entries:
        if entry.value is not None and entry.value[1] > prefix.cut:
            continue
        shape = _judge(entry, response, codec, geometry)
        if isinstance(shape, DropReason):
            dropped.append(DroppedObject(entry.key, shape))
            continue
        assert entry.value is not None
        span, desc = _tokens(prefix.ends, entry.value), _tokens(prefix.ends, shape.desc_span)
        objects.append(ParsedObject(entry.key, entry.index, shape.kind, shape.desc, shape.bins, shape.coord_positions, (span.start, span.stop), tuple(desc)))

    kept = response.text[: prefix.cut]
    indices = object_indices(kept) + [entry.index for entry in container.entries if entry.start < prefix.cut]
    return ParsedRollout(
        prefix_token_ids=tuple(prefix.token_ids),
        prefix_text=kept.decode(errors="replace") if prefix.cut else "{",
        objects=tuple(objects),
        dropped=tuple(dropped),
        max_object_index=max(indices, default=None),
        truncated=not container.closed,
        fallback=not prefix.cut,
        num_unchanged=prefix.num_unchanged,
    )


def _prefix(response: _Response, entries: Sequence[Entry], codec: TokenCodec) -> _Prefix:
    """The response up to the brace that ends its last complete entry; only the token that the cut falls into is replaced."""
    for entry in reversed(entries):
        if entry.value is None:
            continue
        cut = entry.value[1]
        last = bisect_left(response.ends, cut)
        if response.ends[last] == cut:
            return _Prefix(response.token_ids[: last + 1], response.ends[: last + 1], last + 1, cut)
        start = response.ends[last - 1] if last else 0
        needed = response.text[start:cut]
        replacement = codec.encode(needed.decode(errors="replace"))
        pieces = [codec.piece_bytes(token_id) for token_id in replacement]
        # Where the token begins inside a character, its first part has no tokens of its own: the cut moves to the entry before.
        if b"".join(pieces) == needed:
            ends = [start + end for end in accumulate(map(len, pieces))]
            return _Prefix(response.token_ids[:last] + replacement, response.ends[:last] + ends, last, cut)
    return _Prefix(codec.encode("{"), [], 0, 0)


def _tokens(ends: list[int], span: tuple[int, int]) -> range:
    """The tokens that overlap a span of bytes that is not empty."""
    return range(bisect_right(ends, span[0]), bisect_left(ends, span[1]) + 1)


def _judge(entry: Entry, response: _Response, codec: TokenCodec, geometry: frozenset[GeometryKind]) -> _Shape | DropReason:
    """What a complete entry holds, or the first reason why it is no object."""
    if entry.value is None or not entry.well_formed or not _is_utf8(response.text[slice(*entry.value)]):
        return DropReason.MALFORMED
    members = read_members(response.text, entry.value, response.coords)
    if members is None:
        return DropReason.MALFORMED
    reason = _judge_keys(members)
    if reason is not None:
        return reason

    # `desc` comes at most once now, and all geometry keys are the same one.
    leaf = next((value for key, value in members.fields if key == "desc"), None)
    if not isinstance(leaf, Leaf) or not leaf.quoted:
        return DropReason.MISSING_DESC
    desc = unescape(response.text[leaf.start : leaf.end])
    if not desc.strip():
        return DropReason.MISSING_DESC
    shapes = [(key, value) for key, value in members.fields if key in ALL_GEOMETRY]
    arrays = [value for _, value in shapes if isinstance(value, list)]
    if not arrays:
        return DropReason.MISSING_GEOM
    kind = GeometryKind(shapes[0][0])
    if not all(_holds_only_coords(array, nested=kind is GeometryKind.POLY) for array in arrays):
        return DropReason.NON_COORD_TOKEN
    positions = _positions(arrays[0], kind)
    if positions is None or len(shapes) > 1:
        return DropReason.WRONG_ARITY
    bins = tuple([bin for position in positions if (bin := codec.coord_bin(response.token_ids[position])) is not None])
    if kind is GeometryKind.BBOX and not (bins[0] <= bins[2] and bins[1] <= bins[3]):
        return DropReason.BBOX_INVALID
    if kind not in geometry:
        return DropReason.POLY_UNSUPPORTED
    return _Shape(kind, desc, (leaf.start, leaf.end), positions, bins)


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
    return all(value.coord_position is not None if isinstance(value, Leaf) else nested and _holds_only_coords(value, nested=False) for value in array)


def _positions(array: list[Value], kind: GeometryKind) -> tuple[int, ...] | None:
    """The tokens of a geometry that holds only coord tokens; None where their number, or their grouping into points, is wrong."""
    rows = [value for value in array if isinstance(value, list)]
    if rows and (len(rows) < len(array) or any(len(row) != 2 for row in rows)):
        return None
    leaves = [leaf for row in rows for leaf in row] if rows else array
    positions = tuple(leaf.coord_position for leaf in leaves if isinstance(leaf, Leaf) and leaf.coord_position is not None)
    if kind is GeometryKind.BBOX:
        return positions if len(positions) == _NUM_BOX_COORDS else None
    return positions if len(positions) >= _MIN_POLY_COORDS and len(positions) % 2 == 0 else None


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
