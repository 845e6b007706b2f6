"""Files that grow while a command runs: what was written is there, and a full disk is told with its
path.
"""

from pathlib import Path

import pytest

from shared.errors import StorageError
from shared.run_files import RunFile, write_run_file


def test_what_was_written_is_in_the_file_before_it_is_closed(tmp_path):
    file = RunFile(tmp_path / "log")
    file.write("a digit: ٣\n")
    assert (tmp_path / "log").read_text(encoding="utf-8") == "a digit: ٣\n"
    file.close()


def test_a_file_goes_on_where_it_ended_or_begins_again(tmp_path):
    for mode, expected in (("wb", "1"), ("ab", "11"), ("wb", "1")):
        file = RunFile(tmp_path / "log", mode=mode)
        file.write("1")
        file.close()
        assert (tmp_path / "log").read_text() == expected


def test_a_full_disk_is_told_once_with_the_path_and_the_file_closes():
    file = RunFile(Path("/dev/full"))
    with pytest.raises(
        StorageError, match=r"cannot write /dev/full: .*No space left on device; free space"
    ):
        file.write("x")
    file.close()


def test_each_kind_of_file_has_its_own_remedy():
    file = RunFile(
        Path("/dev/full"),
        error_of=lambda path, error: StorageError(str(path), str(error), remedy="buy a disk"),
    )
    with pytest.raises(StorageError, match="buy a disk"):
        file.write("x")


def test_a_place_that_cannot_be_written_is_told_with_its_path(tmp_path):
    with pytest.raises(StorageError, match=r"cannot write .*nowhere/log: .*No such file"):
        RunFile(tmp_path / "nowhere" / "log")
    with pytest.raises(StorageError, match=r"cannot write .*nowhere/log: .*No such file"):
        write_run_file(tmp_path / "nowhere" / "log", "x")
