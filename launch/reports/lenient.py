"""The lenient reading of answers, used only in reports: it accepts JSON of stock models.

Training, matching and rewards read answers strictly (`shared.grounding.parsing`). The lenient
reading is tried if the strict reading left something out. Each rule has a counter (`Leniency`). The
rules for JSON:

- Objects count at any place: after text or a fence, without a list, in a second list, in another
  object, or without a comma between them. Text before the last `</think>` does not count.
- Strings and keys may have single quotes; keys may have none. A comma may follow the last member.
- Box and name may have other keys (`_BOX_KEYS`, `_NAME_KEYS`), and the name may be missing.
  Additional keys are ignored.
- A number may be a float or a string. It is clamped if it is outside the image by at most a tenth
  of the side. Corners may be swapped. Numbers may be nested: pairs, or several boxes.

Phrases (`rex_omni`) count at any place and with any separator.

The reading is one linear pass without recursion. It continues at the last lexeme of an object that
it cannot read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from launch.reports.lenient_json import Leniency, Members, WrittenLeaf, read_members
from shared.grounding.coco import ScoredObject
from shared.grounding.evaluation import DetectionSummary, Scene, summarise
from shared.grounding.json_list import BoxList
from shared.grounding.phrase_list import PhraseList
from shared.grounding.serialize import AnswerFormat
from shared.grounding.validation import fits, is_box
from shared.records import GeometryKind, Sample
from shared.tokens.vocabulary import parse_coord_token

_Number = TypeVar("_Number", int, float)


class ReadObject(NamedTuple):
    """One object that the lenient reading of an answer found."""

    object: ScoredObject
    needed: frozenset[Leniency]
    """The rules that were relaxed to read the object; empty if none had to be."""


_BOX_KEYS = ("bbox_2d", "bbox", "box_2d", "box", "bounding_box")
_POINT_KEYS = ("point_2d", "point")
_NAME_KEYS = (
    *("label", "desc", "name", "class", "category", "class_name", "object", "object_name"),
    *("text", "text_content", "description", "ref", "phrase"),
)
_NUMBER_TEXT = re.compile(r"\s*+[+-]?(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][+-]?[0-9]++)?\s*+")
_FENCE = re.compile(r"\s*(?:(?:```|~~~)\w*)?\s*")
_CONTAINER_OPENS = re.compile(r'(?:\[|\{\s*"object_[0-9]+"\s*:)\s*\Z')
_SEPARATORS = {
    "{": re.compile(r'\s*,\s*"object_[0-9]+"\s*:\s*'),
    "[": re.compile(r"\s*,\s*"),
}
_THOUGHT_END = "</think>"
_PHRASE = re.compile(
    r"<\|object_ref_start\|>([^<]{1,512})<\|object_ref_end\|>\s*<\|box_start\|>([0-9<>,\s]*+)"
)
_BIN = re.compile(r"<([0-9]{1,3})>")


def read_leniently(
    scene: Scene, geometry: frozenset[GeometryKind]
) -> tuple[ReadObject, ...] | None:
    """Read the answer to a held-out sample leniently.

    Returns None if the strict reading left nothing out, or if it has more objects than the lenient
    reading.
    """
    answer_format = scene.answer_format.of(scene.sample)
    is_list = not isinstance(answer_format, PhraseList)
    num_braces = scene.text.count("{") - (answer_format.opening == "{")
    is_rest = is_list and (num_braces != len(scene.objects) or not scene.objects)
    if not (scene.truncated or scene.dropped or is_rest):
        return None
    if isinstance(answer_format, PhraseList):
        found = tuple(_phrases(scene.text, answer_format))
    else:
        found = tuple(_objects(scene, answer_format, geometry & answer_format.geometry))
    return found if len(found) >= len(scene.objects) else None


@dataclass(frozen=True, slots=True)
class LenientReading:
    """The metrics of an evaluation whose answers are read leniently."""

    detection: DetectionSummary
    num_answers: int
    """Number of answers with an object that the strict reading does not have."""
    num_objects: int
    """Number of objects that the strict reading does not have."""
    needed: Mapping[Leniency, int]
    """Number of objects by relaxed rule, the most frequent first; an object may need several."""


def lenient_reading(
    scenes: Sequence[Scene],
    strict: DetectionSummary,
    geometry: frozenset[GeometryKind],
    point_tolerance: float,
) -> LenientReading:
    """Read an evaluation's answers leniently; `strict` is the summary of the strict reading."""
    needed: Counter[Leniency] = Counter()
    read = list(scenes)
    num_answers = num_objects = 0
    for index, scene in enumerate(scenes):
        found = read_leniently(scene, geometry) or ()
        strict_objects = Counter((one.kind, one.bins, one.desc) for one in scene.objects)
        new = []
        for one in found:
            key = (one.object.kind, one.object.bins, one.object.desc)
            if strict_objects[key] <= 0:
                new.append(one)
            strict_objects[key] -= 1
        if new:
            needed.update(kind for one in new for kind in one.needed)
            num_objects += len(new)
            num_answers += 1
            objects = tuple(one.object for one in found)
            read[index] = replace(scene, objects=objects, dropped=())
    thresholds = [at.iou_threshold for at in strict.thresholds]
    detection = strict
    if num_answers:
        detection = summarise(read, thresholds, point_tolerance=point_tolerance)
    ordered = sorted(needed.items(), key=lambda item: (-item[1], item[0]))
    return LenientReading(detection, num_answers, num_objects, dict(ordered))


