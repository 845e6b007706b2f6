"""Engines for `benchmarks.weight_sync` that skip parts of the verification of a weight sync.

This module is imported in the engines' processes.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator

import torch
from spoiling_worker import SpoilingWatch, SpoilingWorker

from benchmarks.sync_sides import ALL_PARTS, Part
from rollout_actors.engine.vllm_engine import VllmEngine
from shared.weight_sync.canary import CanaryProbe, Scores
from shared.weight_sync.offer import CANARY, CHECKSUMS


class UnverifiedWatch(SpoilingWatch):
    """Receives weights and accepts the sender's checksums without computing them again."""

    def _checked(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if name == CHECKSUMS:
                self.checksums = self.sent = tensor.tolist()
            elif name == CANARY:
                self.logprobs = tensor.clone().view(torch.float64).tolist()
            else:
                yield name, tensor


class UncomparedWatch(SpoilingWatch):
    """Receives weights and computes checksums, without comparing them with the sender's."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = super().load_weights(weights)
        self.sent = self.checksums
        return loaded


class UnverifiedWorker(SpoilingWorker):
    def cpu_s(self) -> float:
        return time.process_time()

    def set_parts(self, parts: Collection[str]) -> None:
        """Set which parts of the verification the next weight syncs have in this worker."""
        if Part.ENGINE_CHECKSUMS not in parts:
            self.watch_class = UnverifiedWatch
        else:
            self.watch_class = SpoilingWatch if Part.LEARNER_CHECKSUMS in parts else UncomparedWatch


class UnverifiedEngine(VllmEngine):
    """A vLLM engine that can accept a weight sync without computing the canary."""

    parts: Collection[Part] = ALL_PARTS

    async def _score(self, probe: CanaryProbe, *, adapted: bool) -> Scores:
        scores = (
            await super()._score(probe, adapted=adapted)
            if Part.ENGINE_CANARY in self.parts
            else None
        )
        if scores is not None and Part.LEARNER_CANARY in self.parts:
            return scores
        assert probe.expected_logprobs is not None
        return probe.expanded_token_ids, probe.expected_logprobs
