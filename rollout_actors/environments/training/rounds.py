"""The environment of a training run in one process, from its start to its end, round by round."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from rollout_actors.environments.clients.engine import Engines
from rollout_actors.environments.concurrency import in_thread, reraise_cancellation, traceback_of
from rollout_actors.environments.training.child_processes import EnvironmentProcesses
from rollout_actors.environments.training.runner import (
    EnvironmentRunner,
    RunnerSettings,
    SentRollouts,
    load_tokenizer,
)
from shared.errors import RolloutError
from shared.protocols import CLOSED_S
from shared.trajectory import EnvironmentRequest

_LOGGER = logging.getLogger(__name__)

CLEANUP_S = CLOSED_S / 2
"""Seconds that running rollouts have for `@cleanup` when the run ends. The rest of the driver's
wait is for `@teardown`.
"""


class EnvironmentRounds:
    """The environment of a training run, in the process of its Ray actor or of a learner rank."""

    def __init__(self, name: str, settings: RunnerSettings, engines: Engines) -> None:
        """Store the arguments for `start`. `name`: the actor's or learner rank's, for errors."""
        self._name = name
        self._settings = settings
        self._engines = engines
        self._runner: EnvironmentRunner | None = None
        self._rounds = set[asyncio.Task[list[SentRollouts]]]()
        self._processes: EnvironmentProcesses | None = None

    async def start(self) -> None:
        """Load the environment and the tokenizer, and wait for the teacher, if there is one.

        Raises RolloutError(phase="start").
        """
        self._processes = EnvironmentProcesses()
        try:
            self._runner = await in_thread(self._make_runner)
        except ValueError as error:
            raise RolloutError(str(error), actor=self._name, phase="start") from error
        await self._runner.require_teacher()

    def _make_runner(self) -> EnvironmentRunner:
        folder = self._settings.working_dir
        if folder is not None and Path(folder).is_dir():
            os.chdir(folder)
        tokenizer = load_tokenizer(self._settings.model_path)
        return EnvironmentRunner(self._name, self._settings, self._engines, tokenizer)

    async def run(self, requests: Sequence[EnvironmentRequest]) -> list[SentRollouts]:
        """Play and score the rollouts of a round. Return the rollouts of each request, in order.

        Raises RolloutError if an engine failed, or the environment was closed meanwhile.
        """
        assert self._runner is not None, "start must be called first"
        # In its own task, which `leave` can cancel.
        round_ = asyncio.ensure_future(self._runner.run(requests))
        self._rounds.add(round_)
        try:
            return await round_
        except asyncio.CancelledError as error:
            reraise_cancellation(error)
            why = "was closed"
            if not round_.cancelling():
                why = "cancelled the round itself (it did not catch the CancelledError of its task)"
            raise RolloutError(
                f"{why} before its rollouts were done", actor=self._name, phase="generate"
            ) from error
        finally:
            self._rounds.discard(round_)

    async def leave(self) -> None:
        """Cancel the running rollouts, and wait at most `CLEANUP_S` for their `@cleanup`."""
        rounds = [round_ for round_ in self._rounds if not round_.cancelling()]
        for round_ in rounds:
            round_.cancel()
        if self._rounds:
            _, late = await asyncio.wait(self._rounds, timeout=CLEANUP_S)
            if late:
                _LOGGER.warning(
                    "rollouts of environment %s are still cleaning up after %g s, and the"
                    " environment is torn down now; check what its @cleanup functions wait for",
                    self._settings.env_id,
                    CLEANUP_S,
                )

    async def close(self) -> None:
        """End the running rollouts, close the environment, and end the processes that it started.

        This calls their `@cleanup` and its `@teardown`.
        """
        try:
            if self._runner is not None:
                await self.leave()
                await self._runner.aclose()
        except Exception as error:
            # Logged, because the run is ending and the caller does not read the answer.
            name = self._settings.env_id
            _LOGGER.error("teardown of %s failed\n%s", name, traceback_of(error))
            raise
        finally:
            if self._processes is not None:
                self._processes.end(self._settings.env_id)
