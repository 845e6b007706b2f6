"""The learner's weights on their way out: to the engines, version after version, and to disk.

    offer -> send (rank 0 alone) -> done

Every method but `send`, `fall_back_to_full` and `close` is called on all ranks, in the same order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from learner.model.adapters import adapter_files
from learner.model.checkpoint import save_checkpoint
from learner.model.loading import LoadedModel
from learner.model.ranks import LearnerDevice, Ranks, RankTopology
from learner.model.sharding import Parallel
from learner.weight_sync.canary import AsksCanary, Canary, ComputedCanary
from learner.weight_sync.sender import WeightSender
from shared.config import RunConfig
from shared.config.derive import resolved_sync_mode, rollout_servers
from shared.errors import LEARNER, WeightSyncError
from shared.rollouts import WeightOffer
from shared.weight_sync.differences import Differences
from shared.weight_sync.offer import AdapterOffer
from shared.weight_sync.phases import OFFER, SendReport
from shared.weight_sync.transports import BUCKET_BYTES, TransportKind

# The learner's end of adapter syncs: the adapter goes with the offer (DESIGN 9, decision 20).


class AdapterSender:
    """`learner.weight_sync.publisher.Sender`."""

    def __init__(self, model: Any, *, timeout_s: float) -> None:
        self._model = model
        self._timeout_s = timeout_s

    def offer(self, version: int, canary: AsksCanary) -> WeightOffer:
        """The adapter itself. Raises WeightSyncError where it cannot be written down."""
        try:
            files = adapter_files(self._model)
            assert files is not None, "the configuration has an adapter"
        # whatever peft and safetensors find wrong with it: the merged weights do without both
        except Exception as error:
            raise WeightSyncError(
                f"it cannot be written down ({type(error).__name__}: {error})",
                actor=LEARNER,
                phase=OFFER,
            ) from error
        terms = AdapterOffer.make(files, timeout_s=self._timeout_s)
        return WeightOffer(
            version=version,
            transport=TransportKind.ADAPTER,
            rendezvous={"terms": terms},
            canary=canary.probe(),
        )

    def send(self, offer: WeightOffer) -> SendReport:
        """Nothing is left to send."""
        assert offer.sends_adapter
        return SendReport(phase_s={})

    def close(self) -> None:
        """Nothing is held."""


class Sender(Protocol):
    def offer(self, version: int, canary: AsksCanary) -> WeightOffer: ...
    def send(self, offer: WeightOffer) -> SendReport:
        """Returns when the weights are out. Raises WeightSyncError, and LearnerError where the
        canary fails.
        """
        ...

    def close(self) -> None: ...


class WeightPublisher:
    """One rank's part in it. The weights must not change between an offer and its `done`."""

    def __init__(
        self,
        ranks: Ranks,
        device: LearnerDevice,
        loaded: LoadedModel,
        parallel: Parallel,
        senders: tuple[Sender, ...],
        canary: Canary,
    ) -> None:
        """Keep what is called later.

        Args:
            senders: rank 0's, each for the time after the one before it has failed.
            canary: the proof of arrival.
        """
        self._ranks = ranks
        self._device = device
        self._loaded = loaded
        self._parallel = parallel
        self._senders = senders
        self.canary = canary
        self.version = 0
        """That the engines serve; 0 before the first sync."""

    def offer(self) -> WeightOffer | None:
        """The next version of the weights, with the probe that proves their arrival: rank 0's to
        make, and None on the other ranks.

        Raises LearnerError where the ranks do not hold the same, or hold no numbers.
        """
        with self._ranks.of_phase("offer_weights"):
            # Senders pack on streams of their own; engines read shared weights in other processes.
            self._device.wait()
            self._ranks.barrier()
            self._parallel.check()
            self._parallel.gather()
            # Every rank computes it where none has the model alone.
            canary = (
                ComputedCanary(self._parallel.forward(self.canary.probe))
                if self._parallel.holds_parts
                else self.canary
            )
            return self._senders[0].offer(self.version + 1, canary) if self._senders else None

    def send(self, offer: WeightOffer) -> SendReport:
        """Returns when the weights are out. Raises WeightSyncError, and LearnerError where the
        canary fails.
        """
        return self._senders[0].send(offer)

    def fall_back_to_full(self) -> None:
        """An adapter did not arrive: every later offer is of the merged weights."""
        assert len(self._senders) > 1, "only adapters are followed by something else"
        self._senders = self._senders[1:]

    def done(self, noise: Differences | None = None) -> None:
        """Note that the offered weights are served, everywhere.

        `noise` is what this sync measured of the canary's, for the engines of every later offer.
        """
        with self._ranks.of_phase("sync_done"):
            self._ranks.barrier()
        self._parallel.release()
        self.version += 1
        if noise is not None:
            self.canary.noise = noise

    def save(self, folder: Path) -> None:
        """An ordinary checkpoint, which rank 0 writes; returns on every rank when it is there.
        Raises StorageError.
        """
        with self._ranks.of_phase("save"):
            self._device.wait()
            self._parallel.check()
            self._parallel.gather()
            adapter = adapter_files(self._loaded.model)
            if self._ranks.rank == 0:
                save_checkpoint(
                    self._loaded.model,
                    self._loaded.processor,
                    folder,
                    state_dict=self._parallel.state_dict(),
                    adapter=adapter,
                    fresh=self._loaded.fresh_tokens,
                )
            self._parallel.release()
            self._ranks.barrier()

    def close(self) -> None:
        for sender in self._senders:
            sender.close()


def make_senders(
    config: RunConfig, place: RankTopology, loaded: LoadedModel, parallel: Parallel
) -> tuple[Sender, ...]:
    """Rank 0's, as the configuration says what is sent; none on the other ranks."""
    if place.rank != 0:
        return ()
    sync, timeout_s = config.rollout_matching.vllm.sync, config.timeouts.sync_phase_s
    servers = rollout_servers(config)
    full = WeightSender(
        parallel.weights,
        transport=place.transport,
        receivers=place.receivers,
        host=place.address,
        timeout_s=timeout_s,
        join=None if servers is None else servers.join_limit,
        bucket_bytes=sync.bucket_bytes or BUCKET_BYTES[place.transport],
    )
    return (
        (full,)
        if resolved_sync_mode(config) == "full"
        else (AdapterSender(loaded.model, timeout_s=timeout_s), full)
    )
