"""`rollouts/step_000123.jsonl`: a file for each step, a line of JSON for each rollout (`telemetry.rollouts`).

Each learner rank writes of its own rollouts, in a file of its own: rank 0 as above, rank 1 `step_000123.rank1.jsonl`, and so on. ASCII only, whatever a model
wrote: its text is escaped as JSON escapes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from shared.errors import StorageError


class StepLog:
    """Writes the file of one step after the other. Every line is on its way to the disk when `write` returns: nothing is held back."""

    def __init__(self, folder: Path, *, rank: int = 0) -> None:
        """Makes `folder` where it is missing. Raises StorageError."""
        self._folder, self._rank, self._path = folder, rank, folder
        self._file: FileIO | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(str(folder), str(error)) from error

    def begin(self, step: int) -> None:
        """The lines that follow are of this step. Raises StorageError."""
        self.close()
        self._path = step_path(self._folder, step, self._rank)
        try:
            # Unbuffered: a buffer that could not be emptied would raise once more when it is closed.
            self._file = self._path.open("wb", buffering=0)
        except OSError as error:
            raise StorageError(str(self._path), str(error)) from error

    def write(self, line: Mapping[str, Any]) -> None:
        """Raises StorageError."""
        assert self._file is not None, "begin comes before write"
        data = memoryview(json.dumps(line).encode() + b"\n")
        try:
            # A disk that is almost full takes a part, and refuses the rest at the next call.
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise StorageError(str(self._path), str(error)) from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def step_path(folder: Path, step: int, rank: int = 0) -> Path:
    return folder / (f"step_{step:06d}.rank{rank}.jsonl" if rank else f"step_{step:06d}.jsonl")
