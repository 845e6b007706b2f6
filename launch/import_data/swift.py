"""Reads the grounding JSONL of ms-swift: messages with `<ref-object>` and `<bbox>`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from launch.import_data.coco_files import CocoEntry, parse_json, read_bytes
from launch.import_data.objects import (
    HARMLESS_KEYS,
    ObjectSkip,
    SourceObject,
    holds_pixels,
    is_learnable,
)
from launch.import_data.source import (
    ImageSkip,
    ImportOptions,
    Source,
    SourceImage,
    require_folder,
)
from shared.config.base import ConfigPath

REF = "<ref-object>"
BOX = "<bbox>"


class _Message(CocoEntry):
    role: str
    content: str


class _Objects(CocoEntry):
    model_config = ConfigDict(extra="allow")

    ref: list[str] = Field(default_factory=list)
    """Texts of the `<ref-object>`, in the order of the messages."""
    bbox: list[list[float]] = Field(default_factory=list)
    """x1, y1, x2, y2 (or a point x, y) of the `<bbox>`, in that order."""
    bbox_type: Literal["real", "norm1"] | None = None
    """Pixels of the file's image (the default), or parts of it."""

    @property
    def unknown_keys(self) -> tuple[str, ...]:
        return tuple(key for key in self.model_extra or {} if key not in HARMLESS_KEYS)


class _Row(CocoEntry):
    messages: list[_Message]
    images: list[str] = Field(default_factory=list)
    objects: _Objects | None = None


class SwiftImport(ImportOptions):
    """The keys of `format=swift`.

    A row keeps its own `system` and `prompt`, the user's message with its refs filled in. A box is
    called after its ref: the n-th of the answer where the answer has as many refs as boxes, else
    the last one before it in the answer, else the only one of the question.
    """

    source: Annotated[ConfigPath, Field(examples=["grounding.jsonl"])]
    """JSONL file with `messages`, `images` and `objects`."""

    images: ConfigPath | None = None
    """Folder that relative paths of images start from; null: that of the file."""

    @property
    def name(self) -> str:
        return self.source.stem

    def read(self) -> Source:
        if self.images is not None:
            require_folder("images", self.images, "the rows' paths start from")
        return Source(self.source, self._images(read_bytes(self.source)))

    def _images(self, content: bytes) -> Iterator[SourceImage]:
        for number, line in enumerate(content.splitlines(), 1):
            if line.strip():
                remedy = "correct the row, or remove it"
                row = parse_json(self.source, _Row.model_validate_json, line, remedy, number)
                folder = self.source.parent if self.images is None else self.images
                path = folder / row.images[0] if row.images else self.source
                yield _image(row, f"{self.source.stem}:{number}", path)


def _image(row: _Row, sample_id: str, path: Path) -> SourceImage:
    turns = [message for message in row.messages if message.role != "system"]
    objects = row.objects or _Objects()
    unread = [ObjectSkip.MALFORMED] * len(objects.bbox)  # counted with its row
    skip: ImageSkip | None = None
    if len(row.images) != 1:
        skip = ImageSkip.SEVERAL_IMAGES if row.images else ImageSkip.NO_IMAGE
    elif [turn.role for turn in turns] != ["user", "assistant"]:
        skip = ImageSkip.SEVERAL_TURNS
    elif BOX in turns[0].content:
        skip = ImageSkip.BOX_IN_QUESTION
    elif row.objects is None:
        skip = ImageSkip.NO_OBJECTS
    if skip is not None:
        return SourceImage(sample_id, path, unread, skip=skip)
    question, answer = (turn.content for turn in turns)
    num_asked = question.count(REF)
    num_answered = answer.count(REF)
    if (num_asked + num_answered, answer.count(BOX)) != (len(objects.ref), len(objects.bbox)):
        return SourceImage(sample_id, path, unread, skip=ImageSkip.MALFORMED_LABELS)
    for ref in objects.ref[:num_asked]:
        question = question.replace(REF, ref, 1)
    prompt = question.replace("<image>", "").strip()
    keys = {"prompt": prompt}
    for message in row.messages:
        if message.role == "system":
            keys["system"] = message.content
    if not all(map(is_learnable, keys.values())):
        return SourceImage(sample_id, path, unread, skip=ImageSkip.UNUSABLE_TEXT)
    num_refs = num_asked
    asked = set(objects.ref[:num_asked])
    fractions = objects.bbox_type == "norm1"
    found: list[SourceObject | ObjectSkip] = []
    for number, (before, box) in enumerate(zip(answer.split(BOX), objects.bbox, strict=False)):
        num_refs += before.count(REF)
        of = num_asked + number if num_answered == len(objects.bbox) else num_refs - 1
        if len(box) == 2:
            found.append(ObjectSkip.POINT)
        elif len(box) != 4 or not (fractions or holds_pixels(box)):
            found.append(ObjectSkip.MALFORMED)
        else:
            x1, y1, x2, y2 = box
            # Of several that were asked for, nobody says which one it is.
            is_named = of >= num_asked or len(asked) == 1
            desc = objects.ref[of] if is_named else ""
            size = (x2 - x1, y2 - y1)
            found.append(SourceObject(desc, (x1, y1, *size), unknown_keys=objects.unknown_keys))
    return SourceImage(sample_id, path, found, fractions=fractions, keys=keys)
