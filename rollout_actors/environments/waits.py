"""What a rollout waits for that is no part of it: its turn at an engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar


class Stopwatch:
    """The time in which at least one of several is under way. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._since_s = 0.0
        self.total_s = 0.0
        """Without what is under way now."""

    @contextmanager
    def running(self) -> Iterator[None]:
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        with self._lock:
            if not self._running:
                self._since_s = time.perf_counter()
            self._running += 1

    def end(self) -> None:
        with self._lock:
            self._running -= 1
            if not self._running:
                self.total_s += time.perf_counter() - self._since_s


WAITED: ContextVar[Stopwatch | None] = ContextVar("waited", default=None)
"""Of the task's rollout; None where nobody asks."""


def waiting() -> AbstractContextManager[None]:
    """Around a wait that is not to be in `timing`."""
    watch = WAITED.get()
    return nullcontext() if watch is None else watch.running()
