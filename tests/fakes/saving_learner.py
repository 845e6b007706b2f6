"""A learner that writes one small file per checkpoint, or fails as a full disk does."""

from __future__ import annotations

import shutil
from pathlib import Path

from shared.errors import LearnerError, StorageError
from shared.run_files import RUN_FILE, STATE_FOLDER, Span


class SavingLearner:
    """Saves as a learner does: in a folder ending in `.partial` until it is complete."""

    def __init__(self) -> None:
        self.finished = 0
        """Number of updates of its weights."""
        self.refusals = 0
        """Attempts to write that the disk refuses from now on."""
        self.lost = False
        self.reason: str | None = None
        """Why nothing is written in the background."""
        self.is_written = True
        """Whether what is written in the background is there when one asks without waiting."""
        self.interrupted: str | None = None
        """The driver is interrupted during the next save, which `writes` it all or `fails`."""
        self.begun: tuple[Path, str] | None = None
        """What is being written in the background, and the driver's part of it."""
        self.saves: list[tuple[str, float | None]] = []
        """The names of complete checkpoints, and the seconds that their saves had."""
        self.stops: list[float] = []

    def stop(self, *, timeout_s: float) -> int:
        self.stops.append(timeout_s)
        if self.lost:
            raise LearnerError("its process ended", phase="stop")
        return self.finished

    def save(
        self,
        folder: Path,
        run: str,
        answers_ahead: object = None,
        *,
        background: bool = False,
        timeout_s: float | None = None,
    ) -> str | None:
        self.begun = None
        self._refuse(folder)
        interrupted = self.interrupted
        self.interrupted = None
        if interrupted == "fails":
            raise KeyboardInterrupt
        if background and self.reason is None:
            folder.with_name(f"{folder.name}.partial").mkdir(parents=True)
            self.begun = (folder, run)
        else:
            self._write(folder, run, timeout_s)
        if interrupted == "writes":
            raise KeyboardInterrupt
        return self.reason if background else None

    def finish_save(self, *, wait: bool, timeout_s: float | None = None) -> list[Span] | None:
        if self.begun is None:
            return []
        if not (wait or self.is_written):
            return None
        folder, run = self.begun
        self._refuse(folder)
        self._write(folder, run, timeout_s)
        self.begun = None
        return [Span("learner, checkpoints", "write", 1.0, 2.0)]

    def _refuse(self, folder: Path) -> None:
        if self.refusals:
            self.refusals -= 1
            shutil.rmtree(folder.with_name(f"{folder.name}.partial"), ignore_errors=True)
            raise StorageError(str(folder), "[Errno 28] No space left on device", can_pass=True)

    def _write(self, folder: Path, run: str, timeout_s: float | None) -> None:
        partial = folder.with_name(f"{folder.name}.partial")
        (partial / STATE_FOLDER).mkdir(parents=True, exist_ok=True)
        (partial / STATE_FOLDER / RUN_FILE).write_text(run)
        shutil.rmtree(folder, ignore_errors=True)
        partial.replace(folder)
        self.saves.append((folder.name, timeout_s))
