"""A file with the process ids of an engine. The engine's replacement kills these processes.

A vLLM process ends with its parent (`rollout_actors.engine.vllm_plugin`), unless it is stopped or
so stuck that none of its threads runs. Such a process keeps its device's memory, so the
replacement could not start on the device.
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
"""Environment variable: path of the file to which an engine's processes write their ids."""
END_S = 60.0
"""Longest wait for the end of a killed process, in seconds."""


def write_process_down() -> None:
    """Add this vLLM process's id to the file that the environment variable FILE names, if set."""
    if FILE not in os.environ:
        return
    line = json.dumps([os.getpid(), _started(os.getpid())]) + "\n"
    # Appended, because each device may have its own process.
    descriptor = os.open(os.environ[FILE], os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode=0o600)
    with os.fdopen(descriptor, "a") as file:
        file.write(line)


class EngineProcesses:
    """The recorded processes of an engine, which the engine that replaces it can kill."""

    def __init__(self, place: str) -> None:
        """`place` is an id that an engine and its replacement share, unique among all runs."""
        self._file = Path(tempfile.gettempdir()) / f"rollmatch-engine-{place}.processes"
        self.environment = {FILE: str(self._file)}

    def end_left(self) -> None:
        """Kill the previous engine's processes on this machine, and wait until they have ended."""
        try:
            lines = self._file.read_text().splitlines()
        except FileNotFoundError:
            return
        # The pid is not enough: another process may have it by now.
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
                told = f"processes {alive} of a lost engine were killed, but still exist"
                _LOGGER.warning(
                    "%s after %g s; probably a GPU driver or disk hangs: see `dmesg`", told, END_S
                )
                break
            time.sleep(0.05)
        self.remove()

    def remove(self) -> None:
        """Delete the file with the process ids. A second call has no effect."""
        self._file.unlink(missing_ok=True)


def _started(pid: int) -> int | None:
    """Return when the process began, in clock ticks since boot; None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name may contain spaces. The state follows it; the start time is field 22 of the line.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])
