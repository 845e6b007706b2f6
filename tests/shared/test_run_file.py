"""Files that grow while a command runs."""

from pathlib import Path

import pytest

from shared.errors import StorageError
from shared.run_files import RunFile, write_run_file


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
        error_of=lambda path, error: StorageError(str(path), str(error), remedy="buy a disk"),
    )
    with pytest.raises(StorageError, match="buy a disk"):
        of_a_kind.write("x")


@pytest.mark.parametrize("write", [RunFile, lambda path: write_run_file(path, "x")])
def test_a_place_that_cannot_be_written_is_told_with_its_path(tmp_path, write):
    with pytest.raises(StorageError, match=r"cannot write .*nowhere/log: .*No such file"):
        write(tmp_path / "nowhere" / "log")
