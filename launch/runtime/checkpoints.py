"""When the run saves its weights, and which of the saved ones it keeps."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from launch.runtime.resume import (
    ResumePoint,
    RunState,
    checkpoint_folders,
    damaged_name,
    read_state,
)
from shared.config import RunConfig
from shared.config.training import CheckpointSection
from shared.errors import (
    CollectiveError,
    LostLearnerError,
    RolloutError,
    StorageError,
    WeightSyncError,
)
from shared.protocols import PerRank
from shared.records import read_record
from shared.run_files import FINAL_FOLDER, Span, cannot_write

if TYPE_CHECKING:
    from launch.processes.learner_client import LearnerClient
    from launch.runtime.telemetry import Telemetry

INDEX = "checkpoints.json"


class RetentionReason(StrEnum):
    """A reason to keep a checkpoint, as the index names it."""

    PERIODIC = "periodic"
    """One of the newest `keep_last` of `save_steps` and `save_minutes`."""
    BEST = "best"
    """One of the `keep_best` with the highest score."""
    FINAL = "final"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class KeptCheckpoint:
    """One entry of the index.

    Example: `KeptCheckpoint(20, run / "checkpoints/step_000020", 0.71, (RetentionReason.BEST,))`.
    """

    step: int
    """Updates behind its weights."""
    folder: Path
    score: float | None = None
    """The headline of the held-out report; None before a report, or without one."""
    reasons: tuple[RetentionReason, ...] = ()


@dataclass(frozen=True, slots=True)
class _IndexEntry:
    """A `KeptCheckpoint` as JSON, its folder relative to the run's."""

    folder: str
    step: int
    score: float | None
    reasons: tuple[RetentionReason, ...]


