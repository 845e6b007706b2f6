"""The timeline of a run: a file of time spans that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shared.run_files import Patience, RunFile, Span, damaged_line, read_line, replace_file


class TraceWriter:
    """The writer of a run's timeline, in the JSON array form of the Trace Event Format.

    Each track of the timeline is a thread in that format. Times are in microseconds. The format
    does not need the closing bracket, so viewers also open the file of a killed run.
    """

    def __init__(self, path: Path, *, mode: str = "wb", patience: Patience | None = None) -> None:
        """Begin the file or, with "ab", continue it after `cut_timeline`.

        `patience` retries failed writes. Raises StorageError.
        """
        goes_on = mode == "ab" and path.exists()
        events = read_timeline(path) if goes_on else []
        self._tracks = {
            event["args"]["name"]: event["tid"]
            for event in events
            if event["name"] == "thread_name"
        }
        self._file = RunFile(path, mode=mode, patience=patience)
        if not goes_on:
            self._file.write("[\n" + _name_event("process_name", 0, "rollmatch"))

    def write(self, spans: Iterable[Span]) -> None:
        """Append time spans to the timeline. Raises StorageError."""
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
        """Write the closing bracket, so that the timeline is valid JSON. Raises StorageError."""
        self._file.write("\n]\n")

    def close(self) -> None:
        self._file.close()


def _name_event(kind: str, thread: int, name: str) -> str:
    event = {"ph": "M", "pid": 1, "tid": thread, "name": kind, "args": {"name": name}}
    return json.dumps(event)


def read_timeline(path: Path) -> list[dict[str, Any]]:
    """Return the events of a timeline; an empty list if the file does not exist.

    Each event is a line of the file. An incomplete last line of a killed run is left out. Raises
    OSError, and RecordError for a damaged
    line.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    events = []
    for number, line in enumerate(lines, 1):
        text = line.rstrip(b",")
        is_whole = number < len(lines) or text.endswith(b"}}")
        if text in (b"", b"[", b"]") or not is_whole:
            continue
        event = read_line(path, number, text)
        times = [event.get("ts"), event.get("dur")] if event.get("ph") == "X" else []
        args = event.get("args")
        if not (
            event.get("ph") in ("M", "X")
            and isinstance(event.get("name"), str)
            and isinstance(event.get("tid"), int)
            and isinstance(args, dict)
            and (event["name"] != "thread_name" or isinstance(args.get("name"), str))
            and all(isinstance(time, int) for time in times)
        ):
            raise damaged_line(path, number, "is not an event of this timeline")
        events.append(event)
    return events


def cut_timeline(path: Path, last: str) -> None:
    """Remove the spans that end after the span whose name begins with `last`.

    If there is no such span, all spans are removed. The closing bracket is removed too. Raises the
    errors of `read_timeline`.
    """
    if path.exists():
        events = read_timeline(path)
        ends = [one["ts"] + one["dur"] for one in events if one["name"].startswith(last)]
        end = max(ends, default=0)
        kept = [one for one in events if one["ph"] == "M" or one["ts"] + one["dur"] <= end]
        replace_file(path, "[\n" + ",\n".join(json.dumps(event) for event in kept))
