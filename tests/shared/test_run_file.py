"""Files that grow while a command runs."""

import errno
from pathlib import Path

import pytest

from shared import run_files
from shared.errors import StorageError
from shared.run_files import Patience, RunFile, cannot_write, write_run_file


def test_what_was_written_is_in_the_file_before_it_is_closed_and_goes_on_or_begins_again(tmp_path):
    path = tmp_path / "log"
    line = "a digit: ٣\n"
    for mode, expected in (("wb", line), ("ab", line * 2), ("wb", line)):
        file = RunFile(path, mode=mode)
        file.write(line)
        assert path.read_text(encoding="utf-8") == expected
        file.close()


def test_a_full_disk_is_told_once_with_the_path_and_the_kind_of_files_remedy_and_the_file_closes():
    file = RunFile(Path("/dev/full"))
    message = r"cannot write /dev/full: .*No space left on device; free space"
    with pytest.raises(StorageError, match=message):
        file.write("x")
    file.close()
    of_a_kind = RunFile(
        Path("/dev/full"),
        remedy="buy a disk",
    )
    with pytest.raises(StorageError, match="buy a disk"):
        of_a_kind.write("x")


@pytest.mark.parametrize("write", [RunFile, lambda path: write_run_file(path, "x")])
def test_a_place_that_cannot_be_written_is_told_with_its_path(tmp_path, write):
    with pytest.raises(StorageError, match=r"write .*nowhere/log: .*No such file"):
        write(tmp_path / "nowhere" / "log")


# What is tried again


class Clock:
    """Time that goes by in `sleep` alone; then `mends` is called."""

    def __init__(self):
        self.now_s = 100.0
        self.waits = []
        self.mends = lambda: None

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds
        self.waits.append(seconds)
        self.mends()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(run_files, "time", clock)
    return clock


class AlmostFull:
    """An open file with room for three bytes."""

    def __init__(self, file):
        self.file = file

    def write(self, data):
        if self.file.tell() == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data[: 3 - self.file.tell()])

    def close(self):
        self.file.close()


def test_a_full_disk_is_waited_for_and_no_part_of_a_line_is_written_twice(tmp_path, clock):
    """At the second attempt its folder is away, as that of a network share."""
    folder = tmp_path / "share"
    folder.mkdir()
    told = []
    file = RunFile(folder / "log", patience=Patience(300.0, told.append))
    file.file = AlmostFull(file.file)

    def mend():
        if len(clock.waits) == 1:
            folder.rename(tmp_path / "away")
        else:
            (tmp_path / "away").rename(folder)

    clock.mends = mend
    file.write("a line\n")
    file.write("another\n")
    assert (folder / "log").read_text() == "a line\nanother\n"
    assert clock.waits == [1.0, 2.0]
    refused, written = told
    assert refused.startswith(
        f"cannot write {folder / 'log'}: [Errno 28] No space left on device; "
    )
    assert "retries for 300 s (timeouts.storage_s)" in refused
    assert written == f"{folder / 'log'} was written after 3 s"


def test_what_stays_refused_ends_with_its_first_cause(clock):
    errors = [errno.ENOSPC, *[errno.EROFS] * 99]

    def write():
        error = OSError(errors.pop(0), "refused")
        raise cannot_write(Path("/run/metrics.jsonl"), error)

    told = []
    with pytest.raises(StorageError) as caught:
        Patience(25.0, told.append)(write)
    assert str(caught.value) == (
        f"cannot write /run/metrics.jsonl: [Errno {errno.ENOSPC}] refused, also after 25 s"
        f" (timeouts.storage_s); {StorageError.REMEDY}"
    )
    assert clock.waits == [1.0, 2.0, 4.0, 8.0, 10.0]
    assert len(told) == 1


def test_a_later_error_that_cannot_pass_is_raised_itself_and_at_once(clock):
    errors = [OSError(errno.ENOSPC, "full"), OSError(errno.EFBIG, "File too large")]

    def write():
        raise cannot_write(Path("/run/metrics.jsonl"), errors.pop(0))

    with pytest.raises(StorageError, match="File too large") as caught:
        Patience(300.0)(write)
    assert "300" not in str(caught.value)
    assert clock.waits == [1.0]


@pytest.mark.parametrize(
    ("limit_s", "error"),
    [
        pytest.param(0.0, OSError(errno.ENOSPC, "full"), id="no time"),
        pytest.param(300.0, OSError(errno.EFBIG, "File too large"), id="no other attempt helps"),
        pytest.param(300.0, RuntimeError("header too large"), id="not the disk"),
    ],
)
def test_it_is_told_at_once_where_nobody_waits(clock, limit_s, error):
    with pytest.raises(StorageError) as caught:
        Patience(limit_s)(lambda: (_ for _ in ()).throw(cannot_write(Path("/a"), error)))
    assert str(caught.value) == str(cannot_write(Path("/a"), error))
    assert clock.waits == []


def test_what_safetensors_is_refused_can_pass(tmp_path):
    """It has errors of its own, without a number."""
    from safetensors import SafetensorError

    error = SafetensorError("Error while serializing: I/O error: No space left (os error 28)")
    assert cannot_write(tmp_path, error).can_pass
