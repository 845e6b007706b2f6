"""Reads COCO's files, and writes files that appear when they are complete."""

from __future__ import annotations

import codecs
import json
import reprlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    field_validator,
    model_validator,
)

from launch.import_data.objects import HARMLESS_KEYS, finite, is_learnable
from shared.config.base import dotted
from shared.data.file_rows import require_utf8
from shared.data.limits import MAX_FILE_BYTES, read_file
from shared.errors import RecordError

T = TypeVar("T")
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
_SHORT.maxstring = _SHORT.maxother = 60


class CocoEntry(BaseModel):
    """One entry of a file. Keys that nobody here reads are let through; numbers are finite."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)


_Pixels = Annotated[int, Field(gt=0, lt=2**31, strict=False)]
"""Some tools write 640.0."""


class CocoImage(CocoEntry):
    id: int
    file_name: Annotated[str, Field(min_length=1)]
    width: _Pixels | None = None
    height: _Pixels | None = None
    neg_category_ids: list[int] = []
    """LVIS: categories that are not on the image."""
    not_exhaustive_category_ids: list[int] = []
    """LVIS: categories of which some objects are not annotated."""

    @property
    def size(self) -> tuple[int, int] | None:
        """Width and height that the file states; None: the picture's own are taken."""
        if self.width is None or self.height is None:
            return None
        return self.width, self.height

    @model_validator(mode="before")
    @classmethod
    def _named_by_url(cls, value: Any) -> Any:
        """LVIS v1 has a `coco_url` that ends in `train2017/000000000009.jpg`, and no file name."""
        if isinstance(value, dict) and "file_name" not in value:
            url = value.get("coco_url")
            if isinstance(url, str):
                return {**value, "file_name": "/".join(url.split("/")[-2:])}
        return value


_HARMLESS_ATTRIBUTES = frozenset({"occluded", "truncated", "difficult", "track_id", "keyframe"})
_ROTATION = "rotation"


