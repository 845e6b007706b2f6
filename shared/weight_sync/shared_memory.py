"""Memory that processes of one machine share. Without a name, a killed process leaves none."""

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
"""Nobody can change the size: reading a page that is not there any more would kill the process."""


class Address(NamedTuple):
    """The way to a memory for another process, in plain numbers."""

    process: int
    """May be another process's id elsewhere: hence the last two."""
    descriptor: int
    num_bytes: int
    device: int
    inode: int

    @property
    def path(self) -> Path:
        return Path(f"/proc/{self.process}/fd/{self.descriptor}")

    def is_of(self, descriptor: int) -> bool:
        """Return whether the open file is the memory that was made here, as it was."""
        found = os.fstat(descriptor)
        return (
            (found.st_dev, found.st_ino, found.st_size) == (self.device, self.inode, self.num_bytes)
            and found.st_uid == os.geteuid()
            and fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS
        )


NOWHERE = Address(0, 0, 0, 0, 0)
"""The address of no memory."""


class SharedMemory:
    """A mapping that lives as long as `memory` is referred to."""

    def __init__(self, descriptor: int) -> None:
        """Take over the open file. Raises OSError where it cannot be mapped: it stays open then."""
        self.memory = mmap.mmap(descriptor, 0)
        self._descriptor = descriptor
        self._closing = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def create(cls, num_bytes: int) -> SharedMemory | None:
        """Make memory; None where the system has none, or too little to leave half of it free."""
        if available_bytes() < 2 * num_bytes:
            return None
        try:
            descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError:
            return None
        try:
            # Taken now: a process that writes where none is left is killed.
            os.posix_fallocate(descriptor, 0, num_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
            return cls(descriptor)
        except OSError:
            os.close(descriptor)
            return None

    @classmethod
    def open(cls, address: Address) -> SharedMemory | None:
        """Open what another process of this user created; None where it cannot be opened."""
        try:
            # Looked at first: whoever may name an address may not have any other file opened here.
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
        assert self._closing.alive, "the address was taken away"
        found = os.fstat(self._descriptor)
        return Address(os.getpid(), self._descriptor, found.st_size, found.st_dev, found.st_ino)

    def forget(self) -> None:
        """Take the address away: nobody comes any more, whoever has come goes on."""
        self._closing()


def this_machine() -> tuple[int, ...]:
    """Return numbers of one start of one system and of one container, in which processes can find
    each other's memory. Zeros where the system does not say; then trying to open memory tells.
    """
    try:
        boot = uuid.UUID(BOOT_ID.read_text().strip())
        container = OWN_PROCESSES.stat().st_ino
    except OSError:
        return 0, 0, 0
    return (*struct.unpack("<qq", boot.bytes), container)


def available_bytes() -> int:
    """Return what system and container could still give to this process; 0: they do not say."""
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
    # Files that are cached make room when it is needed, so they do not count.
    used = dict(line.split() for line in usage)
    return min(available, int(limit) - int(used["anon"]) - int(used["shmem"]))
