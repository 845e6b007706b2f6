"""The interfaces between the packages: what generates rollouts, its host, and how both end."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from shared.rollouts import Rollout, RolloutRequest, SyncReport, WeightOffer
from shared.weight_sync.phases import SyncPhase

PerRank = list[list[Any]]
"""References to requests or rollouts of a step or a round: `[rank][i]`, in position order."""

CLOSE_S = 20.0
"""Time that engines have to end in order before their processes are killed.

A kill leaves behind what has a name in the system, such as the memory that the processes of an
engine over several devices share. vLLM gives those `WORKER_CLOSE_S`, and 4 s more."""

WORKER_CLOSE_S = 12
"""Seconds that the process of one device has: Python's own end takes one 4 s of a full core."""

CLOSED_S = CLOSE_S + 3.0
"""Longest wait for an engine that was told to end; what `CLOSE_S` leaves it kills itself."""

PR_SET_PDEATHSIG = 1
"""The option of prctl(2) that names the signal of a parent's death."""


def end_with_parent() -> None:
    """Have Linux kill this process when its parent ends, even where this one is stopped or stuck.

    Ray's workers notice the end of their node by themselves, but not in such a state: a driver that
    was killed would leave them behind, with their memory and their device.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class RankBackend(Protocol):
    """A backend in a learner rank's process: an engine, or an environment before one."""

    def generate(self, requests: Sequence[Any]) -> list[Any]:
        """Return one answer per request, in order; no requests, no call. Raises RolloutError."""
        ...

    def receive_weights(self, offer: WeightOffer) -> SyncReport:
        """Load and verify the offered weights, whose version becomes ours.

        Raises WeightSyncError.
        """
        ...

    @property
    def version(self) -> int:
        """Version of the weights being served; 0 before the first sync."""
        ...

    def close(self) -> None:
        """Release the engine and its processes. Twice is harmless."""
        ...


class RolloutBackend(RankBackend, Protocol):
    """A generator of rollouts that takes the learner's weights."""

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Return one rollout per request, in the order of the requests; of none, none.

        A run ends if the prompt of a rollout is not as the learner encodes it, image placeholders
        expanded, or if a token's log-probability is not that of the learner's present weights
        (`rollout_matching.logprob_tolerance`). The stop token is not in the response.

        Raises:
            RolloutError: a request cannot be answered, or the backend is closed.
        """
        ...


class RolloutEngine(Protocol):
    """One engine on an event loop: vLLM in this process, or a server reached over HTTP."""

    async def start(self) -> int:
        """Load the model, or wait for the server, and return the number of rollout devices.

        Raises RolloutError(phase="start").
        """
        ...

    async def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Generate as `RolloutBackend.generate` does; cancelling aborts the requests."""
        ...

    async def run_sync_phase(self, phase: SyncPhase, offer: WeightOffer) -> SyncReport | None:
        """Run one phase of a sync, in the order of `SyncPhase`; the last returns the report.

        Raises WeightSyncError.
        """
        ...

    @property
    def version(self) -> int: ...

    @property
    def is_dead(self) -> bool:
        """Tell whether the engine's process has died."""
        ...

    def close(self) -> None: ...


class WatchedEngine(RolloutEngine, Protocol):
    """An engine that a run can lose and get back. A Ray actor gives it a process (`EngineActor`).

    Both questions raise EngineEndedError or UnreachableError where the engine is lost.
    """

    @property
    def process(self) -> str:
        """Id of the server behind the engine, by any address of it; empty where it has none."""
        ...

    async def progress(self) -> int | None:
        """Return the tokens sampled since the start, those of unfinished answers included.

        None: nobody counts them, or there is nothing to do.
        """
        ...

    async def check_alive(self) -> None:
        """Return as soon as the engine answers, which has nothing to do."""
        ...


class BackendHost(Protocol):
    """A learner rank, as the backend in its process sees it (`hf`, or `vllm.mode: colocate`)."""

    @property
    def name(self) -> str:
        """Name of the rank, and so of the backend in it (`Rollout.actor`)."""
        ...

    @property
    def model(self) -> Any:
        """The transformers model as it is trained, with its adapter."""
        ...

    @property
    def processor(self) -> Any: ...

    @property
    def tokenizer(self) -> Any:
        """The processor's own; of a text model it is the processor."""
        ...

    def raise_if_stopping(self) -> None:
        """Call between tokens: raises RolloutError(phase="generate") once the run is ending.

        The thread that generates is the one that saves the learner's weights then.
        """
        ...

    def weights(self) -> Iterator[tuple[str, Any]]:
        """Yield name and tensor of all that an engine loads, under an ordinary checkpoint's names.

        Adapters are merged, out of place.
        """
        ...

    def offloaded(self, *, model: bool = True) -> AbstractContextManager[None]:
        """Keep what `rollout_matching.offload` names off the device while the context is open.

        `model` False: the model stays, because the engine is about to read it.
        """
        ...


MakeBackend = Callable[[BackendHost], RankBackend]
"""Makes the backend in the learner's process once its model is loaded; it is picklable."""
