"""Files of the rollout logs: `rollouts/step_000123.jsonl`, one line of JSON per rollout.

Each learner rank writes a file (`telemetry.rollouts`): rank 0 as above, rank 1
`step_000123.rank1.jsonl`, and so on. The files are ASCII, with JSON escapes in a model's text.
Images of environments' rollouts are in `rollouts/images/`. Each is stored once, named by its
SHA-256.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import InstanceOf, TypeAdapter, ValidationError

from shared.config.base import dotted
from shared.config.job import TelemetrySection, TimeoutsSection
from shared.errors import RecordError
from shared.records import ImageRef
from shared.run_files import Patience, RunFile, cannot_write

_REMEDY = "do not edit a run's log: restore the file, or check out the version that wrote it"

Text = InstanceOf[str]
"""A model's text. It may contain half of a surrogate pair, which pydantic's `str` refuses."""

RecordT = TypeVar("RecordT")
"""The type of a line of the rollout log, a TypedDict."""


class StepLog:
    """The rollout log of one learner rank: writes one file per step, one line per rollout.

    When `write` returns, the operating system has the line, so a killed process does not lose it.

    Example:
        >>> log = StepLog(Path("rollouts"), rank=1)
        >>> log.begin(7)
        >>> log.write({"position": 3})      # rollouts/step_000007.rank1.jsonl
    """

    def __init__(self, folder: Path, *, rank: int = 0, patience: Patience | None = None) -> None:
        """Open the log in `folder`, which is created if it is missing. Raises StorageError.

        `patience` says how long a failed write is repeated; None: a failed write raises
        immediately.
        """
        self._folder = folder
        self._patience = patience or Patience()
        self._rank = rank
        self._file: RunFile | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(folder, error) from error

    @classmethod
    def of_run(
        cls, telemetry: TelemetrySection, timeouts: TimeoutsSection, rank: int
    ) -> StepLog | None:
        """Return the rollout log of a rank; None if `telemetry.rollouts` is off.

        Raises StorageError.
        """
        if not telemetry.rollouts:
            return None
        # The driver waits `learn_s` for the rank, so the rank must wait less for the disk.
        patience = Patience(min(timeouts.storage_s, timeouts.learn_s / 2))
        return cls(telemetry.run_dir / "rollouts", rank=rank, patience=patience)

    def begin(self, step: int) -> None:
        """Open the file for the lines of a step, counted from 1. Raises StorageError."""
        self.close()
        path = step_path(self._folder, step, self._rank)
        self._file = self._patience(lambda: RunFile(path, patience=self._patience))

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line, as JSON, to the file of the current step. Raises StorageError."""
        assert self._file is not None, "begin comes before write"
        self._file.write(json.dumps(line) + "\n")

    def keep_picture(self, image: ImageRef) -> None:
        """Write an image's bytes into the log's folder, if the file does not exist yet.

        Raises StorageError.
        """
        path = picture_path(self._folder, image.sha256)
        # Another rank may write the same image.
        partial = path.with_name(f"{path.name}.rank{self._rank}.partial")

        def write() -> None:
            data = image.with_data().data
            assert data is not None
            try:
                path.parent.mkdir(exist_ok=True)
                partial.write_bytes(data)
                partial.replace(path)
            except OSError as error:
                raise cannot_write(path, error) from error

        if not path.exists():
            self._patience(write)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def step_path(folder: Path, step: int, rank: int = 0) -> Path:
    return folder / (f"step_{step:06d}.rank{rank}.jsonl" if rank else f"step_{step:06d}.jsonl")


def logged_steps(folder: Path) -> list[int]:
    """Return the steps that have a file in a run's `rollouts/`, ascending."""
    files = folder.glob("step_*.jsonl")
    return sorted(int(file.stem[5:]) for file in files if "rank" not in file.name)


def picture_path(folder: Path, sha256: str) -> Path:
    return folder / "images" / sha256


def log_entry(kind: type[Any], value: Any, **fields: Any) -> Any:
    """Return a log entry of the TypedDict `kind`: `fields`, and other keys copied from `value`.

    Example:
        `log_entry(DroppedEntry, dropped)` is `{"key": dropped.key, "reason": dropped.reason}`.
    """
    names = kind.__annotations__
    return {name: fields[name] if name in fields else getattr(value, name) for name in names}


def read_lines(path: Path, record: TypeAdapter[RecordT]) -> list[RecordT]:
    """Read all lines that the learner ranks logged of a step, in the order of positions.

    `path` is the file of rank 0; the files of the other ranks are found next to it.

    An incomplete last line, which a crashed run can leave, is ignored.

    Raises:
        OSError: the file cannot be read.
        RecordError: a line does not have this version's format; names file, line and field.
    """
    # Sorted by number: rank 10 comes after rank 9.
    others = sorted(
        path.parent.glob(f"{path.stem}.rank*.jsonl"),
        key=lambda other: (len(other.name), other.name),
    )
    lines: list[RecordT] = []
    for file in (path, *others):
        for number, text in enumerate(file.read_bytes().split(b"\n")[:-1], 1):
            try:
                # `validate_json` would refuse halves of surrogate pairs.
                lines.append(record.validate_python(json.loads(text)))
            except ValueError as error:
                field, problem = _problem(error)
                raise RecordError(
                    problem, field=field, remedy=_REMEDY, file=str(file), line=number
                ) from error
    return lines


def _problem(error: ValueError) -> tuple[str, str]:
    if not isinstance(error, ValidationError):
        return "line", f"is not JSON ({error})"
    first = error.errors(include_url=False)[0]
    return dotted(first["loc"]) or "line", first["msg"][0].lower() + first["msg"][1:]
