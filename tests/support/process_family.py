"""A process that a test started, with the processes that it started itself."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from rollout_actors.engine import warm_python


def family_of(process: subprocess.Popen[Any]) -> list[psutil.Process]:
    """The process first; none where it has ended."""
    if process.poll() is not None:
        return []
    first = psutil.Process(process.pid)
    return [first, *descendants_of(first)]


def descendants_of(process: psutil.Process) -> list[psutil.Process]:
    """Children and children's children; those that were forked by the warm server for one of them too, whose parent is that server."""
    fork = fork_of(process)
    found: list[psutil.Process] = []
    for child in (*([] if fork is None else [fork]), *process.children()):
        found += [child, *descendants_of(child)]
    return found


def fork_of(process: psutil.Process) -> psutil.Process | None:
    """What the shim of a fork stands for; None where this is no shim, or the fork has ended."""
    with suppress(psutil.NoSuchProcess):
        name, _, pid = process.name().partition(" ")
        return psutil.Process(int(pid)) if name == warm_python.NAME and pid else None
    return None


def ancestors_of(process: psutil.Process, shims: Mapping[int, psutil.Process]) -> list[psutil.Process]:
    """Parents' parents; a fork of the warm server descends from the shim that asked for it. `shims` are those of forks, by the fork's id."""
    found: list[psutil.Process] = []
    ancestor: psutil.Process | None = process
    while ancestor is not None:
        ancestor = shims.get(ancestor.pid) or ancestor.parent()
        found += [] if ancestor is None else [ancestor]
    return found


def is_warm_server(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
    except psutil.NoSuchProcess:  # a zombie too
        return False
    return "--server" in words and any(word.endswith("warm_python.py") for word in words)


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def is_engine(command_line: str) -> bool:
    """vLLM's core processes. The title that they give themselves does not show under every environment: setproctitle looks for its room in front of the first
    variable, which vLLM may have moved by then."""
    if "warm_python.py" in command_line:
        return False  # the shim of one, which is a process of its own
    return "EngineCore" in command_line or "multiprocessing.spawn" in command_line


@contextmanager
def ended_with_its_family(process: subprocess.Popen[Any]) -> Iterator[None]:
    """At the end the process is asked to end, and what is left of its family is killed."""
    try:
        yield
    finally:
        family = family_of(process)
        process.terminate()
        try:
            process.wait(20)
        finally:
            for member in family:
                if member.is_running():
                    member.kill()
