"""Interfaces between the packages: backends that generate rollouts, and their host."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from shared.rollouts import Rollout, RolloutRequest, SyncReport, WeightOffer
from shared.weight_sync.phases import SyncPhase

PerRank = list[list[Any]]
"""References to the requests or rollouts of a step or round: `[rank][i]`, by position."""

CLOSE_S = 20.0
"""Seconds that engines have to shut down before their processes are killed.

A killed engine leaves named resources behind, such as shared memory of several devices' processes.
vLLM gives those `WORKER_CLOSE_S`, plus 4 s.
"""

WORKER_CLOSE_S = 12
"""Seconds that a device's process has to end. Ending Python takes 4 s of a full core."""

CLOSED_S = CLOSE_S + 3.0
"""Longest wait for an engine to close. After `CLOSE_S` it kills its remaining processes itself."""

PR_SET_PDEATHSIG = 1
"""The option of prctl(2) that sets the signal sent when the parent dies."""


def end_with_parent() -> None:
    """Make Linux kill this process when its parent ends, even if this process is stopped or stuck.

    Ray's workers notice the end of their node, but not in such a state. If the driver is killed,
    they would stay, with their memory and device.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class RankBackend(Protocol):
    """A backend in a learner rank's process: an engine, or an environment that uses one."""

    def generate(self, requests: Sequence[Any]) -> list[Any]:
        """Return one answer per request, in order; [] without requests. Raises RolloutError."""
        ...

    def receive_weights(self, offer: WeightOffer) -> SyncReport:
        """Load and verify the offered weights, and adopt their version.

        Raises WeightSyncError.
        """
        ...

    @property
    def version(self) -> int:
        """Weight version in use; 0 before the first sync."""
        ...

    def close(self) -> None:
        """Release the engine and its processes. A second call has no effect."""
        ...


class RolloutBackend(RankBackend, Protocol):
    """A backend that generates rollouts with weights from the learner."""

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Return one rollout per request, in the order of the requests; [] without requests.

        The stop token is not part of the answer. The learner ends the run if a rollout's prompt
        differs from its own encoding (image placeholders expanded), or if log-probabilities differ
        from its own by more than `rollout_matching.logprob_tolerance` permits.

        Raises:
            RolloutError: a request cannot be answered, or the backend is closed.
        """
        ...


class RolloutEngine(Protocol):
    """An engine on an event loop: vLLM in this process, or a server over HTTP."""

    async def start(self) -> int:
        """Load the model, or wait for the server, and return the number of rollout devices.

        Raises RolloutError(phase="start").
        """
        ...

    async def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Generate like `RolloutBackend.generate`. Cancelling the call aborts the requests."""
        ...

    async def run_sync_phase(self, phase: SyncPhase, offer: WeightOffer) -> SyncReport | None:
        """Run one phase of a sync, in the order of `SyncPhase`; the last phase returns the report.

        Raises WeightSyncError.
        """
        ...

    @property
    def version(self) -> int: ...

    @property
    def is_dead(self) -> bool:
        """Return whether the engine's process has ended."""
        ...

    def close(self) -> None: ...


class WatchedEngine(RolloutEngine, Protocol):
    """An engine that can be lost and replaced during a run. `EngineActor` gives it a process.

    `progress` and `check_alive` raise EngineEndedError or UnreachableError if the engine is lost.
    """

    @property
    def process(self) -> str:
        """Id of the server behind the engine, the same at all its addresses; empty without one."""
        ...

    async def progress(self) -> int | None:
        """Return the number of tokens sampled since the start, including unfinished answers.

        None: tokens are not counted, or there is nothing to do.
        """
        ...

    async def check_alive(self) -> None:
        """Return once the engine answers. It has no work during this call."""
        ...


class BackendHost(Protocol):
    """A learner rank, from the view of the backend in its process (`hf`, `vllm.mode: colocate`)."""

    @property
    def name(self) -> str:
        """Name of the rank, also of the backend in it (`Rollout.actor`)."""
        ...

    @property
    def model(self) -> Any:
        """The transformers model in training, with its adapter."""
        ...

    @property
    def processor(self) -> Any: ...

    @property
    def tokenizer(self) -> Any:
        """The processor's tokenizer; for a text model, the processor itself."""
        ...

    def raise_if_stopping(self) -> None:
        """Raise RolloutError(phase="generate") if the run is ending. Call it between tokens.

        The thread that generates must then save the learner's weights.
        """
        ...

    def weights(self) -> Iterator[tuple[str, Any]]:
        """Yield name and tensor of all that an engine loads, with the names of a checkpoint.

        Adapters are merged into copies.
        """
        ...

    def offloaded(self, *, model: bool = True) -> AbstractContextManager[None]:
        """Keep the parts in `rollout_matching.offload` off the device while the context is open.

        `model` False: the model stays, because the engine is about to read it.
        """
        ...


MakeBackend = Callable[[BackendHost], RankBackend]
"""Creates the backend in the learner's process after the model is loaded; it is picklable."""
