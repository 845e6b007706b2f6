"""A Ray actor with the methods of `EngineActor` whose engine answers by a script: what becomes of a
rollout's calls follows from their seeds.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import ray
from scripted_engines import Says, rollout_of

from shared.rollouts import Rollout, RolloutRequest, SyncReport, WeightOffer
from shared.sent_requests import SentRequests
from shared.weight_sync.phases import SyncPhase


class ScriptedEngineActor:
    """Its process ends with a request of the position `dies_at`."""

    def __init__(
        self, number: int, words: Sequence[Sequence[int]], dies_at: int | None = None
    ) -> None:
        """`words`: answers, of which the seed chooses."""
        self._number = number
        self._words = words
        self._dies_at = dies_at
        self._version = 0

    async def start(self) -> tuple[int, str]:
        return 1, ""

    async def generate(
        self, *objects: SentRequests, places: range | None = None, attempt: int = 0
    ) -> tuple[list[Rollout], int]:
        requests = SentRequests.chosen(objects, places).requests
        if any(request.position == self._dies_at for request in requests):
            os._exit(1)
        rollouts = [
            rollout_of(request, says(request, self._words, self._version), self._number)
            for request in requests
        ]
        return rollouts, len(rollouts)

    async def progress(self) -> int | None:
        return None

    async def check_alive(self) -> None:
        pass

    async def run_sync_phase(self, phase: SyncPhase, offer: WeightOffer) -> SyncReport | None:
        self._version = offer.version
        if phase is not SyncPhase.CANARY:
            return None
        return SyncReport(offer.version, 10, {"wire": 1.0}, canary_max_abs=0.0)

    async def close(self) -> None:
        pass


def says(request: RolloutRequest, words: Sequence[Sequence[int]], version: int = 0) -> Says:
    return Says(words[request.seed % len(words)], version=version)


def create_scripted_actor(
    number: int, words: Sequence[Sequence[int]], dies_at: int | None = None
) -> Any:
    return ray.remote(ScriptedEngineActor).options(num_cpus=0).remote(number, words, dies_at)
