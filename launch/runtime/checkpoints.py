"""When the run saves its weights, and which of the saved ones it keeps."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from shared.config import RunConfig
from shared.config.training import CheckpointSection
from shared.errors import RolloutError, StorageError, WeightSyncError


class SavesWeights(Protocol):
    def stop(self, *, timeout_s: float) -> int:
        """Learn nothing more. The number of finished updates, which the weights are of."""
        ...

    def save(self, folder: Path, *, timeout_s: float | None = None) -> None: ...


class HearsOfCheckpoints(Protocol):
    def saved(self, checkpoint: Path) -> None:
        """It is complete."""
        ...

    def not_saved(self, error: Exception) -> None:
        """The weights of a run that is ending are lost, because of this."""
        ...


class Checkpoints:
    """Asks the learner to save, at the points the driver names, and keeps what is to be kept:
    `checkpoints/` of the run's folder.

    `checkpoints.json` beside it lists every checkpoint that is complete: folder, updates, score and
    why it is there. The score is the headline of the held-out report: F1, or mean reward.
    """

    def __init__(
        self,
        config: RunConfig,
        learner: SavesWeights,
        telemetry: HearsOfCheckpoints,
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """The time of `checkpoint.save_minutes` begins here. `clock_s` tells it."""
        self._config, self._learner, self._telemetry = config, learner, telemetry
        self._run_dir = config.telemetry.run_dir
        self._retention = Retention(config.checkpoint, self._run_dir / "checkpoints")
        self._clock_s = clock_s
        self._saved_s = clock_s()
        """When the newest checkpoint was complete, or the run began."""
        self._on_the_way: dict[Path, KeptCheckpoint] = {}
        """Of the index, by folder: those that a later one may take the place of, from before they
        are written until before they are deleted.
        """
        self._others: list[dict[str, object]] = []
        """Of the index: those that no later one takes the place of, from before they are written.
        """
        self._is_saving = False
        """Whether a save has begun that is not in the index yet."""

    def after_step(self, num_steps: int) -> None:
        """`num_steps` updates are done. StorageError where a checkpoint cannot be written; the
        older ones are still there then.
        """
        minutes = self._config.checkpoint.save_minutes
        is_due = minutes is not None and self._clock_s() - self._saved_s >= 60 * minutes
        self._carry_out(self._retention.after_step(num_steps, is_due=is_due))

    def after_report(self, num_steps: int, score: float) -> None:
        """The weights after so many updates, which the learner holds, have this score on the
        held-out samples.
        """
        self._carry_out(self._retention.after_report(num_steps, score))

    def at_end(self, num_steps: int) -> None:
        """The last update is done."""
        if self._config.checkpoint.save_final:
            self._save_for_good(self._run_dir / "checkpoint", num_steps, "final")

    @contextmanager
    def saved_at_an_early_end(self) -> Iterator[None]:
        """Where the body is interrupted, or a rollout or a sync fails, the weights of the last
        finished update are saved before that goes on.

        Not where the learner fails: what it holds is not to be trusted, or not to be had.
        """
        try:
            yield
        except KeyboardInterrupt:
            self._save_last_update("interrupted")
            raise
        except (RolloutError, WeightSyncError):
            self._save_last_update("failed")
            raise

    def _save_last_update(self, reason: str) -> None:
        """Within `timeouts.interrupt_s`. With `save_on_interrupt` off only note what becomes of a
        save under way.

        Whatever goes wrong here must not hide why the run ends.
        """
        saves = self._config.checkpoint.save_on_interrupt
        if not (saves or self._is_saving):
            return
        limit_s, started_s = self._config.timeouts.interrupt_s, time.monotonic()
        try:
            # Asked, not counted here: the learner may have finished an update that nobody has heard
            # of yet.
            num_updates = self._learner.stop(timeout_s=limit_s)
            # A save that was interrupted here went on in the learner, which is free now: it is
            # complete, or not there at all.
            complete = [
                entry
                for entry in self._others
                if entry["step"] == num_updates and self._is_there(entry)
            ]
            if complete:
                self._telemetry.saved(self._run_dir / str(complete[0]["folder"]))
            elif num_updates and saves:
                left_s = max(0.0, limit_s - (time.monotonic() - started_s))
                self._save_for_good(
                    self._run_dir / f"checkpoint_interrupted_{num_updates:06d}",
                    num_updates,
                    reason,
                    timeout_s=left_s,
                )
            if self._others or self._on_the_way:
                self._write_index()
        # of any kind: it is told, and the run ends with what it was ended by
        except Exception as error:
            self._telemetry.not_saved(error)

    def _carry_out(self, change: RetentionChange) -> None:
        self._on_the_way |= {kept.folder: kept for kept in self._retention.kept}
        if change.save is not None:
            self._is_saving = True
            self._learner.save(change.save)
            self._saved_s = self._clock_s()
            self._telemetry.saved(change.save)
        for folder in change.delete:
            del self._on_the_way[folder]
        if self._on_the_way or change.delete:
            self._write_index()
        self._is_saving = False
        for folder in change.delete:
            try:
                shutil.rmtree(folder)
            except OSError as error:
                raise StorageError(
                    str(folder),
                    str(error),
                    action="delete",
                    remedy="it is not kept any more: permit deleting it",
                ) from error

    def _save_for_good(
        self, folder: Path, num_steps: int, reason: str, *, timeout_s: float | None = None
    ) -> None:
        self._others.append(
            {"folder": folder.name, "step": num_steps, "score": None, "reasons": [reason]}
        )
        self._is_saving = True
        self._learner.save(folder, timeout_s=timeout_s)
        self._telemetry.saved(folder)
        self._write_index()
        self._is_saving = False

    def _is_there(self, entry: Mapping[str, object]) -> bool:
        """Whether this checkpoint of the index is complete: its folder gets its name last of
        all."""
        return (self._run_dir / str(entry["folder"])).is_dir()

    def _write_index(self) -> None:
        """List what is complete. What was interrupted, or failed, may have begun and not be
        there."""
        periodic_and_best: list[dict[str, object]] = [
            {
                "folder": str(kept.folder.relative_to(self._run_dir)),
                "step": kept.step,
                "score": kept.score,
                "reasons": list(kept.reasons),
            }
            for _, kept in sorted(self._on_the_way.items())
        ]
        entries = [entry for entry in (*periodic_and_best, *self._others) if self._is_there(entry)]
        index = self._run_dir / "checkpoints.json"
        partial = index.with_suffix(".json.partial")
        try:
            partial.write_text(json.dumps(entries, indent=2) + "\n")
            partial.replace(index)
        except OSError as error:
            raise StorageError(str(index), str(error)) from error


# Which checkpoints of a run are kept: the newest periodic ones, and the best by the headline of the
# held-out report (F1, or mean reward). Decides, and touches no file.


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
    """Told of every update and report, in their order, and of weights that were saved only by doing
    what it answers.
    """

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
        """The weights after `step` updates, which are the present ones, have this score. Of equal
        ones the older stays.
        """
        if step in self._kept:
            return self._add(replace(self._kept[step], score=score))
        return self._add(KeptCheckpoint(step, self._of(step), score))

    def _add(self, new: KeptCheckpoint) -> RetentionChange:
        candidates = self._kept | {new.step: new}
        newest = set(sorted(self._periodic & candidates.keys())[-self._config.keep_last :])
        rated = [(-kept.score, kept.step) for kept in candidates.values() if kept.score is not None]
        best = {step for _, step in sorted(rated)[: self._config.keep_best]}
        reasons = {RetentionReason.PERIODIC: newest, RetentionReason.BEST: best}
        kept = {
            step: replace(
                candidates[step],
                reasons=tuple(why for why, steps in reasons.items() if step in steps),
            )
            for step in newest | best
        }
        gone = tuple(self._kept[step].folder for step in sorted(self._kept.keys() - kept.keys()))
        is_new = new.step in kept and new.step not in self._kept
        self._kept = kept
        return RetentionChange(new.folder if is_new else None, gone)

    def _of(self, step: int) -> Path:
        return self._folder / f"step_{step:06d}"
