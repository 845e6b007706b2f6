"""What a `counting_worker` in a server's process tells a test. Light to import."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROWS_FILE = "ROLLMATCH_TEST_ROWS"
"""Environment variable of a server whose worker nobody can ask: the file that gets a line per step,
from the first sync on.
"""


@dataclass(frozen=True)
class RowsFile:
    """What a server's `counting_worker` notes, since its client has no way to ask it."""

    path: Path

    @property
    def variables(self) -> dict[str, str]:
        """Of the server's environment."""
        return {ROWS_FILE: str(self.path), "PYTHONPATH": str(Path(__file__).parent)}

    def take(self) -> list[int]:
        """How many sequences each step since the last time was for."""
        rows = [int(line) for line in self.path.read_text().split()] if self.path.exists() else []
        self.path.write_text("")
        return rows
