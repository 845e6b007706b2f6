"""Files that keep what a start has found about a data file, for the starts after it.

Whatever decides a result is in its key, the project's own sources included: a result of another
key is not read. What took less than `QUICK_S` is not kept: a file would cost as much.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import learner
import shared
from learner.model.checkpoint_folder import open_as_folder

_LOGGER = logging.getLogger(__name__)

QUICK_S = 1.0
_KEY = "key"

Fingerprint = tuple[int, int, int]
"""Size in bytes, and when contents and inode last changed (which no copy can set), in ns."""


def fingerprint(path: Path) -> Fingerprint | None:
    """Read size and times of a file; None where there is none."""
    try:
        status = path.stat()
    except (OSError, ValueError):  # ValueError: a path with a null character
        return None
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def digest_of(*content: object) -> str:
    """Digest values whose `repr` tells all about them."""
    return hashlib.sha256(repr(content).encode()).hexdigest()


@cache
def sources_digest() -> str:
    """Digest the modules that rows are read, checked and encoded with."""
    digest = hashlib.sha256()
    for package in (shared, learner):
        assert package.__file__ is not None
        root = Path(package.__file__).parent
        for file in sorted(root.rglob("*.py")):
            digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def kept_file(data_file: Path, kind: str, suffix: str) -> Path:
    """Return the file for a kind of results: one per data file, so that none outgrows its data."""
    home = Path("~").expanduser() if "HOME" in os.environ else Path(tempfile.gettempdir())
    folder = os.environ.get("XDG_CACHE_HOME") or home / ".cache"
    digest = hashlib.sha256(str(data_file.absolute()).encode()).hexdigest()
    return Path(folder) / "rollmatch" / kind / f"{digest[:16]}.{suffix}"


def replace_file(path: Path, content: bytes, *, lost: str) -> None:
    """Replace a kept file, at once: several processes may read and write it.

    Where it cannot be written, warn that the next start does what is `lost` again.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            try:
                file.write(content)
                file.close()
                open_as_folder(Path(file.name))
                Path(file.name).replace(path)
            except OSError:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        _LOGGER.warning("the next start %s again: cannot write %s: %s", lost, path, error.strerror)


def read_arrays(path: Path, key: str) -> dict[str, np.ndarray] | None:
    """Read what `keep_arrays` has kept; None for another key, and where nothing can be read."""
    try:
        with np.load(path, allow_pickle=False) as file:
            if bytes(file[_KEY]).decode() != key:
                return None
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def keep_arrays(path: Path, key: str, arrays: Mapping[str, np.ndarray], *, lost: str) -> None:
    """Keep arrays under this key; `lost` as for `replace_file`."""
    content = io.BytesIO()
    named: dict[str, Any] = {_KEY: np.frombuffer(key.encode(), dtype=np.uint8), **arrays}
    np.savez(content, **named)
    replace_file(path, content.getvalue(), lost=lost)


def as_array(values: Sequence[Any]) -> np.ndarray:
    """Write values of JSON as an array of bytes."""
    return np.frombuffer(json.dumps(values).encode(), dtype=np.uint8)


def from_array(values: np.ndarray) -> list[Any]:
    return list(json.loads(values.tobytes()))
