"""The Ray shell of an environment: rollouts of a step run in this process, against engines that are
actors of their own.
"""

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
from rollout_actors.environments.concurrency import in_thread
from rollout_actors.environments.failures import raise_if_for_all
from rollout_actors.environments.training.runner import (
    EnvironmentRunner,
    RunnerSettings,
    SentRollouts,
    load_tokenizer,
)
from shared.errors import RolloutError, Timeout
from shared.protocols import CLOSED_S
from shared.rollouts import Rollout, RolloutRequest
from shared.sent_requests import PictureShelf, SentRequests

# Python's garbage collector in a process that runs rollouts and little else.


THRESHOLDS = (50_000, 20, 100)


def collect_rarely() -> None:
    """What is there already, libraries and data, is not looked at again, and what follows less
    often: that is most of what the collector takes of a turn (docs/performance.md, "Environments").
    The whole process's setting, so for whoever has a process for itself, when all is loaded."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


# Engines that are Ray actors, asked one request at a time from an event loop:
# `rollout_actors.environments.clients.engine` for environments.
#
# The actors are created, started and sent weights as for any run; nothing here does.


CHECK = (
    "the engine's log, and whether max_new_tokens and what waits before it at the engine fit the"
    " time"
)


class RayEngines:
    """Actors with the methods of `EngineActor`, which have started."""

    def __init__(self, actors: Sequence[Any], names: Sequence[str], limit: Timeout | None) -> None:
        """
        Args:
            actors: Ray actor handles; whoever made them ends them.
            names: the engines', one each.
            limit: the longest that one request may take; None: the engines keep a limit of their
            own.
        """
        self._engines = list(zip(names, actors, strict=True))
        self._limit = limit
        self._call = RayCall("generate", limit, CHECK, RolloutError)
        self._shelf = PictureShelf(ray.put)

    def __len__(self) -> int:
        return len(self._engines)

    async def generate(self, engine: int, request: RolloutRequest) -> Rollout:
        """Raises RolloutError: the engine's own, or naming it where it has ended or does not answer
        in time. A request that nobody waits for any more, for that reason or because this call was
        cancelled, is aborted in the engine."""
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


_LOGGER = logging.getLogger(__name__)

CLEANUP_S = CLOSED_S / 2
"""For rollouts under way to clean up when the run ends; the rest of what the pool waits is for
`@teardown`.
"""


class EnvironmentActor:
    """What `rollout_actors.engine.actor.EngineActor` is to a pool, asked for rollouts of
    environments.
    """

    _runner: EnvironmentRunner | None = None

    def __init__(
        self,
        name: str,
        settings: RunnerSettings,
        engines: Sequence[Any],
        engine_names: Sequence[str],
        limit: Timeout | None,
    ) -> None:
        """`engines` are handles of the run's engine actors; `limit` is that of one call of a model;
        None: the engines keep one.
        """
        self._name, self._settings = name, settings
        self._engines = RayEngines(engines, engine_names, limit)
        self._rounds = set[asyncio.Task[list[SentRollouts]]]()

    async def start(self) -> tuple[int, str]:
        """Load the environment and the tokenizer. As `EngineActor.start`: it works through one part
        of a round at a time, and nobody else can ask it.
        """
        try:
            self._runner = await in_thread(self._make)
        except ValueError as error:
            raise RolloutError(str(error), actor=self._name, phase="start") from error
        return 1, ""

    async def generate(
        self,
        *objects: SentRequests,
        places: range | None = None,
        attempt: int = 0,  # noqa: ARG002 (nobody answers in place of another)
    ) -> tuple[list[SentRollouts], int]:
        """Called with references, which Ray resolves here. The answers are one object, which the
        driver passes on unread, their number another.

        Raises RolloutError where it is closed meanwhile.
        """
        assert self._runner is not None, "start comes first"
        # In a task of its own, which `close` can cancel.
        round_ = asyncio.ensure_future(
            self._runner.run(SentRequests.chosen(objects, places).requests)
        )
        self._rounds.add(round_)
        try:
            answers = await round_
        except asyncio.CancelledError as error:
            raise_if_for_all(error)
            why = (
                "was closed"
                if round_.cancelling()
                else (
                    "cancelled the round itself: it let out the CancelledError of a task of its"
                    " own,"
                )
            )
            raise RolloutError(
                f"{why} before its rollouts were done", actor=self._name, phase="generate"
            ) from error
        finally:
            self._rounds.discard(round_)
        return answers, len(answers)

    async def close(self) -> None:
        """End the environment in order: its rollouts (`@cleanup`), then itself (`@teardown`)."""
        if self._runner is None:
            return
        await self._end_rounds()
        try:
            await self._runner.aclose()
        except Exception:
            # The run is ending, and nobody reads the answer.
            _LOGGER.exception("teardown of %s failed", self._settings.env_id)
            raise

    async def _end_rounds(self) -> None:
        if not self._rounds:
            return
        for round_ in self._rounds:
            round_.cancel()
        _, late = await asyncio.wait(self._rounds, timeout=CLEANUP_S)
        if late:
            _LOGGER.warning(
                "rollouts of %s still clean up after %g s, and it is torn down now; check what its"
                " @cleanup waits for",
                self._settings.env_id,
                CLEANUP_S,
            )

    def _make(self) -> EnvironmentRunner:
        if (folder := self._settings.working_dir) is not None and Path(folder).is_dir():
            os.chdir(folder)
        runner = EnvironmentRunner(
            self._name, self._settings, self._engines, load_tokenizer(self._settings.model_path)
        )
        collect_rarely()
        return runner
