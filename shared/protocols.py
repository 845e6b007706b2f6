"""The plugs between the packages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from shared.rollouts import Rollout, RolloutRequest, SyncReport, WeightOffer
from shared.weight_sync.phases import SyncPhase

PerRank = list[list[Any]]
"""References to requests (`RequestRef`), or to rollouts, of a step or of one of its rounds: those
of each learner rank, in position order.
"""

CLOSE_S = 15.0
"""Given to engines to end in order, before their processes are killed: what has a name in the
system, such as the memory that the processes of an engine over several devices share, is left
behind by a kill. vLLM gives each of those processes up to 9 s; an engine of one device ends at
once."""

CLOSED_S = CLOSE_S + 3.0
"""Longest wait of whoever has told an engine to end: what is left after `CLOSE_S` the engine kills
itself, with all its processes.
"""


class RolloutBackend(Protocol):
    """Something that turns requests into rollouts and takes weights."""

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """One rollout per request, in the same order. No requests: no call to any engine. Raises
        RolloutError.
        """
        ...

    def receive_weights(self, offer: WeightOffer) -> SyncReport:
        """Take and verify the offered weights; afterwards `version` is the offer's. Raises
        WeightSyncError.
        """
        ...

    @property
    def version(self) -> int:
        """The version of the weights being served; 0 before the first sync."""
        ...

    def close(self) -> None:
        """Release the engine and its processes. Twice is harmless."""
        ...


class RolloutEngine(Protocol):
    """One engine on an event loop: a vLLM engine of this process, or a server reached over HTTP. A
    Ray actor gives it a process (`EngineActor`).
    """

    async def start(self) -> int:
        """Load the model, or wait for the server. Returns the engine's rollout devices. Raises
        RolloutError(phase="start").
        """
        ...

    async def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """As `RolloutBackend.generate`. Cancelling it aborts its requests."""
        ...

    async def run_sync_phase(self, phase: SyncPhase, offer: WeightOffer) -> SyncReport | None:
        """One phase of a sync, in the order of `SyncPhase`; the last one gives the report. Raises
        WeightSyncError.
        """
        ...

    @property
    def version(self) -> int: ...

    @property
    def process(self) -> str:
        """Id of the server behind the engine, by any address of it; empty where it has none."""
        ...

    @property
    def is_dead(self) -> bool:
        """Whether the engine's process has ended, so that nothing can come of it any more."""
        ...

    def close(self) -> None: ...


class BackendHost(Protocol):
    """What a learner rank offers to a backend that lives in its process (`hf`, and `vllm.mode:
    colocate`).
    """

    @property
    def name(self) -> str:
        """Of the rank, and so of the backend in it (`Rollout.actor`)."""
        ...

    @property
    def model(self) -> Any:
        """transformers' model, as it is trained: an adapter is part of it."""
        ...

    @property
    def processor(self) -> Any: ...

    def raise_if_stopping(self) -> None:
        """To be called between tokens, in the thread that generates: RolloutError(phase="generate")
        once the run is being ended. Nobody waits for the rollouts then, and the learner's weights,
        which the same thread saves, are waited for.
        """
        ...

    def weights(self) -> Iterator[tuple[str, Any]]:
        """Name and tensor of everything the engine loads: adapters merged (out of place), under the
        names of an ordinary checkpoint.
        """
        ...

    def offloaded(self, *, model: bool = True) -> AbstractContextManager[None]:
        """While it is open, what `rollout_matching.offload` names is not on the device; afterwards
        it is again, whatever happened.

        `model` False: the model stays, because the engine is about to read it.
        """
        ...


MakeBackend = Callable[[BackendHost], RolloutBackend]
"""Called in the learner's process once its model is loaded; travels there, so it is picklable."""
