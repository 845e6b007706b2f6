"""Memory of one machine is shared under a name, and the name does not stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.shared_memory import FOLDER, NAME_BYTES, SharedMemory

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="this machine has no shared memory")


def test_what_one_writes_the_other_reads_also_when_the_name_is_forgotten() -> None:
    mine = SharedMemory.create(5000)
    assert mine is not None
    assert len(mine.path.encode()) <= NAME_BYTES
    yours = SharedMemory.open(mine.path)
    assert yours is not None
    mine.forget()
    mine.forget()
    mine.memory[4990:4995] = b"hello"
    assert yours.memory[4990:4995] == b"hello"
    assert not Path(mine.path).exists()
    assert SharedMemory.open(mine.path) is None, "as on another machine"


def test_more_than_the_machine_has_is_none_and_leaves_nothing_behind() -> None:
    before = set(FOLDER.iterdir())
    assert SharedMemory.create(1 << 50) is None
    assert not {path.name for path in set(FOLDER.iterdir()) - before if path.name.startswith("rollmatch-weights-")}
