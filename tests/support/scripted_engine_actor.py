"""A Ray actor with the methods of `EngineActor` whose engine answers by a script: what becomes of a rollout's calls follows from their seeds."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from scripted_engines import Says, rollout_of

from shared.rollouts import Rollout, RolloutRequest, SyncReport, WeightOffer
from shared.weight_sync import SyncPhase


class ScriptedEngineActor:
    """`trouble` is `sleep`, `die` or nothing, and is met by requests of the position `at`."""

    def __init__(self, number: int, words: Sequence[Sequence[int]], trouble: str = "", at: int = 0) -> None:
        """`words`: answers, of which the seed chooses."""
        self._number, self._words, self._trouble, self._at = number, words, trouble, at
        self._version = 0

    async def start(self) -> tuple[int, str]:
        return 1, ""

    async def generate(self, *requests: RolloutRequest, attempt: int = 0) -> tuple[list[Rollout], int]:
        if self._trouble and any(request.position == self._at for request in requests):
            await asyncio.sleep(3600) if self._trouble == "sleep" else os._exit(1)
        return [rollout_of(request, self._says(request), self._number) for request in requests], len(requests)

    async def run_sync_phase(self, phase: SyncPhase, offer: WeightOffer) -> SyncReport | None:
        self._version = offer.version
        return SyncReport(offer.version, 10, {"wire": 1.0}, canary_max_abs=0.0) if phase is SyncPhase.CANARY else None

    async def close(self) -> None:
        pass

    def _says(self, request: RolloutRequest) -> Says:
        return says(request, self._words, self._version)


def says(request: RolloutRequest, words: Sequence[Sequence[int]], version: int = 0) -> Says:
    return Says(words[request.seed % len(words)], version=version)


def with_support(actor_class: Any) -> Any:
    """As Ray starts it, without resources; its process finds the modules of this folder."""
    return ray.remote(actor_class).options(num_cpus=0, runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parent), "HF_HUB_OFFLINE": "1"}})
