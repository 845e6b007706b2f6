"""A process that a test started, with the processes that it started itself."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil


def family_of(process: subprocess.Popen[Any]) -> list[psutil.Process]:
    """The process first; none where it has ended."""
    if process.poll() is not None:
        return []
    first = psutil.Process(process.pid)
    return [first, *first.children(recursive=True)]


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def is_engine(command_line: str) -> bool:
    """vLLM's core processes. The title that they give themselves does not show under every environment: setproctitle looks for its room in front of the first
    variable, which vLLM may have moved by then."""
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
