"""When a run saves its weights, and when it deletes what a newer checkpoint replaces."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from launch.processes.learner_client import LearnerClient
from launch.run_folder.resume import ResumePoint
from launch.run_folder.saved_checkpoints import (
    KeptCheckpoint,
    RetentionReason,
    RunState,
    checkpoint_folders,
    damaged_name,
    folder_of,
    installed_versions,
    is_complete,
    read_index,
    read_state,
    reason_of,
    retained,
    write_index,
)
from launch.run_folder.telemetry import Telemetry
from shared.config import RunConfig
from shared.errors import (
    CollectiveError,
    LostLearnerError,
    RolloutError,
    StorageError,
    WeightSyncError,
)
from shared.protocols import PerRank
from shared.run_files import Span


class Checkpoints:
    """Decides when a run saves checkpoints, and when newer ones replace older ones.

    Periodic and best checkpoints are written in the background (`checkpoint.background`), one at a
    time. Until a new checkpoint is complete, older ones are not deleted, and the index
    `checkpoints.json` does not change.
    """

    def __init__(
        self,
        config: RunConfig,
        learner: LearnerClient,
        telemetry: Telemetry,
        point: ResumePoint | None = None,
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without checkpoints, or with those of a run that is resumed at `point`.

        `clock_s` returns the time in seconds; `checkpoint.save_minutes` counts from now on.
        """
        self._config = config
        self._learner = learner
        self._telemetry = telemetry
        self._run_dir = config.telemetry.run_dir
        self._clock_s = clock_s
        self._saved_s = clock_s()
        """Time at which the run last continued after a save, or began."""
        self._complete: list[KeptCheckpoint] = []
        """Checkpoints on the disk, including those that will be deleted."""
        self._writing: KeptCheckpoint | None = None
        """The checkpoint that the learner may be writing; set before the learner is called."""
        self._has_given_reason = False
        """Whether a warning has said why checkpoints are not written in the background."""
        self._rounds_ahead: dict[int, Future[PerRank] | None] = {}
        """By number of updates: the next step's first round if it is generated ahead, else None."""
        if point is not None:
            self._complete = self._found_on_disk(point)
            # Nothing is deleted here: the run may continue from a checkpoint to be deleted.
            telemetry.patience(lambda: write_index(self._run_dir, self._complete))

    def round_ahead(self, num_steps: int, handle: Future[PerRank] | None) -> None:
        """Record the round of rollouts that a checkpoint after `num_steps` updates has to contain.

        Call it before that update. `handle` is the future of the next step's first round, if that
        round is generated ahead; else None.
        """
        self._rounds_ahead = {
            number: earlier
            for number, earlier in self._rounds_ahead.items()
            if number == num_steps - 1
        }
        self._rounds_ahead[num_steps] = handle

    def after_step(self, num_steps: int) -> None:
        """Save a checkpoint after `num_steps` updates if it is due. Raises StorageError.

        If it cannot be saved, older checkpoints stay. First, an earlier checkpoint is completed if
        all its files have been written in the background.
        """
        self._finish(wait=False)
        section = self._config.checkpoint
        is_periodic = section.save_steps is not None and num_steps % section.save_steps == 0
        # Counted from the end of the last save: otherwise a slow disk would be written to after
        # every step. Not due while a checkpoint is being written.
        is_due = (
            section.save_minutes is not None
            and self._writing is None
            and self._clock_s() - self._saved_s >= 60 * section.save_minutes
        )
        if is_periodic or is_due:
            reason = RetentionReason.PERIODIC
            folder = folder_of(self._run_dir, num_steps, reason)
            self._keep(KeptCheckpoint(folder, num_steps, reasons=(reason,)))

    def after_report(self, num_steps: int, score: float | None) -> None:
        """Save the weights after step `num_steps` if their held-out `score` is among the best.

        Weights without a score are never among the best.
        """
        new = KeptCheckpoint(
            folder_of(self._run_dir, num_steps, RetentionReason.BEST), num_steps, score
        )

        def rated(one: KeptCheckpoint) -> KeptCheckpoint:
            return replace(one, score=score) if one.folder == new.folder else one

        self._complete = [rated(one) for one in self._complete]
        self._writing = self._writing and rated(self._writing)
        self._keep(new)

    def at_end(self, num_steps: int) -> None:
        """Save the final checkpoint (`checkpoint.save_final`), after the last step, `num_steps`."""
        self._finish(wait=True)
        if self._config.checkpoint.save_final:
            self._save_lasting(num_steps, RetentionReason.FINAL)

    @contextmanager
    def saved_at_an_early_end(self) -> Iterator[None]:
        """Save a checkpoint of the last update if the `with` block ends early.

        Early ends are interruptions (`KeyboardInterrupt`), and errors of rollouts, of weight syncs
        or of the disk. At any other end, only wait for a checkpoint that is being written, unless
        the learner is lost.
        """
        try:
            yield
            self._finish(wait=True)
        except KeyboardInterrupt:
            self._save_last_update(RetentionReason.INTERRUPTED)
            if self._complete:
                command = f"python -m launch.train resume={self._run_dir}"
                self._telemetry.note(f"continue  with `{command}`")
            raise
        except (RolloutError, WeightSyncError, StorageError) as error:
            if isinstance(error, StorageError):
                self._telemetry.patience.limit_s = 0.0  # the run has waited for the disk already
            self._save_last_update(RetentionReason.FAILED)
            raise
        # After an error of the learner its weights may be wrong or out of reach. But a checkpoint
        # that is being written is a copy of an earlier update.
        except Exception as error:
            if not isinstance(error, LostLearnerError | CollectiveError):
                try:
                    limit_s = self._config.timeouts.interrupt_s
                    self._finish(wait=True, deadline=time.monotonic() + limit_s)
                # No error here must hide why the run ends.
                except Exception as unsaved:
                    self._not_saved(unsaved)
            raise

    def _save_last_update(self, reason: RetentionReason) -> None:
        """Save a checkpoint of the last update within `timeouts.interrupt_s` seconds.

        Without `checkpoint.save_on_interrupt`, only finish a checkpoint that is being written. An
        error is logged, not raised.
        """
        try:
            if self._config.checkpoint.save_on_interrupt or self._writing is not None:
                self._save_within(self._config.timeouts.interrupt_s, reason)
        # No error here must hide why the run ends.
        except Exception as error:
            self._not_saved(error)

    def _save_within(self, limit_s: float, reason: RetentionReason) -> None:
        deadline = time.monotonic() + limit_s
        # The learner counts: it may have finished an update that the driver does not know of yet.
        num_updates = self._learner.stop(timeout_s=limit_s)
        saves_last = self._config.checkpoint.save_on_interrupt and num_updates > 0
        # The second half of the time is for the attempt that succeeds.
        patience = self._telemetry.patience
        patience_s = max(0.0, min(patience.limit_s, (deadline - time.monotonic()) / 2))
        writing = self._writing
        try:
            # The last update is worth more than an earlier one, so the time is kept for it.
            patience.limit_s = 0.0 if saves_last else patience_s
            self._finish(wait=True, deadline=deadline)
        except StorageError as error:
            if not saves_last:
                raise
            # A complete checkpoint has its name: only the index or a deletion was refused.
            is_named = writing is not None and writing.folder.is_dir()
            outcome = (
                "the last update is saved anyway"
                if is_named
                else "this checkpoint is given up, and the last update is saved instead"
            )
            self._telemetry.warn(f"{error}; {outcome}")
        # The wait above has used a part of the time.
        patience.limit_s = min(patience_s, max(0.0, deadline - time.monotonic()) / 2)
        complete = [kept for kept in self._complete if kept.step == num_updates]
        if complete:
            if writing is None or complete[0].folder != writing.folder:  # else it was logged above
                self._telemetry.saved(complete[0].folder)
        elif saves_last:
            self._save_lasting(num_updates, reason, deadline)
        self._note_written([])  # again, if the index was refused above

    def _keep(self, new: KeptCheckpoint) -> None:
        """Save the current weights as checkpoint `new`.

        Does nothing if `retained` would not keep it, or if it is saved already.
        """
        known = [*self._complete, *([self._writing] if self._writing else [])]
        kept = retained([*known, new], self._config.checkpoint)
        if new.folder in {one.folder for one in kept} - {one.folder for one in known}:
            self._finish(wait=True)
            self._save_replaceable(new)
        elif self._writing is None:
            self._settle()

    def _save_replaceable(self, new: KeptCheckpoint) -> None:
        """Save the current weights, in the background if possible."""
        started_s = time.monotonic()
        # Set before the learner is asked, so that an interruption in between finds it.
        self._writing = new
        background = self._config.checkpoint.background
        reason = self._save(new, background=background)
        self._telemetry.waited_for_save(new.folder, time.monotonic() - started_s)
        self._saved_s = self._clock_s()
        if reason is not None and not self._has_given_reason:
            self._telemetry.warn(
                f"the run waits while a checkpoint is written (checkpoint.background): {reason}"
            )
            self._has_given_reason = True
        if reason is not None or not background:
            self._note_written([])

    def _save_lasting(
        self, num_steps: int, reason: RetentionReason, deadline: float | None = None
    ) -> None:
        """Save a checkpoint that no later one replaces, and wait for it."""
        folder = folder_of(self._run_dir, num_steps, reason)
        self._writing = KeptCheckpoint(folder, num_steps, reasons=(reason,))
        self._save(self._writing, deadline)
        self._note_written([])

    def _finish(self, *, wait: bool, deadline: float | None = None) -> None:
        """Complete the checkpoint that is being written, if all its files have been written.

        `wait`: first wait until they have been written, at most until `deadline` on the monotonic
        clock. Raises StorageError.
        """
        if self._writing is None:
            return
        started_s = time.monotonic()
        try:
            # After a failure the learner writes it again, from its copy.
            written = self._telemetry.patience(
                lambda: self._learner.finish_save(wait=wait, timeout_s=_left_s(deadline))
            )
        except StorageError:
            self._writing = None
            raise
        if written is not None:
            self._telemetry.waited_for_save(self._writing.folder, time.monotonic() - started_s)
            self._note_written(written)

    def _note_written(self, written: Sequence[Span]) -> None:
        """Record the checkpoint that the learner wrote, and delete those that it replaces.

        `written`: when the learner ranks wrote it in the background.
        """
        new = self._writing
        # At an early end the learner may not have been asked to save it, or may have failed.
        if new is not None and self._telemetry.patience(lambda: is_complete(new)):
            if not any(one.folder == new.folder and one.step == new.step for one in self._complete):
                # The final checkpoint of a resumed run replaces the earlier one in its folder.
                others = [one for one in self._complete if one.folder != new.folder]
                self._complete = [*others, new]
                self._telemetry.saved(new.folder, written)
            self._settle()  # again, if only this failed before
        self._writing = None

    def _settle(self) -> None:
        """Write the index of the kept checkpoints, and delete the others. Raises StorageError."""
        kept = retained(self._complete, self._config.checkpoint)
        folders = {one.folder for one in kept}
        gone = [one.folder for one in self._complete if one.folder not in folders]
        # The index first: it never lists a checkpoint that is being deleted.
        self._telemetry.patience(lambda: write_index(self._run_dir, kept))
        self._complete = kept
        for folder in gone:
            _delete(folder)

    def _save(
        self, new: KeptCheckpoint, deadline: float | None = None, *, background: bool = False
    ) -> str | None:
        """Save the current weights, and the state that a resumed run needs.

        `deadline` is on the monotonic clock. Returns why the checkpoint was not written in the
        background although `background` is set; else None.
        """
        handle = self._rounds_ahead.get(new.step)
        answers = None
        is_lost = False
        if handle is not None:
            try:
                answers = handle.result(timeout=_left_s(deadline))
            # any error: it ends the run, and the weights are worth saving without the round
            except Exception:
                is_lost = True
        state = RunState(
            new.step,
            self._config.model_dump(mode="json"),
            installed_versions(),
            sync_fallback=self._telemetry.sync_fallback,
            has_answers_ahead=answers is not None,
            lost_answers_ahead=is_lost,
        )
        if not background:
            self._telemetry.note(f"saving    {new.folder}")
        # The whole save is tried again, because a failed one leaves nothing of this checkpoint.
        return self._telemetry.patience(
            lambda: self._learner.save(
                new.folder,
                state.as_json(),
                answers,
                background=background,
                timeout_s=_left_s(deadline),
            )
        )

    def _found_on_disk(self, point: ResumePoint) -> list[KeptCheckpoint]:
        """Return the run's checkpoints of the step of `point` and of earlier steps.

        Later and damaged checkpoints are renamed. Incomplete ones are deleted, and full ones that
        the index does not list, because the run ended before it wrote the index. The checkpoint at
        `point` is never deleted.
        """
        for folder, reason in point.damaged.items():
            self._put_aside(folder, damaged_name(folder), f"is damaged ({reason})")
        checkpoint = point.checkpoint
        if checkpoint.suffix == ".old":
            checkpoint = checkpoint.with_suffix("")
            point.checkpoint.replace(checkpoint)
        indexed = {entry.folder: entry for entry in read_index(self._run_dir)}
        found = []
        for folder in checkpoint_folders(self._run_dir):
            if folder.suffix in (".partial", ".old"):
                _delete(folder)
                continue
            state = read_state(folder)
            if folder.suffix or not (folder in indexed or state):
                continue
            step = state.step if state else indexed[folder].step
            if step > point.step:
                aside = folder.with_name(f"{folder.name}.replaced")
                self._put_aside(folder, aside, "is of a later step")
            elif folder in indexed:
                found.append(indexed[folder])
            elif folder == checkpoint:
                found.append(KeptCheckpoint(folder, step, reasons=(reason_of(folder),)))
            else:
                _delete(folder)
        return found

    def _put_aside(self, folder: Path, aside: Path, why: str) -> None:
        shutil.rmtree(aside, ignore_errors=True)
        folder.replace(aside)
        self._telemetry.note(f"resumed   {folder} {why}, and was renamed to {aside.name}")

    def _not_saved(self, error: Exception) -> None:
        self._telemetry.warn(f"the weights of this run could not be saved: {error}")


def _left_s(deadline: float | None) -> float | None:
    """Return the seconds until `deadline` on the monotonic clock; None without a deadline."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _delete(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        remedy = "it is no longer needed: permit deleting it"
        raise StorageError(str(folder), str(error), action="delete", remedy=remedy) from error
