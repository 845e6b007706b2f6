"""How one engine takes weights: the receiver's phases of `shared.weight_sync.phases`,
driven through vLLM's weight-transfer API (DESIGN 9).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from shared.errors import RolloutError, Timeout, WeightSyncError, late
from shared.rollouts import SyncReport, WeightOffer
from shared.weight_sync.canary import CanaryProbe, Scores
from shared.weight_sync.checksum import ChecksummedWeights
from shared.weight_sync.differences import Differences
from shared.weight_sync.offer import AdapterOffer, FullOffer, terms_of
from shared.weight_sync.phases import ENGINE_MARGIN_S, SyncPhase, phase_limit
from shared.weight_sync.transports import TransportKind

# What a worker of an engine says it loaded in one update, and the check of it that every way of
# taking weights makes (DESIGN 9.3).


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A worker's account of the full weights of one sync."""

    checksums: list[int]
    """One per bucket, of what was handed to the model."""
    sent: list[int]
    """One per bucket, of what the sender packed."""
    missing: list[str]
    """The engine's parameters that were not loaded."""
    unexpected: list[str]
    """Loaded names that are none of the engine's parameters."""
    load_s: float
    """Seconds in which the model took the weights."""
    verify_s: float
    """Seconds in which checksums were computed."""
    logprobs: list[str]
    """The learner's of the canary; empty where the offer has them. As text: they may be NaN, for
    which the JSON of a stock server has no number.
    """


def check_receipts(receipts: Sequence[LoadReport], actor: str) -> None:
    """Every worker loaded every parameter of its model and nothing else, and each bucket as it was
    sent. Raises WeightSyncError(phase="verify").
    """
    for receipt in receipts:
        names = [f"not loaded: {name}" for name in receipt.missing] + [
            f"not a parameter: {name}" for name in receipt.unexpected
        ]
        if names:
            shown = f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
            raise WeightSyncError(
                shown,
                actor=actor,
                phase=SyncPhase.VERIFY,
                quantity="set of loaded names",
                size=len(names),
            )
        if len(receipt.checksums) != len(receipt.sent):
            counted = (
                f"{len(receipt.checksums)} buckets arrived with {len(receipt.sent)} checksums;"
                " check that learner and engine run the same version"
            )
            raise WeightSyncError(
                counted, actor=actor, phase=SyncPhase.VERIFY, quantity="number of buckets"
            )
        wrong = [
            i
            for i, (got, sent) in enumerate(zip(receipt.checksums, receipt.sent, strict=True))
            if got != sent
        ]
        if wrong:
            arrived = f"buckets {wrong} of {len(receipt.sent)} did not arrive as they were sent"
            raise WeightSyncError(
                arrived,
                actor=actor,
                phase=SyncPhase.VERIFY,
                quantity="bucket checksums",
                size=len(wrong),
            )


# One engine's place in the sender's process group, by vLLM's weight-transfer API (DESIGN 9).


@dataclass(frozen=True, slots=True)
class InitRequest:
    """As vLLM reads its `WeightTransferInitRequest`, which is not to be had without importing all
    of vLLM.
    """

    init_info: dict[str, Any]


class JoinsGroups(Protocol):
    """Of vLLM's `AsyncLLM`, by itself or by the routes of a server."""

    async def init_weight_transfer_engine(self, request: InitRequest) -> None: ...
    async def shutdown_weight_transfer_engine(self) -> None: ...


class TransferGroup:
    """Kept from sync to sync."""

    def __init__(self, llm: JoinsGroups, *, transport: TransportKind, rank_offset: int) -> None:
        """`rank_offset`: the rank of the engine's first worker."""
        self.transport = transport
        self._llm = llm
        self._rank_offset = rank_offset
        self._joined = ""

    async def join(self, terms: FullOffer) -> None:
        """Nothing where the sender has opened no other group since the last time."""
        group = terms.group
        if self._joined == group.key:
            return
        self.forget()
        await self._llm.shutdown_weight_transfer_engine()
        info: dict[str, Any] = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": self._rank_offset,
            "world_size": group.world_size,
            "packed_buffer_size_bytes": terms.bucket_bytes,
        }
        info |= (
            {"join_s": terms.join_limit.seconds, "timeout_s": terms.timeout_s}
            if self.transport is TransportKind.GLOO
            else {"packed": True, "packed_num_buffers": 2}
        )
        await self._llm.init_weight_transfer_engine(InitRequest(init_info=info))
        self._joined = group.key

    def forget(self) -> None:
        """Join again next time, whatever the sender offers."""
        self._joined = ""


class ScoreProbe(Protocol):
    async def __call__(self, probe: CanaryProbe, *, adapted: bool) -> Scores:
        """What the engine thinks of the probe, with the adapter that it serves, if it has one, or
        without.
        """
        ...


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """As vLLM reads its `WeightTransferUpdateRequest`, which is not to be had without importing all
    of vLLM.
    """

    update_info: dict[str, Any]


class UpdatedEngine(Protocol):
    """What a sync asks of an engine: these methods of vLLM's `AsyncLLM`, by itself, by the routes
    of a server, or by its `LLM`. They raise what went wrong.
    """

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
    """`rollout_actors.weight_sync.adapters.AdapterLoader`, or whatever stands for it where an
    engine takes none.
    """

    @property
    def request(self) -> Any:
        """vLLM's `LoRARequest` for every request and every canary; None: the base weights alone."""
        ...

    async def take(self, terms: AdapterOffer) -> None: ...
    async def verify(self) -> None: ...
    async def drop(self) -> None: ...