class Checkpoints:
    """Asks the learner to save, and deletes what a newer checkpoint replaces: `checkpoints/`.

    Periodic and best ones are written beside the run (`checkpoint.background`), one at a time.
    Until one is whole nothing that it replaces is deleted, and the index does not change.
    `checkpoints.json` beside it lists every checkpoint that is complete (`KeptCheckpoint`).
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
        """Go on with the checkpoints of a run that is resumed at `point`.

        `clock_s` measures `checkpoint.save_minutes`, which begin now.
        """
        self._config = config
        self._learner = learner
        self._telemetry = telemetry
        self._run_dir = config.telemetry.run_dir
        self._retention = Retention(config.checkpoint, self._run_dir / "checkpoints")
        self._clock_s = clock_s
        self._saved_s = clock_s()
        """Time at which the run last went on behind a save, or began."""
        self._replaceable: dict[Path, KeptCheckpoint] = {}
        """Periodic and best ones, from before they are written until before they are deleted."""
        self._lasting: list[KeptCheckpoint] = []
        """The others, from before they are written."""
        self._writing: Path | None = None
        """The periodic or best one that the learner may be writing, from before it is asked to."""
        self._gone: list[Path] = []
        """Replaceable ones to delete when none is being written."""
        self._told_reason = False
        """Whether it was told why the run waits for its checkpoints."""
        self._indexed: set[Path] = set()
        """Folders in the index as it was last written."""
        self._superseded: list[Path] = []
        """Checkpoints of early ends, to delete when a newer one is complete."""
        self._rounds_ahead: dict[int, Future[PerRank] | None] = {}
        """The rounds generated before their time, by the number of updates before them."""
        if point is not None:
            self._take_up(point)

    def round_ahead(self, num_steps: int, handle: Future[PerRank] | None) -> None:
        """Note what is generated for the next step already, before the update `num_steps`."""
        self._rounds_ahead = {
            number: earlier
            for number, earlier in self._rounds_ahead.items()
            if number == num_steps - 1
        }
        self._rounds_ahead[num_steps] = handle

    def after_step(self, num_steps: int) -> None:
        """Save after `num_steps` updates if that is due. Raises StorageError; older ones stay.

        What is being written gets its name if all of it is there.
        """
        self._finish(wait=False)
        minutes = self._config.checkpoint.save_minutes
        # From where the run went on, or a slow disk would be written to after every step; and not
        # while it is written to.
        is_due = (
            minutes is not None
            and self._writing is None
            and self._clock_s() - self._saved_s >= 60 * minutes
        )
        self._carry_out(self._retention.after_step(num_steps, is_due=is_due))

    def after_report(self, num_steps: int, score: float | None) -> None:
        """Save the weights, which are those of the report, if their score is among the best.

        Without a score they are never among the best.
        """
        self._carry_out(self._retention.after_report(num_steps, score))

    def at_end(self, num_steps: int) -> None:
        """Save the final weights, after the last update."""
        self._finish(wait=True)
        if self._config.checkpoint.save_final:
            folder = self._run_dir / FINAL_FOLDER
            self._save_lasting(folder, num_steps, RetentionReason.FINAL)

    @contextmanager
    def saved_at_an_early_end(self) -> Iterator[None]:
        """Save the last finished update where the body is interrupted, or a rollout, a sync or the
        disk fails. However it ends, what is being written is waited for.
        """
        try:
            yield
            self._finish(wait=True)
        except KeyboardInterrupt:
            self._save_last_update(RetentionReason.INTERRUPTED)
            raise
        except (RolloutError, WeightSyncError, StorageError) as error:
            if isinstance(error, StorageError):
                self._telemetry.patience.limit_s = 0.0  # it has been waited for already
            self._save_last_update(RetentionReason.FAILED)
            raise
        # Where the learner fails, what it holds is not to be trusted, or out of reach; but a copy
        # is of an update before.
        except Exception as error:
            if not isinstance(error, LostLearnerError | CollectiveError):
                try:
                    limit_s = self._config.timeouts.interrupt_s
                    self._finish(wait=True, deadline=time.monotonic() + limit_s)
                # Of any kind: it must not hide why the run ends.
                except Exception as unsaved:
                    self._telemetry.not_saved(unsaved)
            raise

    def _save_last_update(self, reason: RetentionReason) -> None:
        """Save within `timeouts.interrupt_s`, or only record what becomes of a save under way."""
        saves = self._config.checkpoint.save_on_interrupt
        unfinished = [kept for kept in self._entries() if kept.folder not in self._indexed]
        if not (saves or unfinished):
            return
        limit_s = self._config.timeouts.interrupt_s
        deadline = time.monotonic() + limit_s
        try:
            # Not counted here: it may have finished an update that nobody has heard of yet.
            num_updates = self._learner.stop(timeout_s=limit_s)
            saves_last = saves and num_updates > 0
            # The second half is for the attempt that succeeds.
            patience = self._telemetry.patience
            patience_s = max(0.0, min(patience.limit_s, (deadline - time.monotonic()) / 2))
            writing = self._writing
            try:
                # The last update is worth more than one before it, and so is the time.
                patience.limit_s = 0.0 if saves_last else patience_s
                self._finish(wait=True, deadline=deadline)
            except StorageError as error:
                if not saves_last:
                    raise
                if writing is not None and writing.is_dir():
                    # Of the index, which is written again below, or of what it replaces.
                    self._telemetry.goes_on_saving(error)
                else:
                    self._telemetry.gives_up_save(error)
            # The wait has taken its part of the time.
            patience.limit_s = min(patience_s, max(0.0, deadline - time.monotonic()) / 2)
            # A save that was interrupted here went on in the learner, which is free now: it is
            # complete, or not there at all.
            complete = [
                kept
                for kept in self._entries()
                if kept.step == num_updates and kept.folder.is_dir()
            ]
            if complete:
                if complete[0].folder != writing:  # else it was told just now
                    self._telemetry.saved(complete[0].folder)
            elif saves_last:
                folder = self._run_dir / f"checkpoint_interrupted_{num_updates:06d}"
                self._save_lasting(folder, num_updates, reason, deadline)
            self._delete_gone()
        # Of any kind: it must not hide why the run ends.
        except Exception as error:
            self._telemetry.not_saved(error)

    def _carry_out(self, change: RetentionChange) -> None:
        self._replaceable |= {kept.folder: kept for kept in self._retention.kept}
        if change.save is not None:
            self._finish(wait=True)
            # Before what it replaces: an interruption in between deletes nothing.
            self._writing = change.save
        self._gone += change.delete
        if change.save is not None:
            self._begin(change.save)
        elif self._writing is None:
            self._delete_gone()

    def _begin(self, folder: Path) -> None:
        """Save the present weights, and go on while they are written, if that can be."""
        started_s = time.monotonic()
        background = self._config.checkpoint.background
        reason = self._save(folder, self._replaceable[folder].step, background=background)
        self._telemetry.waited_for_save(folder, time.monotonic() - started_s)
        self._saved_s = self._clock_s()
        if reason is not None and not self._told_reason:
            self._telemetry.saves_in_foreground(reason)
            self._told_reason = True
        if reason is not None or not background:
            self._note_whole([])

    def _finish(self, *, wait: bool, deadline: float | None = None) -> None:
        """Note that what is being written is whole, if it is; `wait`: until it is.

        `deadline` is by the monotonic clock. Raises StorageError.
        """
        folder = self._writing
        if folder is None:
            return
        started_s = time.monotonic()
        try:
            # Behind a failure the learner writes it again, from its copy.
            written = self._telemetry.patience(
                lambda: self._learner.finish_save(wait=wait, timeout_s=_left_s(deadline))
            )
        except StorageError:
            self._gone = []
            self._writing = None
            raise
        if written is not None:
            self._telemetry.waited_for_save(folder, time.monotonic() - started_s)
            self._note_whole(written)

    def _note_whole(self, written: Sequence[Span]) -> None:
        folder = self._writing
        # At an early end the learner may never have been asked to save it.
        if folder is None or not folder.is_dir():
            self._gone = []
            self._writing = None
            return
        self._writing = None
        self._telemetry.saved(folder, written)
        self._delete_gone()
        self._delete_superseded()

    def _delete_gone(self) -> None:
        """Write the index, and delete what a checkpoint that is whole has replaced.

        Raises StorageError; where it is the index's, a later call deletes them.
        """
        for folder in self._gone:
            self._replaceable.pop(folder, None)
        # The index first: it never lists a checkpoint that is being deleted.
        if self._entries() or self._gone:
            self._write_index()
        gone = self._gone
        self._gone = []
        for folder in gone:
            _delete(folder)

    def _save(
        self,
        folder: Path,
        num_steps: int,
        deadline: float | None = None,
        *,
        background: bool = False,
    ) -> str | None:
        """Save the present weights, those of `num_steps` updates, and what a resumed run needs.

        `deadline` is by the monotonic clock. Returns why it was not in the background as wanted.
        """
        handle = self._rounds_ahead.get(num_steps)
        answers = None
        is_lost = False
        if handle is not None:
            try:
                answers = handle.result(timeout=_left_s(deadline))
            # of any kind: the run ends for it, and the weights are worth saving without the round
            except Exception:
                is_lost = True
        state = RunState.of_run(
            self._config,
            num_steps,
            sync_fallback=self._telemetry.sync_fallback,
            has_answers_ahead=answers is not None,
            lost_answers_ahead=is_lost,
        )
        # All of it again: whatever could not be written, nothing is left of this checkpoint.
        return self._telemetry.patience(
            lambda: self._learner.save(
                folder,
                state.as_json(),
                answers,
                background=background,
                timeout_s=_left_s(deadline),
            )
        )

    def _delete_superseded(self) -> None:
        superseded = self._superseded
        self._superseded = []
        if superseded:
            self._lasting = [kept for kept in self._lasting if kept.folder not in superseded]
            self._write_index()
        for folder in superseded:
            _delete(folder)

    def _take_up(self, point: ResumePoint) -> None:
        """Go on with what the run had saved up to the point; what is later or damaged is put aside.

        What the index does not name is of a run that ended between a checkpoint and the index.
        """
        for folder, reason in point.damaged.items():
            self._put_aside(folder, damaged_name(folder), f"is damaged ({reason})")
        checkpoint = point.checkpoint
        if checkpoint.suffix == ".old":
            checkpoint = checkpoint.with_suffix("")
            point.checkpoint.replace(checkpoint)
        indexed = {entry.folder: entry for entry in read_index(self._run_dir)}
        kept = []
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
                kept.append(indexed[folder])
            elif folder == checkpoint:
                kept.append(KeptCheckpoint(step, folder, reasons=(self._reason_of(folder),)))
            else:
                _delete(folder)
        for entry in kept:
            if set(entry.reasons) <= {RetentionReason.PERIODIC, RetentionReason.BEST}:
                self._retention.take_up(entry)
            else:
                self._lasting.append(entry)
                if RetentionReason.FINAL not in entry.reasons:
                    self._superseded.append(entry.folder)
        self._replaceable = {entry.folder: entry for entry in self._retention.kept}
        self._write_index()

    def _put_aside(self, folder: Path, aside: Path, why: str) -> None:
        shutil.rmtree(aside, ignore_errors=True)
        folder.replace(aside)
        self._telemetry.put_aside(folder, aside, why)

    def _reason_of(self, folder: Path) -> RetentionReason:
        if folder.parent == self._run_dir / "checkpoints":
            return RetentionReason.PERIODIC
        is_final = folder.name == FINAL_FOLDER
        return RetentionReason.FINAL if is_final else RetentionReason.INTERRUPTED

    def _save_lasting(
        self, folder: Path, num_steps: int, reason: RetentionReason, deadline: float | None = None
    ) -> None:
        """Save a checkpoint that no later one replaces."""
        self._lasting = [kept for kept in self._lasting if kept.folder != folder]
        self._lasting.append(KeptCheckpoint(num_steps, folder, reasons=(reason,)))
        self._superseded = [other for other in self._superseded if other != folder]
        self._save(folder, num_steps, deadline)
        self._telemetry.saved(folder)
        self._write_index()
        self._delete_superseded()

    def _entries(self) -> list[KeptCheckpoint]:
        """Return every checkpoint that has been begun and is kept, in the order of the index."""
        return [*(kept for _, kept in sorted(self._replaceable.items())), *self._lasting]

    def _write_index(self) -> None:
        # Only what is complete: a folder gets its name last of all.
        complete = [kept for kept in self._entries() if kept.folder.is_dir()]
        entries = [
            asdict(
                _IndexEntry(
                    str(kept.folder.relative_to(self._run_dir)),
                    kept.step,
                    kept.score,
                    kept.reasons,
                )
            )
            for kept in complete
        ]
        index = self._run_dir / INDEX
        partial = index.with_suffix(".json.partial")

        def write() -> None:
            try:
                partial.write_text(json.dumps(entries, indent=2) + "\n")
                partial.replace(index)
            except OSError as error:
                raise cannot_write(index, error) from error

        self._telemetry.patience(write)
        self._indexed = {kept.folder for kept in complete}


def read_index(run_dir: Path) -> list[KeptCheckpoint]:
    """Read `checkpoints.json`; empty if there is none. Raises ConfigError if it is damaged."""
    remedy = (
        "restore it from another copy of the run's folder; or remove it, and keep elsewhere what"
        " you need of its checkpoints: only the one that the run resumes stays"
    )
    index = run_dir / INDEX
    entries = read_record(index, list[_IndexEntry], key="resume.run", remedy=remedy) or []
    return [
        KeptCheckpoint(entry.step, run_dir / entry.folder, entry.score, entry.reasons)
        for entry in entries
    ]


def _left_s(deadline: float | None) -> float | None:
    """Return the seconds until a time of the monotonic clock."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _delete(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        remedy = "it is not kept any more: permit deleting it"
        raise StorageError(str(folder), str(error), action="delete", remedy=remedy) from error


