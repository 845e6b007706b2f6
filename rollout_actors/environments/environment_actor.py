"""The Ray shell of an environment: rollouts of a step run in this process, against engines that are actors of their own."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout_actors.environments.collector import collect_rarely
from rollout_actors.environments.failures import raise_if_for_all
from rollout_actors.environments.ray_engines import RayEngines
from rollout_actors.environments.runner import Answer, EnvironmentRunner, RunnerSettings, load_tokenizer
from rollout_actors.environments.turns import in_thread
from shared.errors import Limit, RolloutError
from shared.protocols import CLOSED_S
from shared.sent_requests import SentRequests

_LOGGER = logging.getLogger(__name__)

CLEANUP_S = CLOSED_S / 2
"""For rollouts under way to clean up when the run ends; the rest of what the pool waits is for `@teardown`."""


class EnvironmentActor:
    """What `rollout_actors.engine_actor.EngineActor` is to a pool, asked for rollouts of environments."""

    _runner: EnvironmentRunner | None = None

    def __init__(self, name: str, settings: RunnerSettings, engines: Sequence[Any], engine_names: Sequence[str], limit: Limit | None) -> None:
        """`engines` are handles of the run's engine actors; `limit` is that of one call of a model; None: the engines keep one."""
        self._name, self._settings = name, settings
        self._engines = RayEngines(engines, engine_names, limit)
        self._rounds = set[asyncio.Task[list[Answer]]]()

    async def start(self) -> tuple[int, str]:
        """Load the environment and the tokenizer. As `EngineActor.start`: it works through one part of a round at a time, and nobody else can ask it."""
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
    ) -> tuple[list[Answer], int]:
        """Called with references, which Ray resolves here. The answers are one object, which the driver passes on unread, their number another.

        Raises RolloutError where it is closed meanwhile.
        """
        assert self._runner is not None, "start comes first"
        # In a task of its own, which `close` can cancel.
        round_ = asyncio.ensure_future(self._runner.run(SentRequests.chosen(objects, places).requests))
        self._rounds.add(round_)
        try:
            answers = await round_
        except asyncio.CancelledError as error:
            raise_if_for_all(error)
            why = "was closed" if round_.cancelling() else "cancelled the round itself: it let out the CancelledError of a task of its own,"
            raise RolloutError(f"{why} before its rollouts were done", actor=self._name, phase="generate") from error
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
                "rollouts of %s still clean up after %g s, and it is torn down now; check what its @cleanup waits for", self._settings.env_id, CLEANUP_S
            )

    def _make(self) -> EnvironmentRunner:
        if (folder := self._settings.working_dir) is not None and Path(folder).is_dir():
            os.chdir(folder)
        runner = EnvironmentRunner(self._name, self._settings, self._engines, load_tokenizer(self._settings.model_path))
        collect_rarely()
        return runner
