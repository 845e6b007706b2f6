"""Finds and reads files to import, and writes files that appear only when complete."""

from __future__ import annotations

import codecs
import json
import reprlib
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path, PurePath
from typing import IO, Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from shared.config.base import dotted
from shared.data.file_rows import readable, require_utf8
from shared.data.limits import MAX_FILE_BYTES, read_file
from shared.errors import ConfigError, RecordError

T = TypeVar("T")
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
_SHORT.maxstring = _SHORT.maxother = 60


class FileEntry(BaseModel):
    """Base of entries of annotation files. Unknown keys are ignored; numbers must be finite."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)


def find_file(path: Path) -> Path:
    """Return the file at this path, or one with an equivalent name.

    The suffix may differ in case. The name may differ in Unicode normalisation: on a macOS disk,
    `ü` is `u` and two dots.
    """
    if path.is_file():
        return path
    return files_by_suffix(_find_folder(path.parent)).get(file_key(path.name), path)


def file_key(name: str) -> tuple[str, str]:
    """Return a file name's stem in Unicode form NFC, and its suffix in lower case."""
    path = PurePath(unicodedata.normalize("NFC", name))
    return path.stem, path.suffix.lower()


@lru_cache(maxsize=64)
def _find_folder(path: Path) -> Path:
    """Return the folder at this path, or one whose name differs only in Unicode form."""
    if path.is_dir() or path == path.parent:
        return path
    folder = _find_folder(path.parent)
    wanted = unicodedata.normalize("NFC", path.name)
    names = [one.name for one in folder.iterdir()] if folder.is_dir() else []
    same = sorted(name for name in names if unicodedata.normalize("NFC", name) == wanted)
    return folder / (same[0] if same else path.name)


@lru_cache(maxsize=8)
def files_by_suffix(folder: Path) -> Mapping[tuple[str, str], Path]:
    """Map the `file_key` of each file in a folder to the file; the first by name wins."""
    files = sorted(folder.iterdir(), reverse=True) if folder.is_dir() else []
    return {file_key(file.name): file for file in files if file.is_file()}


def require_folder(key: str, path: Path, holds: str) -> None:
    if not path.is_dir():
        raise ConfigError(f"{key}: {path} is not a folder; give the folder that {holds}")


def read_bytes(path: Path, name: str = "MAX_FILE_BYTES", limit: int = MAX_FILE_BYTES) -> bytes:
    """Read a file like `read_file`, without its byte order mark. Raises RecordError.

    `limit`: maximum number of bytes; `name`: name of the limit, for the error.
    """
    with readable(path):
        content = read_file(path, name, limit)
    require_utf8(content, path)
    return content.removeprefix(codecs.BOM_UTF8)


def parse_json(
    path: Path, parse: Callable[[Any], T], data: Any, remedy: str, line: int | None = None
) -> T:
    """Return `parse(data)`, a pydantic reader of JSON or of decoded JSON.

    Raises RecordError, which names the field of the first problem and counts the others.
    """
    try:
        return parse(data)
    except ValidationError as error:
        field, problem = first_problem(error)
        raise RecordError(
            problem, field=field or "file", remedy=remedy, file=str(path), line=line
        ) from None


def first_problem(error: ValidationError) -> tuple[str, str]:
    """Return the field of pydantic's first problem, and a message about it.

    The message also says how many other problems there are.
    """
    first = error.errors(include_url=False)[0]
    # For unions, `loc` contains the tried type: `list[list[float]]`, `dict[str,any]`.
    keys = tuple(key for key in first["loc"] if isinstance(key, int) or key.isidentifier())
    message = first["msg"].removeprefix("Value error, ")
    shown = _SHORT.repr(first["input"])  # YAML aliases may expand a thousandfold
    is_shown = len(shown) <= 60 and first["type"] != "missing"
    got = f", got {shown}" if is_shown else ""
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return dotted(keys), f"{message[0].lower()}{message[1:]}{got}{more}"


@contextmanager
def written_once(path: Path) -> Iterator[IO[str]]:
    """Open a temporary file for writing. It becomes `path` if the `with` block succeeds.

    If the block fails, the temporary file is removed.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            yield file
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_json(path: Path, value: object) -> None:
    with written_once(path) as file:
        file.write(json.dumps(value, ensure_ascii=False, indent=2) + "\n")


def require_absent(*paths: Path) -> None:
    """Raise ConfigError if a file to be written already exists."""
    existing = [str(path) for path in paths if path.exists()]
    if existing:
        raise ConfigError(f"out: {', '.join(existing)} exists; choose another name or remove it")
