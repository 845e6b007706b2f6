"""Ends the processes that an environment has started, at the latest when its own process ends.

They are recognised by an environment variable, which their children inherit. Run as a program, this
file watches the environment's process, and ends its child processes if it was killed. It imports
nothing of this project.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOGGER = logging.getLogger(__name__)

VARIABLE = "ROLLMATCH_ENVIRONMENT"
POLL_S = 0.5
EXEC_S = 10.0
"""Time that a process may take to execute a program before it counts as not marked."""


class EnvironmentProcesses:
    """Marks the processes that an environment in this process starts from now on, to end them.

    They end in `end`, or when this process dies. A child that is only forked, and runs no program,
    is not recognised.
    """

    def __init__(self) -> None:
        self._mark = secrets.token_hex(16)
        self._children_before = set(multiprocessing.active_children())
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), self._mark]
        # In its own session, so that neither Ctrl-C nor the end of a terminal reaches it.
        watcher = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert watcher.stdin is not None
        self._watched = watcher.stdin
        watcher.wait()  # for the first of its two processes
        os.environ[VARIABLE] = self._mark

    def end(self, name: str) -> None:
        """Kill the marked processes that still run after the teardown of the environment `name`.

        A second call has no effect.
        """
        if os.environ.get(VARIABLE) == self._mark:
            del os.environ[VARIABLE]
        for child in set(multiprocessing.active_children()) - self._children_before:
            child.kill()
        if ended := end_marked(self._mark):
            _LOGGER.warning(
                "%s left %d processes running that it had started (%s); they were killed; end them"
                " in @cleanup or @teardown",
                *(name, len(ended), ended[0]),
            )
        self._watched.close()


def unmarked() -> dict[str, str]:
    """Return this process's environment variables without the mark, for other child processes.

    A child process with these variables does not end with the environment.
    """
    return {name: value for name, value in os.environ.items() if name != VARIABLE}


@contextmanager
def processes_of(name: str) -> Iterator[None]:
    """Kill the processes that environment `name` started in the `with` block, at its end."""
    processes = EnvironmentProcesses()
    try:
        yield
    finally:
        processes.end(name)


def end_marked(mark: str) -> list[str]:
    """Kill all processes that have this value of the marking variable, and return their names."""
    names: dict[Path, str] = {}
    # Repeated, because they may have started others; a killed process may exist a moment longer.
    while marked := _marked(mark):
        for process in marked:
            try:
                names[process] = (process / "comm").read_text().strip()
                os.kill(int(process.name), signal.SIGKILL)
            except OSError:
                continue  # it has ended by itself
        time.sleep(0.01)
    return list(names.values())


def _marked(mark: str) -> list[Path]:
    entry = f"{VARIABLE}={mark}".encode()
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and entry in variables_of(process):
                found.append(process)
        except OSError:
            continue  # another user's, or it has ended
    return found


def variables_of(process: Path) -> list[bytes]:
    """Return the environment variables that a process of /proc was started with.

    They are empty for one that has ended and is not waited for, and for a moment in `exec`, which
    this function waits out: `subprocess.Popen` may return before it.
    """
    environ = process / "environ"
    deadline_s = time.monotonic() + EXEC_S
    while not environ.read_bytes() and _is_in_exec(process) and time.monotonic() < deadline_s:
        time.sleep(0.001)
    return environ.read_bytes().split(b"\0")  # again, because it may have left `exec` meanwhile


def _is_in_exec(process: Path) -> bool:
    if not _is_there(process.name):
        return False
    env_end = (process / "stat").read_text().rpartition(")")[2].split()[48]
    # A thread of the kernel never has an address either, but it has no program.
    return env_end == "0" and bool((process / "exe").readlink().name)


def _is_there(pid: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def main() -> None:
    watched, mark = sys.argv[1:]
    if os.fork():  # Ray kills the children of an actor before it ends the actor
        return
    # Polls too, because processes forked from the watched one may hold its end of the pipe.
    while _is_there(watched) and not select.select([sys.stdin], [], [], POLL_S)[0]:
        continue
    end_marked(mark)


if __name__ == "__main__":
    main()
