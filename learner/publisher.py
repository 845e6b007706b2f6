"""The learner's weights on their way out: to the engines, version after version, and to disk.

    offer -> send (rank 0 alone) -> done

Every method but `send`, `fall_back_to_full` and `close` is called on all ranks, in the same order.
"""

from __future__ import annotations

from pathlib import Path

from learner.adapter_sender import AdapterSender
from learner.adapters import adapter_files
from learner.canary import Canary
from learner.checkpoint import save_checkpoint
from learner.loading import LoadedModel
from learner.parallel import Parallel
from learner.place import LearnerPlace
from learner.ranks import Ranks
from learner.weight_sender import WeightSender
from shared.config import RunConfig
from shared.config.derive import resolved_sync_mode
from shared.rollouts import WeightOffer
from shared.weight_sync import SendReport

Sender = WeightSender | AdapterSender


class WeightPublisher:
    """One rank's part in it. The weights must not change between an offer and its `done`."""

    def __init__(self, ranks: Ranks, loaded: LoadedModel, parallel: Parallel, sender: Sender | None, canary: Canary) -> None:
        """`sender` is rank 0's; `canary` is the proof of arrival."""
        self._ranks = ranks
        self._loaded = loaded
        self._parallel = parallel
        self._sender = sender
        self.canary = canary
        self.version = 0
        """That the engines serve; 0 before the first sync."""

    def offer(self) -> WeightOffer | None:
        """The next version of the weights, with the probe that proves their arrival: rank 0's to make, and None on the other ranks.

        Raises LearnerError where the ranks do not hold the same.
        """
        with self._ranks.of_phase("offer_weights"):
            self._ranks.barrier()
            self._parallel.check()
            self._parallel.gather()
            if self._parallel.holds_parts:
                # Every rank computes it where none has the model alone.
                probe = self._parallel.forward(self.canary.probe)
                return None if self._sender is None else self._sender.offer(self.version + 1, probe)
            if self._sender is None:
                return None
            if isinstance(self._sender, WeightSender) and self._sender.takes_time:
                return self._sender.offer(self.version + 1, self.canary.question(), self.canary.logprobs)
            return self._sender.offer(self.version + 1, self.canary.probe())

    def send(self, offer: WeightOffer) -> SendReport:
        """Returns when the weights are out. Raises WeightSyncError."""
        assert self._sender is not None, "rank 0 sends"
        return self._sender.send(offer)

    def fall_back_to_full(self) -> None:
        """An adapter that was offered did not arrive: every later offer is of the merged weights."""
        assert isinstance(self._sender, AdapterSender), "only an offer of an adapter falls back"
        self._sender.fall_back_to_full()

    def done(self) -> None:
        """The offered weights are served, everywhere: every rank holds the version that was offered."""
        with self._ranks.of_phase("sync_done"):
            self._ranks.barrier()
        self._parallel.release()
        self.version += 1

    def save(self, folder: Path) -> None:
        """An ordinary checkpoint, which rank 0 writes; returns on every rank when it is there. Raises StorageError."""
        with self._ranks.of_phase("save"):
            self._parallel.check()
            self._parallel.gather()
            adapter = adapter_files(self._loaded.model)
            if self._ranks.rank == 0:
                save_checkpoint(self._loaded.model, self._loaded.processor, folder, state_dict=self._parallel.state_dict(), adapter=adapter)
            self._parallel.release()
            self._ranks.barrier()

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()


def make_sender(config: RunConfig, place: LearnerPlace, loaded: LoadedModel, parallel: Parallel) -> Sender | None:
    """Rank 0's, as the configuration says what is sent; None on the other ranks."""
    if place.rank != 0:
        return None
    sync, timeout_s = config.rollout_matching.vllm.sync, config.timeouts.sync_phase_s
    full = WeightSender(
        parallel.weights,
        transport=place.transport,
        receivers=place.receivers,
        host=place.address,
        timeout_s=timeout_s,
        bucket_bytes=sync.bucket_bytes,
    )
    if resolved_sync_mode(config) == "full":
        return full
    return AdapterSender(loaded.model, full, timeout_s=timeout_s, falls_back=sync.fallback_to_full)
