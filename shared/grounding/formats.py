"""Answer formats: the texts that objects are written in (`data.answer_format`).

Each has the same four parts: a strict parse that knows the tokens of everything, a prefix that
objects can be appended to, a serialiser, and the slots, which are the tokens that write a
coordinate. What is the same for all of them, from the cut of the prefix to the matching, is not
theirs. A format is one class, and one line of `FORMATS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.grounding.geometry import pixels_of
from shared.grounding.json_list import BoxList, PictureResize
from shared.grounding.objects import DropReason, ParsedObject
from shared.grounding.phrase_list import PhraseList
from shared.grounding.scanner import Container, Entry, object_indices, scan_container
from shared.grounding.serialize import (
    DESC_FIRST,
    SerializedText,
    layout_append,
    layout_objects,
)
from shared.grounding.validation import Response, ValidValue, validate_entry
from shared.prompts import DEFAULT_USER_PROMPT
from shared.records import ALL_GEOMETRY, GeometryKind, GroundTruthObject, Sample
from shared.tokens.vocabulary import COORD_TOKENS


class AnswerFormat(Protocol):
    """One way to write the objects of a picture, and to read them back.

    Example: `FORMATS["qwen3_vl"]` writes `[{"bbox_2d": [10, 20, 300, 400], "label": "cat"}]`.
    """

    @property
    def opening(self) -> str:
        """The text that an answer with objects begins with."""
        ...

    @property
    def empty_prefix(self) -> str:
        """The text of a container without entries, not closed: the prefix of an unusable answer."""
        ...

    @property
    def coord_tokens(self) -> tuple[str, ...]:
        """The token of each bin, 0..999; empty where coordinates are digits, a token or more."""
        ...

    @property
    def markup_tokens(self) -> tuple[str, ...]:
        """The other tokens that an answer is made of. A name must not have one."""
        ...

    @property
    def names_each_object(self) -> bool:
        """Every object has a name of its own; else one name may stand for several."""
        ...

    @property
    def geometry(self) -> frozenset[GeometryKind]:
        """Kinds of shapes that can be written."""
        ...

    @property
    def user_prompt(self) -> str:
        """The question that asks for it."""
        ...

    def for_pictures(self, resize: PictureResize) -> AnswerFormat:
        """Return the format of a model that is shown its pictures so."""
        ...

    def of(self, sample: Sample) -> AnswerFormat:
        """Return the format of answers about this sample; its numbers may be the picture's own."""
        ...

    def opens(self, text: str) -> bool:
        """Tell whether an answer begins with a container, whatever follows."""
        ...

    def scan(self, text: bytes) -> Container | None:
        """Find the complete entries of an answer; None where it begins with no container."""
        ...

    def max_index(self, text: bytes, entries: Sequence[Entry]) -> int | None:
        """Return the largest number of a key in the kept text; None where no key has one."""
        ...

    def validate(
        self,
        entry: Entry,
        response: Response,
        ends: Sequence[int],
        geometry: frozenset[GeometryKind],
    ) -> ValidValue | DropReason:
        """Return the object of a complete entry, or the first reason why it is none.

        Args:
            ends: [token of the kept prefix]: offset behind its bytes.
            geometry: the kinds that are wanted.
        """
        ...

    def pixels(self, found: ParsedObject, sample: Sample) -> tuple[float, ...]:
        """Return the coordinates of an object of an answer, in pixels of the sample's picture."""
        ...

    def digits(self, bins: Sequence[int]) -> tuple[str, ...]:
        """Write each coordinate of an object; only of formats without coord tokens."""
        ...

    def layout_objects(self, objects: Sequence[GroundTruthObject]) -> SerializedText:
        """Write a whole answer, with the place of everything in it."""
        ...

    def layout_append(
        self, prefix_text: str, objects: Sequence[GroundTruthObject], *, start_index: int
    ) -> SerializedText:
        """Write the text that closes `prefix_text` with `objects`, numbered from `start_index`.

        Places are counted from the end of the prefix. ValueError where nothing can be appended.
        """
        ...

    def longest_append(self, objects: Sequence[GroundTruthObject]) -> SerializedText:
        """Write the objects as an append, behind the prefix that makes it longest."""
        ...

    def choice_to_go_on(self, text: bytes, value: tuple[int, int]) -> int:
        """Return the byte at which an answer could have ended in place of the entry of `value`."""
        ...


