"""Token ids of a response to the objects it names and the prefix that is kept of it (DESIGN 7.2).

The bytes of the tokens are scanned as one text; offsets lead back to tokens, so nothing is decoded and encoded again except the end
of one fused token. A malformed response is data: nothing here raises on account of what a model wrote.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from shared.grounding.entries import COORD_START, Entry, PlainFields, unescape
from shared.grounding.members import Leaf, Members, Value, read_members
from shared.grounding.objects import DroppedObject, DropReason, ParsedObject, ParsedRollout
from shared.grounding.scanner import Container, object_indices, scan_container
from shared.records import ALL_GEOMETRY, GeometryKind
from shared.tokens.vocabulary import END_OF_TURN, TokenCodec

_NUM_BOX_COORDS = 4
_MIN_POLY_COORDS = 6


@dataclass(frozen=True, slots=True)
class _Response:
    """A response up to its hard stop. Lists by coord token have one element per coord token of the response, wherever it stands."""

    token_ids: list[int]
    text: bytes
    ends: list[int]
    """[token]: offset behind each token's bytes, ascending."""
    coord_positions: list[int]
    """[coord token]: its position among `token_ids`, ascending."""
    coord_ends: list[int]
    """[coord token]: offset behind its bytes."""
    coord_bins: list[int]
    """[coord token]: 0..999."""

    @classmethod
    def read(cls, token_ids: Sequence[int], codec: TokenCodec) -> _Response:
        kept = list(token_ids)
        if codec.eos_token_id in kept:
            del kept[kept.index(codec.eos_token_id) :]
        # The codec is asked once per distinct token: a response repeats few of them over and over.
        pieces = {token_id: codec.piece_bytes(token_id) for token_id in set(kept)}
        bins = {token_id: bin for token_id in pieces if (bin := codec.coord_bin(token_id)) is not None}
        parts = list(map(pieces.__getitem__, kept))
        ends = list(accumulate(map(len, parts)))
        positions = [position for position, token_id in enumerate(kept) if token_id in bins]
        text, _, _ = b"".join(parts).partition(END_OF_TURN.encode())
        return cls(kept, text, ends, positions, [ends[position] for position in positions], [bins[kept[position]] for position in positions])

    def coords_in(self, span: tuple[int, int]) -> slice:
        """The coord tokens that end in a span of bytes, as a slice of the lists by coord token."""
        return slice(bisect_right(self.coord_ends, span[0]), bisect_right(self.coord_ends, span[1]))

    def coord_spans(self, span: tuple[int, int], origin: int) -> dict[tuple[int, int], int]:
        """Byte span, counted from `origin`, of each coord token that ends in `span`; to its index in the lists by coord token."""
        spans: dict[tuple[int, int], int] = {}
        coords = self.coords_in(span)
        for coord in range(coords.start, coords.stop):
            position = self.coord_positions[coord]
            start = self.ends[position - 1] if position else 0
            spans[start - origin, self.ends[position] - origin] = coord
        return spans


@dataclass(frozen=True, slots=True)
class _Prefix:
    token_ids: list[int]
    ends: list[int]
    """[token]: offset behind each token's bytes."""
    num_unchanged: int
    cut: int
    """Bytes of the response that are kept; 0 in the fallback."""


class _Shape(NamedTuple):
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
    container = scan_container(response.text) or Container((), closed=bool(response.text.strip(b" \t\n\r")))
    prefix = _prefix(response, container.entries, codec)
    objects: list[ParsedObject] = []
    dropped: list[DroppedObject] = []
    entries = [entry for entry in container.entries if entry.start < prefix.cut]
    for entry in entries:
        shape = _judge(entry, response, geometry)
        if isinstance(shape, DropReason):
            dropped.append(DroppedObject(entry.key, shape))
            continue
        assert entry.value is not None
        span, desc = _tokens(prefix.ends, entry.value), _tokens(prefix.ends, shape.desc_span)
        objects.append(ParsedObject(entry.key, entry.index, shape.kind, shape.desc, shape.bins, shape.coord_positions, (span.start, span.stop), tuple(desc)))

    return ParsedRollout(
        prefix_token_ids=tuple(prefix.token_ids),
        prefix_text=response.text[: prefix.cut].decode(errors="replace") if prefix.cut else "{",
        objects=tuple(objects),
        dropped=tuple(dropped),
        max_object_index=_max_index(response.text[: prefix.cut], entries),
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


def _max_index(text: bytes, entries: Sequence[Entry]) -> int | None:
    """The largest n of an `object_{n}` key in the kept text, at any depth, or of one of its entries, which need no colon."""
    others: list[bytes] = []
    position = 0
    for entry in entries:
        if entry.plain is not None and entry.value is not None:  # has no other key to look for
            others.append(text[position : entry.start])
            position = entry.value[1]
    indices = object_indices(b"".join([*others, text[position:]]))
    return max([*indices, *(entry.index for entry in entries)], default=None)


def _judge(entry: Entry, response: _Response, geometry: frozenset[GeometryKind]) -> _Shape | DropReason:
    """What a complete entry holds, or the first reason why it is no object."""
    shape = None if entry.plain is None else _plain_shape(entry.plain, response)
    found = shape or _judge_members(entry, response)
    return DropReason.POLY_UNSUPPORTED if isinstance(found, _Shape) and found.kind not in geometry else found


def _plain_shape(plain: PlainFields, response: _Response) -> _Shape | None:
    """What a plain entry holds; None where it is no object after all."""
    raw = response.text[slice(*plain.desc)]
    coords = response.coords_in(plain.array)
    positions, bins = response.coord_positions[coords], response.coord_bins[coords]
    if not (raw.isascii() or _is_utf8(raw)) or len(positions) != response.text.count(COORD_START, *plain.array):
        return None
    desc = unescape(raw)
    if not desc.strip() or not _fits(plain.kind, len(bins)) or (plain.kind is GeometryKind.BBOX and not _is_box(bins)):
        return None
    return _Shape(plain.kind, desc, plain.desc, tuple(positions), tuple(bins))


def _judge_members(entry: Entry, response: _Response) -> _Shape | DropReason:
    """The same for any entry; whether its kind is wanted is not asked here."""
    if entry.value is None or not entry.separated or (entry.aside is not None and _members(entry.aside, response, braced=False) is None):
        return DropReason.MALFORMED
    members = _members(entry.value, response, braced=True)
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
    return _Shape(kind, desc, desc_span, tuple([response.coord_positions[coord] for coord in coords]), tuple(bins))


def _members(span: tuple[int, int], response: _Response, *, braced: bool) -> Members | None:
    """The members of the object at a span, or (not `braced`) those that stand there without its braces; None where they are not sound."""
    raw = response.text[slice(*span)]
    if not _is_utf8(raw):
        return None
    return read_members(raw if braced else b"{%b}" % raw, response.coord_spans(span, span[0] if braced else span[0] - 1))


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
