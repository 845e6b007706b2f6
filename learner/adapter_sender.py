"""The learner's end of adapter syncs: the adapter goes with the offer, until a failure makes the run go on with full weights (DESIGN 9, decision 20)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from learner.adapters import adapter_files
from learner.weight_sender import WeightSender
from shared.canary import CanaryProbe
from shared.errors import LEARNER, WeightSyncError
from shared.rollouts import WeightOffer
from shared.transports import Transport
from shared.weight_sync import OFFER, SendReport
from shared.weight_terms import AdapterTerms


class AdapterSender:
    """In place of a `WeightSender`, which it holds for the time after a failure. One way: there is no return to adapters within a run."""

    def __init__(self, model: Any, full: WeightSender, *, timeout_s: float, falls_back: bool) -> None:
        """`full` sends the merged weights of the same model; `falls_back` is the configuration's sync.fallback_to_full."""
        self._model = model
        self._full = full
        self._timeout_s = timeout_s
        self._falls_back = falls_back
        self._remedy = "" if falls_back else "; set rollout_matching.vllm.sync.fallback_to_full: true, or sync.mode: full"
        self._has_fallen_back = False

    def offer(self, version: int, canary: CanaryProbe) -> WeightOffer:
        """The adapter itself, or after a failure what the full sender offers. Raises WeightSyncError where the adapter cannot be written down."""
        if self._has_fallen_back:
            return self._full.offer(version, canary)
        try:
            files = adapter_files(self._model)
            assert files is not None, "the configuration has an adapter"
            terms = AdapterTerms.make(files.tensors, files.config, timeout_s=self._timeout_s, falls_back=self._falls_back)
        except Exception as error:  # whatever peft and safetensors find wrong with it: the merged weights do without both
            reason = WeightSyncError(f"the adapter cannot be written down ({type(error).__name__}: {error}){self._remedy}", actor=LEARNER, phase=OFFER)
            if not self._falls_back:
                raise reason from error
            self.fall_back_to_full()
            return replace(self._full.offer(version, canary), fell_back=str(reason))
        return WeightOffer(version=version, transport=Transport.ADAPTER, rendezvous={"terms": terms}, canary=canary)

    def fall_back_to_full(self) -> None:
        """From the next offer on, for the rest of the run."""
        self._has_fallen_back = True

    def send(self, offer: WeightOffer) -> SendReport:
        """Of an adapter nothing is left to send. Raises WeightSyncError."""
        if offer.sends_adapter:
            return SendReport(phase_s={})
        return self._full.send(offer)

    def close(self) -> None:
        self._full.close()
