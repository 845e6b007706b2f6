"""The Ray actor of one rollout engine. Create it with
`ray.remote(EngineActor).options(...).remote(VllmEngineSpec(name, settings, index))`.

Its `runtime_env` must be `engine_runtime_env(settings)`, because those environment variables must
be set before vllm is imported.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import ray

from rollout_actors.engine.left_over import EngineProcesses
from rollout_actors.engine.settings import EngineSettings
from rollout_actors.engine.vllm_import import explained_import
from shared.errors import RolloutError
from shared.protocols import WatchedEngine, end_with_parent
from shared.rollouts import Rollout, SyncReport, WeightOffer
from shared.sent_requests import SentRequests
from shared.weight_sync.phases import SyncPhase

T = TypeVar("T")

LAST_WORDS_S = 5.0
"""Seconds between the first call that finds the engine dead and the exit of the actor's process.
The answers of all pending calls must arrive in this time.
"""

MakeEngine = Callable[[], WatchedEngine]
"""A picklable function that makes an engine. The rollout actor calls it in its own process."""


@dataclass(frozen=True, slots=True)
class VllmEngineSpec:
    """Arguments of a `VllmEngine`. A call of the spec makes the engine in the calling process."""

    name: str
    settings: EngineSettings
    index: int
    """Number of the engine among the engines of the run, from 0."""
    place: str | None = None
    """Id that an engine shares with its replacement after a failure; None: no id."""

    def __call__(self) -> WatchedEngine:
        # Imported here because the driver imports this module and should not pay for vllm.
        with explained_import(self.name):
            from rollout_actors.engine.vllm_engine import VllmEngine

        processes = None if self.place is None else EngineProcesses(self.place)
        return VllmEngine(self.name, self.settings, index=self.index, processes=processes)


class EngineActor:
    """The rollout actor: a Ray actor that runs one engine in its own process and event loop.

    The process exits soon after the engine has died. Otherwise Ray would continue to send it work.
    """

    def __init__(self, make_engine: MakeEngine) -> None:
        end_with_parent()
        # Made here, so that vLLM is imported while the learner loads. `start` raises its error,
        # because Ray reports an error in a constructor as a traceback without its type.
        self._failure: RolloutError | None = None
        self._num_owed = 0
        """Calls of `generate` that have not returned."""
        try:
            self._engine = make_engine()
        except RolloutError as error:
            self._failure = error

    async def start(self) -> tuple[int, str]:
        """Start the engine. Return its number of devices and the id of the server that it uses.

        The id is `WatchedEngine.process`. Raises RolloutError, also if no engine could be made.
        """
        if self._failure is not None:
            raise self._failure
        return await self._or_exit(self._engine.start()), self._engine.process

    async def generate(
        self, *objects: SentRequests, places: range | None = None, attempt: int = 0
    ) -> tuple[list[Rollout], int]:
        """Generate one rollout per request. Return the rollouts and their number.

        Args:
            objects: lists of requests, passed as Ray object references that Ray resolves here.
            places: indices of the requests to generate, counted over all lists; None: all.
            attempt: number of other engines that failed to answer these requests.
        """
        chosen = SentRequests.chosen(objects, places)
        # Counted before the images are fetched, because a stall of the fetch is a stall too.
        self._num_owed += 1
        try:
            # In a thread, because the images may have to come from another node.
            requests = await asyncio.to_thread(chosen.with_data, ray.get)
            rollouts = await self._or_exit(self._engine.generate(requests))
        finally:
            self._num_owed -= 1
        if attempt:
            rollouts = [replace(rollout, attempt=rollout.attempt + attempt) for rollout in rollouts]
        return rollouts, len(rollouts)

    async def progress(self) -> int | None:
        """Return the number of tokens that the engine has sampled since its start.

        Return None if no call of `generate` is pending, or if the engine does not count tokens.

        Raises EngineEndedError or UnreachableError if the engine is lost.
        """
        num_tokens = await self._engine.progress()
        return num_tokens if self._num_owed else None

    async def check_alive(self) -> None:
        """Wait until the engine has answered a test call. Raises the same errors as `progress`."""
        await self._or_exit(self._engine.check_alive())

    async def run_sync_phase(self, phase: SyncPhase, offer: WeightOffer) -> SyncReport | None:
        return await self._or_exit(self._engine.run_sync_phase(phase, offer))

    async def close(self) -> None:
        """Shut down the engine and its processes. Pending calls of `generate` fail."""
        self._engine.close()

    async def _or_exit(self, work: Awaitable[T]) -> T:
        try:
            return await work
        except Exception:
            if self._engine.is_dead:
                # Not `ray.actor.exit_actor`: callers would learn only that it was called, and not
                # the reason that is raised here.
                asyncio.get_running_loop().call_later(LAST_WORDS_S, os._exit, 1)
            raise
