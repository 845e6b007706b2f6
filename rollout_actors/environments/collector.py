"""Python's garbage collector in a process that runs rollouts and little else."""

from __future__ import annotations

import gc

THRESHOLDS = (50_000, 20, 100)


def collect_rarely() -> None:
    """What is there already, libraries and data, is not looked at again, and what follows less often: that is most of what the collector takes of a turn
    (docs/performance.md, "Environments"). The whole process's setting, so for whoever has a process for itself, when all is loaded."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