@dataclass(slots=True)
class _UnderWay:
    """What is known of a sync so far."""

    receipts: list[LoadReport] = field(default_factory=list)
    finish_s: float = 0.0
    phase_s: dict[str, float] = field(default_factory=dict)
    measures_noise: bool = False
    """As `WeightReceiver.measures_noise` says."""
    scores_before: Scores | None = None
    """Scores of the checkpoint, where the noise is measured by them."""
    canary: Differences = field(default_factory=lambda: Differences(0.0, 0.0))
    noise: Differences | None = None
    adapter_effect: float | None = None


class WeightReceiver:
    """One engine's part in every sync, and its door: what it serves, and whether it does."""

    def __init__(
        self,
        name: str,
        llm: UpdatedEngine,
        group: TransferGroup | None,
        *,
        score: ScoreProbe,
        adapter: TakesAdapters,
        fatal: tuple[type[Exception], ...] = (),
    ) -> None:
        """`group` None: the weights pass from hand to hand. `fatal` errors mean that the engine is
        gone, and pass through every phase as they are.
        """
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

    async def take(
        self, offer: WeightOffer, handed: ChecksummedWeights | None = None
    ) -> SyncReport:
        """Every phase in order. `handed`: the weights of the offer, where they pass from hand to
        hand.
        """
        for phase in SyncPhase:
            report = await self.run(phase, offer, handed)
        assert report is not None
        return report

    async def run(
        self, phase: SyncPhase, offer: WeightOffer, handed: ChecksummedWeights | None = None
    ) -> SyncReport | None:
        """One phase of `SyncPhase`, which must come in order. From the first one on the door is
        shut; the last one opens it, and gives the report.

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
                self.shut = (
                    f"its sync to version {offer.version} is under way, or was not completed"
                )
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
        """Receiving, checksums and loading alternate within the one call to vLLM that the clock of
        `wire` measures, and the worker's own account takes them apart; so does the sender's, where
        the weights pass from hand to hand and it works within that call too:

            reported   clock of the phase   and from the worker
            from hand to hand wire       wire                 - load - checksums - finish: what is
            left is waiting       not reported gather     not reported         nothing
            the sender's load                            load + finish (vLLM's
            `finish_weight_update`) verify     names and numbers    + checksums
            + the sender's others     their own            nothing

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
        waited = (
            {"wire": wire_s - load_s - verify_s} if handed is None else {"gather": handed.gather_s}
        )
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
        if (
            self._group is not None
            and not offer.sends_adapter
            and offer.transport != self._group.transport
        ):
            raise self._error(
                f"the learner offers {offer.transport}, the engine was started for"
                f" {self._group.transport}",
                SyncPhase.PAUSE,
            )
        if self._sync.measures_noise:
            self._sync.scores_before = await self._score(_probe_of(offer), adapted=True)
        # "wait": what still runs ends under the weights it began with.
        await self._llm.pause_generation(mode="wait", clear_cache=False)

    async def _rendezvous(self, offer: WeightOffer) -> None:
        # An adapter comes with the offer: there is nothing to join.
        if self._group is not None and not offer.sends_adapter:
            await self._group.join(FullOffer.of(offer))

    async def _wire(self, offer: WeightOffer) -> None:
        if offer.sends_adapter:
            await self.adapter.take(AdapterOffer.of(offer))
            return
        # The merged weights hold the adapter: served on top of them it would count twice.
        await self.adapter.drop()
        terms = FullOffer.of(offer)
        await self._llm.collective_rpc("begin_verified_load", args=(terms.bucket_bytes,))
        await self._llm.start_weight_update()
        tensors = terms.sent
        update = {
            "names": [t.name for t in tensors],
            "dtype_names": [t.dtype for t in tensors],
            "shapes": [list(t.shape) for t in tensors],
        }
        await self._llm.update_weights(UpdateRequest(update_info=update))
        started = time.perf_counter()
        await self._llm.finish_weight_update()
        self._sync.finish_s = time.perf_counter() - started
        self._sync.receipts = [
            LoadReport(**receipt) for receipt in await self._llm.collective_rpc("load_report")
        ]

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
            self._sync.adapter_effect = probe.check_adapter(
                self._name, scores, await self._score(probe, adapted=False)
            )
        # Only now: a version that was not verified is never the label of a rollout.
        await self._llm.update_weight_version(str(offer.version))

    async def _abandon(self, limit: Timeout) -> None:
        """Leave the group, so that the sender's wait ends, and make the model whole, so that its
        next forward does not kill the process.

        An engine that cannot do even this is stuck inside a collective: its actor has to be ended.
        """
        if self._group is not None:
            self._group.forget()
        await self._bounded(SyncPhase.WIRE, self._llm.collective_rpc("abandon_update"), limit)

    async def _bounded(self, phase: SyncPhase, work: Awaitable[Any], limit: Timeout) -> None:
        try:
            await asyncio.wait_for(work, limit.seconds + ENGINE_MARGIN_S)
        except self._passed_on:
            raise
        except TimeoutError as error:
            told = late("the engine", limit, "that the learner and every other engine are alive")
            raise self._error(told, phase) from error
        except RolloutError as error:
            raise self._error(error.message, phase) from error
        # vLLM reports whatever failed in its worker as a plain Exception
        except Exception as error:
            raise self._error(str(error), phase) from error

    def _error(self, message: str, phase: SyncPhase) -> WeightSyncError:
        return WeightSyncError(message, actor=self._name, phase=phase)


def _probe_of(offer: WeightOffer) -> CanaryProbe:
    assert isinstance(offer.canary, CanaryProbe)
    return offer.canary
