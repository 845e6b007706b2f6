"""Write objects as the answer that the model learns to give (decisions 1 and 33).

`AnswerFormat` is the base class of all answer formats.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from shared.grounding.geometry import pixels_of
from shared.grounding.objects import DropReason, ParsedObject
from shared.grounding.scanner import Container, Entry, is_open_container
from shared.grounding.validation import Response, ValidValue
from shared.records import GeometryKind, GroundTruthObject, Sample
from shared.tokens.vocabulary import coord_token

if TYPE_CHECKING:
    from shared.grounding.json_list import PictureResize

DESC_FIRST = "desc_first"
GEOMETRY_FIRST = "geometry_first"
FIELD_ORDERS = (DESC_FIRST, GEOMETRY_FIRST)


@dataclass(frozen=True, slots=True)
class ObjectLayout:
    """The places of one object's parts in a serialized answer: half-open spans of UTF-8 bytes."""

    value: tuple[int, int]
    """Span of the object `{...}` with its braces.

    In a phrase list: span of a box's coordinates; for a phrase's first box, it begins at the name.
    """
    desc: tuple[int, int]
    """Span of the name without quotes; empty if the object shares an earlier object's name."""
    coords: tuple[tuple[int, int], ...]
    """Span of each coordinate: of its coordinate token without quotes, or of its digits."""


@dataclass(frozen=True, slots=True)
class SerializedText:
    """Objects written as the text of an answer, with the place of each object in the text."""

    text: str
    objects: tuple[ObjectLayout, ...]
    closing: tuple[int, int]
    """Byte span of the answer's closing bracket, or of the token that closes the last phrase; empty
    if there is neither."""


class AnswerFormat(ABC):
    """A way to write the objects of an image as text and to parse them (`data.answer_format`).

    A subclass defines `opening`, `user_prompt` and the four abstract methods. The defaults suit a
    format with one name per object, boxes, and coordinates in digits.

    Example: `FORMATS["qwen3_vl"]` writes `[{"bbox_2d": [10, 20, 300, 400], "label": "cat"}]`.
    """

    __slots__ = ()
    opening: ClassVar[str]
    """The text at the beginning of an answer in this format, if it has objects."""
    user_prompt: ClassVar[str]
    """The default user message, which asks for this format."""
    coord_tokens: ClassVar[tuple[str, ...]] = ()
    """The coordinate token of each bin, 0..999; empty if coordinates are written in digits."""
    markup_tokens: ClassVar[tuple[str, ...]] = ()
    """The other special tokens of the format, which names of objects must not contain."""
    names_each_object: ClassVar[bool] = True
    """Whether a name is written for every object; else objects may share one written name."""
    geometry: ClassVar[frozenset[GeometryKind]] = frozenset({GeometryKind.BBOX})
    """Kinds of shapes (boxes, polygons, points) that the format can write."""

    @abstractmethod
    def scan(self, text: bytes) -> Container | None:
        """Find the complete entries of an answer, valid objects or not.

        Return None if the answer does not begin with a container of this format, such as a JSON
        object or list.
        """

    @abstractmethod
    def validate(
        self,
        entry: Entry,
        response: Response,
        ends: Sequence[int],
        geometry: frozenset[GeometryKind],
    ) -> ValidValue | DropReason:
        """Return the object that a complete entry describes, or the first reason why it is invalid.

        Args:
            response: the answer as tokens and bytes.
            ends: for each token of the kept prefix, the offset after its bytes.
            geometry: the kinds of shapes that are kept.
        """

    @abstractmethod
    def layout_objects(self, objects: Sequence[GroundTruthObject]) -> SerializedText:
        """Write these objects as a whole answer, with the place of each part in the text."""

    @abstractmethod
    def layout_append(
        self, prefix_text: str, objects: Sequence[GroundTruthObject], *, start_index: int
    ) -> SerializedText:
        """Write the text that appends objects to the beginning of an answer, and closes it.

        Objects are numbered from `start_index`. Byte spans count from the end of `prefix_text`.
        Raises ValueError if nothing can be appended.
        """

    @property
    def empty_prefix(self) -> str:
        """The beginning of an answer without objects, to which objects can be appended."""
        return self.opening

    def for_pictures(self, resize: PictureResize) -> Self:  # noqa: ARG002
        """Return this answer format for a model whose processor resizes images with `resize`."""
        return self

    def of(self, sample: Sample) -> Self:  # noqa: ARG002
        """Return this answer format for answers about one sample.

        It depends on the sample only if coordinates are in pixels of the image.
        """
        return self

    def opens(self, text: str) -> bool:
        """Return whether a text begins like an answer in this format, whatever follows."""
        return self.scan(text.encode(errors="replace")) is not None

    def max_index(self, text: bytes, entries: Sequence[Entry]) -> int | None:  # noqa: ARG002
        """Return the largest n of the keys `object_{n}` in an answer; None if there are none."""
        return None

    def pixels(self, found: ParsedObject, sample: Sample) -> tuple[float, ...]:
        """Return the coordinates of an object in an answer, in pixels of the sample's image."""
        return pixels_of(found.bins, width=sample.width, height=sample.height)

    def digits(self, bins: Sequence[int]) -> tuple[str, ...]:
        """Return the digits of each coordinate of an object, in a format that writes digits."""
        return tuple(map(str, bins))

    def longest_append(self, objects: Sequence[GroundTruthObject]) -> SerializedText:
        """Return the longest text with which these objects can be appended to an answer.

        Its length limits the length of a training target.
        """
        return self.layout_append(self.empty_prefix, objects, start_index=1)

    def choice_to_go_on(self, text: bytes, value: tuple[int, int]) -> int:
        """Return the byte offset at which an answer continued with an object instead of ending.

        `value` is the byte span of this object in the answer's `text`.
        """
        before = text[: value[0]].rstrip(b" \t\n\r")
        return len(before) - 1 if before.endswith(b",") else value[0]


