"""`rollouts/step_000123.jsonl`: a file for each step, a line of JSON for each rollout
(`telemetry.rollouts`).

Each learner rank writes of its own rollouts, in a file of its own: rank 0 as above, rank 1
`step_000123.rank1.jsonl`, and so on. ASCII only, whatever a model wrote: its text is escaped as
JSON escapes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import InstanceOf, TypeAdapter, ValidationError

from shared.config.base import dotted
from shared.errors import RecordError
from shared.run_files import RunFile, cannot_write

REMEDY = "a run's log is not to be edited: restore the file, or check out the version that ran it"

Text = InstanceOf[str]
"""What a model wrote may hold half of a surrogate pair, which pydantic does not take for text."""

LineT = TypeVar("LineT")
"""A format of lines."""


class StepLog:
    """Writes the file of one step after the other. Every line is on its way to the disk when
    `write` returns: nothing is held back.
    """

    def __init__(self, folder: Path, *, rank: int = 0) -> None:
        """Makes `folder` where it is missing. Raises StorageError."""
        self._folder, self._rank = folder, rank
        self._file: RunFile | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(folder, error) from error

    def begin(self, step: int) -> None:
        """The lines that follow are of this step, counted from 1. Raises StorageError."""
        self.close()
        self._file = RunFile(step_path(self._folder, step, self._rank))

    def write(self, line: Mapping[str, Any]) -> None:
        """Raises StorageError."""
        assert self._file is not None, "begin comes before write"
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def step_path(folder: Path, step: int, rank: int = 0) -> Path:
    return folder / (f"step_{step:06d}.rank{rank}.jsonl" if rank else f"step_{step:06d}.jsonl")


def checked(
    value: Any, kind: TypeAdapter[LineT], consistent: Callable[[LineT], Mapping[str, bool]]
) -> LineT:
    """What a line's JSON says, if it is a line of this kind. RecordError, not located, with the
    field that it is not for.

    Args:
        consistent: what readers rely on beyond the types: fields, and whether they fit the others.
    """
    try:
        line = kind.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise RecordError(
            first["msg"][0].lower() + first["msg"][1:],
            field=dotted(first["loc"]) or "line",
            remedy=REMEDY,
        ) from None
    for field, holds in consistent(line).items():
        if not holds:
            raise RecordError("contradicts the rest of the line", field=field, remedy=REMEDY)
    return line


def read_lines(path: Path, checked_line: Callable[[Any], LineT]) -> list[LineT]:
    """The whole lines of a step, in the order of positions. `path` is rank 0's file, and those of
    other ranks are looked for beside it.

    Half a line at a file's end is what a run that died left, and no line. Raises OSError, and with
    file and line the RecordError of `checked_line`, which says what a line's JSON is.
    """
    lines = _read_file(path, checked_line)
    # By number: rank 10 comes after rank 9.
    for other in sorted(
        path.parent.glob(f"{path.stem}.rank*.jsonl"),
        key=lambda other: (len(other.name), other.name),
    ):
        lines += _read_file(other, checked_line)
    return lines


def _read_file(path: Path, checked_line: Callable[[Any], LineT]) -> list[LineT]:
    lines: list[LineT] = []
    for number, text in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            lines.append(checked_line(json.loads(text)))
        except RecordError as error:
            raise error.at(str(path), number) from error
        except ValueError as error:
            raise RecordError(
                f"is not JSON ({error})", field="line", remedy=REMEDY, file=str(path), line=number
            ) from error
    return lines
