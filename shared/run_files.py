"""Files in a run folder: append, read, replace, and verify them."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

from shared.errors import ConfigError, RecordError, StorageError

_LOGGER = logging.getLogger(__name__)

T = TypeVar("T")

CONFIG = "config.json"
"""Name of the file with a run's configuration. A folder with this file is a run folder."""
FAILED_CONFIG = "config_of_failed_start.json"
"""Name of the configuration file after a run that failed before its first weight sync.

Another run can use the folder.
"""
FINAL_FOLDER = "checkpoint"
"""Name of the folder with the checkpoint after the last step, in the run folder."""
STATE_FOLDER = "run_state"
"""Name of the folder with the optimizer and data state, in a full checkpoint.

A run can continue from a full checkpoint (`learner.run_state`).
"""
SUMS = "SHA256SUMS"
"""Name of the file with the sha256 of all other files, in a checkpoint.

It has the format of `sha256sum -c`.
"""
RUN_FILE = "run.json"
"""Name of the file with the driver's state, in `STATE_FOLDER`.

It holds a `launch.run_folder.saved_checkpoints.RunState`.
"""
_ENCODING_ERRORS = "backslashreplace"
"""How lone surrogates are written, which occur in file names that are not UTF-8: as escapes,
instead of failing.
"""
_PASSING = {
    *(errno.ENOSPC, errno.EDQUOT),  # until space is freed
    *(errno.EROFS, errno.EACCES, errno.EPERM),  # until writing is permitted, or a ticket renewed
    # Until a network share is back. While it is not mounted, its folder is missing.
    *(errno.EIO, errno.ESTALE, errno.ENOENT, errno.ENOTCONN, errno.ETIMEDOUT),
    *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ECONNREFUSED),
}
"""Error numbers that can disappear while a run waits, unlike a wrong path or a limit."""
_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 10.0


def cannot_write(
    path: Path, error: Exception, *, remedy: str = StorageError.REMEDY
) -> StorageError:
    """Return a StorageError about a file or folder that could not be written."""
    number = error.errno if isinstance(error, OSError) else None
    # safetensors writes in Rust, and its errors have the number only in their text.
    if (named := re.search(r"\(os error (\d+)\)", str(error))) is not None:
        number = int(named[1])
    return StorageError(str(path), str(error), remedy=remedy, can_pass=number in _PASSING)


class Patience:
    """Calls a function that writes a file, and retries it for a limited time if it fails.

    Example:
        >>> patience = Patience(300.0)
        >>> patience(lambda: write_run_file(path, text))
    """

    def __init__(self, limit_s: float = 0.0, tell: Callable[[str], None] = _LOGGER.warning) -> None:
        """Retry each write for `limit_s` seconds (`timeouts.storage_s`); 0: do not retry.

        `tell` logs the messages about writes that fail and that succeed later.
        """
        self.limit_s = limit_s
        self._tell = tell

    def __call__(self, write: Callable[[], T]) -> T:
        """Call `write`, and again after each error that may pass, and return its result.

        Raises:
            StorageError: an error that retrying cannot mend, or the first error if the time is
                over.
        """
        first: StorageError | None = None
        started_s = time.monotonic()
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                result = write()
            except StorageError as error:
                left_s = started_s + self.limit_s - time.monotonic()
                if not error.can_pass or (left_s <= 0 and first is None):
                    raise
                if first is not None and left_s <= 0:
                    tried = f"{first.reason}, also after {self.limit_s:g} s (timeouts.storage_s)"
                    raise StorageError(
                        first.path, tried, action=first.action, remedy=first.remedy
                    ) from error
                if first is None:
                    first = error
                    self._tell(
                        f"cannot {error.action} {error.path}: {error.reason}; the run waits and"
                        f" retries for {self.limit_s:g} s (timeouts.storage_s): free space or"
                        " permit writing there"
                    )
                time.sleep(min(wait_s, left_s))
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            else:
                if first is not None:
                    waited_s = time.monotonic() - started_s
                    self._tell(f"{first.path} was written after {waited_s:.0f} s")
                return result


class RunFile:
    """A file that a command writes to while it runs, and that is complete if the command is killed.

    It is not buffered: when `write` returns, the operating system has the text. So `close` cannot
    fail on a full disk and hide the error that ended the command.
    """

    def __init__(
        self,
        path: Path,
        *,
        mode: str = "wb",
        remedy: str = StorageError.REMEDY,
        patience: Patience | None = None,
    ) -> None:
        """Open the file; `mode` is "wb" to replace it or "ab" to append.

        `patience` retries failed writes, but not the opening; None: no retries. Raises StorageError
        with `remedy`.
        """
        self.path = path
        self._remedy = remedy
        self._patience = patience or Patience()
        try:
            self.file: IO[bytes] = path.open(mode, buffering=0)
        except OSError as error:
            raise cannot_write(path, error, remedy=remedy) from error

    def write(self, text: str) -> None:
        """Append the text to the file. Raises StorageError."""
        left = memoryview(text.encode(errors=_ENCODING_ERRORS))
        was_refused = False

        def write_rest() -> None:
            nonlocal left, was_refused
            try:
                if was_refused:
                    # After a network share was lost and is back, its open files stay unusable.
                    with suppress(OSError):
                        self.file.close()
                    self.file = self.path.open("ab", buffering=0)
                # An almost full disk accepts a part of the text, and fails at the next call.
                while left:
                    left = left[self.file.write(left) :]
            except OSError as error:
                was_refused = True
                raise cannot_write(self.path, error, remedy=self._remedy) from error

        self._patience(write_rest)

    def close(self) -> None:
        self.file.close()