def _phrases(text: str, answer_format: PhraseList) -> Iterator[ReadObject]:
    opens = answer_format.opens(text)
    end = 0
    for phrase in _PHRASE.finditer(text):
        between = re.sub(r"<\|box_end\|>|None|\s", "", text[end : phrase.start()])
        needed = set() if between == ("," if end else "") else {Leniency.SEPARATOR}
        if not opens:
            needed = {Leniency.TEXT_BEFORE}
        end = phrase.end()
        for element in phrase[2].split(","):
            bins = tuple(int(bin) for bin in _BIN.findall(element))
            if len(bins) == 4:
                yield _read(GeometryKind.BBOX, bins, None, phrase[1].strip(), needed)


def _read(
    kind: GeometryKind,
    bins: tuple[int, ...],
    pixels: tuple[float, ...] | None,
    name: str,
    needed: set[Leniency],
) -> ReadObject:
    if kind is GeometryKind.BBOX and not (is_box(bins) and is_box(pixels or bins)):
        needed = needed | {Leniency.CORNERS}
        bins = _in_order(bins)
        pixels = None if pixels is None else _in_order(pixels)
    return ReadObject(ScoredObject(kind, bins, name, 1.0, pixels), frozenset(needed))


def _in_order(box: tuple[_Number, ...]) -> tuple[_Number, ...]:
    x1, y1, x2, y2 = box
    return (min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2))


def _objects(
    scene: Scene, answer_format: AnswerFormat, kinds: frozenset[GeometryKind]
) -> Iterator[ReadObject]:
    """Yield the objects that an answer in JSON contains, in order of appearance."""
    text = scene.text
    places = _Places(text, answer_format)
    position = text.find("{", places.start)
    while position >= 0:
        members = read_members(text, position)
        shapes = [*_shapes(members, answer_format, kinds, scene.sample)] if members.closed else []
        if shapes:
            around = places.needed(position, members.end)
            for one in shapes:
                yield one._replace(needed=one.needed | around)
        position = text.find("{", members.end)


