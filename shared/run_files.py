"""Files of a run's folder: written as they grow, read back, and compared with their sums."""

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
"""A folder with it holds a run."""
FAILED_CONFIG = "config_of_failed_start.json"
"""Its name after a start that ended before its first sync: another start may use the folder."""
FINAL_FOLDER = "checkpoint"
"""The checkpoint after the last step, in the run's folder."""
STATE_FOLDER = "run_state"
"""A checkpoint with it is full: a run continues from it (`learner.run_state`)."""
SUMS = "SHA256SUMS"
"""In a checkpoint: the sha256 of each of its other files, as `sha256sum -c` reads it."""
RUN_FILE = "run.json"
"""In that folder: the driver's part (`launch.run_folder.saved_checkpoints.RunState`)."""
_ENCODING_ERRORS = "backslashreplace"
"""Half a surrogate pair, as in a file name that is not UTF-8, must not keep the rest from disk."""
_PASSING = {
    *(errno.ENOSPC, errno.EDQUOT),  # somebody frees space
    *(errno.EROFS, errno.EACCES, errno.EPERM),  # or permits writing, or renews a ticket
    # A network share comes back. The folder of one that is not mounted is missing.
    *(errno.EIO, errno.ESTALE, errno.ENOENT, errno.ENOTCONN, errno.ETIMEDOUT),
    *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ECONNREFUSED),
}
"""Error numbers that can pass while a run waits; a wrong path or a limit cannot."""
_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 10.0


def cannot_write(
    path: Path, error: Exception, *, remedy: str = StorageError.REMEDY
) -> StorageError:
    """Make the error about a file or folder that the system refused to write."""
    number = error.errno if isinstance(error, OSError) else None
    # safetensors writes in Rust, and has the number only in its text.
    if (named := re.search(r"\(os error (\d+)\)", str(error))) is not None:
        number = int(named[1])
    return StorageError(str(path), str(error), remedy=remedy, can_pass=number in _PASSING)


class Patience:
    """Tries again for some time what the disk refuses, and says so.

    Example:
        >>> patience = Patience(300.0)
        >>> patience(lambda: write_run_file(path, text))
    """

    def __init__(self, limit_s: float = 0.0, tell: Callable[[str], None] = _LOGGER.warning) -> None:
        """`limit_s`: `timeouts.storage_s`; 0: nothing is tried again."""
        self.limit_s = limit_s
        self._tell = tell

    def __call__(self, write: Callable[[], T]) -> T:
        """Call `write`, and again if it raises an error that can pass; return its result.

        Raises:
            StorageError: the first one, when the limit is over.
        """
        first: StorageError | None = None
        started_s = time.monotonic()
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                result = write()
            except StorageError as error:
                left_s = started_s + self.limit_s - time.monotonic()
                if not error.can_pass or left_s <= 0:
                    if first is None:
                        raise
                    tried = f"{first.reason}, and again for {self.limit_s:g} s (timeouts.storage_s)"
                    raise StorageError(
                        first.path, tried, action=first.action, remedy=first.remedy
                    ) from error
                if first is None:
                    first = error
                    self._tell(
                        f"cannot {error.action} {error.path}: {error.reason}; the run waits and"
                        f" tries again for {self.limit_s:g} s (timeouts.storage_s): free space or"
                        " permit writing there"
                    )
                time.sleep(min(wait_s, left_s))
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            else:
                if first is not None:
                    waited_s = time.monotonic() - started_s
                    self._tell(f"{first.path} could be written after {waited_s:.0f} s")
                return result


class RunFile:
    """A file that grows while a command runs, and survives the command's death.

    Text is on its way to the disk when `write` returns. Nothing is left in a buffer for `close`,
    which would fail again on a full disk and hide the error that ended the command.
    """

    def __init__(
        self,
        path: Path,
        *,
        mode: str = "wb",
        remedy: str = StorageError.REMEDY,
        patience: Patience | None = None,
    ) -> None:
        """Open the file; `mode` is "wb", or "ab" to append. Raises StorageError with `remedy`.

        `patience` is for later writes; None: what is refused is not tried again.
        """
        self.path = path
        self._remedy = remedy
        self._patience = patience or Patience()
        try:
            self.file: IO[bytes] = path.open(mode, buffering=0)
        except OSError as error:
            raise cannot_write(path, error, remedy=remedy) from error

    def write(self, text: str) -> None:
        """Write all of the text. Raises StorageError."""
        left = memoryview(text.encode(errors=_ENCODING_ERRORS))
        was_refused = False

        def write_rest() -> None:
            nonlocal left, was_refused
            try:
                if was_refused:
                    # The open file of a share that was away stays broken when the share is back.
                    with suppress(OSError):
                        self.file.close()
                    self.file = self.path.open("ab", buffering=0)
                # A disk that is almost full takes a part, and refuses the rest at the next call.
                while left:
                    left = left[self.file.write(left) :]
            except OSError as error:
                was_refused = True
                raise cannot_write(self.path, error, remedy=self._remedy) from error

        self._patience(write_rest)

    def close(self) -> None:
        self.file.close()


