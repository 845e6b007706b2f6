"""Limits of the sizes of the user's data: larger files are damaged, or made to exhaust a machine.

The limits are far above what fits into a context of a million tokens. Edit them here if your data
is valid and larger.
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
"""Bytes of a line in a JSONL file."""
MAX_FILE_BYTES = 8 * 2**30
"""Bytes of a file that is read as a whole: annotations."""
MAX_SEARCH_BYTES = 2**30
"""Bytes after which the search for the end of a line that is too long stops."""
MAX_LABEL_BYTES = 16 * 2**20
"""Bytes of the file with an image's labels, and of YOLO's `data.yaml`."""
MAX_PICKLE_BYTES = 64 * 2**20
"""Bytes of RefCOCO's pickle file of references; the releases have 15 MB.

Reading it may take 64 times its size in memory.
"""
MAX_VALUES = 10_000_000
"""Number of values in RefCOCO's pickle file, with shared values counted each time they are used.

The releases have 3 million.
"""
MAX_TEXT = 1_000_000
"""Number of characters of a text, such as a prompt or a name."""
MAX_IMAGES = 1_000
"""Number of images of a row."""
MAX_COORDINATES = 100_000
"""Number of coordinates of all objects of a row; each is at least one token of the answer."""
MAX_VERTICES = 20_000
"""Number of vertices of an imported polygon; the time to simplify it is quadratic."""
MAX_IMAGE_BYTES = 512 * 2**20
"""Bytes of an image file."""
MAX_PIXELS = 128 * 2**20
"""Width times height of an image. Decoded it takes 384 MiB; Pillow's limit is a third higher."""
MAX_FOLDER_FILES = 5_000_000
"""Number of files in a folder that is searched recursively."""
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def above(name: str, limit: int) -> str:
    """Return how messages name an exceeded limit.

    Example: `more than MAX_IMAGES = 1000 (shared/data/limits.py)`.
    """
    return f"more than {name} = {limit} ({WHERE})"


def require_file(path: Path) -> os.stat_result:
    """Return the status of a regular file. Raises OSError for a pipe, a socket or a device.

    The file is not opened, because reading a pipe, socket or device might never end.
    """
    status = path.stat()
    if (kind := _KINDS.get(stat.S_IFMT(status.st_mode))) is not None:
        raise OSError(errno.EINVAL, f"it is {kind}, not a file")
    return status


def read_file(path: Path, name: str = "MAX_FILE_BYTES", limit: int = MAX_FILE_BYTES) -> bytes:
    """Return the content of a regular file. Raises OSError, also for more than `limit` bytes.

    `name` is the limit's name in messages."""
    size = require_file(path).st_size
    if size > limit:
        raise OSError(errno.EFBIG, f"it has {size} bytes, {above(name, limit)}")
    with path.open("rb") as file:
        return file.read(size)  # no more: a file in /proc reports size 0 and may be endless


class FileLine(NamedTuple):
    """One line of a data file, and its place in the file."""

    number: int
    """Line number, from 1."""
    offset: int
    """Number of bytes before the line in the file."""
    content: bytes
    """The line without its end; if the line is too long, only its beginning."""
    size: int
    """Number of bytes of the line, including its end."""
    problem: str | None
    """What a message says if the line is too long; None if it is not."""

    def require_short(self) -> None:
        """Raise RecordError if the line is too long. The error does not name file and line."""
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
