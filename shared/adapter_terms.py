"""A LoRA adapter inside a weight offer: small enough to travel with the call, so it needs no process group (DESIGN 9)."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.rollouts import WeightOffer

ADAPTER_TRANSPORT = "adapter"
"""`WeightOffer.transport` of an offer whose weights are in the offer itself."""
_KEY = "adapter"


@dataclass(frozen=True, slots=True)
class AdapterTerms:
    """`WeightOffer.rendezvous["adapter"]`: the two files of an adapter folder as peft writes it, and how to check them."""

    tensors: bytes
    """`adapter_model.safetensors`."""
    config: str
    """`adapter_config.json`."""
    sha256: str
    """Of both, in this order, as hexadecimal digits."""
    timeout_s: float
    """Longest time of any one phase: the configuration's timeouts.sync_phase_s."""

    @classmethod
    def make(cls, tensors: bytes, config: Mapping[str, Any], *, timeout_s: float) -> AdapterTerms:
        text = json.dumps(config, sort_keys=True)
        return cls(tensors, text, _digest(tensors, text), timeout_s)

    @classmethod
    def of(cls, offer: WeightOffer) -> AdapterTerms:
        terms = offer.rendezvous[_KEY]
        assert isinstance(terms, cls)
        return terms

    @classmethod
    def from_json(cls, mapping: Mapping[str, Any]) -> AdapterTerms:
        """The reverse of `to_json`. ValueError and KeyError for what that did not write."""
        return cls(base64.b64decode(mapping["tensors"], validate=True), str(mapping["config"]), str(mapping["sha256"]), float(mapping["timeout_s"]))

    def to_json(self) -> dict[str, Any]:
        """For servers behind HTTP: the tensors in base64."""
        return {"tensors": base64.b64encode(self.tensors).decode("ascii"), "config": self.config, "sha256": self.sha256, "timeout_s": self.timeout_s}

    def offer(self, version: int, canary: Any) -> WeightOffer:
        return WeightOffer(version=version, transport=ADAPTER_TRANSPORT, rendezvous={_KEY: self}, canary=canary)

    @property
    def num_bytes(self) -> int:
        return len(self.tensors)

    @property
    def is_intact(self) -> bool:
        return _digest(self.tensors, self.config) == self.sha256


def _digest(tensors: bytes, config: str) -> str:
    return hashlib.sha256(tensors + config.encode()).hexdigest()
