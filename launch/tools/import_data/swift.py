"""Reads the grounding JSONL of ms-swift: messages with `<ref-object>` and `<bbox>`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from launch.tools.import_data.boxes import BoxOrder, BoxReading, BoxUnit
from launch.tools.import_data.files import FileEntry, parse_json, require_folder
from launch.tools.import_data.objects import (
    HARMLESS_KEYS,
    ObjectSkip,
    SourceObject,
    is_learnable,
)
from launch.tools.import_data.source import (
    REPEATED_IMAGE,
    ImageSkip,
    ImportOptions,
    ImportReport,
    Source,
    SourceImage,
)
from shared.config.base import ConfigPath
from shared.data.file_rows import decode_row, lines_of
from shared.errors import RecordError

REF = "<ref-object>"
BOX = "<bbox>"
_MARK = re.compile(f"{REF}|{BOX}")
_FLAT_OBJECT = re.compile(r"\{[^{}]*\}")
_OBJECT_OR_REF = re.compile(r"\{[^{}]*\}|" + REF)
_LABEL = re.compile(r'"(?:label|name|category|desc|ref)"\s*:\s*"([^"\\]*)"')
"""A name in a JSON object of an answer."""


class _Message(FileEntry):
    role: str
    content: str


class _Objects(FileEntry):
    model_config = ConfigDict(extra="allow")

    ref: list[str] = Field(default_factory=list)
    """Texts of the `<ref-object>` marks, in the order of the messages."""
    bbox: list[list[float]] = Field(default_factory=list)
    """x1, y1, x2, y2 (or a point x, y) of the `<bbox>` marks, in the same order."""
    bbox_type: Literal["real", "norm1"] | None = None
    """Unit of `bbox`: `real` (the default) is pixels of the image file, `norm1` fractions of its
    sides.
    """

    @property
    def unknown_keys(self) -> tuple[str, ...]:
        return tuple(key for key in self.model_extra or {} if key not in HARMLESS_KEYS)


class _Row(FileEntry):
    messages: list[_Message]
    images: list[str] = Field(default_factory=list)
    objects: _Objects | None = None


class SwiftImport(ImportOptions):
    """Options of `rollmatch import-data format=swift`: grounding JSONL of ms-swift.

    A row keeps its system message as `system`, and the user's message, with its refs filled in, as
    `prompt`. If the answer has as many refs as boxes, boxes and refs are paired in order.
    Otherwise, in an answer with one JSON object per box, a box gets the ref or the `label` in its
    object as its name. In other answers with refs, it gets the last ref before it, or the next ref
    if the answer begins with a box. A box without any of these gets the question's ref, if there is
    only one.
    """

    format_reading: ClassVar[BoxReading] = BoxReading(BoxOrder.XYXY)

    source: Annotated[ConfigPath, Field(examples=["grounding.jsonl"])]
    """JSONL file with `messages`, `images` and `objects`."""

    images: ConfigPath | None = None
    """Folder that image paths are relative to; null: the folder of `source`."""

    @property
    def name(self) -> str:
        return self.source.stem

    def no_coco_results(self, report: ImportReport, /) -> str | None:
        if not report.images["repeated"]:
            return None
        return (
            "several rows ask about one image, but COCO results are of every object on it (first:"
            f" {report.first[REPEATED_IMAGE]})"
        )

    def read(self) -> Source:
        if self.images is not None:
            require_folder("images", self.images, "the rows' paths are relative to")
        return Source(self.source, self._images())

    def _images(self) -> Iterator[SourceImage]:
        for line in lines_of(self.source):
            number = line.number
            try:
                line.require_short()
                content = decode_row(self.source, line.content)
            except RecordError as error:
                raise error.at(str(self.source), number) from None
            remedy = "correct the row, or remove it"
            row = parse_json(self.source, _Row.model_validate, content, remedy, number)
            folder = self.source.parent if self.images is None else self.images
            path = folder / row.images[0] if row.images else self.source
            yield _image(row, f"{self.source.stem}:{number}", path, self.reading)


def _image(row: _Row, sample_id: str, path: Path, reading: BoxReading) -> SourceImage:
    turns = [message for message in row.messages if message.role != "system"]
    objects = row.objects or _Objects()
    unread = [ObjectSkip.MALFORMED] * len(objects.bbox)  # counted with the row
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
    # One pass over all placeholders: a ref may contain a placeholder.
    of_next = iter(objects.ref)
    question = re.sub(REF, lambda _: next(of_next), question)
    prompt = question.replace("<image>", "").strip()
    keys = {"prompt": prompt}
    for message in row.messages:
        if message.role == "system":
            keys["system"] = message.content
    if not all(map(is_learnable, keys.values())):
        return SourceImage(sample_id, path, unread, skip=ImageSkip.UNUSABLE_TEXT)
    if objects.bbox_type == "norm1":
        reading = replace(reading, unit=BoxUnit.PARTS)
    found: list[SourceObject | ObjectSkip] = []
    names = _names(answer, objects.ref[:num_asked], objects.ref[num_asked:])
    for desc, box in zip(names, objects.bbox, strict=True):
        if len(box) == 2:
            found.append(ObjectSkip.POINT)
        elif len(box) != 4:
            found.append(ObjectSkip.MALFORMED)
        else:
            unknown = objects.unknown_keys
            found.append(SourceObject(desc, reading.box(box), unknown_keys=unknown))
    return SourceImage(sample_id, path, found, reading=reading, keys=keys)


def _names(answer: str, asked: Sequence[str], refs: Sequence[str]) -> list[str]:
    """Return the names of an answer's boxes, in order; "" for a box without a name.

    Args:
        asked: texts of the question's refs.
        refs: texts of the answer's refs.
    """
    # If the question has several refs, the box may belong to any of them.
    only = asked[0] if len(set(asked)) == 1 else ""
    num_boxes = answer.count(BOX)
    if len(refs) == num_boxes:
        return list(refs)
    objects = _FLAT_OBJECT.findall(answer)
    if sum(one.count(BOX) for one in objects) == num_boxes and all(
        one.count(BOX) == 1 and one.count(REF) <= 1 for one in objects if BOX in one
    ):
        return _names_in_json(answer, refs, only)
    if not refs:
        return [only] * num_boxes
    # The first mark shows whether labels come before or after their boxes.
    marks = _MARK.findall(answer)
    is_behind = BOX in marks and REF in marks and marks.index(BOX) < marks.index(REF)
    names: list[str] = []
    of_next = iter(refs)
    name = only
    waiting = 0
    for mark in marks:
        if mark == REF:
            name = next(of_next)
            names += [name] * waiting
            waiting = 0
        elif is_behind:
            waiting += 1
        else:
            names.append(name)
    # Boxes after the last label have no name; a label in the question may belong to any box.
    names += [""] * waiting
    return [""] * num_boxes if is_behind and asked else names


def _names_in_json(answer: str, refs: Sequence[str], only: str) -> list[str]:
    """Return the names of boxes in JSON objects: the ref or text in the same object."""
    names = []
    of_next = iter(refs)
    for part in _OBJECT_OR_REF.findall(answer):
        if BOX not in part:
            for _ in range(part.count(REF)):
                next(of_next)
        elif REF in part:
            names.append(next(of_next))
        else:
            texts = _LABEL.findall(part)
            names.append(texts[0] if len(texts) == 1 else only)
    return names
