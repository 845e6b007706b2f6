"""What a rollout waits for that is no part of it: its turn at an engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

WAITED_S: ContextVar[list[float] | None] = ContextVar("waited_s", default=None)
"""Seconds of each wait of the task's rollout; None where nobody asks."""


@contextmanager
def waiting() -> Iterator[None]:
    """Around a wait that is not to be in `timing`."""
    began_s, waited_s = time.perf_counter(), WAITED_S.get()
    try:
        yield
    finally:
        if waited_s is not None:
            waited_s.append(time.perf_counter() - began_s)