# The longest key that parses is object_999999999 (decision 26).
_LONGEST_PREFIX = '{"object_999999999": {}'
_LONGEST_KEY_INDEX = 10**9


@dataclass(frozen=True, slots=True)
class ObjectDictionary:
    """`{"object_1": {"desc": "cat", "bbox_2d": ["<|coord_10|>", ...]}}`: coord tokens."""

    field_order: str = DESC_FIRST

    opening = empty_prefix = "{"
    coord_tokens = COORD_TOKENS
    markup_tokens = ()
    names_each_object = True
    geometry = ALL_GEOMETRY
    user_prompt = DEFAULT_USER_PROMPT

    def for_pictures(self, resize: PictureResize) -> ObjectDictionary:  # noqa: ARG002
        return self

    def of(self, sample: Sample) -> ObjectDictionary:  # noqa: ARG002
        return self

    def opens(self, text: str) -> bool:
        return text.lstrip(" \t\n\r").startswith("{")

    def scan(self, text: bytes) -> Container | None:
        return scan_container(text)

    def max_index(self, text: bytes, entries: Sequence[Entry]) -> int | None:
        # At any depth; the key of an entry counts without its colon too.
        others: list[bytes] = []
        position = 0
        for entry in entries:
            if entry.plain is not None and entry.value is not None:  # has no other key to look for
                others.append(text[position : entry.start])
                position = entry.value[1]
        indices = object_indices(b"".join([*others, text[position:]]))
        return max([*indices, *(entry.number for entry in entries)], default=None)

    def validate(
        self,
        entry: Entry,
        response: Response,
        ends: Sequence[int],  # noqa: ARG002 (a coord token is in no token that is cut)
        geometry: frozenset[GeometryKind],
    ) -> ValidValue | DropReason:
        return validate_entry(entry, response, geometry)

    def pixels(self, found: ParsedObject, sample: Sample) -> tuple[float, ...]:
        return pixels_of(found.bins, width=sample.width, height=sample.height)

    def digits(self, bins: Sequence[int]) -> tuple[str, ...]:  # noqa: ARG002
        raise AssertionError("coord tokens have no digits")

    def layout_objects(self, objects: Sequence[GroundTruthObject]) -> SerializedText:
        return layout_objects(objects, field_order=self.field_order)

    def layout_append(
        self, prefix_text: str, objects: Sequence[GroundTruthObject], *, start_index: int
    ) -> SerializedText:
        return layout_append(
            prefix_text, objects, start_index=start_index, field_order=self.field_order
        )

    def longest_append(self, objects: Sequence[GroundTruthObject]) -> SerializedText:
        return layout_append(_LONGEST_PREFIX, objects, start_index=_LONGEST_KEY_INDEX)

    def choice_to_go_on(self, text: bytes, value: tuple[int, int]) -> int:
        key_end = text.rindex(b'"', 0, value[0])
        key = text.rindex(b'"', 0, key_end)
        before = text[:key].rstrip(b" \t\n\r")
        # Behind the container's brace there is no comma.
        return len(before) - 1 if before.endswith(b",") else key


COORD_TOKENS_FORMAT = ObjectDictionary()
FORMATS: dict[str, AnswerFormat] = {
    "coord_tokens": COORD_TOKENS_FORMAT,
    "qwen3_vl": BoxList(),
    "qwen2_5_vl": BoxList(in_pixels=True),
    "rex_omni": PhraseList(),
}
"""By the value of `data.answer_format`."""


def answer_format(name: str, field_order: str) -> AnswerFormat:
    """Return the format of that name; `field_order` is of `coord_tokens` alone."""
    return ObjectDictionary(field_order) if name == "coord_tokens" else FORMATS[name]