class CocoAnnotation(CocoEntry):
    id: Any = None
    image_id: int
    category_id: int
    bbox: Annotated[list[float], Field(min_length=4, max_length=4)]
    """x, y, w, h in pixels."""
    iscrowd: Annotated[bool, Field(strict=False)] = False
    segmentation: list[list[float]] | dict[str, Any] | None = None
    """Rings x, y, ... in pixels; a mapping is a run-length code."""
    rotation: float = 0.0
    """CVAT's `attributes.rotation`: degrees by which the box is turned about its centre, clockwise.
    """
    unknown_keys: tuple[str, ...] = ()
    """Keys that are not known here: with those of `attributes`, as `attributes.name`."""

    @model_validator(mode="before")
    @classmethod
    def _other_keys(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        known = cls.model_fields.keys() - {_ROTATION, "unknown_keys"}
        unknown = [key for key in value if key not in known and key not in HARMLESS_KEYS]
        if not value.get("ignore"):  # Label Studio writes 0
            unknown = [key for key in unknown if key != "ignore"]
        entry = {key: value[key] for key in known if key in value}
        attributes = value.get("attributes")
        if isinstance(attributes, dict):
            angle = finite([attributes[_ROTATION]]) if _ROTATION in attributes else None
            of_tool = _HARMLESS_ATTRIBUTES
            if angle is not None:
                entry[_ROTATION] = angle[0]
                of_tool |= {_ROTATION}
            unknown += [f"attributes.{key}" for key in attributes if key not in of_tool]
        if unknown:
            entry["unknown_keys"] = tuple(unknown)
        return entry

    @field_validator("segmentation")
    @classmethod
    def _pairs(cls, value: Any) -> Any:
        if isinstance(value, list) and any(len(ring) % 2 for ring in value):
            raise ValueError("a ring must have x, y for each vertex, so an even number of values")
        return value


@dataclass(frozen=True, slots=True)
class Malformed:
    """An annotation that cannot be read."""

    id: Any
    image_id: Any
    error: ValidationError


def _read_annotation(value: Any) -> CocoAnnotation | Malformed:
    try:
        return CocoAnnotation.model_validate(value)
    except ValidationError as error:
        ids = value if isinstance(value, dict) else {}
        return Malformed(ids.get("id"), ids.get("image_id"), error)


class CocoCategory(CocoEntry):
    id: int
    name: str


class CocoFile(CocoEntry):
    images: list[CocoImage]
    annotations: list[Annotated[CocoAnnotation | Malformed, PlainValidator(_read_annotation)]]
    categories: list[CocoCategory]

    @property
    def readable(self) -> list[CocoAnnotation]:
        return [one for one in self.annotations if isinstance(one, CocoAnnotation)]

    @property
    def first_malformed(self) -> tuple[str, str]:
        """The field and the problem of the first annotation that cannot be read."""
        for index, one in enumerate(self.annotations):
            if isinstance(one, Malformed):
                field, problem = _first_problem(one.error)
                return f"annotations[{index}]{'.' if field else ''}{field}", problem
        raise AssertionError("all annotations are readable")


def read_annotations(path: Path) -> CocoFile:
    """Read a file of COCO annotations ("instances").

    Raises:
        RecordError: the file cannot be read, an entry of images or categories is malformed, or
            every annotation is, an id is repeated, or a name in use cannot be learned or stands for
            two categories.
    """
    file = parse_json(
        path, CocoFile.model_validate_json, read_bytes(path), "correct the entry, or remove it"
    )
    if file.annotations and not file.readable:
        field, problem = file.first_malformed
        remedy = "correct the entry, or remove it"
        raise RecordError(problem, field=field, remedy=remedy, file=str(path))
    lists: dict[str, Sequence[CocoImage | CocoCategory]] = {
        "images": file.images,
        "categories": file.categories,
    }
    for kind, entries in lists.items():
        first_of_id: dict[int, int] = {}
        for index, entry in enumerate(entries):
            first = first_of_id.setdefault(entry.id, index)
            if first != index:
                raise RecordError(
                    f"is {entry.id}, as {kind}[{first}].id is",
                    field=f"{kind}[{index}].id",
                    remedy="give every entry its own id",
                    file=str(path),
                )
    used = {annotation.category_id for annotation in file.readable}
    first_of_name: dict[str, int] = {}
    for index, category in enumerate(file.categories):
        if category.id not in used:
            continue
        name = category.name
        first = first_of_name.setdefault(name, index)
        problem = remedy = ""
        # A name is text that the model learns: no token of the answer's own grammar.
        if not is_learnable(name):
            problem = "which cannot be an object's desc"
            remedy = "give the category a name in words"
        elif first != index:
            problem = f"as that of categories[{first}] is, and both are in use"
            remedy = "rename one: predictions find their category by its name"
        if problem:
            field = f"categories[{index}].name"
            raise RecordError(f"is {name!r}, {problem}", field=field, remedy=remedy, file=str(path))
    return file


def distinct_categories(file: CocoFile) -> list[dict[str, Any]]:
    """List the categories for the export. Of those with one name, the one in use stays."""
    used = {annotation.category_id for annotation in file.readable}
    in_use_last = sorted(file.categories, key=lambda category: category.id in used)
    id_of = {category.name: category.id for category in in_use_last}
    return [
        category.model_dump() for category in file.categories if id_of[category.name] == category.id
    ]


def read_bytes(path: Path, name: str = "MAX_FILE_BYTES", limit: int = MAX_FILE_BYTES) -> bytes:
    """Read a file without its byte order mark, as `read_file`. Raises RecordError."""
    try:
        content = read_file(path, name, limit)
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise RecordError(
            problem, field="file", remedy="correct the path", file=str(path)
        ) from error
    require_utf8(content, path)
    return content.removeprefix(codecs.BOM_UTF8)


def parse_json(
    path: Path, parse: Callable[[bytes], T], data: bytes, remedy: str, line: int | None = None
) -> T:
    """Return `parse(data)`, a pydantic reader of JSON.

    Raises:
        RecordError: names the field of the first problem, and counts the others.
    """
    try:
        return parse(data)
    except ValidationError as error:
        field, problem = _first_problem(error)
        raise RecordError(
            problem, field=field or "file", remedy=remedy, file=str(path), line=line
        ) from None


def _first_problem(error: ValidationError) -> tuple[str, str]:
    """Return the field of the first problem, and what it is, with the number of others."""
    first = error.errors(include_url=False)[0]
    # A union puts the type that it tried into `loc`: `list[list[float]]`, `dict[str,any]`.
    keys = tuple(key for key in first["loc"] if isinstance(key, int) or key.isidentifier())
    message = first["msg"].removeprefix("Value error, ")
    shown = _SHORT.repr(first["input"])  # aliases may write out a thousandfold
    is_shown = len(shown) <= 60 and first["type"] != "missing"
    got = f", got {shown}" if is_shown else ""
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return dotted(keys), f"{message[0].lower()}{message[1:]}{got}{more}"


@contextmanager
def written_once(path: Path) -> Iterator[IO[str]]:
    """Open a file beside `path`; it gets that name if the block ends well, else it is removed."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            yield file
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    with written_once(path) as file:
        file.write(json.dumps(value, ensure_ascii=False, indent=2) + "\n")
