"""Limits for data from outside: beyond them a file is damaged, or made to exhaust a machine.

They are far above what fits into a context of a million tokens. Edit them here if your data is
valid and larger.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shared.errors import RecordError

WHERE = "shared/data/limits.py"
MAX_LINE_BYTES = 16 * 2**20
"""Line of a JSONL file."""
MAX_FILE_BYTES = 8 * 2**30
"""File that is read as a whole: annotations."""
MAX_SEARCH_BYTES = 2**30
"""Line that is too long: the search for its end stops here."""
MAX_EXAMPLE_BYTES = 256 * 2**20
"""Line with an environment's example or rollout, which may contain images."""
MAX_LABEL_BYTES = 16 * 2**20
"""Labels of an image, and YOLO's `data.yaml`."""
MAX_PICKLE_BYTES = 64 * 2**20
"""RefCOCO's file of refs; the releases have 15 MB. Reading it may take 64 times its size in
memory."""
MAX_VALUES = 10_000_000
"""Values in that file with its references expanded; the releases have 3 million."""
MAX_TEXT = 1_000_000
"""Characters of a text, such as a prompt or a name."""
MAX_IMAGES = 1_000
"""Images of a row."""
MAX_COORDINATES = 100_000
"""Numbers of all boxes, polygons and points of a row: each is at least one token of the answer."""
MAX_VERTICES = 20_000
"""Vertices of an imported polygon; the time to simplify it is quadratic."""
MAX_IMAGE_BYTES = 512 * 2**20
"""Image file."""
MAX_PIXELS = 128 * 2**20
"""Width times height of an image. Decoded it takes 384 MiB; Pillow's limit is a third higher."""
MAX_FOLDER_FILES = 5_000_000
"""Files of a folder that is searched recursively."""
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def above(name: str, limit: int) -> str:
    """Name an exceeded limit: `more than MAX_IMAGES = 1000 (shared/data/limits.py)`."""
    return f"more than {name} = {limit} ({WHERE})"


def require_file(path: Path) -> os.stat_result:
    """Return the status of a file. Raises OSError for a pipe, a socket or a device.

    It is not opened, because reading one of these might never end.
    """
    status = path.stat()
    if (kind := _KINDS.get(stat.S_IFMT(status.st_mode))) is not None:
        raise OSError(errno.EINVAL, f"it is {kind}, not a file")
    return status


def read_file(path: Path, name: str = "MAX_FILE_BYTES", limit: int = MAX_FILE_BYTES) -> bytes:
    """Read a regular file of at most `limit` bytes; messages name it `name`. Raises OSError."""
    size = require_file(path).st_size
    if size > limit:
        raise OSError(errno.EFBIG, f"it has {size} bytes, {above(name, limit)}")
    with path.open("rb") as file:
        return file.read(size)  # no more: a file in /proc reports size 0 and may be endless


class FileLine(NamedTuple):
    """A line of a file."""

    number: int
    """From 1."""
    offset: int
    """Bytes of the file before it."""
    content: bytes
    """Without its end; if the line is too long, only its beginning."""
    size: int
    """Bytes, including its end."""
    problem: str | None
    """Why it is too long, or None."""

    def require_short(self) -> None:
        """Raise RecordError, without file and line, if the line is too long."""
        if self.problem is not None:
            remedy = "split the row, or put its data into separate files"
            raise RecordError(self.problem, field="row", remedy=remedy)


def file_lines(
    path: Path, name: str = "MAX_LINE_BYTES", limit: int = MAX_LINE_BYTES
) -> Iterator[FileLine]:
    """Yield the non-blank lines of a regular file, holding at most `limit` bytes of each.

    Raises OSError.
    """
    require_file(path)
    with path.open("rb", buffering=2**20) as file:
        offset = 0
        for number in itertools.count(1):
            content = part = file.readline(limit + 2)
            if not content:
                return
            size = len(content)
            while not part.endswith(b"\n") and (part := file.readline(2**20)):
                size += len(part)
                if size > MAX_SEARCH_BYTES:
                    over = above("MAX_SEARCH_BYTES", MAX_SEARCH_BYTES)
                    raise OSError(errno.EFBIG, f"line {number} has {over}")
            content = content.rstrip(b"\r\n")
            is_long = size > limit + 2 or len(content) > limit
            problem = f"has {size} bytes, {above(name, limit)}" if is_long else None
            if content.strip():
                yield FileLine(number, offset, content, size, problem)
            offset += size
