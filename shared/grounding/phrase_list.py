"""The answer format of Rex-Omni (`rex_omni`): phrases, each with the boxes of all its objects.

    <|object_ref_start|>cat<|object_ref_end|><|box_start|><10><20><300><400>,<5><6><7><8><|box_end|>

A comma and a space separate phrases. A coordinate is one token of the model's vocabulary, `<0>` to
`<999>`, and an object is one box. A phrase's first object has the name in front of it; its other
objects are only coordinates. The format has no container, so an answer without objects is empty. A
kept prefix ends inside the phrase of its last box. Appended text continues or closes that phrase.

Source: github.com/IDEA-Research/Rex-Omni (arXiv 2510.12798). As in its data, each phrase appears
once in an answer, with its boxes from left to right. There, phrases are in random order; here, in
the order of their first objects. For a phrase that the image does not show, Rex-Omni writes `None`
instead of boxes. `None` is skipped when read and never written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shared.grounding.objects import DropReason
from shared.grounding.scanner import SPACE, Container, Entry, PlainFields
from shared.grounding.serialize import AnswerFormat, ObjectLayout, SerializedText, SpannedText
from shared.grounding.validation import Response, ValidValue, fits, is_box, is_utf8
from shared.prompts import PHRASE_USER_PROMPT
from shared.records import GeometryKind, GroundTruthObject
from shared.tokens.vocabulary import NUM_BINS

PHRASE_START = "<|object_ref_start|>"
PHRASE_END = "<|object_ref_end|>"
BOX_START = "<|box_start|>"
BOX_END = "<|box_end|>"

_MARKER = re.compile(rb"<\|(?:object_ref|box)_(?:start|end)\|>")
# Groups are atomic, not possessive: see `scanner`.
_HEAD = re.compile(
    rb"<\|object_ref_start\|>((?>(?:(?!%b).)*))<\|object_ref_end\|>%b<\|box_start\|>"
    % (_MARKER.pattern, SPACE),
    re.DOTALL,
)
_BLANK = re.compile(SPACE)
_BETWEEN = re.compile(SPACE + b"," + SPACE)
_ELEMENT = re.compile(rb"[^,]*+")
_COORD = rb"<(?:0|[1-9][0-9]{0,2})>" + SPACE
_COORDS = re.compile(rb"(?>(?:%b)+)" % _COORD)
_BOX = re.compile(rb"(?:%b){4}" % _COORD)
_WHITESPACE = b" \t\n\r"
_NO_OBJECT = b"None"


@dataclass(frozen=True, slots=True)
class _ScannedPhrases:
    container: Container
    open_phrase: str | None
    """Name of the unclosed phrase in which the text ends, if another box can follow. Empty if a box
    there would be invalid. None if the text does not end in such a phrase."""


def _scan(text: bytes) -> _ScannedPhrases | None:
    """Find the boxes of all phrases; None if `text` begins with something other than a phrase.

    A blank text is an answer without objects. Entries are the non-empty texts between commas,
    except `None`. The last entry of an unclosed phrase counts only if it has four coordinates.
    """
    if _BLANK.fullmatch(text) is not None:
        return _ScannedPhrases(Container((), closed=True), None)
    if not text.lstrip(_WHITESPACE).startswith(PHRASE_START.encode()):
        return None
    entries: list[Entry] = []
    open_phrase: str | None = None
    end = 0  # of the previous phrase
    follows: re.Pattern[bytes] | None = _BLANK  # required between it and the next phrase
    for head in _HEAD.finditer(text):
        in_order = follows is not None and follows.fullmatch(text, end, head.start()) is not None
        marker = _MARKER.search(text, head.end())
        is_closed = marker is not None and marker[0] == BOX_END.encode()
        stop = len(text) if marker is None else marker.start()
        written = b""
        open_phrase = None
        position = head.end()
        separated = in_order
        is_first = True
        while position <= stop:
            element = _ELEMENT.match(text, position, stop)
            assert element is not None, "the pattern matches empty text"
            written = element[0].strip(_WHITESPACE)
            is_complete = is_closed or element.end() < stop or _BOX.fullmatch(written) is not None
            if written and written != _NO_OBJECT and is_complete:
                begin = text.index(written, position)
                array = (begin, begin + len(written))
                # The first entry starts at the phrase, and its value at the name.
                start, value = (head.start(), head.start(1)) if is_first else (begin, begin)
                plain = PlainFields(GeometryKind.BBOX, head.span(1), array)
                number = len(entries)
                entry = Entry(f"[{number}]", number, start, (value, array[1]), separated, plain)
                entries.append(entry)
                is_first = False
            # An extra comma makes the next box malformed.
            separated = in_order and bool(written)
            position = element.end() + 1
        if marker is None:
            end = stop
            if written and written != _NO_OBJECT:
                open_phrase = head[1].decode(errors="replace") if in_order else ""
        else:
            end = marker.end()
        follows = _BETWEEN if is_closed else None
    closed = follows is _BETWEEN and _BLANK.fullmatch(text, end) is not None
    return _ScannedPhrases(Container(tuple(entries), closed, len(text)), open_phrase)


@dataclass(frozen=True, slots=True)
class PhraseList(AnswerFormat):
    """The answer format `rex_omni`: each phrase is followed by the boxes of all its objects.

    `<|object_ref_start|>cat<|object_ref_end|><|box_start|><10><20><300><400><|box_end|>`
    """

    opening = PHRASE_START
    empty_prefix = ""
    coord_tokens = tuple(f"<{bin}>" for bin in range(NUM_BINS))
    markup_tokens = (PHRASE_START, PHRASE_END, BOX_START, BOX_END)
    names_each_object = False
    user_prompt = PHRASE_USER_PROMPT

    def scan(self, text: bytes) -> Container | None:
        scanned = _scan(text)
        return None if scanned is None else scanned.container

    def validate(
        self,
        entry: Entry,
        response: Response,
        ends: Sequence[int],  # noqa: ARG002 (a coordinate token is never cut)
        geometry: frozenset[GeometryKind],  # noqa: ARG002 (all objects are boxes, always wanted)
    ) -> ValidValue | DropReason:
        assert entry.plain is not None
        _, name, array = entry.plain
        raw = response.text[slice(*name)]
        if not entry.separated or not is_utf8(raw):
            return DropReason.MALFORMED
        desc = raw.decode()
        if not desc.strip():
            return DropReason.MISSING_DESC
        coords = response.coords_in(array)
        positions = response.coord_positions[coords]
        # Other tokens may spell the characters of a coordinate token; they do not count as one.
        num_written = response.text.count(b"<", *array)
        is_list = _COORDS.fullmatch(response.text, *array) is not None
        if not is_list or len(positions) != num_written:
            return DropReason.NON_COORD_TOKEN
        bins = response.coord_bins[coords]
        if not fits(GeometryKind.BBOX, len(bins)):
            is_polygon = fits(GeometryKind.POLY, len(bins))
            return DropReason.POLY_UNSUPPORTED if is_polygon else DropReason.WRONG_ARITY
        if not is_box(bins):
            return DropReason.BBOX_INVALID
        return ValidValue(GeometryKind.BBOX, desc, name, tuple(positions), tuple(bins))

    def layout_objects(self, objects: Sequence[GroundTruthObject]) -> SerializedText:
        return self._layout(None, objects)

    def layout_append(
        self,
        prefix_text: str,
        objects: Sequence[GroundTruthObject],
        *,
        start_index: int,  # noqa: ARG002 (objects have no numbers)
    ) -> SerializedText:
        if prefix_text == self.empty_prefix:
            return self._layout(None, objects)
        scanned = _scan(prefix_text.encode(errors="replace"))
        if scanned is None or scanned.open_phrase is None:
            raise ValueError(
                f"cannot append after {prefix_text[-60:]!r}: it does not end after a box of an open"
                " phrase; use ParsedRollout.prefix_text"
            )
        return self._layout(scanned.open_phrase, objects)

    def longest_append(self, objects: Sequence[GroundTruthObject]) -> SerializedText:
        # After an open phrase whose name no object has.
        return self._layout("", objects)

    def choice_to_go_on(self, text: bytes, value: tuple[int, int]) -> int:
        start = value[0]
        if text.endswith(PHRASE_START.encode(), 0, start):
            start -= len(PHRASE_START)
        before = text[:start].rstrip(_WHITESPACE)
        return len(before) - 1 if before.endswith(b",") else start

    def _layout(
        self, open_phrase: str | None, objects: Sequence[GroundTruthObject]
    ) -> SerializedText:
        """Continue `open_phrase` with the objects, or write a new answer if it is None."""
        phrases: dict[str, list[int]] = {}
        for index, object_ in enumerate(objects):
            assert object_.kind is GeometryKind.BBOX, "sample loading checks the geometry"
            phrases.setdefault(object_.desc, []).append(index)
        text = SpannedText("")
        layouts: dict[int, ObjectLayout] = {}
        is_open = open_phrase is not None
        # Objects of the open phrase come first.
        for name in sorted(phrases, key=lambda name: name != open_phrase):
            desc: tuple[int, int] | None = None
            if name != open_phrase:
                text.add(f"{BOX_END}, {PHRASE_START}" if is_open else PHRASE_START)
                desc = text.add(name)
                text.add(f"{PHRASE_END}{BOX_START}")
            for index in sorted(phrases[name], key=lambda index: objects[index].bins[0]):
                if desc is None:
                    text.add(",")
                coords = tuple(text.add(self.coord_tokens[bin]) for bin in objects[index].bins)
                start = coords[0][0]
                layouts[index] = ObjectLayout(
                    (start if desc is None else desc[0], coords[-1][1]),
                    desc or (start, start),
                    coords,
                )
                desc = None
            is_open = True
        closing = text.add(BOX_END if is_open else "")
        in_order = tuple(layouts[index] for index in range(len(objects)))
        return SerializedText(text.joined(), in_order, closing)
