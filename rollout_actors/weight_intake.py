"""How one engine takes weights: the receiver's phases of `shared.weight_sync`, driven through vLLM's weight-transfer API (DESIGN 9)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rollout_actors.receipt import Receipt, check_receipts
from shared.canary import CanaryProbe, Scores
from shared.errors import Limit, RolloutError, WeightSyncError, late
from shared.rollouts import SyncReport, WeightOffer
from shared.transports import Transport
from shared.weight_sync import ENGINE_MARGIN_S, SyncPhase
from shared.weight_terms import AdapterTerms, FullTerms, terms_of


class Score(Protocol):
    async def __call__(self, probe: CanaryProbe, *, adapted: bool) -> Scores:
        """What the engine thinks of the probe, with the adapter that it serves, if it has one, or without."""
        ...


@dataclass(frozen=True, slots=True)
class InitRequest:
    """As vLLM reads its `WeightTransferInitRequest`, which is not to be had without importing all of vLLM."""

    init_info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """As vLLM reads its `WeightTransferUpdateRequest`."""

    update_info: dict[str, Any]


class UpdatedEngine(Protocol):
    """What a sync asks of an engine: these methods of vLLM's `AsyncLLM`, by itself, by the routes of a server, or by its `LLM`. They raise what went wrong."""

    async def pause_generation(self, *, mode: Literal["wait"], clear_cache: bool) -> None: ...
    async def resume_generation(self) -> None: ...
    async def init_weight_transfer_engine(self, request: InitRequest) -> None: ...
    async def shutdown_weight_transfer_engine(self) -> None: ...
    async def start_weight_update(self) -> None: ...
    async def update_weights(self, request: UpdateRequest) -> None: ...
    async def finish_weight_update(self) -> None: ...
    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> list[Any]: ...
    async def reset_prefix_cache(self) -> bool: ...
    async def reset_mm_cache(self) -> None: ...
    async def reset_encoder_cache(self) -> None: ...
    async def update_weight_version(self, new_version: str) -> None: ...


class TakesAdapters(Protocol):
    """`rollout_actors.adapter_intake.AdapterIntake`, or whatever stands for it where an engine takes none."""

    async def take(self, terms: AdapterTerms, llm: Any) -> None: ...
    async def verify(self, llm: Any) -> None: ...
    async def drop(self, llm: Any) -> None: ...


