"""An environment in a learner rank's process, next to the engine there (`hf`, or `vllm.mode:
colocate`).

    learner's thread   | begin step | serve: the engine answers call by call | learn ...
    environment's loop              | rollouts, tools, rewards               |

The environment has an event loop in its own thread, during the whole run. Its rollouts live only
between the beginning and the end of a round. This module imports neither torch nor vllm, because
the driver imports it too.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rollout_actors.backends.calls import ASKERS, EngineCalls, ServingBackend
from rollout_actors.environments.concurrency import Work
from rollout_actors.environments.training.rounds import EnvironmentRounds
from rollout_actors.environments.training.runner import RunnerSettings, SentRollouts
from shared.protocols import CLOSED_S, BackendHost
from shared.rollouts import SyncReport, WeightOffer
from shared.trajectory import EnvironmentRequest

T = TypeVar("T")

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """Makes an `EnvironmentBackend` in a learner rank's process when it is called there."""

    make_engine: Callable[[BackendHost], ServingBackend]
    settings: RunnerSettings

    def __call__(self, host: BackendHost) -> EnvironmentBackend:
        backend = EnvironmentBackend(host.name, self.make_engine(host), self.settings)
        try:
            backend.start()
        except BaseException:
            backend.close()
            raise
        return backend


class EnvironmentBackend:
    """Plays rollouts of an environment in a learner rank's process, with the engine there.

    The environment's draws from the global generators of Python, numpy and torch continue in the
    next round. The learner's own draws are the same as without the environment.
    """

    def __init__(self, name: str, engine: ServingBackend, settings: RunnerSettings) -> None:
        """`name`: the learner rank's name, for the environment's errors and rollouts."""
        # Imported here, because it imports torch.
        from rollout_actors.backends.process_isolation import GeneratorStates

        self._engine = engine
        self._calls = EngineCalls(name)
        self._rounds = EnvironmentRounds(name, settings, self._calls)
        self._env_id = settings.env_id
        self._generators = GeneratorStates.now()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="environment", daemon=True)
        self._is_closed = False

    def start(self) -> None:
        """Load the environment; the driver limits the time for this. Raises RolloutError."""
        from rollout_actors.backends.process_isolation import random_state_kept

        self._thread.start()
        with random_state_kept():
            loading = self._drawing(self._rounds.start())
            asyncio.run_coroutine_threadsafe(loading, self._loop).result()

    def generate(self, requests: Sequence[EnvironmentRequest]) -> list[SentRollouts]:
        """Play and score the rollouts of a round. Return the rollouts of each request.

        Raises RolloutError if the engine failed or the run is ending. If the run is ending, the
        learner rank may instead raise its own exception between two engine steps. Before either
        error, all rollouts have cleaned up, or had `CLEANUP_S` seconds for it.
        """
        if not requests:
            return []
        begun: list[concurrent.futures.Future[list[SentRollouts]]] = []

        def begin() -> None:
            round_ = asyncio.run_coroutine_threadsafe(self._play(requests), self._loop)
            round_.add_done_callback(lambda _: self._calls.close())
            begun.append(round_)

        self._calls.open()
        try:
            self._engine.serve(self._calls, begin)
        finally:
            self._calls.close()
            if not all(round_.done() for round_ in begun):
                # The engine does not answer its rollouts any more.
                leaving = asyncio.run_coroutine_threadsafe(self._rounds.leave(), self._loop)
                concurrent.futures.wait([leaving], CLOSED_S)
        (round_,) = begun
        return round_.result()

    def receive_weights(self, offer: WeightOffer) -> SyncReport:
        return self._engine.receive_weights(offer)

    @property
    def version(self) -> int:
        return self._engine.version

    def close(self) -> None:
        """End running rollouts, close the environment, and close the engine, in this order.

        A second call has no effect.
        """
        try:
            if not self._is_closed and self._thread.is_alive():
                self._end_environment()
        finally:
            self._is_closed = True
            self._engine.close()

    def _end_environment(self) -> None:
        closing = asyncio.run_coroutine_threadsafe(self._rounds.close(), self._loop)
        closing.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
        concurrent.futures.wait([closing], CLOSED_S)
        if closing.done():
            self._thread.join(CLOSED_S)
        else:
            _LOGGER.warning(
                "%s was not torn down within %g s; check what its @teardown waits for",
                self._env_id,
                CLOSED_S,
            )

    def _run_loop(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _play(self, requests: Sequence[EnvironmentRequest]) -> list[SentRollouts]:
        ASKERS.set(self._calls.askers)
        return await self._drawing(self._rounds.run(requests))

    async def _drawing(self, work: Work[T]) -> T:
        """Await the work with the environment's own states of the global generators."""
        self._generators.restore()
        try:
            return await work
        finally:
            self._generators = type(self._generators).now()