def write_run_file(path: Path, text: str) -> None:
    """Write a file of a run folder, or replace its content. Raises StorageError."""
    try:
        path.write_text(text, encoding="utf-8", errors=_ENCODING_ERRORS)
    except OSError as error:
        raise cannot_write(path, error) from error


@dataclass(frozen=True, slots=True)
class Span:
    """A period of work of one part of the system, for a run's timeline.

    `track` names the part (an engine, the learner, the driver) and `name` the work. Times are in
    Unix seconds.
    """

    track: str
    name: str
    start_s: float
    end_s: float
    args: Mapping[str, object] = field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    def overlaps(self, other: Span) -> bool:
        return self.start_s < other.end_s and other.start_s < self.end_s


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON object of each line of a file; an empty list if the file does not exist.

    A last line without its end is ignored: the writer was killed, or the disk was full. Raises
    OSError, and RecordError for a damaged line.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    return [read_line(path, number, line) for number, line in enumerate(lines, 1)]


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Return the JSON object of each line of a file; each must have an integer `step`.

    Raises like `read_lines`, and RecordError for a line without `step`.
    """
    lines = read_lines(path)
    for number, line in enumerate(lines, 1):
        if type(line.get("step")) is not int:
            raise damaged_line(path, number, "has no step number")
    return lines


def read_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """Return the JSON object that a line of a file contains.

    Raises RecordError if the line is damaged; the error names `path` and `number`, from 1.
    """
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise damaged_line(path, number, f"is not JSON ({error})") from error
    if not isinstance(entry, dict):
        raise damaged_line(path, number, "is not a JSON object")
    return entry


def damaged_line(path: Path, number: int, problem: str) -> RecordError:
    remedy = "restore the file from a copy of the run folder, or remove the line"
    return RecordError(problem, field="line", remedy=remedy, file=str(path), line=number)


def cut_lines(path: Path, keeps: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Delete the lines of a file for which `keeps` is false, and return the remaining JSON objects.

    A file that does not exist has no lines. Raises like `read_steps`, and OSError.
    """
    kept = [line for line in read_steps(path) if keeps(line)]
    if path.exists():
        replace_file(path, "".join(json.dumps(line) + "\n" for line in kept))
    return kept


def replace_file(path: Path, text: str) -> None:
    """Replace the content of a file atomically: it has the old or the new content at any time.

    Raises OSError.
    """
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def write_sums(folder: Path, files: Iterable[Path], name: str) -> Path:
    """Write the sha256 of these files into the file `name` in their folder; return its path.

    The folder is a checkpoint. Raises OSError.
    """
    sums = folder / name
    lines = zip(_digests(paths := sorted(files)), paths, strict=True)
    sums.write_text("".join(f"{sha}  {path.relative_to(folder)}\n" for sha, path in lines))
    return sums


def damage(checkpoint: Path) -> str | None:
    """Return how a checkpoint's files differ from its list of sha256 sums; None if they are equal.

    Raises ConfigError if a file cannot be read, so its content is unknown.
    """
    try:
        listed = (checkpoint / SUMS).read_text(encoding="utf-8", errors="replace").splitlines()
        sums = {name: sha for sha, _, name in (line.partition("  ") for line in listed)}
        if f"{STATE_FOLDER}/{RUN_FILE}" not in sums or any(".." in name for name in sums):
            return f"{SUMS} is damaged"
        found = _digests([checkpoint / name for name in sums])
    except FileNotFoundError as error:
        missing = Path(error.filename).relative_to(checkpoint)
        older = "; older versions of rollmatch did not write it" if missing.name == SUMS else ""
        return f"{missing} is missing{older}"
    except OSError as error:
        raise ConfigError(
            f"resume.run: {error.filename} cannot be read ({error.strerror}); permit reading it, or"
            " wait until its disk is available"
        ) from error
    changed = [name for name, sha in zip(sums, found, strict=True) if sums[name] != sha]
    return (
        f"files changed since they were saved (sha256): {', '.join(changed)}" if changed else None
    )


def _digests(paths: Sequence[Path]) -> list[str]:
    """Return the sha256 of each file; several are read at the same time. Raises OSError."""

    def digest(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor() as threads:
        return list(threads.map(digest, paths))
