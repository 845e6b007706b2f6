"""Python's garbage collector in a process that runs rollouts and little else."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (50_000, 20, 100)


def collect_rarely() -> None:
    """What is there already, libraries and data, is not looked at again, and what follows less often: that is most of what the collector takes of a turn
    (docs/performance.md, "Environments"). The whole process's setting, so for whoever has a process for itself, when all is loaded."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """The same for a command, which may have been called by somebody who goes on."""
    before = gc.get_threshold()
    collect_rarely()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
