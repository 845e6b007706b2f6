"""The answer formats: how objects are written as text (`data.answer_format`).

Each format has a strict parser, a serializer, a way to append objects to the kept part of an
answer, and a notation for coordinates. Everything else, such as matching, is the same for all
formats. A format is a subclass of `AnswerFormat` and one line of `FORMATS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.grounding.json_list import BoxList
from shared.grounding.objects import DropReason
from shared.grounding.phrase_list import PhraseList
from shared.grounding.scanner import Container, Entry, object_indices, scan_container
from shared.grounding.serialize import (
    DESC_FIRST,
    AnswerFormat,
    SerializedText,
    layout_append,
    layout_objects,
)
from shared.grounding.validation import Response, ValidValue, validate_entry
from shared.prompts import DEFAULT_USER_PROMPT
from shared.records import ALL_GEOMETRY, GeometryKind, GroundTruthObject
from shared.tokens.vocabulary import COORD_TOKENS

# The longest key that parses is object_999999999 (decision 26).
_LONGEST_PREFIX = '{"object_999999999": {}'
_LONGEST_KEY_INDEX = 10**9


@dataclass(frozen=True, slots=True)
class ObjectDictionary(AnswerFormat):
    """The answer format `coord_tokens`: a JSON object with coordinate tokens.

    `{"object_1": {"desc": "cat", "bbox_2d": ["<|coord_10|>", ...]}}`
    """

    field_order: str = DESC_FIRST

    opening = "{"
    coord_tokens = COORD_TOKENS
    geometry = ALL_GEOMETRY
    user_prompt = DEFAULT_USER_PROMPT

    def scan(self, text: bytes) -> Container | None:
        return scan_container(text)

    def max_index(self, text: bytes, entries: Sequence[Entry]) -> int | None:
        # Search at any depth. An entry's key counts even without its colon.
        others: list[bytes] = []
        position = 0
        for entry in entries:
            if entry.plain is not None and entry.value is not None:  # contains no other key
                others.append(text[position : entry.start])
                position = entry.value[1]
        indices = object_indices(b"".join([*others, text[position:]]))
        return max([*indices, *(entry.number for entry in entries)], default=None)

    def validate(
        self,
        entry: Entry,
        response: Response,
        ends: Sequence[int],  # noqa: ARG002 (a coordinate token is never cut)
        geometry: frozenset[GeometryKind],
    ) -> ValidValue | DropReason:
        return validate_entry(entry, response, geometry)

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
        # No comma follows the container's brace.
        return len(before) - 1 if before.endswith(b",") else key


COORD_TOKENS_FORMAT = ObjectDictionary()
FORMATS: dict[str, AnswerFormat] = {
    "coord_tokens": COORD_TOKENS_FORMAT,
    "qwen3_vl": BoxList(),
    "qwen2_5_vl": BoxList(in_pixels=True),
    "rex_omni": PhraseList(),
}
"""The answer formats, by the value of `data.answer_format` that selects them."""


def answer_format(name: str, field_order: str) -> AnswerFormat:
    """Return the answer format with this name in `data.answer_format`.

    `field_order` (`custom.object_field_order`) is used only by `coord_tokens`.
    """
    return ObjectDictionary(field_order) if name == "coord_tokens" else FORMATS[name]
