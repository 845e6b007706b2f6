"""How an engine beside the learner takes weights: the phases of `shared.weight_sync`, one after the other in the calling thread (DESIGN 9).

The weights pass from hand to hand, so that there is no wire and no rendezvous; names, checksums, caches and canary are checked as in any other sync.
On CPU the hand is a reference; on a GPU, where the engine has a process of its own, a handle of CUDA's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rollout_actors.ipc_handles import SharingDevice, ipc_handles
from rollout_actors.receipt import Receipt, check_receipts
from shared.canary import CanaryProbe, Scores
from shared.checksummed_weights import ChecksummedWeights
from shared.errors import WeightSyncError
from shared.rollouts import SyncReport, WeightOffer
from shared.transports import Transport
from shared.weight_sync import SyncPhase
from shared.weight_terms import AdapterTerms, FullTerms

if TYPE_CHECKING:
    from vllm import LLM

    from rollout_actors.adapter_intake import AdapterIntake


class Score(Protocol):
    def __call__(self, probe: CanaryProbe, *, adapted: bool) -> Scores:
        """What the engine thinks of the probe, with the adapter that it serves, if it has one, or without."""
        ...


class InProcessIntake:
    """Part of an `LLM` beside the learner, started for the transport `inproc` or `ipc`, in every sync. Nothing may be generated meanwhile.

    No phase has a timeout: the work is done in the caller's thread, and nobody else is waited for.
    """

    def __init__(self, name: str, llm: LLM, *, transport: str, devices: Sequence[SharingDevice], adapter: AdapterIntake, score: Score) -> None:
        """`adapter` is what the engine serves on top of its base weights; whoever sends it a request asks there.

        `devices`: the engine's, where the transport is `ipc`.
        """
        self._name = name
        self._llm = llm
        self._transport = transport
        self._devices = devices
        self._adapter = adapter
        self._score = score

    def take(self, offer: WeightOffer, weights: Iterable[tuple[str, torch.Tensor]]) -> SyncReport:
        """Load the offered weights, which are those of the offer's terms in their order, and prove it. Raises WeightSyncError naming the phase."""
        if offer.sends_adapter:
            return self._take_adapter(offer)
        if offer.transport != self._transport:
            raise self._error(f"the learner offers {offer.transport}, the engine was started for {self._transport}", SyncPhase.PAUSE)
        terms = FullTerms.of(offer)
        phase_s: dict[str, float] = {}
        sealed = ChecksummedWeights(weights, terms, torch)
        receipts = self._timed(SyncPhase.WIRE, phase_s, lambda: self._load(sealed, terms))
        self._timed(SyncPhase.VERIFY, phase_s, lambda: check_receipts(receipts, self._name))
        self._timed(SyncPhase.RESET, phase_s, self._reset)
        canary_max_abs = self._timed(SyncPhase.CANARY, phase_s, lambda: self._canary(offer))
        verify_s = sealed.verify_s + max(receipt.verify_s for receipt in receipts)
        phase_s["gather"] = sealed.gather_s
        phase_s["load"] = phase_s.pop("wire") - sealed.gather_s - verify_s
        phase_s["verify"] += verify_s
        return SyncReport(version=offer.version, bytes=terms.num_bytes, phase_s=phase_s, canary_max_abs=canary_max_abs)

    def _take_adapter(self, offer: WeightOffer) -> SyncReport:
        terms = AdapterTerms.of(offer)
        phase_s: dict[str, float] = {}
        self._timed(SyncPhase.WIRE, phase_s, lambda: self._load_adapter(terms))
        self._timed(SyncPhase.RESET, phase_s, self._reset)
        canary_max_abs = self._timed(SyncPhase.CANARY, phase_s, lambda: self._canary(offer))
        phase_s["load"] = phase_s.pop("wire")
        return SyncReport(offer.version, terms.num_bytes, phase_s, canary_max_abs, mode="adapter")

    def _load_adapter(self, terms: AdapterTerms) -> None:
        with self._adapter.arriving(terms) as request:
            self._llm.llm_engine.add_lora(request)
        if set(self._llm.llm_engine.list_loras()) != {request.lora_int_id}:
            raise self._error("vLLM does not hold the adapter that it was given", SyncPhase.VERIFY)

    def _load(self, sealed: ChecksummedWeights, terms: FullTerms) -> list[Receipt]:
        if self._adapter.request is not None:
            # The merged weights hold the adapter: served on top of them it would count twice.
            self._llm.llm_engine.remove_lora(self._adapter.request.lora_int_id)
            self._adapter.request = None
        try:
            self._llm.collective_rpc("begin_receipt", args=(terms.bucket_bytes,))
            self._llm.start_weight_update()
            kept = self._hand_over(sealed, terms)
            self._llm.finish_weight_update()
            del kept  # only now: the engine has read them
        except Exception:
            # Back from the meta device: the next forward would kill the process. The weights are then good for nothing but another sync.
            self._llm.collective_rpc("abandon_update")
            raise
        return [Receipt(**receipt) for receipt in self._llm.collective_rpc("receipt")]

    def _hand_over(self, sealed: ChecksummedWeights, terms: FullTerms) -> list[torch.Tensor]:
        """What must outlive the update."""
        if self._transport == Transport.INPROC:
            self._llm.update_weights({"update_info": {"weights": sealed}})
            return []
        self._llm.init_weight_transfer_engine({"init_info": {"packed": False}})
        # Of this process's own tensors, and not those in the offer: with several learner ranks, that is rank 0's.
        handles, kept = ipc_handles(sealed, self._devices)
        tensors = terms.sent
        update = {"names": [t.name for t in tensors], "dtype_names": [t.dtype for t in tensors], "shapes": [list(t.shape) for t in tensors]}
        self._llm.update_weights({"update_info": update | {"ipc_handles": handles}})
        return kept

    def _reset(self) -> None:
        # Loading resets no cache, and what they hold was computed with the old weights.
        if not self._llm.reset_prefix_cache():
            raise self._error("the prefix cache is in use", SyncPhase.RESET)
        self._llm.reset_mm_cache()
        self._llm.llm_engine.reset_encoder_cache()

    def _canary(self, offer: WeightOffer) -> float:
        probe = offer.canary
        assert isinstance(probe, CanaryProbe)
        scores = self._score(probe, adapted=True)
        max_abs = probe.check(self._name, *scores)
        if offer.sends_adapter:
            probe.check_adapter(self._name, scores, self._score(probe, adapted=False))
        # Only now: a version that was not verified is never the label of a rollout.
        self._llm.update_weight_version(str(offer.version))
        return max_abs

    def _timed(self, phase: SyncPhase, phase_s: dict[str, float], work: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        try:
            return work()
        except WeightSyncError:
            raise
        except Exception as error:  # of vLLM's loader, or of the source
            raise self._error(str(error), phase) from error
        finally:
            phase_s[str(phase)] = time.perf_counter() - started

    def _error(self, message: str, phase: SyncPhase) -> WeightSyncError:
        return WeightSyncError(message, actor=self._name, phase=phase)
