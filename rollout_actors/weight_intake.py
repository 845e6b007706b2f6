"""How one engine takes weights: the receiver's phases of `shared.weight_sync`, driven through vLLM's weight-transfer API (DESIGN 9)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from rollout_actors.receipt import Receipt, check_receipts
from rollout_actors.transfer_group import TransferGroup
from shared.canary import CanaryProbe, Scores
from shared.canary_noise import Differences
from shared.checksummed_weights import ChecksummedWeights
from shared.errors import Limit, RolloutError, WeightSyncError, late
from shared.rollouts import SyncReport, WeightOffer
from shared.weight_sync import ENGINE_MARGIN_S, SyncPhase, phase_limit
from shared.weight_terms import AdapterTerms, FullTerms, terms_of


class Score(Protocol):
    async def __call__(self, probe: CanaryProbe, *, adapted: bool) -> Scores:
        """What the engine thinks of the probe, with the adapter that it serves, if it has one, or without."""
        ...


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """As vLLM reads its `WeightTransferUpdateRequest`, which is not to be had without importing all of vLLM."""

    update_info: dict[str, Any]


class UpdatedEngine(Protocol):
    """What a sync asks of an engine: these methods of vLLM's `AsyncLLM`, by itself, by the routes of a server, or by its `LLM`. They raise what went wrong."""

    async def pause_generation(self, *, mode: Literal["wait"], clear_cache: bool) -> None: ...
    async def resume_generation(self) -> None: ...
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

    @property
    def request(self) -> Any:
        """vLLM's `LoRARequest` for every request and every canary; None: the base weights alone."""
        ...

    async def take(self, terms: AdapterTerms) -> None: ...
    async def verify(self) -> None: ...
    async def drop(self) -> None: ...


@dataclass(slots=True)
class _UnderWay:
    """What is known of a sync so far."""

    receipts: list[Receipt] = field(default_factory=list)
    finish_s: float = 0.0
    phase_s: dict[str, float] = field(default_factory=dict)
    measures_noise: bool = False
    """As `WeightIntake.measures_noise` says."""
    scores_before: Scores | None = None
    """Scores of the checkpoint, where the noise is measured by them."""
    canary: Differences = field(default_factory=lambda: Differences(0.0, 0.0))
    noise: Differences | None = None
    adapter_effect: float | None = None