@dataclass(frozen=True, slots=True)
class RetentionChange:
    """A folder for the weights as they are now, and those to delete once it is complete."""

    save: Path | None = None
    delete: tuple[Path, ...] = ()


class Retention:
    """Decides which checkpoints are kept: the newest periodic ones and the best. Touches no file.

    It has to hear of every update and report, in their order.
    """

    def __init__(self, config: CheckpointSection, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._periodic: set[int] = set()
        self._kept: dict[int, KeptCheckpoint] = {}

    def take_up(self, kept: KeptCheckpoint) -> None:
        """Hear of a checkpoint that the run had kept before it was resumed."""
        self._kept[kept.step] = kept
        if RetentionReason.PERIODIC in kept.reasons:
            self._periodic.add(kept.step)

    @property
    def kept(self) -> tuple[KeptCheckpoint, ...]:
        """The kept checkpoints, from the oldest to the newest."""
        return tuple(self._kept[step] for step in sorted(self._kept))

    def after_step(self, step: int, *, is_due: bool = False) -> RetentionChange:
        """Decide after `step` updates. `is_due`: `save_minutes` have gone by."""
        is_periodic = self._config.save_steps is not None and step % self._config.save_steps == 0
        if not is_periodic and not is_due:
            return RetentionChange()
        self._periodic.add(step)
        return self._add(step)

    def after_report(self, step: int, score: float | None) -> RetentionChange:
        """Decide by the score of the present weights. Of equal ones the older stays."""
        return self._add(step, score)

    def _add(self, step: int, score: float | None = None) -> RetentionChange:
        new = KeptCheckpoint(step, self._folder / f"step_{step:06d}", score)
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
