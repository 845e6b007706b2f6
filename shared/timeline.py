"""Spans of time, and the trace file that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.run_file import RunFile


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
    """Writes spans as they come, in the JSON array form of the Trace Event Format: one thread per track, times in microseconds.

    The format does not need the closing bracket, so the file of a run that was killed opens as well.
    """

    def __init__(self, path: Path) -> None:
        """Raises StorageError."""
        self._file = RunFile(path)
        self._tracks: dict[str, int] = {}
        self._file.write("[\n" + json.dumps({"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": "rollmatch"}}))

    def write(self, spans: Iterable[Span]) -> None:
        """Raises StorageError."""
        events: list[dict[str, Any]] = []
        for span in spans:
            if span.track not in self._tracks:
                self._tracks[span.track] = len(self._tracks) + 1
                events.append({"ph": "M", "pid": 1, "tid": self._tracks[span.track], "name": "thread_name", "args": {"name": span.track}})
            times = {"ts": round(span.start_s * 1e6), "dur": round(span.duration_s * 1e6)}
            events.append({"ph": "X", "pid": 1, "tid": self._tracks[span.track], "name": span.name, **times, "args": dict(span.args)})
        self._file.write("".join(",\n" + json.dumps(event) for event in events))

    def complete(self) -> None:
        """The closing bracket, with which the file is JSON as well. Raises StorageError."""
        self._file.write("\n]\n")

    def close(self) -> None:
        self._file.close()
