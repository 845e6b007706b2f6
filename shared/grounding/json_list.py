"""Qwen's answer formats: a JSON list of boxes and points in digits (`qwen3_vl`, `qwen2_5_vl`).

    [{"bbox_2d": [10, 20, 300, 400], "label": "cat"}, {"point_2d": [150, 210], "label": "ear"}]

Qwen3-VL writes coordinates in thousandths of the image's sides, 0..1000. They are read as bins of
norm1000 (0..999); 1000, the far border, becomes bin 999. Qwen2.5-VL writes pixels of the image as
the model sees it, resized to whole image tokens. A bin is relative to the last pixel
(docs/explanation/decisions.md), Qwen's numbers are relative to the side. The difference is at most
one pixel, or a thousandth of the side if that is more.

Models may put the list into a Markdown fence (```). If an answer begins with a fence, the appended
text ends with one. The inside of an entry is read as strict JSON (`validation`).
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, sqrt
from typing import Self

from shared.grounding.objects import DropReason, ParsedObject
from shared.grounding.scanner import (
    OBJECT_VALUE,
    SPACE,
    Container,
    Entry,
    read_lexeme,
    unescape,
)
from shared.grounding.serialize import (
    AnswerFormat,
    ObjectLayout,
    SerializedText,
    SpannedText,
    escaped,
)
from shared.grounding.validation import (
    Leaf,
    Response,
    ValidValue,
    Value,
    find_wrong_keys,
    fits,
    is_box,
    is_utf8,
    read_fields,
)
from shared.prompts import LIST_USER_PROMPT
from shared.records import GeometryKind, GroundTruthObject, Sample
from shared.tokens.vocabulary import NUM_BINS

_OPENING = re.compile(SPACE + rb"(?:(```(?:json)?)" + SPACE + rb")?(\[)")
_FENCE = 1
_BRACKET = 2
_BLANK = re.compile(SPACE)
_NUMBER = re.compile(rb"0|[1-9][0-9]{0,5}")
_DESC_KEY = "label"
_MOST = 1000
_MAX_BIN = NUM_BINS - 1
_START = b"start"
"""The symbol of the list's opening bracket in `_scan`."""


@dataclass(frozen=True, slots=True)
class _Scanned:
    container: Container
    fenced: bool
    can_append: bool
    """The list is open, and nothing inside it is open."""


def _scan(text: bytes) -> _Scanned | None:
    """Find the objects at the list's top level; None if `text` does not begin with a list.

    An entry is an object and ends at its closing brace; braces inside strings do not count. An
    incomplete last entry is not reported. Everything else in the list is ignored.
    """
    opening = _OPENING.match(text)
    if opening is None:
        return None
    entries: list[Entry] = []
    earlier = b""
    last = _START
    depth = 0  # open `[` inside the list
    position = opening.end(_BRACKET)
    closed = False
    while not closed and (lexeme := read_lexeme(text, position)) is not None:
        symbol, start, position = lexeme
        if symbol == OBJECT_VALUE and not depth:
            separated = last == _START or (last == b"," and earlier not in (_START, b","))
            number = len(entries)
            entries.append(Entry(f"[{number}]", number, start, (start, position), separated))
        elif symbol == b"[":
            depth += 1
        elif symbol == b"]":
            closed = not depth
            depth = max(depth - 1, 0)
        earlier, last = last, symbol
    can_append = not closed and not depth and _BLANK.fullmatch(text, position) is not None
    fenced = opening[_FENCE] is not None
    return _Scanned(Container(tuple(entries), closed, position), fenced, can_append)


@dataclass(frozen=True, slots=True)
class PictureResize:
    """Computes the size to which Qwen's image processors resize an image.

    Width and height are multiples of an image token's side, and the number of pixels has limits.

    Example: `PictureResize(28, 3136, 1003520).size_of(640, 480)` is (644, 476).
    """

    side: int
    """Side of an image token, in pixels."""
    min_pixels: int
    """Least number of pixels (width times height); `max_pixels` is the largest."""
    max_pixels: int

    def size_of(self, width: int, height: int) -> tuple[int, int]:
        """Return (width, height) as `smart_resize` of transformers does."""
        sides = (width, height)
        resized = [round(length / self.side) * self.side for length in sides]
        if resized[0] * resized[1] > self.max_pixels:
            beta = sqrt(height * width / self.max_pixels)
            resized = [
                max(self.side, floor(length / beta / self.side) * self.side) for length in sides
            ]
        elif resized[0] * resized[1] < self.min_pixels:
            beta = sqrt(self.min_pixels / (height * width))
            resized = [ceil(length * beta / self.side) * self.side for length in sides]
        return resized[0], resized[1]