def serialize_objects(
    objects: Sequence[GroundTruthObject], *, field_order: str = DESC_FIRST, start_index: int = 1
) -> str:
    """Write objects as JSON on one line: `{"object_1": {...}, ...}`.

    The text is as `json.dumps(ensure_ascii=False)` writes it. `start_index` is the first object's
    number.

    Example: one cat is `{"object_1": {"desc": "cat", "bbox_2d": ["<|coord_10|>", ...]}}`.
    """
    return layout_objects(objects, field_order=field_order, start_index=start_index).text


def layout_objects(
    objects: Sequence[GroundTruthObject], *, field_order: str = DESC_FIRST, start_index: int = 1
) -> SerializedText:
    """Write objects as `serialize_objects` does, and return the place of each part too."""
    return _layout("{", objects, start_index, field_order)


def layout_append(
    prefix_text: str,
    objects: Sequence[GroundTruthObject],
    *,
    start_index: int,
    field_order: str = DESC_FIRST,
) -> SerializedText:
    """Write the text that appends objects to the JSON object in `prefix_text`, and closes it.

    Objects are numbered from `start_index`. Byte spans count from the end of `prefix_text`.

    Raises:
        ValueError: `prefix_text` is not an open top-level object that ends in `{`, `,` or `}`, or
            it ends in `,` and `objects` is empty. To find this out, only braces and strings are
            read, as in the parser.
    """
    last = prefix_text.rstrip(" \t\n\r")[-1:]
    if last not in ("{", ",", "}") or not is_open_container(prefix_text.encode(errors="replace")):
        raise ValueError(
            f"cannot append after {prefix_text[-40:]!r}: it is not an open JSON object that ends in"
            " '{', ',' or '}'; use ParsedRollout.prefix_text"
        )
    if last == "," and not objects:
        behind = prefix_text[-40:]
        raise ValueError(
            f"cannot close the JSON object after {behind!r}, which ends in a comma: remove the"
            " comma, or pass an object to append"
        )
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
    """Return a name as JSON writes it between quotes."""
    return json.dumps(desc, ensure_ascii=False)[1:-1]


def _add_desc(text: SpannedText, object_: GroundTruthObject) -> tuple[int, int]:
    text.add('"desc": "')
    span = text.add(escaped(object_.desc))
    text.add('"')
    return span


def _add_geometry(text: SpannedText, object_: GroundTruthObject) -> tuple[tuple[int, int], ...]:
    """Add a box's coordinates as one array, or a polygon's vertices as one pair each."""
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
    """Builds a text from parts, and returns the byte span of each part."""

    def __init__(self, opening: str) -> None:
        self._parts = [opening]
        self._num_bytes = len(opening.encode())

    def add(self, part: str) -> tuple[int, int]:
        """Append a part to the text, and return its byte span."""
        start = self._num_bytes
        self._parts.append(part)
        self._num_bytes += len(part.encode())
        return start, self._num_bytes

    def joined(self) -> str:
        return "".join(self._parts)
