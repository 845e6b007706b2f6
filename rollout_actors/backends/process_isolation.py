"""What an engine changes in the process it is a guest of, and what it must find there each time it
works (FACTS 2).

In-process vLLM seeds every random generator, opens a default process group, puts a function that
does nothing in the place of `torch.set_num_threads`, reads environment variables whenever it likes,
and freezes the garbage collector's heap. A learner that has a group, a number of threads and a
random state of its own needs all of them back.
"""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.distributed import distributed_c10d as c10d

# A process's random state, kept from whoever draws from it or seeds it as a guest.


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Afterwards the generators of python, numpy and torch (of every device) are where they were,
    whatever happened.
    """
    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    of_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        for device, state in enumerate(of_devices):
            torch.cuda.set_rng_state(state, device)


NUM_THREADS = 1
"""Of a CPU engine: with more, log-probabilities depend on the batch (DESIGN 5, decision 23)."""


class EngineContext:
    """The engine's side of the process. `with context.entered():` around everything that touches
    the engine; outside, nothing of it is to be seen.

    Not reentrant, and the process is the engine's alone meanwhile.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        """`environment`: variables that the engine and its children find set."""
        self._environment = dict(environment)
        self._world = EngineWorld()

    @contextmanager
    def entered(self) -> Iterator[None]:
        with (
            random_state_kept(),
            self._environment_set(),
            self._one_thread(),
            self._hooks_kept(),
            self._heap_not_frozen(),
            _nothing_compiled(self._environment),
            self._world.entered(),
        ):
            yield

    def forget_default_group(self) -> None:
        """Before the engine ends, inside: left to itself it ends by destroying "all" process
        groups, names of the learner's included.
        """
        self._world.end_default_group()

    @contextmanager
    def _environment_set(self) -> Iterator[None]:
        host = dict(os.environ)
        os.environ.update(self._environment)
        try:
            yield
        finally:
            # What the engine has set is there again when it works again.
            self._environment = {
                name: value for name, value in os.environ.items() if host.get(name) != value
            }
            for name in set(os.environ) - set(host):
                del os.environ[name]
            os.environ.update(host)

    @contextmanager
    def _one_thread(self) -> Iterator[None]:
        set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
        set_num_threads(NUM_THREADS)
        try:
            yield
        finally:
            torch.set_num_threads = set_num_threads
            set_num_threads(num_threads)

    @contextmanager
    def _hooks_kept(self) -> Iterator[None]:
        # Whoever opens a default group prefixes the tracebacks of the process with its rank.
        hook = sys.excepthook
        try:
            yield
        finally:
            sys.excepthook = hook

    @contextmanager
    def _heap_not_frozen(self) -> Iterator[None]:
        num_frozen = gc.get_freeze_count()
        try:
            yield
        finally:
            if gc.get_freeze_count() > num_frozen:
                gc.unfreeze()


@contextmanager
def _nothing_compiled(environment: Mapping[str, str]) -> Iterator[None]:
    """`TORCHDYNAMO_DISABLE` is read when torch's compiler is imported, which may have happened long
    ago.
    """
    import torch._dynamo.config as dynamo

    disabled = dynamo.disable
    dynamo.disable = disabled or environment.get("TORCHDYNAMO_DISABLE") == "1"
    try:
        yield
    finally:
        dynamo.disable = disabled


class EngineWorld(c10d._World):
    """The process groups of the engine, apart from the learner's: torch's own extension point for
    this is to replace `distributed_c10d._world`.

    torch's `_World` holds the default group itself, but its other properties read and write
    variables of torch's module. A second `_World` alone would list, and destroy, the learner's
    groups: so every such property is overridden, to keep the engine's in the object.
    """

    FIRST_GROUP = 1_000_000
    """The engine's groups are numbered from far above the learner's: the names of groups differ
    within a process, and the learner's next group must get the same name on every rank, wherever
    engines are."""

    def __init__(self) -> None:
        super().__init__()
        self._maps: dict[str, dict[Any, Any]] = {}
        self._group_count = self.FIRST_GROUP

    @property
    def pg_map(self) -> dict[Any, Any]:
        """Group -> backend and store. `destroy_process_group()` ends all that are in it."""
        return self._own("pg_map")

    @property
    def pg_names(self) -> dict[Any, Any]:
        """Group -> name, by which functional collectives find it."""
        return self._own("pg_names")

    @property
    def pg_group_ranks(self) -> dict[Any, Any]:
        """Group -> its ranks by global rank: the engine's global ranks are not the learner's."""
        return self._own("pg_group_ranks")

    @property
    def pg_backend_config(self) -> dict[Any, Any]:
        """Group -> its backend for each kind of device."""
        return self._own("pg_backend_config")

    @property
    def tags_to_pg(self) -> dict[Any, Any]:
        """Tag -> groups: where an existing group of the same ranks is looked for."""
        return self._own("tags_to_pg")

    @property
    def pg_to_tag(self) -> dict[Any, Any]:
        """Group -> tag."""
        return self._own("pg_to_tag")

    @property
    def group_count(self) -> int:
        """The next group's name."""
        return self._group_count

    @group_count.setter
    def group_count(self, value: int) -> None:
        self._group_count = value

    def _own(self, name: str) -> dict[Any, Any]:
        return self._maps.setdefault(name, {})

    @contextmanager
    def entered(self) -> Iterator[None]:
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


def _set_global_rank(default_group: Any) -> None:
    torch._C._distributed_c10d._set_global_rank(
        -1 if default_group is None else default_group.rank()
    )
