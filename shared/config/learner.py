"""`learner`: the ranks that train, and what Ray reserves for each."""

from __future__ import annotations

from pydantic import NonNegativeFloat, PositiveInt

from shared.config.base import Section


class LearnerSection(Section):
    world_size: PositiveInt = 1
    """Learner ranks."""

    gpus: NonNegativeFloat | None = None
    """GPUs that Ray reserves for each rank; null: 1 where the cluster has GPUs, else 0."""

    cpus: NonNegativeFloat | None = None
    """CPU cores that Ray reserves for each rank; null: 1."""

    cpu_threads: PositiveInt | None = None
    """Threads of torch in each rank; null: torch's own choice."""
