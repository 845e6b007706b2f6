"""The notes of a `counting_worker` in a server's process. Light to import."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROWS_FILE = "ROLLMATCH_TEST_ROWS"
"""Environment variable of a server whose worker nobody can ask: the file that gets a line per step,
from the first sync on.
"""


@dataclass(frozen=True)
class RowsFile:
    """The file in which a server's `counting_worker` notes what no client can ask it."""

    path: Path

    @property
    def variables(self) -> dict[str, str]:
        """The server's environment."""
        return {ROWS_FILE: str(self.path), "PYTHONPATH": str(Path(__file__).parent)}

    def take(self) -> list[int]:
        """Return how many sequences each step since the last time was for."""
        rows = [int(line) for line in self.path.read_text().split()] if self.path.exists() else []
        self.path.write_text("")
        return rows
