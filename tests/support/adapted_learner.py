"""A small learner whose adapter is what learns, for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from engine_support import TIMEOUTS, SmallLearner

from learner.model.adapters import apply_adapter
from learner.model.checkpoint import CheckpointWeights
from learner.model.ranks import ReceiverGroup
from learner.weight_sync.publisher import AdapterSender, Sender
from learner.weight_sync.sender import WeightSender
from shared.config.model import AdapterSection
from shared.rollouts import WeightOffer
from shared.weight_sync.offer import AdapterTerms

Spoil = Callable[[AdapterTerms], AdapterTerms]


class AdaptedLearner(SmallLearner):
    """`spoil` changes what it offers once."""

    def __init__(
        self,
        checkpoint: Path,
        kind: str = "lora",
        *,
        mode: str = "adapter",
        falls_back: bool = True,
        token_ids: Sequence[int] = (),
    ) -> None:
        super().__init__(checkpoint, num_receivers=1)
        section = AdapterSection(kind=kind, rank=4, alpha=8.0)
        apply_adapter(self.model, section, base_path=str(checkpoint), seed=3, token_ids=token_ids)
        self._trained = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        self.start = {name: parameter.detach().clone() for name, parameter in self._trained.items()}
        self._full = WeightSender(
            CheckpointWeights(self.model),
            transport="rollmatch_gloo",
            receivers=(ReceiverGroup(1),),
            timeout_s=TIMEOUTS.sync_phase.seconds,
            bucket_bytes=1 << 20,
        )
        self.sender: Sender = self._full if mode == "full" else AdapterSender(self.model, timeout_s=TIMEOUTS.sync_phase.seconds)
        self.offers_adapter, self.falls_back = mode == "adapter", falls_back
        self.spoil: Spoil | None = None

    def learn(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self._trained.items():
                parameter.copy_(self.start[name] + 0.2 * torch.randn(parameter.shape, generator=generator))

    def offer_weights(self) -> WeightOffer:
        offer, spoil, self.spoil = super().offer_weights(), self.spoil, None
        return offer if spoil is None else replace(offer, rendezvous={"terms": spoil(AdapterTerms.of(offer))})

    def fall_back_to_full(self) -> None:
        self.sender, self.offers_adapter = self._full, False

    def close(self) -> None:
        self._full.close()
        super().close()
