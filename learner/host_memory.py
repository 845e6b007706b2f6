"""The host memory that this process can use: the machine's memory, or its container's limit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """The host memory that the learner ranks of one node need, and that is available to them.

    Example: two ranks on one node that need 3 GiB each, and see 9 GiB available, are
    `NodeMemory(6 << 30, 9 << 30)`.
    """

    needed: int
    """Bytes that all learner ranks of the node need together."""
    available: int
    """Available bytes, as seen by the rank that sees the fewest: its container may limit it."""

    @classmethod
    def scarcest(
        cls, needed: Iterable[int], available: Iterable[int], nodes: Iterable[int]
    ) -> NodeMemory:
        """Return the node that would have the least memory left. Arguments are in rank order.

        Args:
            needed: bytes that each rank needs.
            available: bytes that each rank sees as available on its node.
            nodes: the number of each rank's node (`node_number`).
        """
        found: dict[int, NodeMemory] = {}
        for size, left, node in zip(needed, available, nodes, strict=True):
            others = found.get(node, cls(0, left))
            found[node] = cls(others.needed + size, min(others.available, left))
        return min(found.values(), key=lambda one: one.available - one.needed)


def node_number() -> int:
    """Return a number of 63 bits that identifies this machine, even from inside a container. If the
    system has no boot id, all machines get the same number.
    """
    digest = hashlib.sha256("".join(_lines(BOOT_ID)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def available_memory() -> int:
    """Return how many bytes of host memory can still be allocated.

    Memory that holds cached files counts as available.
    """
    (kib,) = (int(line.split()[1]) for line in _lines(MEMINFO) if line.startswith("MemAvailable:"))
    left = [1024 * kib]
    for file, limit in container_limits():
        used, cached = {
            "memory.max": ("memory.current", ("inactive_file", "active_file")),
            "memory.limit_in_bytes": (
                "memory.usage_in_bytes",
                ("total_inactive_file", "total_active_file"),
            ),
        }[file.name]
        counts = dict(line.split() for line in _lines(file.with_name("memory.stat")))
        for usage in _lines(file.with_name(used)):
            left.append(limit - int(usage) + sum(int(counts[name]) for name in cached))
    return min(left)


def in_gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"


def container_limits() -> Iterator[tuple[Path, int]]:
    """Yield each memory limit of this process's cgroups (version 1 or 2): file and bytes."""
    for line in _lines(OWN_CGROUPS):
        _, controllers, own_path = line.split(":", 2)
        if not controllers:
            mounted = CGROUPS
            name = "memory.max"
        elif "memory" in controllers.split(","):
            mounted = CGROUPS / "memory"
            name = "memory.limit_in_bytes"
        else:
            continue
        # In a container, its cgroup may be mounted as the root, which this file does not name.
        inner = mounted / own_path.strip("/")
        for folder in (inner, *inner.parents):
            if folder.is_relative_to(mounted):
                file = folder / name
                yield from ((file, int(limit)) for limit in _lines(file) if limit != "max")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
