"""Objects to the text that the model is taught to write (decisions 1 and 33)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from shared.grounding.scanner import is_open_container
from shared.records import GeometryKind, GroundTruthObject
from shared.tokens.vocabulary import coord_token

DESC_FIRST = "desc_first"
GEOMETRY_FIRST = "geometry_first"
FIELD_ORDERS = (DESC_FIRST, GEOMETRY_FIRST)


@dataclass(frozen=True, slots=True)
class ObjectLayout:
    """The place of one object in `SerializedText.text`. Half-open spans of UTF-8 bytes."""

    value: tuple[int, int]
    """`{...}`, braces included; of a box behind a phrase its coordinates, and of the first one that
    is written in a phrase the name too."""
    desc: tuple[int, int]
    """The value of `desc`, between its quotes; empty where a name was written for an object
    before."""
    coords: tuple[tuple[int, int], ...]
    """One per bin: the coord token without its quotes."""


@dataclass(frozen=True, slots=True)
class SerializedText:
    """Text with the place of every object in it."""

    text: str
    objects: tuple[ObjectLayout, ...]
    closing: tuple[int, int]
    """Byte span of the closing top-level brace, of the last phrase's end, or empty."""


def serialize_objects(
    objects: Sequence[GroundTruthObject], *, field_order: str = DESC_FIRST, start_index: int = 1
) -> str:
    """Write `{"object_1": {...}, ...}` on one line, as `json.dumps(ensure_ascii=False)` does.

    Example: one cat is `{"object_1": {"desc": "cat", "bbox_2d": ["<|coord_10|>", ...]}}`.
    """
    return layout_objects(objects, field_order=field_order, start_index=start_index).text


def layout_objects(
    objects: Sequence[GroundTruthObject], *, field_order: str = DESC_FIRST, start_index: int = 1
) -> SerializedText:
    """Write as `serialize_objects`, with the place of everything in it."""
    return _layout("{", objects, start_index, field_order)


def layout_append(
    prefix_text: str,
    objects: Sequence[GroundTruthObject],
    *,
    start_index: int,
    field_order: str = DESC_FIRST,
) -> SerializedText:
    """Write the text that closes `prefix_text` with `objects`, numbered from `start_index`.

    Places are counted from the end of the prefix.

    Raises:
        ValueError: `prefix_text` is not an open top-level object that ends in `{`, `,` or `}`, or
            ends in `,` with nothing to append. Like the parser, this goes by braces and strings.
    """
    last = prefix_text.rstrip(" \t\n\r")[-1:]
    if last not in ("{", ",", "}") or not is_open_container(prefix_text.encode(errors="replace")):
        raise ValueError(
            f"cannot append behind {prefix_text[-40:]!r}: no open JSON object that ends in '{{',"
            " ',' or '}'; use ParsedRollout.prefix_text"
        )
    if last == "," and not objects:
        behind = prefix_text[-40:]
        raise ValueError(f"cannot close behind {behind!r}: remove the comma, or append an object")
    return _layout(", " if last == "}" and objects else "", objects, start_index, field_order)


def _layout(
    opening: str, objects: Sequence[GroundTruthObject], start_index: int, field_order: str
) -> SerializedText:
    if field_order not in FIELD_ORDERS:
        orders = ", ".join(FIELD_ORDERS)
        raise ValueError(f"unknown field_order {field_order!r}; use one of {orders}")
    text = SpannedText(opening)
    layouts: list[ObjectLayout] = []
    for index, object_ in enumerate(objects, start_index):
        text.add(", " if layouts else "")
        text.add(f'"object_{index}": ')
        layouts.append(_add_object(text, object_, field_order))
    closing = text.add("}")
    return SerializedText(text.joined(), tuple(layouts), closing)


def _add_object(text: SpannedText, object_: GroundTruthObject, field_order: str) -> ObjectLayout:
    start, _ = text.add("{")
    if field_order == DESC_FIRST:
        desc = _add_desc(text, object_)
        text.add(", ")
        coords = _add_geometry(text, object_)
    else:
        coords = _add_geometry(text, object_)
        text.add(", ")
        desc = _add_desc(text, object_)
    _, end = text.add("}")
    return ObjectLayout((start, end), desc, coords)


def escaped(desc: str) -> str:
    """Write a name as it stands between its quotes."""
    return json.dumps(desc, ensure_ascii=False)[1:-1]


def _add_desc(text: SpannedText, object_: GroundTruthObject) -> tuple[int, int]:
    text.add('"desc": "')
    span = text.add(escaped(object_.desc))
    text.add('"')
    return span


def _add_geometry(text: SpannedText, object_: GroundTruthObject) -> tuple[tuple[int, int], ...]:
    """Add box coordinates in one array, polygon vertices as one pair each."""
    points = object_.kind is GeometryKind.POLY
    text.add(f'"{object_.kind}": [')
    spans: list[tuple[int, int]] = []
    for i, bin in enumerate(object_.bins):
        text.add(", " if i else "")
        text.add('["' if points and i % 2 == 0 else '"')
        spans.append(text.add(coord_token(bin)))
        text.add('"]' if points and i % 2 else '"')
    text.add("]")
    return tuple(spans)


class SpannedText:
    """Text in the making, with its number of bytes."""

    def __init__(self, opening: str) -> None:
        self._parts = [opening]
        self._num_bytes = len(opening.encode())

    def add(self, part: str) -> tuple[int, int]:
        """Append `part` and return its byte span."""
        start = self._num_bytes
        self._parts.append(part)
        self._num_bytes += len(part.encode())
        return start, self._num_bytes

    def joined(self) -> str:
        return "".join(self._parts)
