"""Files of a run's folder, and the trace that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from shared.errors import RecordError, StorageError

CONFIG = "config.json"
"""A folder with it holds a run."""
FAILED_CONFIG = "config_of_failed_start.json"
"""Its name after a start that ended before its first sync: another start may use the folder."""
FINAL_FOLDER = "checkpoint"
"""The checkpoint after the last step, in the run's folder."""
STATE_FOLDER = "run_state"
"""A checkpoint with it is full: a run goes on from it (`learner.run_state`)."""
RUN_FILE = "run.json"
"""In that folder: the driver's part (`launch.runtime.resume.RunState`)."""
_ENCODING_ERRORS = "backslashreplace"
"""Half a surrogate pair, as in a file name that is no UTF-8, must not keep the rest from disk."""


def cannot_write(path: Path, error: OSError) -> StorageError:
    """Make the error about a file of a run's folder."""
    return StorageError(str(path), str(error))


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
        error_of: Callable[[Path, OSError], StorageError] = cannot_write,
    ) -> None:
        """Open the file; `mode` is "wb", or "ab" to append. Raises what `error_of` makes."""
        self.path = path
        self._error_of = error_of
        try:
            self.file: IO[bytes] = path.open(mode, buffering=0)
        except OSError as error:
            raise error_of(path, error) from error

    def write(self, text: str) -> None:
        """Write all of the text. Raises StorageError."""
        data = memoryview(text.encode(errors=_ENCODING_ERRORS))
        try:
            # A disk that is almost full takes a part, and refuses the rest at the next call.
            while data:
                data = data[self.file.write(data) :]
        except OSError as error:
            raise self._error_of(self.path, error) from error

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
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    def overlaps(self, other: Span) -> bool:
        return self.start_s < other.end_s and other.start_s < self.end_s


class TraceWriter:
    """Writes spans as they come, in the JSON array form of the Trace Event Format.

    There is one thread per track; times are in microseconds. The format does not need the closing
    bracket, so the file of a killed run opens as well.
    """

    def __init__(self, path: Path, *, mode: str = "wb") -> None:
        """Begin the file or, with "ab", go on with what `cut_timeline` has left of it.

        Raises StorageError.
        """
        goes_on = mode == "ab" and path.exists()
        self._tracks = _tracks_in(path) if goes_on else {}
        self._file = RunFile(path, mode=mode)
        if not goes_on:
            self._file.write("[\n" + _name_event("process_name", 0, "rollmatch"))

    def write(self, spans: Iterable[Span]) -> None:
        """Append the spans. Raises StorageError."""
        for span in spans:
            if span.track not in self._tracks:
                self._tracks[span.track] = len(self._tracks) + 1
                name = _name_event("thread_name", self._tracks[span.track], span.track)
                self._file.write(",\n" + name)
            event = {
                "ph": "X",
                "pid": 1,
                "tid": self._tracks[span.track],
                "name": span.name,
                "ts": round(span.start_s * 1e6),
                "dur": round(span.duration_s * 1e6),
                "args": dict(span.args),
            }
            self._file.write(",\n" + json.dumps(event))

    def complete(self) -> None:
        """Write the closing bracket, with which the file is JSON as well. Raises StorageError."""
        self._file.write("\n]\n")

    def close(self) -> None:
        self._file.close()


def _name_event(kind: str, thread: int, name: str) -> str:
    event = {"ph": "M", "pid": 1, "tid": thread, "name": kind, "args": {"name": name}}
    return json.dumps(event)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of JSON of a file that grows; none where it is not there.

    The last line of a run that was killed, or whose disk was full, may be half: it is left out.
    Raises OSError, and RecordError for a line that is damaged.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            entries.append(json.loads(line))
        except ValueError as error:
            problem = f"is not JSON ({error})"
            remedy = "restore the file from another copy of the run's folder"
            raise RecordError(
                problem, field="line", remedy=remedy, file=str(path), line=number
            ) from error
    return entries


def cut_lines(path: Path, keeps: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Keep the lines of JSON that `keeps`, if there are any, and return them. Raises OSError."""
    kept = [line for line in read_lines(path) if keeps(line)]
    if path.exists():
        replace_file(path, "".join(json.dumps(line) + "\n" for line in kept))
    return kept


def cut_timeline(path: Path, last: str) -> None:
    """Keep what was over when the span whose name begins with `last` ended, if the file is there.

    Without such a span nothing is kept. The closing bracket goes. Raises OSError.
    """
    if path.exists():
        events = list(_events(path))
        ends = [one["ts"] + one["dur"] for one in events if one["name"].startswith(last)]
        end = max(ends, default=0)
        kept = [one for one in events if one["ph"] == "M" or one["ts"] + one["dur"] <= end]
        replace_file(path, "[\n" + ",\n".join(json.dumps(event) for event in kept))


def replace_file(path: Path, text: str) -> None:
    """Replace the content of a file, which holds the old or the new one at any moment.

    Raises OSError.
    """
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a timeline, one a line; the last one of a killed run may be half."""
    for line in path.read_text().splitlines():
        text = line.rstrip(",")
        if text.startswith("{") and text.endswith("}}"):
            yield json.loads(text)


def _tracks_in(path: Path) -> dict[str, int]:
    named = (event for event in _events(path) if event["name"] == "thread_name")
    return {event["args"]["name"]: event["tid"] for event in named}
