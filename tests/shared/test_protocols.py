"""A process that shares its parent's fate ends with it, even where it is stopped."""

from __future__ import annotations

import subprocess
import sys

import psutil

CHILD = """
import os, signal
from shared.protocols import end_with_parent
end_with_parent()
print(os.getpid(), flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"


def test_a_stopped_process_ends_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    child.wait(timeout=240)
    parent.communicate(timeout=240)
