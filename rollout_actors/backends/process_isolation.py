"""Separate process-wide states for a learner and for the vLLM engine in its process.

In-process vLLM seeds every random generator, opens a default process group, replaces
`torch.set_num_threads` by a function without effect, reads environment variables at any time, and
freezes the garbage collector's heap. The learner must get its own state back after each use of
the engine, and the engine must find its own state at the next use.
"""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

NUM_THREADS = 1
"""Threads of an engine on CPU. With more, log-probabilities depend on the batch (decision 23)."""


class GeneratorStates(NamedTuple):
    """The states of the global random generators of Python, numpy and torch, on every device."""

    python: tuple[object, ...]
    numpy: Any
    """numpy's state: a mapping, or a tuple in older versions."""
    torch: Tensor
    devices: Sequence[Tensor]

    @classmethod
    def now(cls) -> GeneratorStates:
        on_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), on_devices)

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        for device, state in enumerate(self.devices):
            torch.cuda.set_rng_state(state, device)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore all global random generators after the `with` block to their state before it."""
    states = GeneratorStates.now()
    try:
        yield
    finally:
        states.restore()


class EngineContext:
    """The process-wide state of a vLLM engine in a learner's process.

    Use the engine only inside `entered()`, and do not use the learner there. `entered()` is not
    reentrant. `environment` has environment variables for the engine and its child processes.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._world = EngineWorld()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Install the engine's process-wide state in the `with` block, then the learner's again."""
        import torch._dynamo.config as dynamo

        environment = dict(os.environ)
        set_num_threads = torch.set_num_threads
        num_threads = torch.get_num_threads()
        hook = sys.excepthook
        num_frozen = gc.get_freeze_count()
        disabled = dynamo.disable
        with random_state_kept():
            os.environ.update(self._environment)
            set_num_threads(NUM_THREADS)
            # torch reads TORCHDYNAMO_DISABLE at import, which may have happened before.
            dynamo.disable = disabled or self._environment.get("TORCHDYNAMO_DISABLE") == "1"
            try:
                with self._world.entered():
                    yield
            finally:
                dynamo.disable = disabled
                # vLLM freezes the heap after its start, so the learner's garbage would stay in it.
                if gc.get_freeze_count() > num_frozen:
                    gc.unfreeze()
                # Opening a default group adds the rank to all tracebacks of the process.
                sys.excepthook = hook
                # vLLM has replaced it by a function without effect.
                torch.set_num_threads = set_num_threads
                set_num_threads(num_threads)
                # Keep the variables that the engine has set, for its next use.
                self._environment = {
                    name: value
                    for name, value in os.environ.items()
                    if environment.get(name) != value
                }
                for name in set(os.environ) - set(environment):
                    del os.environ[name]
                os.environ.update(environment)

    def forget_default_group(self) -> None:
        """Shut down the engine's process group. Call it inside `entered()`, before the engine ends.

        Otherwise the engine ends by destroying all process groups, including the learner's.
        """
        self._world.end_default_group()


def _engine_map(name: str) -> property:
    """Return a property with the engine's own map, in place of torch's map `name`."""
    return property(lambda world: world._maps.setdefault(name, {}))


class EngineWorld(c10d._World):
    """torch's record of the engine's process groups, separate from the learner's.

    Replacing `distributed_c10d._world` is torch's own extension point for this. torch's `_World`
    holds the default group itself, but its other properties use module variables of torch. With
    those the engine would list, and destroy, the learner's groups. So all such properties are
    overridden here.
    """

    # torch numbers the groups of a process. The engine's begin far above the learner's, whose next
    # group must get the same name on every rank, including ranks without an engine.
    FIRST_GROUP = 1_000_000

    pg_map = _engine_map("pg_map")
    """Process group -> backend and store. `destroy_process_group()` ends all groups in it."""
    pg_names = _engine_map("pg_names")
    """Process group -> name."""
    pg_group_ranks = _engine_map("pg_group_ranks")
    """Process group -> its ranks by global rank."""
    pg_backend_config = _engine_map("pg_backend_config")
    """Process group -> backend for each device type."""
    tags_to_pg = _engine_map("tags_to_pg")
    """Tag -> process groups."""
    pg_to_tag = _engine_map("pg_to_tag")
    """Process group -> tag."""

    def __init__(self) -> None:
        super().__init__()
        self._maps: dict[str, dict[object, object]] = {}
        self._group_count = self.FIRST_GROUP

    @property
    def group_count(self) -> int:
        return self._group_count

    @group_count.setter
    def group_count(self, value: int) -> None:
        self._group_count = value

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let torch use the engine's process groups, not the learner's, in the `with` block."""
        host = c10d._world
        c10d._world = self
        _set_global_rank(self.default_pg)
        try:
            yield
        finally:
            c10d._world = host
            _set_global_rank(host.default_pg)

    def end_default_group(self) -> None:
        group = self.default_pg
        if group is None:
            return
        self.default_pg = None
        group.shutdown()
        torch._C._distributed_c10d._unregister_process_group(self.pg_names[group])


def _set_global_rank(default_group: ProcessGroup | None) -> None:
    # torch's C++ side keeps the rank for its logs, separately from the group; -1: no group.
    rank = -1 if default_group is None else default_group.rank()
    torch._C._distributed_c10d._set_global_rank(rank)
