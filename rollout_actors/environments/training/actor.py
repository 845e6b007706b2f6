"""The Ray actor of an environment, whose process runs a step's rollouts against the engines'."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from rollout_actors.engine.ray_calls import RayCall
from rollout_actors.environments.concurrency import in_thread, reraise_cancellation
from rollout_actors.environments.training.runner import (
    EnvironmentRunner,
    RunnerSettings,
    SentRollouts,
    load_tokenizer,
)
from shared.errors import RolloutError, Timeout, UnreachableError
from shared.protocols import CLOSED_S, end_with_parent
from shared.rollouts import Rollout, RolloutRequest
from shared.sent_requests import PictureShelf, SentRequests

_LOGGER = logging.getLogger(__name__)

THRESHOLDS = (50_000, 20, 100)
"""Garbage collector's, for a process that runs rollouts and little else."""
CHECK = (
    "the engine's log, and whether max_new_tokens and what waits before it at the engine fit the"
    " time"
)
CLEANUP_S = CLOSED_S / 2
"""Time for rollouts under way to clean up when the run ends. The rest of what the driver waits is
for `@teardown`.
"""


def collect_rarely() -> None:
    """Collect garbage of this process less often, and never look again at what is loaded already.

    That is most of what the collector takes of a turn (docs/performance.md, "Environments").
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


class RayEngines:
    """The run's engines as Ray actors, asked one request at a time from an event loop."""

    def __init__(
        self,
        actors: Sequence[Any],
        names: Sequence[str],
        limit: Timeout | None,
        *,
        outlived: bool = False,
    ) -> None:
        """Take handles of started `EngineActor`s.

        Args:
            limit: of one request; None: they keep one.
            outlived: what an engine that has ended was asked may be asked of another.
        """
        self._names = tuple(names)
        self.use(actors)
        self._limit = limit
        gone = UnreachableError if outlived else None
        self._call = RayCall("generate", limit, CHECK, RolloutError, gone=gone)
        self._shelf = PictureShelf(ray.put)

    def __len__(self) -> int:
        return len(self._engines)

    def use(self, actors: Sequence[Any]) -> None:
        """Ask these from now on: some are new, under the names of engines that were lost."""
        self._engines = list(zip(self._names, actors, strict=True))

    async def generate(self, engine: int, request: RolloutRequest) -> Rollout:
        """Ask one engine. A request that is late or cancelled is aborted there.

        Raises:
            RolloutError: the engine's own, or naming it where it has ended or is late.
        """
        name, actor = self._engines[engine]
        # A rollout's calls show the same pictures, and so do the rollouts of an example.
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
    """An environment's process, with the methods of `EngineActor`: the driver asks both alike."""

    _runner: EnvironmentRunner | None = None

    def __init__(
        self,
        name: str,
        settings: RunnerSettings,
        engines: Sequence[Any],
        engine_names: Sequence[str],
        limit: Timeout | None,
        outlives_engines: bool = False,
    ) -> None:
        """Take the engines, as `RayEngines` does. `outlives_engines`: its `outlived`."""
        end_with_parent()
        self._name = name
        self._settings = settings
        self._engines = RayEngines(engines, engine_names, limit, outlived=outlives_engines)
        self._rounds = set[asyncio.Task[list[SentRollouts]]]()

    async def start(self) -> tuple[int, str]:
        """Load the environment and the tokenizer, and wait for the teacher, if there is one.

        Returns:
            What `EngineActor.start` does: it takes one part of a round at a time, and no server.
        """
        try:
            self._runner = await in_thread(self._make_runner)
        except ValueError as error:
            raise RolloutError(str(error), actor=self._name, phase="start") from error
        await self._runner.require_teacher()
        return 1, ""

    def _make_runner(self) -> EnvironmentRunner:
        folder = self._settings.working_dir
        if folder is not None and Path(folder).is_dir():
            os.chdir(folder)
        tokenizer = load_tokenizer(self._settings.model_path)
        runner = EnvironmentRunner(self._name, self._settings, self._engines, tokenizer)
        collect_rarely()
        return runner

    async def generate(
        self,
        *objects: SentRequests,
        places: range | None = None,
        attempt: int = 0,  # noqa: ARG002 (nobody answers in place of another)
    ) -> tuple[list[SentRollouts], int]:
        """Run the chosen requests; Ray resolves the references that it is called with.

        Returns:
            The answers, an object that the driver passes on unread, and their number.

        Raises:
            RolloutError: an engine failed, or the actor was closed meanwhile.
        """
        assert self._runner is not None, "start comes first"
        requests = SentRequests.chosen(objects, places).requests
        # In a task of its own, which `close` can cancel.
        round_ = asyncio.ensure_future(self._runner.run(requests))
        self._rounds.add(round_)
        try:
            answers = await round_
        except asyncio.CancelledError as error:
            reraise_cancellation(error)
            why = "was closed"
            if not round_.cancelling():
                why = "cancelled the round itself: it let out the CancelledError of its own task,"
            raise RolloutError(
                f"{why} before its rollouts were done", actor=self._name, phase="generate"
            ) from error
        finally:
            self._rounds.discard(round_)
        return answers, len(answers)

    async def use_engines(self, engines: Sequence[Any]) -> None:
        """Ask these engines from now on; no rollout is under way."""
        self._engines.use(engines)

    async def progress(self) -> None:
        """Answer, by which the driver knows that this process is not stopped."""

    async def check_alive(self) -> None:
        """Answer, as `EngineActor.check_alive` does."""

    async def close(self) -> None:
        """End the environment in order: its rollouts (`@cleanup`), then itself (`@teardown`)."""
        if self._runner is None:
            return
        for round_ in self._rounds:
            round_.cancel()
        if self._rounds:
            _, late = await asyncio.wait(self._rounds, timeout=CLEANUP_S)
            if late:
                _LOGGER.warning(
                    "rollouts of %s still clean up after %g s, and it is torn down now; check what"
                    " its @cleanup waits for",
                    self._settings.env_id,
                    CLEANUP_S,
                )
        try:
            await self._runner.aclose()
        except Exception:
            # The run is ending, and nobody reads the answer.
            _LOGGER.exception("teardown of %s failed", self._settings.env_id)
            raise
