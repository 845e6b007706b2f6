"""`vllm.mode: colocate`: a vLLM engine in the learner's process, on the learner's device, that
works while the learner does not.

Imports neither torch nor vllm: importing the latter costs ten seconds and changes the process, so
it happens inside the engine's `EngineContext`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from rollout_actors.engine.completion import StartTime
from rollout_actors.engine.failure import EngineFailures
from rollout_actors.engine.settings import EngineSettings, engine_environment
from rollout_actors.engine.vllm_import import explained_import
from shared.errors import ConfigError, RolloutError, WeightSyncError
from shared.protocols import BackendHost
from shared.rollouts import Rollout, RolloutRequest, SyncReport, WeightOffer
from shared.weight_sync.phases import SyncPhase
from shared.weight_sync.transports import TransportKind

if TYPE_CHECKING:
    from rollout_actors.backends.colocated_llm import ColocatedLLM
    from rollout_actors.backends.process_isolation import EngineContext

T = TypeVar("T")


def colocate_tensor_parallel(given: int | None, visible_devices: int) -> int:
    """Devices of one engine: as given, else 4 or the largest of 2 and 1 that a learner rank can
    have on its node (DESIGN 5, decision 22).

    ConfigError for more than there are.
    """
    if given is None:
        return next(size for size in (4, 2, 1) if size <= max(visible_devices, 1))
    if given > max(visible_devices, 1):
        raise ConfigError(
            f"rollout_matching.vllm.tensor_parallel_size: an engine of {given} devices beside a"
            f" learner rank that can have {visible_devices} of one node; leave it null, or lower it"
        )
    return given


def _engine_context(settings: EngineSettings, failures: EngineFailures) -> EngineContext:
    # Here and not above: whoever places the engines imports this module, and need not pay for
    # torch.
    from rollout_actors.backends.process_isolation import EngineContext

    environment = engine_environment(settings) | failures.environment
    if settings.transport == TransportKind.IPC:
        # The handles of a GPU's memory are pickled on their way from this process to the engine's,
        # which is its child.
        environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    return EngineContext(environment)


@dataclass(frozen=True, slots=True)
class ColocatedSpec:
    """Makes a `ColocatedBackend` in the learner's process, and starts its engine."""

    settings: EngineSettings
    """Its transport is `inproc` on CPU, `ipc` on a GPU."""
    sleep: bool = True

    def __call__(self, host: BackendHost) -> ColocatedBackend:
        backend = ColocatedBackend(host, host.name, self.settings, sleep=self.sleep)
        backend.start()
        return backend


class ColocatedBackend:
    """A `RolloutBackend` whose engine shares process and device with its host.

    The host is offloaded (`rollout_matching.offload`) while the engine is loaded, while it
    generates and while it takes an adapter. While it takes full weights, the host's model stays
    where it is, because that is where they are read. The engine sleeps from the end of a sync or a
    `generate` to the next of them: the host may learn after either.
    """

    def __init__(
        self, host: BackendHost, name: str, settings: EngineSettings, *, sleep: bool
    ) -> None:
        self._host = host
        self._name = name
        self._settings = settings
        self._sleep = sleep
        self._failures = EngineFailures()
        self._context = _engine_context(settings, self._failures)
        self._llm: ColocatedLLM | None = None
        self._over = ""
        """Why there will be nothing any more."""

    def start(self) -> None:
        """Load the engine, if it is not there. Raises RolloutError(phase="start"), after which this
        backend is of no use.
        """
        if self._llm is not None:
            return
        with self._host.offloaded(), self._context.entered():
            self._llm = self._guarded("start", self._load)
            self._guarded("start", self._llm.fall_asleep)

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Leaves off between two of the engine's steps where the host raises. The host is back on
        its device then, and the engine empty.
        """
        if not requests:
            return []
        if shut := self._over or self._engine.intake.shut:
            raise RolloutError(
                f"the engine serves no rollouts: {shut}", actor=self._name, phase="generate"
            )
        started = StartTime.now()
        with self._host.offloaded(), self._context.entered():
            llm = self._engine
            return self._guarded("generate", lambda: self._rollouts(llm, requests, started))

    def receive_weights(self, offer: WeightOffer) -> SyncReport:
        """Once the engine has begun with it, no rollout is served until a sync has succeeded."""
        if self._over:
            raise WeightSyncError(
                f"the engine takes no weights: {self._over}",
                actor=self._name,
                phase=SyncPhase.PAUSE,
            )
        # Full weights are read where they lie; an adapter comes with the offer.
        with self._host.offloaded(model=offer.sends_adapter), self._context.entered():
            llm = self._engine
            self._of_sync(SyncPhase.PAUSE, "wake", lambda: llm.wake_for(offer))
            report = llm.take_weights(offer, self._host.weights())
            # The host may learn before anything is generated. Behind a failed sync it does not.
            self._of_sync(SyncPhase.CANARY, "sleep", llm.fall_asleep)
            return report

    def collective_rpc(self, method: str, *arguments: Any) -> list[Any]:
        """What this method of the engine's workers returns, one for each device."""
        with self._context.entered():
            return self._engine.collective_rpc(method, *arguments)

    @property
    def version(self) -> int:
        return 0 if self._llm is None else self._llm.intake.version

    def close(self) -> None:
        """Also after a failure. Twice is harmless."""
        self._over = "it was closed"
        if self._llm is None:
            return
        with self._context.entered():
            llm, self._llm = self._llm, None
            self._context.forget_default_group()
            llm.shut_down()
        self._failures.remove()

    @property
    def _engine(self) -> ColocatedLLM:
        assert self._llm is not None, "start comes first"
        return self._llm

    def _of_sync(self, phase: SyncPhase, what: str, work: Callable[[], None]) -> None:
        try:
            self._guarded(what, work)
        except RolloutError as error:
            raise WeightSyncError(error.message, actor=self._name, phase=phase) from error

    def _load(self) -> ColocatedLLM:
        with explained_import(self._name):
            from rollout_actors.backends.colocated_llm import ColocatedLLM

        return ColocatedLLM(
            self._name,
            self._settings,
            sleep=self._sleep,
            raise_if_stopping=self._host.raise_if_stopping,
        )

    def _rollouts(
        self, llm: ColocatedLLM, requests: Sequence[RolloutRequest], started: StartTime
    ) -> list[Rollout]:
        llm.wake()
        try:
            return llm.generate(requests, started)
        finally:
            # Also behind a refused request: the host comes back to the device in any case.
            llm.fall_asleep()

    def _guarded(self, phase: str, work: Callable[[], T]) -> T:
        try:
            return work()
        except (RolloutError, ConfigError):
            raise
        # whatever an engine dies of comes out of it here, and leaves it in the middle of a step
        except Exception as error:
            why, story = self._failures.of_error(error)
            self._over = f"it failed ({why})"
            failed = RolloutError(
                f"{why}; see the learner's log, and the device's free memory",
                actor=self._name,
                phase=phase,
            )
            failed.add_note(story)
            raise failed from error