@dataclass(frozen=True, slots=True)
class BoxList(AnswerFormat):
    """The answer formats `qwen3_vl` and `qwen2_5_vl`: a JSON list with coordinates in digits.

    `[{"bbox_2d": [10, 20, 300, 400], "label": "cat"}]`
    """

    in_pixels: bool = False
    """Whether coordinates are pixels of the resized image; else thousandths of its sides."""
    resize: PictureResize | None = None
    """How the model resizes images; None if it is not known yet, or if `in_pixels` is False."""
    size: tuple[int, int] | None = None
    """Width and height of the sample's resized image; None if `in_pixels` is False."""

    opening = "["
    geometry = frozenset({GeometryKind.BBOX, GeometryKind.POINT})
    user_prompt = LIST_USER_PROMPT

    def for_pictures(self, resize: PictureResize) -> Self:
        return replace(self, resize=resize) if self.in_pixels else self

    def of(self, sample: Sample) -> Self:
        if not self.in_pixels:
            return self
        assert self.resize is not None, "call `for_pictures` with the processor's resize first"
        return replace(self, size=self.resize.size_of(sample.width, sample.height))

    def scan(self, text: bytes) -> Container | None:
        scanned = _scan(text)
        return None if scanned is None else scanned.container

    def validate(
        self,
        entry: Entry,
        response: Response,
        ends: Sequence[int],
        geometry: frozenset[GeometryKind],
    ) -> ValidValue | DropReason:
        assert entry.value is not None
        start = entry.value[0]
        raw = response.text[slice(*entry.value)]
        members = read_fields(raw, {}) if entry.separated and is_utf8(raw) else None
        if members is None:
            return DropReason.MALFORMED
        known = geometry & self.geometry
        reason = find_wrong_keys(members, _DESC_KEY, known)
        if reason is not None:
            return reason
        leaf = next((value for key, value in members.fields if key == _DESC_KEY), None)
        if not isinstance(leaf, Leaf) or not leaf.quoted:
            return DropReason.MISSING_DESC
        desc = unescape(raw[leaf.start : leaf.end])
        if not desc.strip():
            return DropReason.MISSING_DESC
        shapes = [(key, value) for key, value in members.fields if key in known]
        arrays = [value for _, value in shapes if isinstance(value, list)]
        if not arrays:
            return DropReason.MISSING_GEOM
        spans, *others = [self._number_spans(array, raw) for array in arrays]
        if spans is None or None in others:
            return DropReason.NON_COORD_TOKEN
        kind = GeometryKind(shapes[0][0])
        if len(shapes) > 1 or not fits(kind, len(spans)):
            return DropReason.WRONG_ARITY
        numbers = tuple(int(raw[slice(*span)]) for span in spans)
        bins = tuple(self._bin(number, i) for i, number in enumerate(numbers))
        if kind is GeometryKind.BBOX and not is_box(bins):
            return DropReason.BBOX_INVALID
        coord_spans = tuple((start + first, start + stop) for first, stop in spans)
        # A token that contains parts of two numbers is one position.
        positions = dict.fromkeys(
            position
            for first, stop in coord_spans
            for position in range(bisect_right(ends, first), bisect_left(ends, stop) + 1)
        )
        desc_span = (start + leaf.start, start + leaf.end)
        return ValidValue(kind, desc, desc_span, tuple(positions), bins, coord_spans, numbers)

    def pixels(self, found: ParsedObject, sample: Sample) -> tuple[float, ...]:
        return self.pixels_of_numbers(found.numbers, sample)

    def pixels_of_numbers(self, numbers: Sequence[float], sample: Sample) -> tuple[float, ...]:
        sides = (sample.width, sample.height)
        return tuple(number * sides[i % 2] / self._most(i) for i, number in enumerate(numbers))

    def digits(self, bins: Sequence[int]) -> tuple[str, ...]:
        if not self.in_pixels:
            return tuple(map(str, bins))
        # Round to the nearest (half up), in integers.
        lasts = [self._most(i) - 1 for i in range(len(bins))]
        pairs = zip(bins, lasts, strict=True)
        return tuple(str((2 * bin * last + _MAX_BIN) // (2 * _MAX_BIN)) for bin, last in pairs)

    def _bin(self, number: int, axis: int) -> int:
        """Return the bin of a coordinate that an answer writes; `axis` is even for x, odd for y."""
        if not self.in_pixels:
            return min(number, _MAX_BIN)
        last = self._most(axis) - 1
        return min((2 * number * _MAX_BIN + last) // (2 * last), _MAX_BIN)

    def clamped(self, number: float, axis: int) -> tuple[float, int] | None:
        """Clamp a coordinate of an answer to the image, and return it with its bin.

        Returns None if the coordinate is outside the image by more than a tenth of its side. `axis`
        is even for x, odd for y.
        """
        most = float(self._most(axis))
        if not -0.1 * most <= number <= 1.1 * most:  # also true for NaN
            return None
        inside = min(max(number, 0.0), most)
        if inside.is_integer():
            return inside, self._bin(int(inside), axis)
        scale = _MAX_BIN / (most - 1) if self.in_pixels else 1.0
        return inside, min(floor(inside * scale + 0.5), _MAX_BIN)

    def _most(self, axis: int) -> int:
        """Return the largest coordinate along an axis: the number at the right or lower border."""
        if not self.in_pixels:
            return _MOST
        assert self.size is not None, "pixels are relative to one image: call `of` first"
        return self.size[axis % 2]

    def _number_spans(self, array: list[Value], raw: bytes) -> list[tuple[int, int]] | None:
        """List the byte span of each number; None if a value is not a number inside the image."""
        spans: list[tuple[int, int]] = []
        for axis, leaf in enumerate(array):
            if not isinstance(leaf, Leaf) or leaf.quoted:
                return None
            written = raw[leaf.start : leaf.end]
            if _NUMBER.fullmatch(written) is None or int(written) > self._most(axis):
                return None
            spans.append((leaf.start, leaf.end))
        return spans

    def layout_objects(self, objects: Sequence[GroundTruthObject]) -> SerializedText:
        return self._layout("[", objects, "]")

    def layout_append(
        self,
        prefix_text: str,
        objects: Sequence[GroundTruthObject],
        *,
        start_index: int,  # noqa: ARG002 (entries have no numbers)
    ) -> SerializedText:
        scanned = _scan(prefix_text.encode(errors="replace"))
        last = prefix_text.rstrip(" \t\n\r")[-1:]
        if scanned is None or not scanned.can_append or last not in ("[", ",", "}"):
            raise ValueError(
                f"cannot append after {prefix_text[-40:]!r}: it is not an open JSON list that ends"
                " in '[', ',' or '}'; use ParsedRollout.prefix_text"
            )
        if last == "," and not objects:
            behind = prefix_text[-40:]
            raise ValueError(
                f"cannot close the JSON list after {behind!r}, which ends in a comma: remove the"
                " comma, or pass an object to append"
            )
        separator = ", " if last == "}" and objects else ""
        return self._layout(separator, objects, "]\n```" if scanned.fenced else "]")

    def longest_append(self, objects: Sequence[GroundTruthObject]) -> SerializedText:
        return self.layout_append("```json\n[{}", objects, start_index=1)

    def _layout(
        self, opening: str, objects: Sequence[GroundTruthObject], closing: str
    ) -> SerializedText:
        text = SpannedText(opening)
        layouts: list[ObjectLayout] = []
        for object_ in objects:
            assert object_.kind in self.geometry, "sample loading checks the geometry"
            text.add(", " if layouts else "")
            start, _ = text.add(f'{{"{object_.kind}": [')
            coords: list[tuple[int, int]] = []
            for number in self.digits(object_.bins):
                text.add(", " if coords else "")
                coords.append(text.add(number))
            text.add('], "label": "')
            desc = text.add(escaped(object_.desc))
            _, end = text.add('"}')
            layouts.append(ObjectLayout((start, end), desc, tuple(coords)))
        end_of_list = text.add(closing)
        return SerializedText(text.joined(), tuple(layouts), end_of_list)
