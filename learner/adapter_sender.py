"""The learner's end of adapter syncs: the adapter goes with the offer (DESIGN 9, decision 20)."""

from __future__ import annotations

from typing import Any

from learner.adapters import adapter_files
from learner.canary import AsksCanary
from shared.errors import LEARNER, WeightSyncError
from shared.rollouts import WeightOffer
from shared.transports import Transport
from shared.weight_sync import OFFER, SendReport
from shared.weight_terms import AdapterTerms


class AdapterSender:
    """`learner.publisher.Sender`."""

    def __init__(self, model: Any, *, timeout_s: float) -> None:
        self._model = model
        self._timeout_s = timeout_s

    def offer(self, version: int, canary: AsksCanary) -> WeightOffer:
        """The adapter itself. Raises WeightSyncError where it cannot be written down."""
        try:
            files = adapter_files(self._model)
            assert files is not None, "the configuration has an adapter"
        except Exception as error:  # whatever peft and safetensors find wrong with it: the merged weights do without both
            raise WeightSyncError(f"it cannot be written down ({type(error).__name__}: {error})", actor=LEARNER, phase=OFFER) from error
        terms = AdapterTerms.make(files, timeout_s=self._timeout_s)
        return WeightOffer(version=version, transport=Transport.ADAPTER, rendezvous={"terms": terms}, canary=canary.probe())

    def send(self, offer: WeightOffer) -> SendReport:
        """Nothing is left to send."""
        assert offer.sends_adapter
        return SendReport(phase_s={})

    def close(self) -> None:
        """Nothing is held."""
