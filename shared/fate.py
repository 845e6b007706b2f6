"""Fate sharing: a process that ends with the one that started it."""

from __future__ import annotations

import ctypes
import signal

PR_SET_PDEATHSIG = 1
"""Of prctl(2)."""


def end_with_parent() -> None:
    """Have Linux kill this process when its parent ends, even where this one is stopped or stuck.

    Ray's workers notice the end of their node by themselves, but not in such a state: a driver that
    was killed would leave them behind, with their memory and their device.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
