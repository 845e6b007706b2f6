"""Memory that processes of one machine share has no name, and nothing else is opened in its
place."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from shared.weight_sync.shared_memory import NAME, NOWHERE, Address, SharedMemory, this_machine

CREATOR = """
from shared.weight_sync.shared_memory import SharedMemory, this_machine
memory = SharedMemory.create(5000)
print(*memory.address, flush=True)
print(*this_machine(), flush=True)
input()
assert memory.memory[4990:4995] == b"hello"
"""


@pytest.fixture
def mine() -> Iterator[SharedMemory]:
    memory = SharedMemory.create(5000)
    assert memory is not None
    yield memory
    memory.forget()


def test_what_one_process_writes_the_other_reads_and_both_name_their_machine_alike() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CREATOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as creator:
        assert creator.stdin is not None and creator.stdout is not None
        opened = SharedMemory.open(Address(*map(int, creator.stdout.readline().split())))
        assert opened is not None
        assert creator.stdout.readline().split() == list(map(str, this_machine()))
        opened.memory[4990:4995] = b"hello"
        creator.communicate("\n", timeout=120)
        assert creator.returncode == 0


def test_an_address_that_was_taken_away_opens_nothing_and_who_has_come_goes_on(
    mine: SharedMemory,
) -> None:
    address = mine.address
    yours = SharedMemory.open(address)
    assert yours is not None
    mine.forget()
    mine.forget()
    mine.memory[4990:4995] = b"hello"
    assert yours.memory[4990:4995] == b"hello"
    assert SharedMemory.open(address) is None


@pytest.mark.slow
def test_it_has_no_name_and_goes_with_its_last_owner() -> None:
    held = holdings()
    memory = SharedMemory.create(5000)
    assert memory is not None
    assert all(now > then for now, then in zip(holdings(), held, strict=True))
    assert not [path for path in Path("/dev/shm").iterdir() if NAME in path.name]
    del memory
    assert holdings() == held


def holdings() -> tuple[int, int]:
    """Count this process's mappings and descriptors of weights, which other tests may have left
    some of."""
    gc.collect()
    descriptors = 0
    for link in list(Path("/proc/self/fd").iterdir()):
        # That of the listing is closed, and other threads close theirs meanwhile.
        with suppress(FileNotFoundError):
            descriptors += NAME in str(link.readlink())
    return Path("/proc/self/maps").read_text().count(NAME), descriptors


def test_its_size_cannot_be_changed_by_anybody(mine: SharedMemory) -> None:
    for num_bytes in (10, 10_000):
        with pytest.raises(PermissionError):
            os.truncate(mine.address.path, num_bytes)


@pytest.mark.parametrize("field", ["num_bytes", "device", "inode"])
def test_other_memory_than_the_announced_is_not_opened(mine: SharedMemory, field: str) -> None:
    """As on another machine, or in another container, where another process has the number."""
    address = mine.address
    assert SharedMemory.open(address._replace(**{field: getattr(address, field) + 1})) is None


def test_any_other_file_is_not_opened_whatever_its_numbers(tmp_path: Path) -> None:
    secret = os.open(tmp_path / NAME, os.O_CREAT | os.O_RDWR)
    os.write(secret, b"of the server's user")
    lookalike = os.memfd_create(NAME)  # not sealed: it could be cut while it is read
    os.ftruncate(lookalike, 10)
    for descriptor in (secret, lookalike):
        found = os.fstat(descriptor)
        address = Address(os.getpid(), descriptor, found.st_size, found.st_dev, found.st_ino)
        assert SharedMemory.open(address) is None
        os.close(descriptor)


def test_more_than_there_is_is_none_and_so_is_what_is_opened_nowhere() -> None:
    assert SharedMemory.create(1 << 50) is None
    assert SharedMemory.open(NOWHERE) is None


def test_memory_that_cannot_be_mapped_is_not_there_and_holds_nothing(
    mine: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, length: int) -> None:
        raise PermissionError(1, "not here")

    monkeypatch.setattr("shared.weight_sync.shared_memory.mmap.mmap", refuse)
    before = sorted(Path("/proc/self/fd").iterdir())
    assert (SharedMemory.create(5000), SharedMemory.open(mine.address)) == (None, None)
    assert sorted(Path("/proc/self/fd").iterdir()) == before
