"""Engines that are Ray actors, asked one request at a time from an event loop: `rollout_actors.environments.engine_client` for environments.

The actors are created, started and sent weights as for any run; nothing here does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from rollout_actors.ray_answers import Call, told
from shared.errors import Limit, RolloutError, late
from shared.rollouts import Rollout, RolloutRequest
from shared.sent_requests import PictureShelf

CHECK = "the engine's log, and whether max_new_tokens and what waits before it at the engine fit the time"


class RayEngines:
    """Actors with the methods of `EngineActor`, which have started."""

    def __init__(self, actors: Sequence[Any], names: Sequence[str], limit: Limit | None) -> None:
        """
        Args:
            actors: Ray actor handles; whoever made them ends them.
            names: the engines', one each.
            limit: the longest that one request may take; None: the engines keep a limit of their own.
        """
        self._engines = list(zip(names, actors, strict=True))
        self._limit = limit
        self._call = Call("generate", limit, CHECK, RolloutError)
        self._shelf = PictureShelf(ray.put)

    def __len__(self) -> int:
        return len(self._engines)

    async def generate(self, engine: int, request: RolloutRequest) -> Rollout:
        """Raises RolloutError: the engine's own, or naming it where it has ended or does not answer in time. A request that nobody waits for any more, for
        that reason or because this call was cancelled, is aborted in the engine."""
        name, actor = self._engines[engine]
        # A rollout's calls show the same pictures, and so do the rollouts of an example.
        answer = actor.generate.remote(self._shelf.send([request]))
        try:
            async with asyncio.timeout(None if self._limit is None else self._limit.seconds):
                rollouts, _ = await answer
        except RayError as error:
            raise told(self._call, name, error) from error
        except TimeoutError as error:
            ray.cancel(answer)
            assert self._limit is not None
            raise RolloutError(late(name, self._limit, CHECK), actor=name, phase="generate") from error
        except asyncio.CancelledError:
            ray.cancel(answer)
            raise
        (rollout,) = rollouts
        return rollout