def write_run_file(path: Path, text: str) -> None:
    """Replace the content of a file. Raises StorageError."""
    try:
        path.write_text(text, encoding="utf-8", errors=_ENCODING_ERRORS)
    except OSError as error:
        raise cannot_write(path, error) from error


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time on one track (an engine, the learner, the driver), in Unix seconds."""

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
    """Return the lines of JSON of a file that grows; none without such a file.

    The last line of a run that was killed, or whose disk was full, may be half: it is left out.
    Raises OSError, and RecordError for a line that is damaged.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    return [read_line(path, number, line) for number, line in enumerate(lines, 1)]


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file whose lines are about steps. Raises as `read_lines` does."""
    lines = read_lines(path)
    for number, line in enumerate(lines, 1):
        if type(line.get("step")) is not int:
            raise damaged_line(path, number, "has no number of a step")
    return lines


def read_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """Return the JSON object of a line, from 1. Raises RecordError if it is damaged."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise damaged_line(path, number, f"is not JSON ({error})") from error
    if not isinstance(entry, dict):
        raise damaged_line(path, number, "is no JSON object")
    return entry


def damaged_line(path: Path, number: int, problem: str) -> RecordError:
    """Make the error about a line, from 1, of a run's file."""
    remedy = "restore the file from another copy of the run's folder, or remove the line"
    return RecordError(problem, field="line", remedy=remedy, file=str(path), line=number)


def cut_lines(path: Path, keeps: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Keep the lines about steps that `keeps`, if there are any, and return them.

    Raises as `read_lines` does.
    """
    kept = [line for line in read_steps(path) if keeps(line)]
    if path.exists():
        replace_file(path, "".join(json.dumps(line) + "\n" for line in kept))
    return kept


def replace_file(path: Path, text: str) -> None:
    """Replace the content of a file, which holds the old or the new one at any moment.

    Raises OSError.
    """
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def write_sums(folder: Path, files: Iterable[Path], name: str) -> Path:
    """Write the sha256 of files of a checkpoint into its file `name`, and return its path.

    Raises OSError.
    """
    sums = folder / name
    lines = zip(_digests(paths := sorted(files)), paths, strict=True)
    sums.write_text("".join(f"{sha}  {path.relative_to(folder)}\n" for sha, path in lines))
    return sums


def damage(checkpoint: Path) -> str | None:
    """Say how a checkpoint's files differ from those that were saved; None: they do not.

    Raises:
        ConfigError: the disk refuses a file, which says nothing about its content.
    """
    try:
        listed = (checkpoint / SUMS).read_text(encoding="utf-8", errors="replace").splitlines()
        sums = {name: sha for sha, _, name in (line.partition("  ") for line in listed)}
        if f"{STATE_FOLDER}/{RUN_FILE}" not in sums or any(".." in name for name in sums):
            return f"{SUMS} is damaged"
        found = _digests([checkpoint / name for name in sums])
    except FileNotFoundError as error:
        missing = Path(error.filename).relative_to(checkpoint)
        older = "; an older version of rollmatch wrote none" if missing.name == SUMS else ""
        return f"{missing} is missing{older}"
    except OSError as error:
        raise ConfigError(
            f"resume.run: {error.filename} cannot be read ({error.strerror}); permit reading it, or"
            " wait until its disk is back"
        ) from error
    changed = [name for name, sha in zip(sums, found, strict=True) if sums[name] != sha]
    return f"not as they were saved, by their sha256: {', '.join(changed)}" if changed else None


def _digests(paths: Sequence[Path]) -> list[str]:
    """Return the sha256 of each file, several read at a time. Raises OSError."""

    def digest(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor() as threads:
        return list(threads.map(digest, paths))
