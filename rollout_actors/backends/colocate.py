"""`vllm.mode: colocate`: a vLLM engine in the learner's process; the two work alternately.

This module imports neither torch nor vllm. Importing vllm takes ten seconds and changes the
process, so it happens inside the engine's `EngineContext`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rollout_actors.backends.calls import EngineCalls
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


def colocate_tensor_parallel(given: int | None, visible_devices: int) -> int:
    """Return the number of devices of the engine in each learner rank's process.

    It is `given`, or the largest of 4, 2 and 1 that `visible_devices` permits. Raises ConfigError
    if `given` is larger than `visible_devices`.
    """
    available = max(visible_devices, 1)
    if given is None:
        # Powers of two, because they divide the number of attention heads.
        return next(size for size in (4, 2, 1) if size <= available)
    if given > available:
        why = f"is {given}, but a learner rank has only {visible_devices} devices of its node"
        why += "; lower the key, or set it to null"
        raise ConfigError(f"rollout_matching.vllm.tensor_parallel_size: {why}")
    return given


class ColocatedBackend:
    """Generates rollouts with a vLLM engine in the process and on the device of a learner rank.

    The learner rank is the `host`. Its model and optimizer are offloaded
    (`rollout_matching.offload`) while the engine loads, generates, or receives an adapter. During a
    weight sync of full weights the host's model stays on the device, because the engine reads it.
    The engine releases its memory after each call, because the host may learn next.
    """

    def __init__(self, host: BackendHost, settings: EngineSettings, *, sleep: bool = True) -> None:
        """Load the engine. Raises RolloutError.

        `settings.transport` is `inproc` on CPU and `ipc` on a GPU. `sleep`: whether the engine
        releases its memory between calls.
        """
        # Imported here because the driver imports this module too and should not pay for torch.
        from rollout_actors.backends.process_isolation import EngineContext

        self._host = host
        self._name = host.name
        self._failures = EngineFailures()
        environment = engine_environment(settings) | self._failures.environment
        if settings.transport == TransportKind.IPC:
            # Handles of GPU memory are pickled for the engine's process, which is a child.
            environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        self._context = EngineContext(environment)
        self._llm: ColocatedLLM | None = None
        self._receives_all = False
        """Whether weight syncs send all weights, not only an adapter; False before the first."""
        self._ended = ""
        """Reason why the engine can no longer be used; empty if it can."""
        try:
            with host.offloaded(), self._context.entered(), self._failing("start"):
                with explained_import(self._name):
                    from rollout_actors.backends.colocated_llm import ColocatedLLM
                self._llm = ColocatedLLM(
                    self._name, settings, sleep=sleep, raise_if_stopping=host.raise_if_stopping
                )
                self._llm.fall_asleep()
        except BaseException:
            self.close()  # the caller has no backend to close
            raise

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Generate one rollout per request, in order. Raises RolloutError.

        If the run is ending, the learner rank raises an exception between two engine steps.
        """
        if not requests:
            return []
        started = StartTime.now()
        with self._awake():
            return self._engine.generate(requests, started)

    def serve(self, calls: EngineCalls, begin: Callable[[], None]) -> None:
        """Answer an environment's model calls as they arrive, until the round of rollouts ends.

        `begin` is called once, when the engine is ready. If the run is ending, the learner rank
        raises an exception between two engine steps.
        """
        with self._awake():
            begin()
            self._engine.serve(calls)

    def receive_weights(self, offer: WeightOffer) -> SyncReport:
        """Load new weights into the engine, and verify them.

        Raises WeightSyncError. Then the engine generates nothing until a sync has succeeded.
        """
        if self._ended:
            why = f"the engine takes no weights: {self._ended}"
            raise WeightSyncError(why, actor=self._name, phase=SyncPhase.PAUSE)
        # Full weights are read from the host's model; an adapter is part of the offer.
        with self._host.offloaded(model=offer.sends_adapter), self._context.entered():
            # If the engine cannot get its memory back, the sync fails before it changes anything.
            with self._failing_sync(SyncPhase.PAUSE):
                self._engine.wake_for(offer)
            report = self._engine.take_weights(offer, self._host.weights())
            # A run that has sent all weights once never returns to adapters.
            self._receives_all = not offer.sends_adapter
            # The host may learn before the next rollouts. After a failed sync it does not learn, so
            # the engine stays awake.
            with self._failing_sync(SyncPhase.CANARY):
                self._engine.fall_asleep()
            return report

    @property
    def version(self) -> int:
        return 0 if self._llm is None else self._llm.intake.version

    def close(self) -> None:
        """Shut down the engine, also after a failure. A second call has no effect."""
        self._ended = "it was closed"
        if self._llm is not None:
            with self._context.entered():
                # Cleared first, so that a failure below does not lead to a second shutdown.
                llm = self._llm
                self._llm = None
                self._context.forget_default_group()
                llm.shut_down()
        self._failures.remove()

    @property
    def _engine(self) -> ColocatedLLM:
        assert self._llm is not None, "it was closed"
        return self._llm

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Wake the engine for the `with` block. Raises RolloutError if it cannot generate."""
        if shut := self._ended or self._engine.intake.unavailable_reason:
            why = f"the engine serves no rollouts: {shut}"
            raise RolloutError(why, actor=self._name, phase="generate")
        with self._host.offloaded(), self._context.entered(), self._failing("generate"):
            self._engine.wake()
            weights_follow = False
            try:
                yield
                weights_follow = self._receives_all and self._host.updates_next
            finally:
                # Also after a refused request: the host returns to the device in any case, and the
                # device's memory may not hold both.
                self._engine.fall_asleep(weights_follow=weights_follow)

    @contextmanager
    def _failing(self, phase: str) -> Iterator[None]:
        """Turn a fatal error of the engine into a RolloutError, and mark the engine as unusable."""
        try:
            yield
        except (RolloutError, ConfigError):
            raise
        # After any other error the engine is in the middle of a step and unusable.
        except Exception as error:
            why, story = self._failures.of_error(error)
            self._ended = f"it failed ({why})"
            message = f"{why}; see the learner's log, and the device's free memory"
            failed = RolloutError(message, actor=self._name, phase=phase)
            failed.add_note(story)
            raise failed from error

    @contextmanager
    def _failing_sync(self, phase: SyncPhase) -> Iterator[None]:
        try:
            with self._failing(phase):
                yield
        except RolloutError as error:
            raise WeightSyncError(error.message, actor=self._name, phase=phase) from error
