"""COCO's files: annotations and categories in, and files that appear when they are complete."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import IO, Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator
from pydantic_core import ErrorDetails

from shared.config.base import dotted
from shared.errors import ConfigError, RecordError
from shared.tokens.vocabulary import COORD_TOKENS, END_OF_TURN


class _Entry(BaseModel):
    """One entry of a COCO file. Keys that nobody here reads are let through; numbers are finite."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)


_Pixels = Annotated[int, Field(gt=0, lt=2**31)]


class CocoImage(_Entry):
    id: int
    file_name: Annotated[str, Field(min_length=1)]
    width: _Pixels
    height: _Pixels


class CocoAnnotation(_Entry):
    image_id: int
    category_id: int
    bbox: Annotated[list[float], Field(min_length=4, max_length=4)]
    """x, y, w, h in pixels."""
    iscrowd: int | bool = 0
    segmentation: list[list[float]] | dict[str, Any] | None = None
    """Rings x, y, ... in pixels; a mapping is a run-length code."""

    @field_validator("segmentation")
    @classmethod
    def _pairs(
        cls, value: list[list[float]] | dict[str, Any] | None
    ) -> list[list[float]] | dict[str, Any] | None:
        if isinstance(value, list) and any(len(ring) % 2 for ring in value):
            raise ValueError("a ring must have x, y for each vertex, so an even number of values")
        return value


class CocoCategory(_Entry):
    id: int
    name: str


class CocoFile(_Entry):
    images: list[CocoImage]
    annotations: list[CocoAnnotation]
    categories: list[CocoCategory]

    def names(self) -> dict[int, str]:
        """Category id to name."""
        return {category.id: category.name for category in self.categories}


Name = TypeVar("Name", bound=str)
_CATEGORIES = TypeAdapter(list[CocoCategory], config=ConfigDict(strict=True))


def read_annotations(path: Path) -> CocoFile:
    """A file of COCO annotations ("instances"). RecordError names the file and the entry: what
    cannot be read, repeated ids, unusable names.
    """
    file: CocoFile = parse_json(path, CocoFile.model_validate_json, _read(path))
    _require_distinct(path, "images", [image.id for image in file.images])
    _require_distinct(path, "categories", [category.id for category in file.categories])
    used = {annotation.category_id for annotation in file.annotations}
    _check_names(path, file.categories, used)
    return file


def read_categories(path: Path) -> dict[str, int]:
    """Name to id, of a file that `launch.import_coco` wrote beside its records: `[{"id": ...,
    "name": ...}, ...]`. RecordError as above.
    """
    categories = parse_json(path, _CATEGORIES.validate_json, _read(path))
    _check_names(path, categories, {category.id for category in categories})
    return {category.name: category.id for category in categories}


def distinct_categories(file: CocoFile) -> list[dict[str, Any]]:
    """The categories for the way back. A name that several have belongs to the one in use
    (`read_annotations` refuses two in use).
    """
    used = {annotation.category_id for annotation in file.annotations}
    by_name = {
        category.name: category
        for category in sorted(file.categories, key=lambda category: category.id in used)
    }
    return [
        {"id": category.id, "name": category.name}
        for category in file.categories
        if by_name[category.name].id == category.id
    ]


def parse_json(
    path: Path,
    parse: Any,
    data: bytes,
    *,
    line: int | None = None,
    remedies: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """`parse(data)`, a pydantic reader of JSON. RecordError with the place of the first thing that
    is wrong; `remedies` are those of single fields.
    """
    try:
        return parse(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        field = _field(first)
        remedy = remedies[field] if field in remedies else _remedy(first)
        raise RecordError(
            f"{_problem(first)}{more}", field=field, remedy=remedy, file=str(path), line=line
        ) from None


@contextmanager
def written_once(path: Path) -> Iterator[IO[str]]:
    """A text file beside `path`, which gets that name when the block ends well and is removed when
    it does not.
    """
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


def require_absent(paths: Sequence[Path]) -> None:
    """ConfigError where one of the files to write exists."""
    there = [str(path) for path in paths if path.exists()]
    if there:
        raise ConfigError(f"out: {', '.join(there)} exists; choose another name or remove it")


def counted(counts: Mapping[Name, int]) -> str:
    """`crowd 2, rle 1`, most first; `none`."""
    return (
        ", ".join(
            f"{name} {count}"
            for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        )
        or "none"
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RecordError(
            f"cannot be read: {error.strerror}",
            field="file",
            remedy="correct the path",
            file=str(path),
        ) from error


def _require_distinct(path: Path, where: str, ids: Sequence[int]) -> None:
    place_of: dict[int, int] = {}
    for place, id in enumerate(ids):
        if id in place_of:
            raise RecordError(
                f"is {id}, as {where}[{place_of[id]}].id is",
                field=f"{where}[{place}].id",
                remedy="give every entry its own id",
                file=str(path),
            )
        place_of[id] = place


def _check_names(path: Path, categories: Sequence[CocoCategory], used: set[int]) -> None:
    """Names in use become the text that a model learns, and lead back to one category each."""
    place_of: dict[str, int] = {}
    for place, category in enumerate(categories):
        if category.id not in used:
            continue
        field = f"categories[{place}].name"
        if not category.name.strip() or any(
            token in category.name for token in (END_OF_TURN, *COORD_TOKENS)
        ):
            raise RecordError(
                f"is {category.name!r}, which cannot be an object's desc",
                field=field,
                remedy="give the category a name in words",
                file=str(path),
            )
        if category.name in place_of:
            problem = (
                f"is {category.name!r}, as that of categories[{place_of[category.name]}] is, and"
                " both are in use"
            )
            raise RecordError(
                problem,
                field=field,
                remedy="rename one: predictions find their category by its name",
                file=str(path),
            )
        place_of[category.name] = place


def _problem(error: ErrorDetails) -> str:
    if error["type"] == "missing":
        return "is missing"
    message, shown = error["msg"].removeprefix("Value error, "), repr(error["input"])
    got = f", got {shown}" if len(shown) <= 60 and error["type"] != "json_invalid" else ""
    return f"{message[0].lower()}{message[1:]}{got}"


def _field(error: ErrorDetails) -> str:
    # A union puts the type it tried into `loc`: `list[list[float]]`, `dict[str,any]`, `int`.
    keys = tuple(
        part
        for part in error["loc"]
        if isinstance(part, int) or (part.isidentifier() and part not in ("int", "bool"))
    )
    return dotted(keys) or "file"


def _remedy(error: ErrorDetails) -> str:
    if error["type"] == "json_invalid":
        return "it must be one JSON value in UTF-8; download or export it again"
    if error["type"] == "missing":
        return "add it"
    return "correct the entry, or remove it"