class WeightIntake:
    """One engine's part in every sync. Keeps the transfer group from sync to sync."""

    def __init__(
        self,
        name: str,
        llm: UpdatedEngine,
        *,
        transport: str,
        rank_offset: int,
        score: Score,
        adapter: TakesAdapters,
        fatal: tuple[type[Exception], ...] = (),
    ) -> None:
        """`fatal` errors mean that the engine is gone, and pass through every phase as they are."""
        self._name = name
        self._llm = llm
        self._transport = Transport(transport)
        self._rank_offset = rank_offset
        self._score = score
        self._adapter = adapter
        self._passed_on: tuple[type[Exception], ...] = (WeightSyncError, *fatal)
        self._joined = ""
        # A new sync begins when the clean-up of a failed one is over.
        self._turn = asyncio.Lock()
        # Of the sync under way, or of the last one:
        self._receipts: list[Receipt] = []
        self._finish_s = 0.0
        self._phase_s: dict[SyncPhase, float] = {}
        self._canary_max_abs = 0.0
        self._adapter_effect: float | None = None
        self._phases: dict[SyncPhase, Callable[[WeightOffer], Awaitable[None]]] = {
            SyncPhase.PAUSE: self._pause,
            SyncPhase.RENDEZVOUS: self._rendezvous,
            SyncPhase.WIRE: self._wire,
            SyncPhase.VERIFY: self._verify,
            SyncPhase.RESET: self._reset,
            SyncPhase.CANARY: self._canary,
        }
        # An adapter is in the offer: there is nothing to join, and its digest is verified before it is loaded.
        self._adapter_phases = {**self._phases, SyncPhase.RENDEZVOUS: _nothing, SyncPhase.WIRE: self._take_adapter, SyncPhase.VERIFY: self._verify_adapter}

    async def run(self, phase: SyncPhase, offer: WeightOffer) -> None:
        """Raises WeightSyncError naming the phase, at the latest after the offer's timeout, and what is fatal."""
        phases, timeout_s = self._adapter_phases if offer.sends_adapter else self._phases, terms_of(offer).timeout_s
        async with self._turn:
            started = time.perf_counter()
            try:
                await self._bounded(phase, phases[phase](offer), timeout_s)
            except WeightSyncError:
                if phase in (SyncPhase.RENDEZVOUS, SyncPhase.WIRE) and not offer.sends_adapter:
                    await self._abandon(timeout_s)
                raise
            self._phase_s[phase] = time.perf_counter() - started

    def report(self, offer: WeightOffer) -> SyncReport:
        """Of the sync that took this offer, after its last phase.

        Receiving, checksums and loading alternate within the one call to vLLM that the clock of `wire` measures, and the worker's own account takes them apart:

            reported   clock of the phase   and from the worker
            wire       wire                 - load - checksums - finish: what is left is waiting for bytes
            load                            load + finish (vLLM's `finish_weight_update`)
            verify     names and numbers    + checksums
            others     their own            nothing

        (From hand to hand, what is left of wire is waiting for the sender to make the weights.)

        An adapter is read and loaded by one call, reported as `load`, and nothing is waited for.
        """
        if offer.sends_adapter:
            phase_s = {"load" if phase is SyncPhase.WIRE else str(phase): seconds for phase, seconds in self._phase_s.items()}
            num_bytes, effect = terms_of(offer).num_bytes, self._adapter_effect
            return SyncReport(offer.version, num_bytes, phase_s, self._canary_max_abs, mode="adapter", adapter_effect=effect)
        load_s = max(receipt.load_s for receipt in self._receipts)
        verify_s = max(receipt.verify_s for receipt in self._receipts)
        phase_s = {str(phase): seconds for phase, seconds in self._phase_s.items()}
        phase_s["wire"] -= load_s + verify_s + self._finish_s
        phase_s["load"] = load_s + self._finish_s
        phase_s["verify"] += verify_s
        return SyncReport(version=offer.version, bytes=terms_of(offer).num_bytes, phase_s=phase_s, canary_max_abs=self._canary_max_abs)

    async def _pause(self, offer: WeightOffer) -> None:
        if offer.transport != self._transport and not offer.sends_adapter:
            raise self._error(f"the learner offers {offer.transport}, the engine was started for {self._transport}", SyncPhase.PAUSE)
        # "wait": what still runs ends under the weights it began with.
        await self._llm.pause_generation(mode="wait", clear_cache=False)

    async def _rendezvous(self, offer: WeightOffer) -> None:
        terms = FullTerms.of(offer)
        if not terms.groups or self._joined == terms.group.key:
            return
        group = terms.group
        await self._llm.shutdown_weight_transfer_engine()
        self._joined = ""
        info: dict[str, Any] = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": self._rank_offset,
            "world_size": group.world_size,
            "packed_buffer_size_bytes": terms.bucket_bytes,
        }
        info |= {"timeout_s": terms.timeout_s} if self._transport is Transport.GLOO else {"packed": True, "packed_num_buffers": 2}
        await self._llm.init_weight_transfer_engine(InitRequest(init_info=info))
        self._joined = group.key

    async def _wire(self, offer: WeightOffer) -> None:
        # The merged weights hold the adapter: served on top of them it would count twice.
        await self._adapter.drop(self._llm)
        terms = FullTerms.of(offer)
        await self._llm.collective_rpc("begin_receipt", args=(terms.bucket_bytes,))
        await self._llm.start_weight_update()
        tensors = terms.sent
        update = {"names": [t.name for t in tensors], "dtype_names": [t.dtype for t in tensors], "shapes": [list(t.shape) for t in tensors]}
        await self._llm.update_weights(UpdateRequest(update_info=update))
        started = time.perf_counter()
        await self._llm.finish_weight_update()
        self._finish_s = time.perf_counter() - started
        self._receipts = [Receipt(**receipt) for receipt in await self._llm.collective_rpc("receipt")]

    async def _take_adapter(self, offer: WeightOffer) -> None:
        await self._adapter.take(AdapterTerms.of(offer), self._llm)

    async def _verify_adapter(self, offer: WeightOffer) -> None:
        await self._adapter.verify(self._llm)

    async def _verify(self, offer: WeightOffer) -> None:
        check_receipts(self._receipts, self._name)

    async def _reset(self, offer: WeightOffer) -> None:
        # Loading resets no cache, and what they hold was computed with the old weights.
        if not await self._llm.reset_prefix_cache():
            raise self._error("the prefix cache is in use", SyncPhase.RESET)
        await self._llm.reset_mm_cache()
        await self._llm.reset_encoder_cache()

    async def _canary(self, offer: WeightOffer) -> None:
        await self._llm.resume_generation()
        probe = offer.canary
        assert isinstance(probe, CanaryProbe)
        if probe.expected_logprobs is None:
            probe = probe.with_logprobs(self._receipts[0].logprobs)
        scores = await self._score(probe, adapted=True)
        self._canary_max_abs = probe.check(self._name, *scores)
        if offer.sends_adapter:
            self._adapter_effect = probe.check_adapter(self._name, scores, await self._score(probe, adapted=False))
        # Only now: a version that was not verified is never the label of a rollout.
        await self._llm.update_weight_version(str(offer.version))

    async def _abandon(self, timeout_s: float) -> None:
        """Leave the group, so that the sender's wait ends, and make the model whole, so that its next forward does not kill the process.

        An engine that cannot do even this is stuck inside a collective: its actor has to be ended.
        """
        self._joined = ""
        await self._bounded(SyncPhase.WIRE, self._llm.collective_rpc("abandon_update"), timeout_s)

    async def _bounded(self, phase: SyncPhase, work: Awaitable[Any], timeout_s: float) -> None:
        try:
            await asyncio.wait_for(work, timeout_s + ENGINE_MARGIN_S)
        except self._passed_on:
            raise
        except TimeoutError as error:
            told = late("the engine", Limit(timeout_s, "timeouts.sync_phase_s"), "that the learner and every other engine are alive")
            raise self._error(told, phase) from error
        except RolloutError as error:
            raise self._error(error.message, phase) from error
        except Exception as error:  # vLLM reports whatever failed in its worker as a plain Exception
            raise self._error(str(error), phase) from error

    def _error(self, message: str, phase: SyncPhase) -> WeightSyncError:
        return WeightSyncError(message, actor=self._name, phase=phase)


async def _nothing(offer: WeightOffer) -> None:
    pass
