"""When the run saves its weights, and which of the saved ones it keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from shared.config import RunConfig

INTERRUPTED_S = 60.0
"""Longest time for saving the weights of a run that is being ended."""


class SavesWeights(Protocol):
    def save(self, folder: Path, *, timeout_s: float | None = None) -> None: ...


class Checkpoints:
    """Asks the learner to save, at the points the driver names."""

    def __init__(self, config: RunConfig, learner: SavesWeights, saved: Callable[[Path], None]) -> None:
        """`saved` is told of every checkpoint that is complete."""
        self._config, self._learner, self._saved = config, learner, saved
        self._num_steps = 0

    def after_step(self, num_steps: int) -> None:
        """`num_steps` updates are done."""
        self._num_steps = num_steps

    def after_report(self, num_steps: int, f1: float) -> None:
        """The weights after so many updates have this F1 on the held-out samples."""

    def at_end(self, num_steps: int) -> None:
        """The last update is done."""
        if self._config.checkpoint.save_final:
            self._save(self._config.telemetry.run_dir / "checkpoint")

    @contextmanager
    def on_interrupt(self) -> Iterator[None]:
        """Where the body is interrupted, the weights of the last finished update are saved before the interruption goes on."""
        try:
            yield
        except KeyboardInterrupt:
            if self._config.checkpoint.save_on_interrupt and self._num_steps:
                folder = self._config.telemetry.run_dir / f"checkpoint_interrupted_{self._num_steps:06d}"
                self._learner.save(folder, timeout_s=INTERRUPTED_S)
                self._saved(folder)
            raise

    def _save(self, folder: Path) -> None:
        self._learner.save(folder)
        self._saved(folder)
