"""Memory shared by processes of one machine, for weights that a weight sync sends.

The memory has no name in the file system, so it is freed even if its processes are killed.
"""

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
"""Seals (memfd) that fix the size of the memory.

Without them the size could shrink, and reading a page that no longer exists would kill the process.
"""


class Address(NamedTuple):
    """What another process needs to open shared memory: plain numbers that can be sent to it."""

    process: int
    """Id of the process that created the memory.

    On another machine or in another container, the id may be of another process. `device` and
    `inode` show this.
    """
    descriptor: int
    num_bytes: int
    device: int
    inode: int

    @property
    def path(self) -> Path:
        return Path(f"/proc/{self.process}/fd/{self.descriptor}")

    def is_of(self, descriptor: int) -> bool:
        """Return whether the open file `descriptor` is the shared memory that this address names.

        The file must be the same, have the size in the address, belong to this user, and have
        `SEALS`.
        """
        found = os.fstat(descriptor)
        return (
            (found.st_dev, found.st_ino, found.st_size) == (self.device, self.inode, self.num_bytes)
            and found.st_uid == os.geteuid()
            and fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS
        )


NOWHERE = Address(0, 0, 0, 0, 0)
"""The address that is sent if there is no shared memory."""


class SharedMemory:
    """Shared memory mapped into this process, for as long as something refers to `memory`."""

    def __init__(self, descriptor: int) -> None:
        """Map the open file `descriptor` into memory, and become the owner of the file.

        Raises OSError, and leaves the file open, if it cannot be mapped.
        """
        self.memory = mmap.mmap(descriptor, 0)
        self._descriptor = descriptor
        self._closing = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def create(cls, num_bytes: int) -> SharedMemory | None:
        """Allocate shared memory of `num_bytes`; None if that fails.

        Also None if less than twice `num_bytes` of memory is available.
        """
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
        """Open shared memory that another process of this user created; None if that fails."""
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
        """Close the file descriptor: no other process can open the memory any more.

        Existing mappings continue to work.
        """
        self._closing()


def this_machine() -> tuple[int, ...]:
    """Return an id that is equal in all processes that can open each other's shared memory.

    The id identifies the boot and the container. It is zeros if the system has no such ids. Then
    only an attempt to open the memory shows whether it can be opened.
    """
    try:
        boot = uuid.UUID(BOOT_ID.read_text().strip())
        container = OWN_PROCESSES.stat().st_ino
    except OSError:
        return 0, 0, 0
    return (*struct.unpack("<qq", boot.bytes), container)


def available_bytes() -> int:
    """Return the bytes of memory that this process can still allocate; 0 if unknown.

    The system and the container limit them.
    """
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
