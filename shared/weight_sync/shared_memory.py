"""Memory shared by processes of one machine. It has no name, so it is freed even after a kill."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import uuid
import weakref
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

NAME = "rollmatch-weights"
MEMINFO = Path("/proc/meminfo")
CONTAINER = Path("/sys/fs/cgroup")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
OWN_PROCESSES = Path("/proc/self/ns/pid")
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""The size cannot change: reading a page that no longer exists would kill the process."""


class Address(NamedTuple):
    """The address of shared memory for another process, in plain numbers."""

    process: int
    """May be the id of a different process elsewhere: hence `device` and `inode`."""
    descriptor: int
    num_bytes: int
    device: int
    inode: int

    @property
    def path(self) -> Path:
        return Path(f"/proc/{self.process}/fd/{self.descriptor}")

    def is_of(self, descriptor: int) -> bool:
        """Return whether the open file is this memory, unchanged."""
        found = os.fstat(descriptor)
        return (
            (found.st_dev, found.st_ino, found.st_size) == (self.device, self.inode, self.num_bytes)
            and found.st_uid == os.geteuid()
            and fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS
        )


NOWHERE = Address(0, 0, 0, 0, 0)
"""The address of missing memory."""


class SharedMemory:
    """A mapping that exists as long as something refers to `memory`."""

    def __init__(self, descriptor: int) -> None:
        """Take over the open file. Raises OSError, and leaves the file open, if it cannot be
        mapped."""
        self.memory = mmap.mmap(descriptor, 0)
        self._descriptor = descriptor
        self._closing = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def create(cls, num_bytes: int) -> SharedMemory | None:
        """Allocate memory; None if the system has none, or less than twice as much available."""
        if available_bytes() < 2 * num_bytes:
            return None
        try:
            descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError:
            return None
        try:
            # Allocate now: writing when no memory is left would kill the process.
            os.posix_fallocate(descriptor, 0, num_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
            return cls(descriptor)
        except OSError:
            os.close(descriptor)
            return None

    @classmethod
    def open(cls, address: Address) -> SharedMemory | None:
        """Open memory that another process of this user created; None if that is impossible."""
        try:
            # Check first: the sender of an address must not make this process open any other file.
            if not str(address.path.readlink()).startswith(f"/memfd:{NAME}"):
                return None
            descriptor = os.open(address.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        with suppress(OSError):
            if address.is_of(descriptor):
                return cls(descriptor)
        os.close(descriptor)
        return None

    @property
    def address(self) -> Address:
        assert self._closing.alive, "`forget` was called"
        found = os.fstat(self._descriptor)
        return Address(os.getpid(), self._descriptor, found.st_size, found.st_dev, found.st_ino)

    def forget(self) -> None:
        """Close the file descriptor. New readers cannot open it; existing mappings keep working."""
        self._closing()


def this_machine() -> tuple[int, ...]:
    """Return the id of this boot and container; its processes can open each other's memory.

    Zeros if the system has no such ids. Then only trying to open the memory shows if that works.
    """
    try:
        boot = uuid.UUID(BOOT_ID.read_text().strip())
        container = OWN_PROCESSES.stat().st_ino
    except OSError:
        return 0, 0, 0
    return (*struct.unpack("<qq", boot.bytes), container)


def available_bytes() -> int:
    """Return the bytes that system and container can still give to this process; 0 if unknown."""
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return 0
    (kib,) = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    available = int(kib) * 1024
    try:
        limit = (CONTAINER / "memory.max").read_text().strip()
        usage = (CONTAINER / "memory.stat").read_text().splitlines()
    except OSError:
        return available
    if limit == "max":
        return available
    # Cached files can be evicted when memory is needed, so they do not count.
    used = dict(line.split() for line in usage)
    return min(available, int(limit) - int(used["anon"]) - int(used["shmem"]))
