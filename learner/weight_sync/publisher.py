"""The learner's weights on their way out: to the engines, version after version, and to disk.

    offer -> send (rank 0 alone) -> done

Every method but `send` and `close` is called on all ranks, in the same order.
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
from shared.weight_sync.transports import BUCKET_BYTES, TransportKind

CANARY_TOKENS = 32
"""Tokens of the canary's response: enough to pass every layer and the head, and cheap."""


@dataclass(eq=False, repr=False)
class WeightPublisher:
    """One rank's part in publishing. Weights must not change between an offer and its `done`."""

    ranks: Ranks
    device: LearnerDevice
    loaded: LoadedModel
    parallel: Parallel
    sender: WeightSender | None
    """Rank 0's; None on the other ranks."""
    canary: Canary
    _: KW_ONLY
    offers_adapter: bool = False
    """Whether the adapter alone is offered, until `fall_back_to_full`."""
    version: int = field(init=False, default=0)
    """The version that the engines serve; 0 before the first sync."""
    _is_again: bool = field(init=False, default=False)
    """Whether the last offer was of the present version."""

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
        """Make the publisher whose canary is the segment `fixed` with its `images`."""
        offers_adapter = config.sync_mode == "adapter"
        canary = Canary(
            loaded,
            fixed.prompt,
            images,
            fixed.target.token_ids[:CANARY_TOKENS],
            tolerance=config.canary_tolerance,
            proves_adapter=offers_adapter,
            run_dir=config.telemetry.run_dir,
        )
        sender = None
        if place.rank == 0:
            limit_s = config.timeouts.sync_phase_s
            sender = make_sender(parallel.weights, place, config.rollout_matching, limit_s)
        return cls(ranks, device, loaded, parallel, sender, canary, offers_adapter=offers_adapter)

    def offer(self, again: bool = False) -> WeightOffer | None:
        """Offer the next version, with the probe that proves its arrival; None but on rank 0.

        `again`: the present version, whose weights have not changed.

        Raises:
            ConfigError: a configured port is taken.
            LearnerError: the ranks do not hold the same weights, or these are no numbers.
            WeightSyncError: the adapter cannot be written down, or no port can be opened.
        """
        with self.ranks.of_phase("offer_weights"):
            # Senders pack on streams of their own; engines read shared weights in other processes.
            self.device.wait()
            self.ranks.barrier()
            self.parallel.check()
            self._is_again = again
            version = self.version + (not again)
            sender = self.sender
            # Where none has the model alone, every rank computes the probe and gathers.
            holds_parts = self.parallel.holds_parts
            if not self.offers_adapter:
                self.parallel.gather()
            elif sender is None and not holds_parts:
                return None
            probe = None
            if self.offers_adapter or holds_parts:
                probe = self.canary.probe(self.parallel.forward)
            files = adapter_to_offer(self.loaded.model) if self.offers_adapter else None
            if sender is None:
                return None
            if probe is None:
                return sender.offer(version, self.canary.question(), self.canary.logprobs)
            if files is None:
                return sender.offer(version, probe)
            # Nothing is left to send (decision 20).
            terms = AdapterOffer.make(files, timeout_s=sender.timeout_s)
            return WeightOffer(version, TransportKind.ADAPTER, terms, probe)

    def send(self, offer: WeightOffer) -> SendReport:
        """Return when the weights are out. Raises what `WeightSender.send` does."""
        assert self.sender is not None, "rank 0 sends"
        return self.sender.send(offer)

    def fall_back_to_full(self) -> None:
        """Offer merged weights from now on, because an adapter did not arrive."""
        assert self.offers_adapter, "only adapters are followed by something else"
        self.offers_adapter = False

    def done(self, noise: Differences | None = None) -> None:
        """Note that the offered weights are served; later offers bring the `noise` it measured."""
        with self.ranks.of_phase("sync_done"):
            self.ranks.barrier()
        self.parallel.release()
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
        """Return what writes an ordinary checkpoint of the present weights. Every rank takes part.

        Args:
            copies: write a copy of the weights, which no later update reaches, and take from here
                what is copied already.
            write_more: writes this rank's part of what comes beside the weights.
            finish: as of `CheckpointSave`.
        """
        with self.ranks.of_phase("save"):
            self.device.wait()
            self.parallel.check()
            self.parallel.gather()
            # A collective where the model is sharded: before rank 0 goes its own way.
            adapter = adapter_files(self.loaded.model)
            weights = self.parallel.state_dict()
            self.parallel.release()
        content: CheckpointContent | None = None
        if self.ranks.rank == 0:
            if weights is None:
                # Moved one by one: what is made for the files (merged, unpacked, turned) would fill
                # a GPU.
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
        """Do once what a save does, but for its weights, so that nothing new can fail at the end.

        It is done in a scratch folder in `folder`, which does not stay. Every rank takes part.

        Raises:
            ConfigError: what was written is not what the run was given.
            StorageError: it cannot be written there.
        """
        with self.ranks.of_phase("start"):
            # A collective where the model is sharded.
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
        """Leave the groups of the weight sync."""
        if self.sender is not None:
            self.sender.close()


def make_sender(
    weights: WeightSource, place: RankTopology, rollouts: RolloutMatchingSection, timeout_s: float
) -> WeightSender:
    """Return rank 0's sender of full weights. `timeout_s`: of each phase."""
    return WeightSender(
        weights,
        transport=place.transport,
        receivers=place.receivers,
        host=place.address,
        timeout_s=timeout_s,
        join=None if rollouts.servers is None else rollouts.servers.answer_limit,
        bucket_bytes=rollouts.vllm.sync.bucket_bytes or BUCKET_BYTES[place.transport],
    )


def adapter_to_offer(model: PreTrainedModel) -> AdapterFiles:
    """Return the model's adapter as it is sent by itself.

    Where the model is sharded, all ranks call it at once. Raises WeightSyncError where it cannot be
    written down.
    """
    try:
        files = adapter_files(model)
        assert files is not None, "the configuration has an adapter"
    # whatever peft and safetensors find wrong with it: the merged weights do without both
    except Exception as error:
        # But for a rank that did not come, without which there are no merged weights either.
        if is_of_collective(error):
            raise
        raise WeightSyncError(
            f"it cannot be written down ({type(error).__name__}: {error})",
            actor=LEARNER,
            phase=OFFER,
        ) from error
    return files
