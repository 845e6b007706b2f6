"""Spans of time, and the trace file that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from shared.errors import StorageError

# Files that grow while a command runs, and what is said where the disk is full.


ODD = "backslashreplace"
"""For half a surrogate pair, as in the name of a file that is no UTF-8: it must not keep the rest
from being written.
"""


def cannot_write(path: Path, error: OSError) -> StorageError:
    """Of a run's folder."""
    return StorageError(str(path), str(error))


class RunFile:
    """What was written is on its way to the disk when `write` returns: a command that dies keeps
    it. And nothing is left in a buffer for `close`, which would fail once more where the disk is
    full, in place of the error that ended the command."""

    def __init__(
        self,
        path: Path,
        *,
        mode: str = "wb",
        error_of: Callable[[Path, OSError], StorageError] = cannot_write,
    ) -> None:
        """Args:
            mode: "wb", or "ab" to go on with the file.
            error_of: what is raised for an OSError.

        Raises:
            StorageError: it cannot be opened.
        """
        self.path, self._error_of = path, error_of
        try:
            self.file: IO[bytes] = path.open(mode, buffering=0)
        except OSError as error:
            raise error_of(path, error) from error

    def write(self, text: str) -> None:
        """All of it. Raises StorageError."""
        data = memoryview(text.encode(errors=ODD))
        try:
            # A disk that is almost full takes a part, and refuses the rest at the next call.
            while data:
                data = data[self.file.write(data) :]
        except OSError as error:
            raise self._error_of(self.path, error) from error

    def close(self) -> None:
        self.file.close()


def write_run_file(path: Path, text: str) -> None:
    """In place of what was there. Raises StorageError."""
    try:
        path.write_text(text, encoding="utf-8", errors=ODD)
    except OSError as error:
        raise cannot_write(path, error) from error


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time on one track (an engine, the learner, the driver). Unix seconds."""

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
    """Writes spans as they come, in the JSON array form of the Trace Event Format: one thread per
    track, times in microseconds.

    The format does not need the closing bracket, so the file of a run that was killed opens as
    well.
    """

    def __init__(self, path: Path) -> None:
        """Raises StorageError."""
        self._file = RunFile(path)
        self._tracks: dict[str, int] = {}
        self._file.write(
            "[\n"
            + json.dumps(
                {
                    "ph": "M",
                    "pid": 1,
                    "tid": 0,
                    "name": "process_name",
                    "args": {"name": "rollmatch"},
                }
            )
        )

    def write(self, spans: Iterable[Span]) -> None:
        """Raises StorageError."""
        events: list[dict[str, Any]] = []
        for span in spans:
            if span.track not in self._tracks:
                self._tracks[span.track] = len(self._tracks) + 1
                events.append(
                    {
                        "ph": "M",
                        "pid": 1,
                        "tid": self._tracks[span.track],
                        "name": "thread_name",
                        "args": {"name": span.track},
                    }
                )
            times = {"ts": round(span.start_s * 1e6), "dur": round(span.duration_s * 1e6)}
            events.append(
                {
                    "ph": "X",
                    "pid": 1,
                    "tid": self._tracks[span.track],
                    "name": span.name,
                    **times,
                    "args": dict(span.args),
                }
            )
        self._file.write("".join(",\n" + json.dumps(event) for event in events))

    def complete(self) -> None:
        """The closing bracket, with which the file is JSON as well. Raises StorageError."""
        self._file.write("\n]\n")

    def close(self) -> None:
        self._file.close()
