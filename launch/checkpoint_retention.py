"""Which checkpoints of a run are kept: the newest periodic ones, and the best by the headline of the held-out report (F1, or mean reward). Decides, and
touches no file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from shared.config.checkpoint import CheckpointSection


class RetentionReason(StrEnum):
    PERIODIC = "periodic"
    """One of the newest `keep_last` of `save_steps` and `save_minutes`."""
    BEST = "best"
    """One of the `keep_best` with the highest score."""


@dataclass(frozen=True, slots=True)
class KeptCheckpoint:
    """A checkpoint that is there."""

    step: int
    """Updates behind its weights."""
    folder: Path
    score: float | None = None
    """The headline of the held-out report; None before a report, or without one."""
    reasons: tuple[RetentionReason, ...] = ()


@dataclass(frozen=True, slots=True)
class RetentionChange:
    """What is to be done, in this order."""

    save: Path | None = None
    """Where the weights as they are now belong; None: nowhere."""
    delete: tuple[Path, ...] = ()
    """What is not kept any more, once the new one is complete."""


class Retention:
    """Told of every update and report, in their order, and of weights that were saved only by doing what it answers."""

    def __init__(self, config: CheckpointSection, folder: Path) -> None:
        """`folder` is where the checkpoints lie, `step_000123` each."""
        self._config = config
        self._folder = folder
        self._periodic: set[int] = set()
        self._kept: dict[int, KeptCheckpoint] = {}

    @property
    def kept(self) -> tuple[KeptCheckpoint, ...]:
        """From the oldest to the newest."""
        return tuple(self._kept[step] for step in sorted(self._kept))

    def after_step(self, step: int, *, is_due: bool = False) -> RetentionChange:
        """`step` updates are done. `is_due`: `save_minutes` have gone by."""
        is_periodic = self._config.save_steps is not None and step % self._config.save_steps == 0
        if not is_periodic and not is_due:
            return RetentionChange()
        self._periodic.add(step)
        return self._add(KeptCheckpoint(step, self._of(step)))

    def after_report(self, step: int, score: float) -> RetentionChange:
        """The weights after `step` updates, which are the present ones, have this score. Of equal ones the older stays."""
        if step in self._kept:
            return self._add(replace(self._kept[step], score=score))
        return self._add(KeptCheckpoint(step, self._of(step), score))

    def _add(self, new: KeptCheckpoint) -> RetentionChange:
        candidates = self._kept | {new.step: new}
        newest = set(sorted(self._periodic & candidates.keys())[-self._config.keep_last :])
        rated = [(-kept.score, kept.step) for kept in candidates.values() if kept.score is not None]
        best = {step for _, step in sorted(rated)[: self._config.keep_best]}
        reasons = {RetentionReason.PERIODIC: newest, RetentionReason.BEST: best}
        kept = {step: replace(candidates[step], reasons=tuple(why for why, steps in reasons.items() if step in steps)) for step in newest | best}
        gone = tuple(self._kept[step].folder for step in sorted(self._kept.keys() - kept.keys()))
        is_new = new.step in kept and new.step not in self._kept
        self._kept = kept
        return RetentionChange(new.folder if is_new else None, gone)

    def _of(self, step: int) -> Path:
        return self._folder / f"step_{step:06d}"
