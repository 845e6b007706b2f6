"""The processes of one engine, as they write themselves down for the engine that takes its place.

A process of vLLM ends with its parent (`rollout_actors.engine.vllm_plugin`), but not where it is
stopped, or stuck where none of its threads runs. Then it keeps its device's memory, and no other
engine would start there.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_LOGGER = logging.getLogger(__name__)

FILE = "ROLLMATCH_ENGINE_PROCESSES"
"""Environment variable of an engine's processes: the file in which they write themselves down."""
END_S = 10.0
"""Time for what was killed to give its memory back."""


def write_process_down() -> None:
    """Write down this process, one of vLLM's, if FILE is set."""
    if FILE not in os.environ:
        return
    line = json.dumps([os.getpid(), _started(os.getpid())]) + "\n"
    # Appended: each device may have a process of its own.
    descriptor = os.open(os.environ[FILE], os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode=0o600)
    with os.fdopen(descriptor, "a") as file:
        file.write(line)


class EngineProcesses:
    """The processes of the engines that have one place in a run, one after the other."""

    def __init__(self, place: str) -> None:
        """`place` is the place's id, which no other run has."""
        self._file = Path(tempfile.gettempdir()) / f"rollmatch-engine-{place}.processes"
        self.environment = {FILE: str(self._file)}

    def end_left(self) -> None:
        """Kill what is left on this machine of an engine before, and wait until it is gone."""
        try:
            lines = self._file.read_text().splitlines()
        except FileNotFoundError:
            return
        # A number alone may be another process's by now.
        left = [
            (pid, started) for pid, started in map(json.loads, lines) if _started(pid) == started
        ]
        for pid, _ in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # A killed process keeps its device's memory until it is gone.
        deadline = time.monotonic() + END_S
        while alive := [pid for pid, started in left if _started(pid) == started]:
            if time.monotonic() > deadline:
                told = f"processes {alive} of a lost engine were killed and are still there"
                _LOGGER.warning("%s after %g s; is a driver or a disk stuck?", told, END_S)
                break
            time.sleep(0.05)
        self.remove()

    def remove(self) -> None:
        """Delete the file. Twice is harmless."""
        self._file.unlink(missing_ok=True)


def _started(pid: int) -> int | None:
    """Return when this process began, in ticks since the machine did; None where it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # Behind the name, which may hold spaces: the state first, and the time in field 22 of them all.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])
