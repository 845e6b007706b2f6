"""Interfaces between the packages: backends, which generate rollouts, and the rank that hosts one.

A backend is an engine (vLLM or Hugging Face), or an environment that uses an engine.
"""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from shared.rollouts import Rollout, RolloutRequest, SyncReport, WeightOffer
from shared.weight_sync.phases import SyncPhase

PerRank = list[list[Any]]
"""Ray references to the requests or rollouts of a step or round.

`[rank][i]`: of each learner rank, in the order of their positions in the step.
"""

CLOSE_S = 20.0
"""Seconds that an engine has to shut down before its processes are killed.

A killed engine leaves named resources behind, such as the memory that the processes of its devices
share. vLLM waits `WORKER_CLOSE_S` + 4 s for the processes of its devices.
"""

WORKER_CLOSE_S = 12
"""Seconds that vLLM's process for one device has to end. Ending Python takes 4 s of a full core."""

CLOSED_S = CLOSE_S + 3.0
"""Seconds that the driver waits at most for an engine to close.

After `CLOSE_S` the engine kills its remaining processes itself.
"""

PR_SET_PDEATHSIG = 1
"""The option of prctl(2) that sets the signal sent when the parent dies."""


def end_with_parent() -> None:
    """Make Linux kill this process when its parent ends, even if this process is stopped or stuck.

    Ray's worker processes notice the end of their node, but not if they are stopped or stuck. After
    a killed driver they would continue to hold their memory and device.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class RankBackend(Protocol):
    """A backend in a learner rank's process: an engine, or an environment that uses an engine."""

    def generate(self, requests: Sequence[Any]) -> list[Any]:
        """Return one rollout per request, in the order of the requests; [] without requests.

        Raises RolloutError.
        """
        ...

    def receive_weights(self, offer: WeightOffer) -> SyncReport:
        """Load and verify the weights that the learner offers, and adopt their version.

        Raises WeightSyncError.
        """
        ...

    @property
    def version(self) -> int:
        """Version of the weights that generate rollouts now; 0 before the first weight sync."""
        ...

    def close(self) -> None:
        """Release the engine and its processes. A second call has no effect."""
        ...


class RolloutBackend(RankBackend, Protocol):
    """An engine that answers prompts with the learner's weights."""

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Return one rollout per request, in the order of the requests; [] without requests.

        The stop token is not part of the answer. The learner ends the run if a rollout's prompt
        differs from the learner's encoding of it (with expanded image placeholders), or if
        log-probabilities differ from the learner's by more than
        `rollout_matching.logprob_tolerance` permits.

        Raises RolloutError if a request cannot be answered, or the backend is closed.
        """
        ...


class RolloutEngine(Protocol):
    """An engine with asynchronous methods: vLLM in this process, or a client of a vLLM server."""

    async def start(self) -> int:
        """Load the model, or wait for the server, and return the number of rollout devices.

        Raises RolloutError(phase="start").
        """
        ...

    async def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Return one rollout per request, as `RolloutBackend.generate` does.

        Cancelling the call aborts the requests.
        """
        ...

    async def run_sync_phase(self, phase: SyncPhase, offer: WeightOffer) -> SyncReport | None:
        """Run one phase of the weight sync of this offer. Only the last phase returns a report.

        The caller runs the phases in the order of `SyncPhase`. Raises WeightSyncError.
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
    """An engine whose health is watched, so that it can be replaced if it is lost during a run.

    `EngineActor` (a Ray actor) gives it a process. `progress` and `check_alive` raise
    EngineEndedError or UnreachableError if the engine is lost.
    """

    @property
    def process(self) -> str:
        """Id of the vLLM server that the engine is a client of; empty if there is no server.

        A server with several addresses has the same id at each of them.
        """
        ...

    async def progress(self) -> int | None:
        """Return the number of tokens that the engine has sampled, including unfinished answers.

        None: the engine does not count tokens, or has no requests.
        """
        ...

    async def check_alive(self) -> None:
        """Return when the engine answers. It is called while the engine has no requests."""
        ...


class BackendHost(Protocol):
    """The interface of a learner rank for the backend in its process.

    Such a backend is `hf` (Hugging Face), or vLLM with `vllm.mode: colocate`.
    """

    @property
    def name(self) -> str:
        """Name of the learner rank and of its backend; `Rollout.actor` records it."""
        ...

    @property
    def model(self) -> Any:
        """The transformers model that the rank trains, with its LoRA adapter."""
        ...

    @property
    def processor(self) -> Any: ...

    @property
    def tokenizer(self) -> Any:
        """The processor's tokenizer; for a text model, the processor itself."""
        ...

    def raise_if_stopping(self) -> None:
        """Raise RolloutError(phase="generate") if the run is ending. A backend calls it per token.

        The learner's weights are saved by the thread that generates, so generating has to end
        first.
        """
        ...

    def weights(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and tensor of every weight that an engine loads.

        Names are as in a checkpoint's files. Adapters are merged into copies of the weights.
        """
        ...

    @property
    def updates_next(self) -> bool:
        """True if the learner changes its weights before it asks for further rollouts.

        It is read when rollouts are complete. If it is true, a weight sync comes before the next
        rollouts, so the engine's weights are not used again.
        """
        ...

    def offloaded(self, *, model: bool = True) -> AbstractContextManager[None]:
        """Free the device's memory for the engine while the context is open.

        Tensors that `rollout_matching.offload` names are moved off the device. `model` False: the
        model itself stays, because the engine is about to read it.
        """
        ...


MakeBackend = Callable[[BackendHost], RankBackend]
"""A picklable function that creates the backend in a learner rank's process.

It is called after the rank has loaded the model.
"""
