"""Engines for `benchmarks.weight_sync` that can skip the verification of a weight sync.

This module is imported in the engines' processes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import torch
from spoiling_worker import SpoilingWatch, SpoilingWorker

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


class UnverifiedWorker(SpoilingWorker):
    def cpu_s(self) -> float:
        return time.process_time()

    def set_verified(self, is_verified: bool) -> None:
        """Set whether this worker verifies the next weight syncs."""
        self.watch_class = SpoilingWatch if is_verified else UnverifiedWatch


class UnverifiedEngine(VllmEngine):
    """A vLLM engine that can accept a weight sync without computing the canary."""

    is_verified = True

    async def _score(self, probe: CanaryProbe, *, adapted: bool) -> Scores:
        if self.is_verified:
            return await super()._score(probe, adapted=adapted)
        assert probe.expected_logprobs is not None
        return probe.expanded_token_ids, probe.expected_logprobs
