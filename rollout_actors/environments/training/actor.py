"""The Ray actor that plays an environment's rollouts for training, with the run's engines."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayError

from rollout_actors.engine.ray_calls import RayCall
from rollout_actors.environments.training.rounds import EnvironmentRounds
from rollout_actors.environments.training.runner import RunnerSettings, SentRollouts
from shared.errors import RolloutError, Timeout, UnreachableError
from shared.protocols import end_with_parent
from shared.rollouts import Rollout, RolloutRequest
from shared.sent_requests import PictureShelf, SentRequests

if TYPE_CHECKING:
    from ray.actor import ActorHandle

THRESHOLDS = (50_000, 20, 100)
"""Thresholds of Python's garbage collector for a process that plays an environment's rollouts."""
CHECK = (
    "the engine's log; if the engine is only slow, raise this limit, or lower"
    " rollout_matching.max_new_tokens"
)


def collect_rarely() -> None:
    """Run Python's garbage collector less often, and exclude objects that exist already.

    Otherwise the collector takes much of a turn's time
    (docs/explanation/performance.md, "Environments").
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


class RayEngines:
    """The run's rollout actors, to which an environment sends its requests one by one."""

    def __init__(
        self,
        actors: Sequence[ActorHandle],
        names: Sequence[str],
        limit: Timeout | None,
        *,
        outlived: bool = False,
    ) -> None:
        """Store the Ray handles of rollout actors (`EngineActor`), which have been started.

        Args:
            limit: time limit of one request; None: the engines have their own limit.
            outlived: whether a request to an engine that has ended may be sent to another one.
        """
        self._names = tuple(names)
        self.use(actors)
        self._limit = limit
        gone = UnreachableError if outlived else None
        self._call = RayCall("generate", limit, CHECK, RolloutError, gone=gone)
        self._shelf = PictureShelf(ray.put)

    def __len__(self) -> int:
        return len(self._engines)

    def use(self, actors: Sequence[ActorHandle]) -> None:
        """Use these rollout actors from now on. They have the same names as the earlier ones.

        Some are new and replace engines that were lost.
        """
        self._engines = list(zip(self._names, actors, strict=True))

    async def generate(self, engine: int, request: RolloutRequest) -> Rollout:
        """Generate one rollout by the engine with this index.

        If the request is late or cancelled, the engine aborts it.

        Raises:
            RolloutError: the engine's own error, or one with its name if it has ended or is late.
                UnreachableError if it has ended and `outlived` is set.
        """
        name, actor = self._engines[engine]
        # A rollout's calls show the same images, and so do the rollouts of an example.
        answer = actor.generate.remote(self._shelf.send([request]))
        try:
            async with asyncio.timeout(None if self._limit is None else self._limit.seconds):
                rollouts, _ = await answer
        except RayError as error:
            raise self._call.translate_error(name, error) from error
        except TimeoutError as error:
            ray.cancel(answer)
            raise self._call.timeout_error([name]) from error
        except asyncio.CancelledError:
            ray.cancel(answer)
            raise
        (rollout,) = rollouts
        return rollout


class EnvironmentActor:
    """The Ray actor that plays an environment's rollouts, called like a rollout actor."""

    def __init__(
        self,
        name: str,
        settings: RunnerSettings,
        engines: Sequence[ActorHandle],
        engine_names: Sequence[str],
        limit: Timeout | None,
        outlives_engines: bool = False,
    ) -> None:
        """Store the arguments; `start` uses them.

        `engines`, `engine_names`, `limit` and `outlives_engines` are the arguments of `RayEngines`.
        """
        end_with_parent()
        self._engines = RayEngines(engines, engine_names, limit, outlived=outlives_engines)
        self._rounds = EnvironmentRounds(name, settings, self._engines)

    async def start(self) -> tuple[int, str]:
        """Load the environment, and wait for the teacher if there is one. Raises RolloutError.

        Returns:
            1 and "", which the driver reads as the result of `EngineActor.start`: one part of a
            round at a time, and no server.
        """
        await self._rounds.start()
        collect_rarely()
        return 1, ""

    async def generate(
        self,
        *objects: SentRequests,
        places: range | None = None,
        attempt: int = 0,  # noqa: ARG002 (no actor answers in place of another)
    ) -> tuple[list[SentRollouts], int]:
        """Play and score the rollouts of these requests.

        `objects` and `places` are as in `EngineActor.generate`; `attempt` has no effect.

        Returns the rollouts of each request, which the driver passes on unread, and their number.

        Raises RolloutError if an engine failed, or the actor was closed meanwhile.
        """
        answers = await self._rounds.run(SentRequests.chosen(objects, places).requests)
        return answers, len(answers)

    async def generate_at_once(
        self, *objects: SentRequests, parts: Sequence[tuple[int, range]]
    ) -> list[list[SentRollouts] | int]:
        """Play the rollouts of several learner ranks together, and score them by one call.

        Needed if the rubric scores all rollouts of a step together.

        `parts`: for each rank, the number of its `objects` and the indices of its requests.

        Returns a flat list: for each rank in order, the two values that `generate` returns.
        """
        left = iter(objects)
        of_parts = [
            SentRequests.chosen(list(islice(left, num_objects)), places).requests
            for num_objects, places in parts
        ]
        answers = iter(await self._rounds.run(list(chain.from_iterable(of_parts))))
        sent: list[list[SentRollouts] | int] = []
        for requests in of_parts:
            sent += [list(islice(answers, len(requests))), len(requests)]
        return sent

    async def use_engines(self, engines: Sequence[ActorHandle]) -> None:
        """Use these rollout actors from now on. No rollout may be running."""
        self._engines.use(engines)

    async def progress(self) -> None:
        """Return None. The answer shows the driver that this process is not stopped."""

    async def check_alive(self) -> None:
        """Do nothing. The answer shows the driver that this process is alive."""

    async def close(self) -> None:
        """End running rollouts, close the environment, and end the processes that it started."""
        await self._rounds.close()
