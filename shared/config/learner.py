"""`learner`: the ranks that train, and what Ray reserves for each."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, PositiveInt

from shared.config.base import Section, WholeGPUs


class LearnerSection(Section):
    world_size: PositiveInt = 1
    """Learner ranks."""

    parallel: Literal["ddp", "fsdp"] = "ddp"
    """How the ranks share the model: each holds all of it (ddp), or a part (fsdp: FSDP2, for models that do not fit one device). No effect with one rank."""

    gpus: WholeGPUs | None = None
    """Whole GPUs that Ray reserves for each rank; null: 1 where the cluster has GPUs, else 0."""

    cpus: NonNegativeFloat | None = None
    """CPU cores that Ray reserves for each rank; null: 1."""

    cpu_threads: PositiveInt | None = None
    """Threads of torch in each rank; null: as many as the process may use cores.

    Results depend on the number, since it decides the order of float sums: the one that was used is recorded in the run's folder.
    """
