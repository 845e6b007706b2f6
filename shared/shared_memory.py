"""Memory that processes of one machine have in common, under a name that is known for as long as it takes to open it."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from pathlib import Path

FOLDER = Path("/dev/shm")
NAME_BYTES = 256
"""What a name fits into."""


class SharedMemory:
    """A mapping that lives as long as `memory` is referred to. Once its name is forgotten, nothing is left behind by a process that is killed."""

    def __init__(self, path: str, descriptor: int) -> None:
        """Takes over the open file."""
        self.path = path
        try:
            self.memory = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)

    @classmethod
    def create(cls, num_bytes: int) -> SharedMemory | None:
        """None where the machine has no such memory, or too little of it to leave half free (containers have 64 MB unless told otherwise)."""
        if not FOLDER.is_dir() or shutil.disk_usage(FOLDER).free < 2 * num_bytes:
            return None
        descriptor, path = tempfile.mkstemp(prefix="rollmatch-weights-", dir=FOLDER)
        try:
            # Taken now: writing to a page that is not there any more would kill the process.
            os.posix_fallocate(descriptor, 0, num_bytes)
        except OSError:
            os.close(descriptor)
            Path(path).unlink()
            return None
        return cls(path, descriptor)

    @classmethod
    def open(cls, path: str) -> SharedMemory | None:
        """What another process created; None where this one cannot, because it runs elsewhere, or as somebody else."""
        try:
            return cls(path, os.open(path, os.O_RDWR))
        except OSError:
            return None

    def forget(self) -> None:
        """Take the name away: nobody can open it any more, whoever has goes on."""
        Path(self.path).unlink(missing_ok=True)
