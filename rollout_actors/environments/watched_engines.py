"""Engines whose failure ends all the rollouts that ask them."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from rollout_actors.environments.conversation import require_own_prompt
from rollout_actors.environments.engine_client import Engines
from shared.errors import RolloutError, UnreachableError
from shared.records import ImageRef
from shared.rollouts import Rollout, RolloutRequest


class WatchedEngines:
    """The run's engines during one call. What one of them fails with ends the call: as a rollout's own error it would be data, and a
    dead engine would teach. So does what the learner could not learn from."""

    def __init__(self, engines: Engines, name: str, max_images: int) -> None:
        """`name` is that of the environment actor, `max_images` what one prompt may have."""
        self._engines, self._name, self._max_images = engines, name, max_images
        self._num_unreached: Counter[tuple[int, int]] = Counter()
        """Engines that could not be reached, by position and seed of what they were asked."""
        self.sent_images: dict[str, ImageRef] = {}
        """By their hashes (`sha256`), all that were in a prompt."""
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __len__(self) -> int:
        return len(self._engines)

    async def generate(self, engine: int, request: RolloutRequest) -> Rollout:
        if (number := len(request.images)) > self._max_images:
            told = (
                f"example {request.sample_id} shows {number} image{'s' * (number > 1)} in a prompt, and environment.max_images_per_prompt is {self._max_images}"
            )
            raise self._noted(RolloutError(f"{told}; set it to {number} or more", actor=self._name, phase="environment"))
        self.sent_images.update((image.sha256, image) for image in request.images)
        try:
            rollout = await self._engines.generate(engine, request)
            require_own_prompt(rollout, request)
        except UnreachableError as error:
            # The client asks the next one, as long as there is one.
            key = (request.position, request.seed)
            self._num_unreached[key] += 1
            if self._num_unreached[key] >= len(self._engines):
                self._noted(error)
            raise
        except Exception as error:  # an engine that fails unforeseen has failed too
            self._noted(error)
            raise
        return rollout

    def _noted(self, error: Exception) -> Exception:
        if not self._failure.done():
            self._failure.set_exception(error)
        return error

    async def unless_one_fails(self, work: Any) -> Any:
        """What `work` comes to. Raises what an engine has failed with meanwhile, mostly a RolloutError, once all its rollouts have cleaned up."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._failure), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
                # For as long as they clean up; the driver's limit of the round bounds it.
                await asyncio.wait((task,))
        if self._failure.done():
            if task.done() and not task.cancelled():
                task.exception()  # looked at, so that asyncio does not complain
            self._failure.result()
        return task.result()
