"""A LoRA adapter inside a weight offer: small enough to travel with the call, so it needs no process group (DESIGN 9)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.rollouts import WeightOffer

ADAPTER_TRANSPORT = "adapter"
"""`WeightOffer.transport` of an offer whose weights are in the offer itself."""


@dataclass(frozen=True, slots=True)
class AdapterTerms:
    """In place of `shared.weight_sync.Terms`: the two files of an adapter folder as peft writes it, and how to check them. Plain data, no pickle."""

    tensors: bytes
    """`adapter_model.safetensors`."""
    config: str
    """`adapter_config.json`."""
    sha256: str
    """Of both, in this order, as hexadecimal digits."""
    timeout_s: float
    """Longest time of any one phase: the configuration's timeouts.sync_phase_s."""
    falls_back: bool
    """What is done when this sync fails, rollout_matching.vllm.sync.fallback_to_full: full syncs from then on (true), or the run's end."""

    @classmethod
    def make(cls, tensors: bytes, config: Mapping[str, Any], *, timeout_s: float, falls_back: bool) -> AdapterTerms:
        text = json.dumps(config, sort_keys=True)
        return cls(tensors, text, _digest(tensors, text), timeout_s, falls_back)

    @classmethod
    def of(cls, offer: WeightOffer) -> AdapterTerms:
        terms = offer.rendezvous["terms"]
        assert isinstance(terms, cls)
        return terms

    @property
    def num_bytes(self) -> int:
        return len(self.tensors)

    @property
    def is_intact(self) -> bool:
        return _digest(self.tensors, self.config) == self.sha256


def _digest(tensors: bytes, config: str) -> str:
    digest = hashlib.sha256(tensors)
    digest.update(config.encode())
    return digest.hexdigest()