class WeightIntake:
    """One engine's part in every sync, and its door: what it serves, and whether it does."""

    def __init__(
        self, name: str, llm: UpdatedEngine, group: TransferGroup | None, *, score: Score, adapter: TakesAdapters, fatal: tuple[type[Exception], ...] = ()
    ) -> None:
        """`group` None: the weights pass from hand to hand. `fatal` errors mean that the engine is gone, and pass through every phase as they are."""
        self.version = 0
        """Of the weights; 0: the checkpoint's."""
        self.shut = ""
        """Why no rollouts are served, until a sync has been completed; empty: they are."""
        self._name = name
        self._llm = llm
        self._group = group
        self._score = score
        self.adapter = adapter
        self._passed_on: tuple[type[Exception], ...] = (WeightSyncError, *fatal)
        # A new sync begins when the clean-up of a failed one is over.
        self._turn = asyncio.Lock()
        self._sync = _UnderWay()
        self._noise: Differences | None = None
        """The noise that this run's first sync measured here; an offer that brings the run's own is
        compared by that."""
        self._phases: dict[SyncPhase, Callable[[WeightOffer], Awaitable[None]]] = {
            SyncPhase.PAUSE: self._pause,
            SyncPhase.RENDEZVOUS: self._rendezvous,
            SyncPhase.WIRE: self._wire,
            SyncPhase.VERIFY: self._verify,
            SyncPhase.RESET: self._reset,
            SyncPhase.CANARY: self._canary,
        }

    def measures_noise(self, offer: WeightOffer) -> bool:
        """Return whether a sync of the offer, begun now, first scores the weights that it replaces.

        They have to be what the learner offers: the checkpoint, which is version 0 here and which
        the run's first offer is of. A first sync that failed is not measured again: the one that
        takes its place, as full weights take an adapter's, is held to the usual bounds, and so are
        all after it.
        """
        probe = _probe_of(offer)
        is_first = offer.version == 1 and self.version == 0 and not self.shut
        return is_first and probe.tolerance is None and probe.noise is None

    async def take(self, offer: WeightOffer, handed: ChecksummedWeights | None = None) -> SyncReport:
        """Every phase in order. `handed`: the weights of the offer, where they pass from hand to hand."""
        for phase in SyncPhase:
            report = await self.run(phase, offer, handed)
        assert report is not None
        return report

    async def run(self, phase: SyncPhase, offer: WeightOffer, handed: ChecksummedWeights | None = None) -> SyncReport | None:
        """One phase of `SyncPhase`, which must come in order. From the first one on the door is shut; the last one opens it, and gives the report.

        Raises WeightSyncError naming the phase, at the latest after the phase's limit, and what is
        fatal.
        """
        limit = phase_limit(offer, phase)
        async with self._turn:
            if phase is SyncPhase.PAUSE:
                self._sync = _UnderWay(measures_noise=self.measures_noise(offer))
                if offer.version == 1:
                    # What is left is of a first sync that failed, or, on a server, of another run.
                    self._noise = None
                self.shut = f"its sync to version {offer.version} is under way, or was not completed"
            started = time.perf_counter()
            try:
                await self._bounded(phase, self._phases[phase](offer), limit)
            except WeightSyncError:
                if phase in (SyncPhase.RENDEZVOUS, SyncPhase.WIRE) and not offer.sends_adapter:
                    await self._abandon(phase_limit(offer, SyncPhase.WIRE))
                raise
            self._sync.phase_s[str(phase)] = time.perf_counter() - started
            if phase is not SyncPhase.CANARY:
                return None
            self.version, self.shut = offer.version, ""
            return self._report(offer, handed)

    def _report(self, offer: WeightOffer, handed: ChecksummedWeights | None) -> SyncReport:
        """Receiving, checksums and loading alternate within the one call to vLLM that the clock of `wire` measures, and the worker's own account takes them
        apart; so does the sender's, where the weights pass from hand to hand and it works within that call too:

            reported   clock of the phase   and from the worker                                        from hand to hand
            wire       wire                 - load - checksums - finish: what is left is waiting       not reported
            gather     not reported         nothing                                                    the sender's
            load                            load + finish (vLLM's `finish_weight_update`)
            verify     names and numbers    + checksums                                                + the sender's
            others     their own            nothing

        An adapter is read and loaded by one call, reported as `load`, and nothing is waited for.
        """
        sync, num_bytes = self._sync, terms_of(offer).num_bytes
        phase_s = dict(sync.phase_s)
        wire_s = phase_s.pop("wire")
        if offer.sends_adapter:
            return SyncReport(
                offer.version,
                num_bytes,
                phase_s | {"load": wire_s},
                sync.canary.largest,
                mode="adapter",
                adapter_effect=sync.adapter_effect,
                canary_mean_abs=sync.canary.mean,
                canary_noise=sync.noise,
            )
        load_s = max(receipt.load_s for receipt in sync.receipts) + sync.finish_s
        verify_s = max(receipt.verify_s for receipt in sync.receipts)
        waited = {"wire": wire_s - load_s - verify_s} if handed is None else {"gather": handed.gather_s}
        verify_s += phase_s["verify"] + (0.0 if handed is None else handed.verify_s)
        return SyncReport(
            offer.version,
            num_bytes,
            phase_s | waited | {"load": load_s, "verify": verify_s},
            sync.canary.largest,
            canary_mean_abs=sync.canary.mean,
            canary_noise=sync.noise,
        )

    async def _pause(self, offer: WeightOffer) -> None:
        if self._group is not None and not offer.sends_adapter and offer.transport != self._group.transport:
            raise self._error(f"the learner offers {offer.transport}, the engine was started for {self._group.transport}", SyncPhase.PAUSE)
        if self._sync.measures_noise:
            self._sync.scores_before = await self._score(_probe_of(offer), adapted=True)
        # "wait": what still runs ends under the weights it began with.
        await self._llm.pause_generation(mode="wait", clear_cache=False)

    async def _rendezvous(self, offer: WeightOffer) -> None:
        # An adapter comes with the offer: there is nothing to join.
        if self._group is not None and not offer.sends_adapter:
            await self._group.join(FullTerms.of(offer))

    async def _wire(self, offer: WeightOffer) -> None:
        if offer.sends_adapter:
            await self.adapter.take(AdapterTerms.of(offer))
            return
        # The merged weights hold the adapter: served on top of them it would count twice.
        await self.adapter.drop()
        terms = FullTerms.of(offer)
        await self._llm.collective_rpc("begin_receipt", args=(terms.bucket_bytes,))
        await self._llm.start_weight_update()
        tensors = terms.sent
        update = {"names": [t.name for t in tensors], "dtype_names": [t.dtype for t in tensors], "shapes": [list(t.shape) for t in tensors]}
        await self._llm.update_weights(UpdateRequest(update_info=update))
        started = time.perf_counter()
        await self._llm.finish_weight_update()
        self._sync.finish_s = time.perf_counter() - started
        self._sync.receipts = [Receipt(**receipt) for receipt in await self._llm.collective_rpc("receipt")]

    async def _verify(self, offer: WeightOffer) -> None:
        if offer.sends_adapter:
            await self.adapter.verify()
        else:
            check_receipts(self._sync.receipts, self._name)

    async def _reset(self, offer: WeightOffer) -> None:
        # Loading resets no cache, and what they hold was computed with the old weights.
        if not await self._llm.reset_prefix_cache():
            raise self._error("the prefix cache is in use", SyncPhase.RESET)
        await self._llm.reset_mm_cache()
        await self._llm.reset_encoder_cache()

    async def _canary(self, offer: WeightOffer) -> None:
        await self._llm.resume_generation()
        probe = _probe_of(offer)
        if probe.expected_logprobs is None:
            probe = probe.with_logprobs(map(float, self._sync.receipts[0].logprobs))
        if self._sync.scores_before is not None:
            self._noise = self._sync.noise = probe.measure(self._name, self._sync.scores_before)
        probe = replace(probe, noise=probe.noise or self._noise)
        scores = await self._score(probe, adapted=True)
        self._sync.canary = probe.check(self._name, *scores)
        if offer.sends_adapter:
            self._sync.adapter_effect = probe.check_adapter(self._name, scores, await self._score(probe, adapted=False))
        # Only now: a version that was not verified is never the label of a rollout.
        await self._llm.update_weight_version(str(offer.version))

    async def _abandon(self, limit: Limit) -> None:
        """Leave the group, so that the sender's wait ends, and make the model whole, so that its next forward does not kill the process.

        An engine that cannot do even this is stuck inside a collective: its actor has to be ended.
        """
        if self._group is not None:
            self._group.forget()
        await self._bounded(SyncPhase.WIRE, self._llm.collective_rpc("abandon_update"), limit)

    async def _bounded(self, phase: SyncPhase, work: Awaitable[Any], limit: Limit) -> None:
        try:
            await asyncio.wait_for(work, limit.seconds + ENGINE_MARGIN_S)
        except self._passed_on:
            raise
        except TimeoutError as error:
            told = late("the engine", limit, "that the learner and every other engine are alive")
            raise self._error(told, phase) from error
        except RolloutError as error:
            raise self._error(error.message, phase) from error
        except Exception as error:  # vLLM reports whatever failed in its worker as a plain Exception
            raise self._error(str(error), phase) from error

    def _error(self, message: str, phase: SyncPhase) -> WeightSyncError:
        return WeightSyncError(message, actor=self._name, phase=phase)


def _probe_of(offer: WeightOffer) -> CanaryProbe:
    assert isinstance(offer.canary, CanaryProbe)
    return offer.canary
