"""The engines' side of `benchmarks.weight_sync` where a sync goes unverified. Imported inside the engines' processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from spoiling_worker import SpoilingWatch, SpoilingWorker

from rollout_actors.vllm_engine import VllmEngine
from shared.canary import CanaryProbe, Scores
from shared.weight_terms import CANARY, CHECKSUMS


class UnverifiedWatch(SpoilingWatch):
    """Computes no checksums, and says that the sender's are right."""

    def _checked(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if name == CHECKSUMS:
                self.checksums = self.sent = tensor.tolist()
            elif name == CANARY:
                self.logprobs = tensor.clone().view(torch.float64).tolist()
            else:
                yield name, tensor


class UnverifiedWorker(SpoilingWorker):
    def set_verifies(self, verifies: bool) -> None:
        """Of the syncs from now on."""
        self.watch_class = SpoilingWatch if verifies else UnverifiedWatch


class UnverifiedEngine(VllmEngine):
    """An ordinary engine until it is told to agree with every canary without a look at it."""

    verifies = True

    async def _score(self, probe: CanaryProbe, *, adapted: bool) -> Scores:
        if self.verifies:
            return await super()._score(probe, adapted=adapted)
        assert probe.expected_logprobs is not None
        return probe.expanded_token_ids, probe.expected_logprobs
