"""What became of every rollout of an environment: a line each in `rollouts/step_000123.jsonl` (`learner.step_log`), in the order of positions.
`TrajectoryLine` (learner.trajectory_line) is the format.

    jq -c 'select(.error != null) | [.position, .error]' step_000123.jsonl
    jq -r 'select(.reward == 1) | .completion[] | "\\(.role): \\(.content)"' step_000123.jsonl
"""

from __future__ import annotations

from pathlib import Path

from learner.step_log import StepLog, read_lines
from learner.trajectory_line import TrajectoryLine, checked_trajectory_line, line_of
from shared.trajectory import EnvironmentRollout


class TrajectoryLog:
    def __init__(self, folder: Path, *, rank: int = 0) -> None:
        """Makes `folder` where it is missing. Raises StorageError."""
        self._step = 0
        self._lines = StepLog(folder, rank=rank)

    def begin(self, step: int) -> None:
        """The lines that follow are of this step. Raises StorageError."""
        self._step = step
        self._lines.begin(step)

    def write(self, rollout: EnvironmentRollout) -> None:
        """Raises StorageError."""
        self._lines.write(line_of(self._step, rollout))

    def close(self) -> None:
        self._lines.close()


def read_step(path: Path) -> list[TrajectoryLine]:
    """`learner.step_log.read_lines` of a file of `TrajectoryLog`. Raises OSError, and RecordError with file and line for a line that this version did not
    write."""
    return read_lines(path, checked_trajectory_line)
