"""Sends the learner's weights to the engines, version by version, and saves them to disk.

    offer -> send -> done

All ranks call every method except `close`, in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedModel

from learner.model.adapters import adapter_files
from learner.model.checkpoint import (
    CheckpointContent,
    CheckpointWeights,
    WeightSource,
    require_same_config,
)
from learner.model.checkpoint_save import CheckpointSave, HostCopies, Write
from learner.model.loading import LoadedModel
from learner.model.ranks import LearnerDevice, Ranks, RankTopology, is_of_collective
from learner.model.sharding import Parallel
from learner.segments import Segment
from learner.weight_sync.canary import Canary
from learner.weight_sync.sender import WeightSender
from shared.config import RunConfig
from shared.config.rollout import RolloutMatchingSection
from shared.errors import LEARNER, WeightSyncError
from shared.records import ImageRef
from shared.rollouts import WeightOffer
from shared.run_files import cannot_write
from shared.weight_sync.canary import Differences
from shared.weight_sync.offer import AdapterFiles, AdapterOffer
from shared.weight_sync.phases import OFFER, SendReport
from shared.weight_sync.transports import BUCKET_BYTES, WIRES, TransportKind

CANARY_TOKENS = 32
"""Number of response tokens of the canary: enough to test every layer and the head cheaply."""


@dataclass(eq=False, repr=False)
class WeightPublisher:
    """One learner rank's part of weight syncs to the engines and of checkpoints.

    Weights must not change between `offer` and `done`.
    """

    ranks: Ranks
    device: LearnerDevice
    loaded: LoadedModel
    parallel: Parallel
    sender: WeightSender | None
    """Sends full weights to the engines, from rank 0; None on the other ranks."""
    canary: Canary
    _: KW_ONLY
    offers_adapter: bool = False
    """Whether a weight sync sends only the adapter, until `fall_back_to_full` is called."""
    sends_nothing: bool = False
    """Whether the engine is the learner's own model. A sync then has nothing to verify."""
    version: int = field(init=False, default=0)
    """The weight version that the engines serve; 0 before the first sync."""
    _is_again: bool = field(init=False, default=False)
    """Whether the last offer repeated the current version."""

    @classmethod
    def from_config(
        cls,
        config: RunConfig,
        place: RankTopology,
        ranks: Ranks,
        device: LearnerDevice,
        loaded: LoadedModel,
        parallel: Parallel,
        fixed: Segment,
        images: tuple[ImageRef, ...],
    ) -> WeightPublisher:
        """Create the publisher of a run. Every weight sync is tested with the segment `fixed`.

        `images` are the images of the segment's prompt.
        """
        offers_adapter = config.sync_mode == "adapter"
        canary = Canary(
            loaded,
            fixed.prompt,
            images,
            fixed.target.token_ids[:CANARY_TOKENS],
            tolerance=config.canary_tolerance,
            is_raised_by_noise=config.rollout_matching.vllm.sync.canary_tolerance is None,
            proves_adapter=offers_adapter,
            run_dir=config.telemetry.run_dir,
        )
        sender = None
        if place.rank == 0:
            limit_s = config.timeouts.sync_phase_s
            sender = make_sender(
                parallel.weights,
                place,
                config.rollout_matching,
                limit_s,
                is_collective=parallel.holds_parts,
            )
        return cls(
            *(ranks, device, loaded, parallel, sender, canary),
            offers_adapter=offers_adapter,
            sends_nothing=config.rollout_matching.backend.shares_model,
        )

    def offer(self, again: bool = False) -> WeightOffer | None:
        """Begin a weight sync: return, on rank 0, what engines need to receive the next version.

        Other ranks return None. If `again` is true, offer the current version once more; its
        weights have not changed.

        Raises:
            ConfigError: a configured port is in use.
            LearnerError: the ranks do not hold the same weights, or weights are not finite.
            WeightSyncError: the adapter cannot be serialized, or no port can be opened.
        """
        with self.ranks.of_phase("offer_weights"):
            # Senders pack on other streams, and engines read shared weights in other processes.
            self.device.wait()
            self.ranks.barrier()
            self.parallel.check()
            self._is_again = again
            version = self.version + (not again)
            sender = self.sender
            # If the model is sharded, all ranks must join the probe.
            holds_parts = self.parallel.holds_parts
            if sender is None and not holds_parts:
                return None
            probe = None
            if self.offers_adapter or holds_parts:
                probe = self.canary.probe(self.parallel.forward)
            files = adapter_to_offer(self.loaded.model) if self.offers_adapter else None
            if sender is None:
                return None
            if probe is None:
                score = None if self.sends_nothing else self.canary.logprobs
                return sender.offer(version, self.canary.question(), score)
            if files is None:
                return sender.offer(version, probe)
            # The offer contains the whole adapter, so `send` sends nothing (decision 20).
            terms = AdapterOffer.make(files, timeout_s=sender.timeout_s)
            return WeightOffer(version, TransportKind.ADAPTER, terms, probe)

    def send(self, offer: WeightOffer) -> SendReport:
        """Send the offered weights to the engines, from rank 0. Raises like `WeightSender.send`.

        The other ranks only gather a sharded model with rank 0, tensor by tensor.
        """
        if self.sender is not None:
            return self.sender.send(offer)
        if offer.transport in WIRES:
            self.parallel.help_to_send()
        return SendReport(phase_s={})

    def fall_back_to_full(self) -> None:
        """Send, from the next weight sync on, full weights with the adapter merged into them.

        The caller does this after engines could not use an adapter that was sent.
        """
        assert self.offers_adapter, "full weights are already offered"
        self.offers_adapter = False

    def done(self, noise: Differences | None = None) -> None:
        """End a weight sync: record that the engines now serve the offered weights.

        `noise` is how far the canary's log-probabilities of learner and engines differ by rounding.
        If it is given, later offers contain it.
        """
        with self.ranks.of_phase("sync_done"):
            self.ranks.barrier()
        self.version += not self._is_again
        if noise is not None:
            self.canary.noise = noise

    def checkpoint(
        self,
        folder: Path,
        *,
        copies: HostCopies | None = None,
        write_more: Write | None = None,
        finish: Write | None = None,
    ) -> CheckpointSave:
        """Return a `CheckpointSave` that writes a checkpoint of the current weights to `folder`.

        A collective: all ranks call it together.

        Args:
            copies: write copies of the weights, which later updates do not change; existing copies
                are reused. None: write the weights themselves.
            write_more: writes this rank's additional files.
            finish: as in `CheckpointSave`.
        """
        with self.ranks.of_phase("save"):
            self.device.wait()
            self.parallel.check()
            # Collectives if the model is sharded, so all ranks call them.
            adapter = adapter_files(self.loaded.model)
            weights = self.parallel.state_dict()
        content: CheckpointContent | None = None
        if self.ranks.rank == 0:
            if weights is None:
                # Moved one by one: all merged, unpacked and transposed tensors could fill a GPU.
                weights = {
                    name: tensor.cpu() if copies is None else copies(tensor)
                    for name, tensor in CheckpointWeights(self.loaded.model).tensors()
                }
            content = self._content(weights, adapter)

        def write(partial: Path) -> None:
            if content is not None:
                content.write_weights(partial)
            if write_more is not None:
                write_more(partial)

        return CheckpointSave(self.ranks, folder, write=write, finish=finish)

    def try_save(self, folder: Path) -> None:
        """Test before training that a checkpoint can be saved to the run folder.

        A collective. Everything except the weights is written to a temporary folder in `folder`.

        Raises:
            ConfigError: the written configuration differs from the initial checkpoint's.
            StorageError: files cannot be written there.
        """
        with self.ranks.of_phase("start"):
            # A collective if the model is sharded.
            adapter = adapter_files(self.loaded.model)
            self.ranks.together(lambda: self._try_save(folder, adapter), "start")

    def _try_save(self, folder: Path, adapter: AdapterFiles | None) -> None:
        if self.ranks.rank != 0:
            return
        weights = {
            name: torch.empty(shape, dtype=dtype, device="meta")
            for name, dtype, shape in self.parallel.weights.specs()
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=folder, prefix=".tried_save_") as scratch:
                self._content(weights, adapter).write_weights(Path(scratch))
                require_same_config(Path(scratch), self.loaded.base)
        except OSError as error:
            raise cannot_write(folder, error) from error

    def _content(
        self, weights: Mapping[str, torch.Tensor], adapter: AdapterFiles | None
    ) -> CheckpointContent:
        loaded = self.loaded
        return CheckpointContent(loaded.model, loaded.base, weights, adapter, loaded.fresh_tokens)

    def close(self) -> None:
        """Close the process groups that send weights to engines."""
        if self.sender is not None:
            self.sender.close()


