"""Files that keep what a start has found about a data file, for the starts after it.

Whatever decides a result is in its key: a result of another key is not read. What took less than
`QUICK_S` is not kept: a file would cost as much.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from learner.model.checkpoint_folder import open_as_folder

_LOGGER = logging.getLogger(__name__)

READER_VERSION = 1
"""Version of how rows and images are read, checked and encoded; part of every key.

Raise it whenever the same files give other samples, measures or messages.
`tests/learner/data/test_reader_version.py` fails for most such changes; it does not see the wording
of messages, nor how many tokens a prompt and its pictures have (`PromptEncoder`).
"""
QUICK_S = 1.0
_REST = "rest"

Fingerprint = list[int]
"""Size in bytes, and when contents and inode last changed (which no copy can set), in ns."""


def fingerprint(path: Path) -> Fingerprint | None:
    """Read size and times of a file; None where there is none."""
    try:
        status = path.stat()
    except (OSError, ValueError):  # ValueError: a path with a null character
        return None
    # The time of the inode too: a copy can set the other one, and keep the size.
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def digest_of(*content: object) -> str:
    """Digest the reader's version, and values whose `repr` tells all about them."""
    return hashlib.sha256(repr((READER_VERSION, *content)).encode()).hexdigest()


def kept_file(data_file: Path, kind: str) -> Path:
    """Return the file for a kind of results: one per data file, so that none outgrows its data."""
    # Without HOME, as in some containers, `expanduser` asks the list of users, which may not have
    # this one.
    home = Path("~").expanduser() if "HOME" in os.environ else Path(tempfile.gettempdir())
    folder = os.environ.get("XDG_CACHE_HOME") or home / ".cache"
    digest = hashlib.sha256(str(data_file.absolute()).encode()).hexdigest()
    return Path(folder) / "rollmatch" / kind / f"{digest[:16]}.npz"


class Kept(NamedTuple):
    """What was kept of one kind."""

    arrays: dict[str, np.ndarray]
    rest: Any
    """Values of JSON."""


def read(path: Path, key: str) -> Kept | None:
    """Read what `keep` has kept; None for another key, and if nothing can be read."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        kept_key, rest = json.loads(arrays.pop(_REST).tobytes())
    # Whatever is wrong with a kept file, it is measured again and replaced.
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return Kept(arrays, rest) if kept_key == key else None


def keep(path: Path, key: str, arrays: Mapping[str, np.ndarray], rest: Any, *, lost: str) -> None:
    """Keep arrays and values of JSON under a key.

    The file is replaced at once: several processes may read and write it. If it cannot be written,
    a warning says that the next start does what is `lost` again.
    """
    content = io.BytesIO()
    text = np.frombuffer(json.dumps([key, rest]).encode(), dtype=np.uint8)
    named: dict[str, Any] = {_REST: text, **arrays}
    np.savez(content, **named)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder, since a file is replaced at once on its own disk only.
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
        _LOGGER.warning("the next start %s again: cannot write %s: %s", lost, path, error.strerror)
