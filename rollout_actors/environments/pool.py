"""Environments and engines of a run as one: what `rollout_actors.pool.ActorPool` is to the driver, where rollouts are those of environments."""

from __future__ import annotations

from concurrent.futures import Future

from rollout_actors.pool import ActorPool
from shared.chunking import cut_rounds, round_chunk
from shared.protocols import ByRank
from shared.rollouts import SyncReport, WeightOffer


class EnvironmentPool:
    """Rounds go to the environments, which ask the engines; weights go to the engines."""

    def __init__(self, engines: ActorPool, environments: ActorPool, *, decode_batch_size: int, learner_ranks: int, group_size: int) -> None:
        """Both pools have started.

        Args:
            decode_batch_size: most requests that one rollout device decodes at a time.
            group_size: rollouts of each example in training.
        """
        self._engines, self._environments = engines, environments
        self._chunk = round_chunk(decode_batch_size, engines.devices, learner_ranks, together=group_size) // group_size
        self.names = engines.names
        self.devices = engines.devices
        """Rollout devices of each engine."""

    @property
    def version(self) -> int:
        """The version that every engine serves; 0 before the first sync."""
        return self._engines.version

    def split(self, requests: ByRank) -> list[ByRank]:
        """The rounds of a step, as few as the decode batches allow; of whole examples."""
        return cut_rounds(requests, self._chunk)

    def generate(self, round_: ByRank) -> Future[ByRank]:
        """Begin one round. The future holds, for each learner rank, references to its groups of rollouts in position order; it fails with RolloutError naming
        the engine, or the actor whose environments are late."""
        return self._environments.generate(round_)

    def settle(self) -> None:
        """Wait for the round that is being generated, if there is one. Raises its RolloutError."""
        self._environments.settle()

    def receive_weights(self, offer: WeightOffer) -> Future[SyncReport]:
        """As `ActorPool.receive_weights`."""
        return self._engines.receive_weights(offer)
