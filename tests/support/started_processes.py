"""How many engines and Ray nodes a test session starts: their processes, seen in /proc."""

from __future__ import annotations

import os
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path

SESSION = "ROLLMATCH_TEST_SESSION"
"""Environment variable that names the session."""
KINDS = {"VLLM::EngineCor": "engines", "raylet": "Ray nodes", "warm": "forked processes"}
"""The first 15 characters of a process's name, up to a space. An engine in the tests' own process has none."""
EVERY_S = 0.5


class StartedProcesses:
    """A thread that looks again and again, until it is told to stop. Processes that live for less than `EVERY_S` may be missed."""

    def __init__(self) -> None:
        self._mark = f"{SESSION}={os.environ[SESSION]}".encode()
        """In the environment of everything that this session starts."""
        self._seen: set[tuple[str, str]] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, name="started-processes", daemon=True)
        self._thread.start()

    def stop(self) -> Counter[str]:
        """How many of each kind there were."""
        self._stopped.set()
        self._thread.join()
        return Counter(kind for kind, _ in self._seen)

    def _look(self) -> None:
        while not self._stopped.wait(EVERY_S):
            for process in Path("/proc").iterdir():
                if process.name.isdecimal():
                    with suppress(OSError):  # it has ended
                        self._note(process)

    def _note(self, process: Path) -> None:
        name = (process / "comm").read_text().split()
        kind = KINDS.get(name[0]) if name else None
        # An engine's title takes the room of its environment, so those of other sessions on this machine are counted too.
        if kind is not None and (kind == "engines" or self._mark in (process / "environ").read_bytes()):
            begun = (process / "stat").read_text().rpartition(")")[2].split()[19]
            self._seen.add((kind, f"{process.name} {begun}"))