class _Places:
    """Finds, for each object in an answer, the leniencies that its place in the text needs.

    Example: `TEXT_BEFORE` for an object after prose.
    """

    def __init__(self, text: str, answer_format: AnswerFormat) -> None:
        self._text = text
        self._opening = answer_format.opening
        written = text.encode(errors="replace")
        container = answer_format.scan(written)
        self._opens = container is not None
        self._close: int | None = None
        if container is not None and container.closed:
            self._close = len(written[: container.end].decode(errors="replace"))
        self.start = 0 if self._opens else text.rfind(_THOUGHT_END) + 1
        """Offset at which the search for objects begins."""
        self._before = self.start + len(_THOUGHT_END) - 1 if self.start else 0
        self._is_first = True
        self._in_list = False

    def needed(self, start: int, end: int) -> set[Leniency]:
        """Return the leniencies of the object between the offsets `start` and `end`.

        The calls have to be in the order of the objects in the text.
        """
        between = self._text[self._before : start]
        is_first = self._is_first
        self._before = end
        self._is_first = False
        if self._close is not None and start >= self._close:
            return {Leniency.SECOND_LIST}
        if self._opens and not (is_first and not between.strip()):
            separator = (
                _CONTAINER_OPENS.search if is_first else _SEPARATORS[self._opening].fullmatch
            )
            return {Leniency.SEPARATOR} if separator(between) is None else set()
        needed = set()
        opening = _CONTAINER_OPENS.search(between)
        if opening is not None:
            self._in_list = True
        if not self._in_list:
            needed.add(Leniency.NO_LIST)
        if not is_first and opening is not None:
            needed.add(Leniency.SECOND_LIST)
        text_before = between[: None if opening is None else opening.start()]
        if is_first and (self._in_list or _FENCE.fullmatch(text_before) is None):
            needed.add(Leniency.TEXT_BEFORE)
        return needed or {Leniency.TEXT_BEFORE}


def _shapes(
    members: Members,
    answer_format: AnswerFormat,
    kinds: frozenset[GeometryKind],
    sample: Sample,
) -> Iterator[ReadObject]:
    """Yield the boxes, the point or the polygon that the members of a JSON object describe.

    Yields nothing if the object's name is blank or not a string.
    """
    keys = {
        GeometryKind.BBOX: _BOX_KEYS, GeometryKind.POINT: _POINT_KEYS, GeometryKind.POLY: ("poly",)
    }  # fmt: skip
    found = [
        (kind, key)
        for kind in GeometryKind
        for key in keys[kind]
        if kind in kinds and key in members.arrays
    ]
    if not found:
        return
    kind, key = found[0]
    needed = set(members.needed)
    own_name = "label" if isinstance(answer_format, BoxList) else "desc"
    name_key = next((one for one in (own_name, *_NAME_KEYS) if one in members.keys), None)
    name = "" if name_key is None else members.strings.get(name_key, "")
    if name_key is None:
        needed.add(Leniency.NO_NAME)
    elif not name.strip():
        return
    if key != kind or name_key not in (own_name, None):
        needed.add(Leniency.OTHER_KEY)
    if len(members.keys) > 1 + (name_key is not None):
        needed.add(Leniency.EXTRA_KEY)
    rows = members.arrays[key]
    if kind is not GeometryKind.POLY and key in members.nested:
        needed.add(Leniency.NESTED)
    if kind is GeometryKind.POLY or (kind is GeometryKind.BBOX and [*map(len, rows)] == [2, 2]):
        rows = [[leaf for row in rows for leaf in row]]
    for row in rows:
        of_row = set(needed)
        if isinstance(answer_format, BoxList):
            read = _read_numbers(row, answer_format, of_row)
            bins = tuple(bin for _, bin in read)
            pixels = answer_format.pixels_of_numbers([number for number, _ in read], sample)
        else:
            coords = [parse_coord_token(leaf.written) for leaf in row]
            bins = tuple(coord for coord in coords if coord is not None)
            pixels = None
        if len(bins) == len(row) and fits(kind, len(bins)):
            yield _read(kind, bins, pixels, name, of_row)


def _read_numbers(
    row: Sequence[WrittenLeaf], answer_format: BoxList, needed: set[Leniency]
) -> list[tuple[float, int]]:
    """Return the numbers of `row`, clamped to the image, each with its bin.

    Ends at the first leaf that is no number or is too far outside the image. Adds leniencies to
    `needed`.
    """
    found: list[tuple[float, int]] = []
    for axis, leaf in enumerate(row):
        if _NUMBER_TEXT.fullmatch(leaf.written) is None:
            break
        number = float(leaf.written)
        clamped = answer_format.clamped(number, axis)
        if clamped is None:
            break
        if clamped[0] != number:
            needed.add(Leniency.CLAMPED)
        if not leaf.is_plain:
            needed.add(Leniency.NUMBER)
        found.append(clamped)
    return found
