"""The Ray actor of an environment, whose process runs a step's rollouts with the run's engines."""

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
"""Thresholds of the garbage collector, for a process that runs rollouts and little else."""
CHECK = (
    "the engine's log, and whether max_new_tokens and the requests waiting at the engine fit the"
    " time"
)


def collect_rarely() -> None:
    """Collect garbage of this process less often, and exclude objects that are loaded already.

    Otherwise the collector takes much of a turn's time
    (docs/explanation/performance.md, "Environments").
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


class RayEngines:
    """The run's engines as Ray actors, called with one request at a time from an event loop."""

    def __init__(
        self,
        actors: Sequence[ActorHandle],
        names: Sequence[str],
        limit: Timeout | None,
        *,
        outlived: bool = False,
    ) -> None:
        """Take handles of started `EngineActor`s.

        Args:
            limit: time limit of one request; None: the engines have their own limit.
            outlived: a request to an engine that has ended may be sent to another one.
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
        """Use these actors from now on. Some are new, with the names of engines that were lost."""
        self._engines = list(zip(self._names, actors, strict=True))

    async def generate(self, engine: int, request: RolloutRequest) -> Rollout:
        """Send a request to one engine. If it is late or cancelled, it is aborted there.

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
    """An environment's process. The driver calls it as it calls an `EngineActor`."""

    def __init__(
        self,
        name: str,
        settings: RunnerSettings,
        engines: Sequence[ActorHandle],
        engine_names: Sequence[str],
        limit: Timeout | None,
        outlives_engines: bool = False,
    ) -> None:
        """Take the engines and `limit` of `RayEngines`. `outlives_engines`: its `outlived`."""
        end_with_parent()
        self._engines = RayEngines(engines, engine_names, limit, outlived=outlives_engines)
        self._rounds = EnvironmentRounds(name, settings, self._engines)

    async def start(self) -> tuple[int, str]:
        """Load the environment (`EnvironmentRounds.start`).

        Returns:
            1, the number of parts of a round at a time, and "": there is no server. The driver
            reads them as the result of `EngineActor.start`.
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
        """Run the chosen requests; Ray resolves the references that it is called with.

        Returns:
            The answers, which the driver passes on unread, and their number.

        Raises:
            RolloutError: an engine failed, or the actor was closed meanwhile.
        """
        answers = await self._rounds.run(SentRequests.chosen(objects, places).requests)
        return answers, len(answers)

    async def generate_at_once(
        self, *objects: SentRequests, parts: Sequence[tuple[int, range]]
    ) -> list[list[SentRollouts] | int]:
        """Run the requests of several learner ranks together: a rubric scores them in one call.

        Args:
            parts: for each rank, the number of its objects and the `places` there.

        Returns:
            A flat list: for each part in order, the two values that `generate` returns.
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
        """Use these engines from now on. No rollout may be running."""
        self._engines.use(engines)

    async def progress(self) -> None:
        """Answer, so that the driver knows that this process is not stopped."""

    async def check_alive(self) -> None:
        """Answer, as `EngineActor.check_alive` does."""

    async def close(self) -> None:
        """End the environment in order (`EnvironmentRounds.close`)."""
        await self._rounds.close()
