"""Files that grow while a command runs, and what is said where the disk is full."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import IO

from shared.errors import StorageError

ODD = "backslashreplace"
"""For half a surrogate pair, as in the name of a file that is no UTF-8: it must not keep the rest from being written."""


def cannot_write(path: Path, error: OSError) -> StorageError:
    """Of a run's folder."""
    return StorageError(str(path), str(error))


class RunFile:
    """What was written is on its way to the disk when `write` returns: a command that dies keeps it. And nothing is left in a buffer for `close`, which would
    fail once more where the disk is full, in place of the error that ended the command."""

    def __init__(self, path: Path, *, mode: str = "wb", error_of: Callable[[Path, OSError], StorageError] = cannot_write) -> None:
        """Args:
            mode: "wb", or "ab" to go on with the file.
            error_of: what is raised for an OSError.

        Raises:
            StorageError: it cannot be opened.
        """
        self.path, self._error_of = path, error_of
        try:
            self.file: IO[bytes] = path.open(mode, buffering=0)
        except OSError as error:
            raise error_of(path, error) from error

    def write(self, text: str) -> None:
        """All of it. Raises StorageError."""
        data = memoryview(text.encode(errors=ODD))
        try:
            # A disk that is almost full takes a part, and refuses the rest at the next call.
            while data:
                data = data[self.file.write(data) :]
        except OSError as error:
            raise self._error_of(self.path, error) from error

    def close(self) -> None:
        self.file.close()


def write_run_file(path: Path, text: str) -> None:
    """In place of what was there. Raises StorageError."""
    try:
        path.write_text(text, encoding="utf-8", errors=ODD)
    except OSError as error:
        raise cannot_write(path, error) from error
