"""The Ray shell of one rollout engine:
`ray.remote(EngineActor).options(...).remote(VllmEngineSpec(name, settings, index))`.

The actor's `runtime_env` must be `engine_runtime_env(settings)`, whose variables have to be set
before vllm is imported.
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
"""Seconds from the first call that learns that the engine has died to the end of the actor, in
which the answers of all calls arrive.
"""

MakeEngine = Callable[[], WatchedEngine]
"""Called in the actor's process; travels there, so it is picklable."""


@dataclass(frozen=True, slots=True)
class VllmEngineSpec:
    """Makes a vLLM engine in the process that calls it."""

    name: str
    settings: EngineSettings
    index: int
    """The engine's number among the engines of the run."""
    place: str | None = None
    """Id of its place, which only another one of this run has that takes it; None: nobody does."""

    def __call__(self) -> WatchedEngine:
        # Imported here: the driver imports this module, and need not pay for vllm.
        with explained_import(self.name):
            from rollout_actors.engine.vllm_engine import VllmEngine

        processes = None if self.place is None else EngineProcesses(self.place)
        return VllmEngine(self.name, self.settings, index=self.index, processes=processes)


class EngineActor:
    """Gives an engine a process and an event loop.

    Ends its own process soon after the engine's has died, or Ray would go on sending it work.
    """

    def __init__(self, make_engine: MakeEngine) -> None:
        end_with_parent()
        # Made here: vLLM is then imported while the learner loads. Its error is raised by `start`,
        # because of one in a constructor Ray tells the driver a traceback, and no type.
        self._failure: RolloutError | None = None
        self._num_owed = 0
        """Calls of `generate` that have not returned."""
        try:
            self._engine = make_engine()
        except RolloutError as error:
            self._failure = error

    async def start(self) -> tuple[int, str]:
        """Start the engine. Returns its rollout devices and its `process`, once it is ready."""
        if self._failure is not None:
            raise self._failure
        return await self._or_exit(self._engine.start()), self._engine.process

    async def generate(
        self, *objects: SentRequests, places: range | None = None, attempt: int = 0
    ) -> tuple[list[Rollout], int]:
        """Generate one rollout per request: one object, passed on unread, and their number.

        Args:
            objects: sent as references, which Ray resolves here.
            places: indices of the requests that are meant, among those of all objects; None: all.
            attempt: tries of other engines that failed to answer these requests.
        """
        chosen = SentRequests.chosen(objects, places)
        # Counted before the pictures are fetched: a stall there is a stall too.
        self._num_owed += 1
        try:
            # In a thread: the pictures may have to come from another node.
            requests = await asyncio.to_thread(chosen.with_data, ray.get)
            rollouts = await self._or_exit(self._engine.generate(requests))
        finally:
            self._num_owed -= 1
        if attempt:
            rollouts = [replace(rollout, attempt=rollout.attempt + attempt) for rollout in rollouts]
        return rollouts, len(rollouts)

    async def progress(self) -> int | None:
        """Return the tokens sampled since the start, which grow while an answer is owed; None where
        none is, or nobody counts them.

        Raises EngineEndedError or UnreachableError where the engine is lost.
        """
        num_tokens = await self._engine.progress()
        return num_tokens if self._num_owed else None

    async def check_alive(self) -> None:
        """Return as soon as the engine answers, which has nothing to do. Raises as `progress`."""
        await self._or_exit(self._engine.check_alive())

    async def run_sync_phase(self, phase: SyncPhase, offer: WeightOffer) -> SyncReport | None:
        return await self._or_exit(self._engine.run_sync_phase(phase, offer))

    async def close(self) -> None:
        """End the engine's processes in order. Whatever is being generated fails."""
        self._engine.close()

    async def _or_exit(self, work: Awaitable[T]) -> T:
        try:
            return await work
        except Exception:
            if self._engine.is_dead:
                # Not by `ray.actor.exit_actor`: Ray would tell the callers that it was called, and
                # not the reason that is raised here.
                asyncio.get_running_loop().call_later(LAST_WORDS_S, os._exit, 1)
            raise
