"""Rollouts that the learner ranks generate themselves (`rollout_backend: hf`, `vllm.mode: colocate`), as the driver uses rollout engines."""

from __future__ import annotations

from concurrent.futures import Future

from learner.remote_learner import RemoteLearner
from shared.chunking import cut_rounds
from shared.config.derive import rank_name
from shared.protocols import ByRank
from shared.rollouts import SyncReport, WeightOffer


class RankRollouts:
    """What `rollout_actors.pool.ActorPool` is, where each rank generates what it learns. Generation and learning then alternate."""

    def __init__(self, learner: RemoteLearner, *, num_ranks: int, devices_per_rank: int, decode_batch_size: int) -> None:
        self._learner = learner
        self._chunk = decode_batch_size * devices_per_rank
        self.names = tuple(rank_name(rank, num_ranks) for rank in range(num_ranks))
        self.devices = (devices_per_rank,) * num_ranks

    @property
    def version(self) -> int:
        """The version that every rank's engine serves; 0 before the first sync."""
        return self._learner.received_version

    def split(self, requests: ByRank) -> list[ByRank]:
        """The rounds of a step, as few as the decode batches allow."""
        return cut_rounds(requests, self._chunk)

    def generate(self, round_: ByRank) -> Future[ByRank]:
        return self._learner.generate(round_)

    def settle(self) -> None:
        """Nothing to wait for: a rank generates and learns in turn."""

    def receive_weights(self, offer: WeightOffer) -> Future[SyncReport]:
        """The slowest rank's report. The future fails with WeightSyncError, or with LearnerError where a rank did not answer."""
        return self._learner.receive_weights(offer)
