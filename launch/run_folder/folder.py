"""A run's output folder: locks it, cuts its files for a resumed run, and saves errors."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO

from launch.checks.host import run_folder_problem
from launch.doctor.learning import read_findings
from launch.run_folder.console import keep_lost_console
from launch.run_folder.held_out import read_evaluations
from launch.run_folder.ledger import cut_ledger
from launch.run_folder.saved_checkpoints import read_index
from launch.run_folder.timeline import cut_timeline, read_timeline
from shared.config.job import ResumeSection
from shared.config.secrets import redacted
from shared.errors import ConfigError, StorageError
from shared.run_files import (
    CONFIG,
    FAILED_CONFIG,
    cannot_write,
    cut_lines,
    read_steps,
    write_run_file,
)

_LOGGER = logging.getLogger(__name__)

ERROR = "error.txt"


class RunFolder:
    """A run's output folder, locked until it is closed or this process ends."""

    def __init__(self, path: Path, resume: ResumeSection, *, resumes: bool) -> None:
        """Create and lock the folder. For a new run, remove the files of a failed start.

        `resumes`: the run continues from a checkpoint in the folder.

        Raises:
            ConfigError: the folder holds a run, or another process writes to it.
            StorageError: the folder cannot be written.
        """
        self.path = path
        problem = None if resumes else run_folder_problem(self.path, resume)
        if problem is not None:
            raise ConfigError(problem)
        # With `resume=auto`, a run that ended before its first checkpoint is started again.
        begun = (FAILED_CONFIG, CONFIG) if resume.is_auto else (FAILED_CONFIG,)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.path)
            keep_lost_console(self.path)
            if not resumes and any((self.path / name).exists() for name in begun):
                self.cut(0, reports_again=True)
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def cut(self, step: int, *, reports_again: bool) -> int:
        """Cut the folder's files back to their state after step `step`; 0: before the first step.

        `reports_again`: remove the held-out report after this step too, as it will be made again.

        Returns the last step whose metrics are in the files; 0 if there are no metrics.

        Raises the errors of `require_readable`.
        """
        folder = self.path
        require_readable(folder)
        metrics = cut_lines(folder / "metrics.jsonl", lambda line: line["step"] <= step)
        last = int(metrics[-1]["step"]) if metrics else 0
        cut_lines(folder / "plan.jsonl", lambda line: line["step"] <= step)
        cut_ledger(folder, last)
        last_report = step - int(reports_again)
        cut_lines(folder / "evaluations.jsonl", lambda line: line["step"] <= last_report)
        for report in (folder / "evaluations").glob("step_*"):
            # Reports of `rollmatch evaluate` are kept, such as step_000020_val.
            name = re.fullmatch(r"step_(\d{6,})(\.partial)?", report.name)
            if name is not None and int(name[1]) > last_report:
                shutil.rmtree(report)
        for log in (folder / "rollouts").glob("step_*.jsonl"):
            name = re.fullmatch(r"step_(\d{6,})(\.rank\d+)?\.jsonl", log.name)
            if name is not None and int(name[1]) > step:
                log.unlink()
        cut_timeline(folder / "timeline.json", f"step {last} (")
        for file in (ERROR, FAILED_CONFIG):
            (folder / file).unlink(missing_ok=True)
        return last

    def leave_to_another_start(self) -> None:
        """Rename `config.json`, so that another run may use this folder, which has no results.

        Raises StorageError.
        """
        failed = self.path / FAILED_CONFIG
        try:
            (self.path / CONFIG).replace(failed)
        except OSError as error:
            raise cannot_write(failed, error) from error

    def keep_error(self, error: Exception, warn: Callable[[str], None]) -> Path | str:
        """Write the error with its traceback into a file, and return the file.

        If neither this folder nor the temporary folder can be written, return the error's text.
        `warn` prints a warning.
        """
        story = redacted("".join(traceback.format_exception(error)))
        try:
            write_run_file(self.path / ERROR, story)
            return self.path / ERROR
        except StorageError as unwritten:
            warn(str(unwritten))
        try:
            # Only a new file is safe in a folder that all users can write to.
            number, name = tempfile.mkstemp(".txt", f"rollmatch_{self.path.name}_error_")
            os.close(number)
            try:
                write_run_file(Path(name), story)
            except StorageError:
                Path(name).unlink()
                raise
            return Path(name)
        except (OSError, StorageError):
            return story

    def close(self) -> None:
        self._lock.close()


def _locked(folder: Path) -> IO[bytes]:
    """Open and lock the folder's lock file. Raises ConfigError if another process holds it."""
    file = (folder / ".lock").open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ConfigError(
            f"telemetry.run_dir: another process writes to {folder}; wait until that run has ended,"
            " or end it"
        ) from error
    except OSError as error:
        # A network disk without locks: a second run in the folder cannot be detected.
        _LOGGER.warning("%s cannot be locked (%s)", folder, error)
    return file


def require_readable(folder: Path) -> None:
    """Check that all files that a resumed run reads are readable, before anything is changed.

    Raises OSError, ConfigError for a damaged index of checkpoints, and RecordError for a damaged
    line of another file.
    """
    for name in ("metrics.jsonl", "plan.jsonl"):
        read_steps(folder / name)
    read_evaluations(folder)
    read_findings(folder)
    read_timeline(folder / "timeline.json")
    read_index(folder)