def make_sender(
    weights: WeightSource,
    place: RankTopology,
    rollouts: RolloutMatchingSection,
    timeout_s: float,
    *,
    is_collective: bool = False,
) -> WeightSender:
    """Return the sender of full weights to the engines, for learner rank 0.

    `timeout_s` limits each phase of a weight sync. `is_collective`: as in `WeightSender`.
    """
    return WeightSender(
        weights,
        is_collective=is_collective,
        transport=place.transport,
        receivers=place.receivers,
        host=place.address,
        timeout_s=timeout_s,
        join=None if rollouts.servers is None else rollouts.servers.answer_limit,
        bucket_bytes=rollouts.vllm.sync.bucket_bytes or BUCKET_BYTES[place.transport],
    )


def adapter_to_offer(model: PreTrainedModel) -> AdapterFiles:
    """Return the model's adapter, serialized for a weight sync.

    If the model is sharded, this is a collective. Raises WeightSyncError if the adapter cannot be
    serialized.
    """
    try:
        files = adapter_files(model)
        assert files is not None, "the model must have an adapter"
    # any error of peft or safetensors: merged weights need neither and can still be sent
    except Exception as error:
        # Not if a rank was lost: then merged weights cannot be sent either.
        if is_of_collective(error):
            raise
        raise WeightSyncError(
            f"the adapter cannot be serialized ({type(error).__name__}: {error})",
            actor=LEARNER,
            phase=OFFER,
        ) from error
    return files
