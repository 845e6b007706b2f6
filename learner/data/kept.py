"""A cache on disk for the results of checking a data file, so that later runs start faster.

The key of a result contains everything that the result depends on. A result with another key is
not used. Results that take less than `QUICK_S` seconds are not cached: reading would cost as much.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from learner.model.checkpoint_folder import open_as_folder

_LOGGER = logging.getLogger(__name__)

READER_VERSION = 2
"""Version of the code that reads, checks and encodes rows and images; part of every cache key.

Raise it if the same files give different samples, measures or messages.
`tests/learner/data/test_reader_version.py` fails for most such changes. It does not check the
wording of messages or the number of tokens of a prompt and its images (`PromptEncoder`).
"""
QUICK_S = 1.0
_REST = "rest"

Fingerprint = list[int]
"""Size of a file in bytes, and its last change of contents and of inode (times in ns)."""


def fingerprint(path: Path) -> Fingerprint | None:
    """Return size and change times of a file, to detect later changes; None if it is missing."""
    try:
        status = path.stat()
    except (OSError, ValueError):  # ValueError: a path with a null character
        return None
    # A copy can keep the size and set the time of the contents, but not the time of the inode.
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def digest_of(*content: object) -> str:
    """Return a digest of `READER_VERSION` and of values, which must have a complete `repr`."""
    return hashlib.sha256(repr((READER_VERSION, *content)).encode()).hexdigest()


def kept_file(data_file: Path, kind: str) -> Path:
    """Return the path of a data file's cache file for one kind of results."""
    # Without HOME, as in some containers, `expanduser` reads the list of users, which may not
    # contain this user.
    home = Path("~").expanduser() if "HOME" in os.environ else Path(tempfile.gettempdir())
    folder = os.environ.get("XDG_CACHE_HOME") or home / ".cache"
    digest = hashlib.sha256(str(data_file.absolute()).encode()).hexdigest()
    return Path(folder) / "rollmatch" / kind / f"{digest[:16]}.npz"


class Kept(NamedTuple):
    """The content of a cache file, which `keep` wrote."""

    arrays: dict[str, np.ndarray]
    rest: Any
    """Everything except the arrays, as JSON values."""


def read(path: Path, key: str) -> Kept | None:
    """Read a cache file that `keep` wrote. Return None if it cannot be used.

    That is, if it was written with another `key`, is missing or is damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        kept_key, rest = json.loads(arrays.pop(_REST).tobytes())
    # If a cache file is damaged, its data are measured again and the file is replaced.
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return Kept(arrays, rest) if kept_key == key else None


def read_or_measure(
    path: Path, key: str, measure: Callable[[], Kept], *, lost: str, quick_s: float | None = None
) -> Kept:
    """Return a cache file's content, or measure it, and write the file if that takes long.

    Args:
        key: as for `read`; empty: the result depends on something unknown and is not cached.
        lost: as for `keep`.
        quick_s: results that take fewer seconds are not cached; None: `QUICK_S`.
    """
    if key and (found := read(path, key)) is not None:
        return found
    started_s = time.monotonic()
    measured = measure()
    if key and time.monotonic() - started_s >= (QUICK_S if quick_s is None else quick_s):
        keep(path, key, measured.arrays, measured.rest, lost=lost)
    return measured


def keep(path: Path, key: str, arrays: Mapping[str, np.ndarray], rest: Any, *, lost: str) -> None:
    """Write arrays and JSON values (`rest`) to a cache file, with the key that `read` compares.

    The file is replaced atomically, because several processes may read and write it. If it cannot
    be written, a warning says what the next start has to repeat (`lost`).
    """
    content = io.BytesIO()
    text = np.frombuffer(json.dumps([key, rest]).encode(), dtype=np.uint8)
    named: dict[str, Any] = {_REST: text, **arrays}
    np.savez(content, **named)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder, because `replace` is atomic only on the same disk.
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            try:
                file.write(content.getvalue())
                file.close()
                open_as_folder(Path(file.name))
                Path(file.name).replace(path)
            except OSError:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        _LOGGER.warning(
            "cannot write %s (%s), so the next start %s again; free space or permit writing there",
            path,
            error.strerror,
            lost,
        )
