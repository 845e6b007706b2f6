"""A small file of one JSON object that a folder may hold, read with every field checked."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from shared.errors import ConfigError

T = TypeVar("T")


def read_record(file: Path, kind: type[T], *, key: str, remedy: str) -> T | None:
    """Return what the file says, as the dataclass `kind`; None where there is no such file.

    Args:
        key: of the configuration, by which the file was found.
        remedy: what to do about a file that is damaged.

    Raises:
        ConfigError: it names the file, and the first field that is missing, unknown, of another
            type or out of range.
    """
    try:
        return TypeAdapter(kind).validate_json(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        wrong = ": ".join((*map(str, first["loc"]), first["msg"]))
        raise ConfigError(f"{key}: {file} cannot be read ({wrong}); {remedy}") from error
    except OSError as error:
        raise ConfigError(f"{key}: {file} cannot be read ({error}); {remedy}") from error
