"""One engine's side of a weight sync, through vLLM's weight-transfer API (decision 38)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from shared.errors import RolloutError, Timeout, WeightSyncError, late
from shared.rollouts import SyncReport, WeightOffer
from shared.weight_sync.canary import Differences, Scores
from shared.weight_sync.checksum import ChecksummedWeights
from shared.weight_sync.offer import AdapterOffer, FullOffer
from shared.weight_sync.phases import ENGINE_MARGIN_S, SyncPhase, phase_limit
from shared.weight_sync.transports import TransportKind

# Imports vllm, which a client of a server has not.
if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

    from rollout_actors.weight_sync.adapters import AdapterLoader


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A worker's account of the full weights of one sync.

    Example: `LoadReport(checksums=[5, 9], sent=[5, 9], missing=[], unexpected=[], load_s=0.2,
    verify_s=0.1, logprobs=["-0.5"])` is of two buckets that arrived as they were sent.
    """

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
    """The learner's of the canary; empty where the offer has them. As text: the JSON of a stock
    server has no number for a NaN."""


def check_load_reports(reports: Sequence[LoadReport], actor: str) -> None:
    """Raise WeightSyncError unless every worker loaded all parameters as they were sent."""

    def error(message: str, quantity: str, size: int | None = None) -> WeightSyncError:
        return WeightSyncError(
            message, actor=actor, phase=SyncPhase.VERIFY, quantity=quantity, size=size
        )

    for report in reports:
        names = [f"not loaded: {name}" for name in report.missing]
        names += [f"not a parameter: {name}" for name in report.unexpected]
        num_arrived = len(report.checksums)
        num_sent = len(report.sent)
        if names:
            message = f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
            raise error(message, "set of loaded names", len(names))
        if num_arrived != num_sent:
            message = (
                f"{num_arrived} buckets arrived with {num_sent} checksums; check that learner and"
                " engine run the same version"
            )
            raise error(message, "number of buckets")
        pairs = zip(report.checksums, report.sent, strict=True)
        wrong = [i for i, (arrived, sent) in enumerate(pairs) if arrived != sent]
        if wrong:
            message = f"buckets {wrong} of {num_sent} did not arrive as they were sent"
            raise error(message, "bucket checksums", len(wrong))


# vLLM's `WeightTransferInitRequest` and `WeightTransferUpdateRequest`, whose module imports all of
# vLLM.
@dataclass(frozen=True, slots=True)
class InitRequest:
    """The group that an engine is to join."""

    init_info: dict[str, object]


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """The tensors that an engine is to take."""

    update_info: dict[str, object]


class UpdatedEngine(Protocol):
    """The methods of vLLM's `AsyncLLM` that a sync calls, by whatever way to an engine."""

    async def pause_generation(self, *, mode: Literal["wait"], clear_cache: bool) -> None: ...
    async def resume_generation(self) -> None: ...
    async def start_weight_update(self) -> None: ...
    async def update_weights(self, request: UpdateRequest) -> None: ...
    async def finish_weight_update(self) -> None: ...
    async def collective_rpc(self, method: str, *, args: tuple[object, ...] = ()) -> list[Any]: ...
    async def reset_prefix_cache(self) -> bool: ...
    async def reset_mm_cache(self) -> None: ...
    async def reset_encoder_cache(self) -> None: ...
    async def update_weight_version(self, new_version: str) -> None: ...


class GroupedEngine(Protocol):
    """Two more methods of vLLM's `AsyncLLM`, of an engine that joins process groups."""

    async def init_weight_transfer_engine(self, request: InitRequest) -> None: ...
    async def shutdown_weight_transfer_engine(self) -> None: ...


@dataclass(slots=True)
class TransferGroup:
    """One engine's membership in the sender's process group, kept from sync to sync."""

    llm: GroupedEngine
    _: KW_ONLY
    transport: TransportKind
    rank_offset: int
    """The rank of the engine's first worker."""
    _joined: str = field(init=False, default="")

    async def join(self, terms: FullOffer) -> None:
        """Join the offered group, unless this is the one that was joined last."""
        group = terms.group
        if self._joined == group.key:
            return
        # Before anything can fail: half a change of groups must not count as joined.
        self.forget()
        await self.llm.shutdown_weight_transfer_engine()
        info: dict[str, object] = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": self.rank_offset,
            "world_size": group.world_size,
            "packed_buffer_size_bytes": terms.bucket_bytes,
        }
        # vLLM's NCCL transport has no limits of its own: there the phase's limit has to do.
        if self.transport is TransportKind.GLOO:
            info |= {"join_s": terms.join_limit.seconds, "timeout_s": terms.timeout_s}
        else:
            info |= {"packed": True, "packed_num_buffers": 2}
        await self.llm.init_weight_transfer_engine(InitRequest(init_info=info))
        self._joined = group.key

    def forget(self) -> None:
        """Join again next time, whatever the sender offers."""
        self._joined = ""


@dataclass(slots=True)
class _SyncInProgress:
    """The sync under way, as far as it has come."""

    measures_noise: bool = False
    scores_before: Scores | None = None
    """Scores of the checkpoint, where the noise is measured by them."""
    reports: list[LoadReport] = field(default_factory=list)
    phase_s: dict[str, float] = field(default_factory=dict)
    finish_s: float = 0.0
    canary: Differences = field(default_factory=lambda: Differences(0.0, 0.0))
    noise: Differences | None = None
    adapter_effect: float | None = None


class WeightReceiver:
    """Receiving side of a sync. Refuses requests from the pause until the canary has passed."""

    def __init__(
        self,
        name: str,
        llm: UpdatedEngine,
        group: TransferGroup | None,
        *,
        score: Callable[..., Awaitable[Scores]],
        adapter: AdapterLoader | None,
        fatal: tuple[type[Exception], ...] = (),
    ) -> None:
        """Keep what the phases need.

        Args:
            group: None: the weights pass from hand to hand.
            score: `await score(probe, adapted=True)` scores the probe with the adapter that is
                served, if any, or without.
            adapter: None: the engine takes no adapter alone.
            fatal: errors that mean that the engine is gone; every phase lets them pass.
        """
        self.version = 0
        """0 is the checkpoint's."""
        self.unavailable_reason = ""
        """Why no rollouts are served; empty: they are."""
        self._name = name
        self._llm = llm
        self._group = group
        self._score = score
        self.adapter = adapter
        self._passed_on: tuple[type[Exception], ...] = (WeightSyncError, *fatal)
        # A new sync begins when the clean-up of a failed one is over.
        self._lock = asyncio.Lock()
        self._sync = _SyncInProgress()
        self._noise: Differences | None = None
        """The noise that this run's first sync measured here, for offers that bring none."""
        self._phases: dict[SyncPhase, Callable[[WeightOffer], Awaitable[None]]] = {
            SyncPhase.PAUSE: self._pause,
            SyncPhase.RENDEZVOUS: self._rendezvous,
            SyncPhase.WIRE: self._wire,
            SyncPhase.VERIFY: self._verify,
            SyncPhase.RESET: self._reset,
            SyncPhase.CANARY: self._canary,
        }

    @property
    def lora_request(self) -> LoRARequest | None:
        """vLLM's `LoRARequest` for every request and every canary; None: the base weights alone."""
        return None if self.adapter is None else self.adapter.request

    def measures_noise(self, offer: WeightOffer) -> bool:
        """Return whether a sync begun now first scores the weights that it replaces."""
        # They have to be the checkpoint, which the run's first offer is of. After a first sync that
        # failed they are not: the one that takes its place is held to the usual bounds, and so are
        # all after it.
        probe = offer.canary
        is_first = offer.version == 1 and self.version == 0 and not self.unavailable_reason
        return is_first and probe.tolerance is None and probe.noise is None

    async def run_all_phases(
        self, offer: WeightOffer, handed: ChecksummedWeights | None = None
    ) -> SyncReport:
        """Run every phase in order; `handed` are weights that pass from hand to hand.

        Raises what `run_phase` does.
        """
        for phase in SyncPhase:
            report = await self.run_phase(phase, offer, handed)
        assert report is not None, "the last phase gives it"
        return report

    async def run_phase(
        self, phase: SyncPhase, offer: WeightOffer, handed: ChecksummedWeights | None = None
    ) -> SyncReport | None:
        """Run one phase, in order; the last one returns the report.

        Raises WeightSyncError, at the latest after the phase's limit, and what is fatal.
        """
        limit = phase_limit(offer, phase)
        async with self._lock:
            if phase is SyncPhase.PAUSE:
                self._sync = _SyncInProgress(measures_noise=self.measures_noise(offer))
                if offer.version == 1:
                    # What is left is of a first sync that failed, or, on a server, of another run.
                    self._noise = None
                self.unavailable_reason = (
                    f"its sync to version {offer.version} is under way, or was not completed"
                )
            started = time.perf_counter()
            try:
                await self._bounded(phase, self._phases[phase](offer), limit)
            except WeightSyncError:
                # Only these two leave something behind: a half-joined group, or a model in pieces.
                if phase in (SyncPhase.RENDEZVOUS, SyncPhase.WIRE) and not offer.sends_adapter:
                    await self._abandon(phase_limit(offer, SyncPhase.WIRE))
                raise
            self._sync.phase_s[str(phase)] = time.perf_counter() - started
            if phase is not SyncPhase.CANARY:
                return None
            # The canary has passed: only now do rollouts carry the new number.
            self.version = offer.version
            self.unavailable_reason = ""
            return self._report(offer, handed)

    def _report(self, offer: WeightOffer, handed: ChecksummedWeights | None) -> SyncReport:
        """Divide the clock of the phase `wire` by what was done in it.

        Receiving, checksums and loading alternate within one call to vLLM; the accounts of the
        worker, and from hand to hand of the sender, take them apart:

            reported    over a wire                         from hand to hand
            wire        what is left of it: waiting         -
            gather      -                                   the sender's
            load        the worker's, and vLLM's finish     the same
            verify      names, checksums of the worker      and of the sender

        An adapter is read and loaded by one call, reported as `load`.
        """
        sync = self._sync
        phase_s = dict(sync.phase_s)
        wire_s = phase_s.pop("wire")
        if offer.sends_adapter:
            phase_s["load"] = wire_s
        else:
            load_s = max(report.load_s for report in sync.reports) + sync.finish_s
            checksums_s = max(report.verify_s for report in sync.reports)
            phase_s["load"] = load_s
            phase_s["verify"] += checksums_s
            if handed is None:
                phase_s["wire"] = wire_s - load_s - checksums_s
            else:
                phase_s["gather"] = handed.gather_s
                phase_s["verify"] += handed.verify_s
        return SyncReport(
            offer.version,
            offer.terms.num_bytes,
            phase_s,
            sync.canary.largest,
            mode="adapter" if offer.sends_adapter else "full",
            adapter_effect=sync.adapter_effect,
            canary_mean_abs=sync.canary.mean,
            canary_noise=sync.noise,
        )

    async def _pause(self, offer: WeightOffer) -> None:
        expected = None if self._group is None else self._group.transport
        # An adapter comes with the offer, whatever transport the engine was started for.
        if expected not in (None, offer.transport) and not offer.sends_adapter:
            raise self._error(
                f"the learner offers {offer.transport}, the engine was started for {expected}",
                SyncPhase.PAUSE,
            )
        if self._sync.measures_noise:
            self._sync.scores_before = await self._score(offer.canary, adapted=True)
        # No cache is cleared here: that has to follow the new weights (`_reset`).
        # "wait": what still runs ends under the weights it began with.
        await self._llm.pause_generation(mode="wait", clear_cache=False)

    async def _rendezvous(self, offer: WeightOffer) -> None:
        # An adapter comes with the offer: there is nothing to join.
        if self._group is not None and isinstance(offer.terms, FullOffer):
            await self._group.join(offer.terms)

    async def _wire(self, offer: WeightOffer) -> None:
        terms = offer.terms
        if isinstance(terms, AdapterOffer):
            if self.adapter is None:
                raise ValueError(
                    "this kind of engine takes no adapter alone; set"
                    " rollout_matching.vllm.sync.mode: full"
                )
            await self.adapter.take(terms)
            return
        # The merged weights hold the adapter: served on top of them it would count twice.
        if self.adapter is not None:
            await self.adapter.drop()
        # Before the update, which moves the parameters to the meta device: the worker notes their
        # names now.
        await self._llm.collective_rpc("begin_verified_load", args=(terms.bucket_bytes,))
        await self._llm.start_weight_update()
        update = {
            "names": [tensor.name for tensor in terms.sent],
            "dtype_names": [tensor.dtype for tensor in terms.sent],
            "shapes": [list(tensor.shape) for tensor in terms.sent],
        }
        await self._llm.update_weights(UpdateRequest(update_info=update))
        started = time.perf_counter()
        await self._llm.finish_weight_update()
        self._sync.finish_s = time.perf_counter() - started
        reports = await self._llm.collective_rpc("load_report")
        self._sync.reports = [LoadReport(**report) for report in reports]

    async def _verify(self, offer: WeightOffer) -> None:
        if offer.sends_adapter:
            assert self.adapter is not None, "it has taken the adapter"
            await self.adapter.verify()
        else:
            check_load_reports(self._sync.reports, self._name)

    async def _reset(self, offer: WeightOffer) -> None:
        # Loading resets no cache, and what they hold was computed with the old weights: rollouts
        # would mix both, without any error.
        if not await self._llm.reset_prefix_cache():
            raise self._error("the prefix cache is in use", SyncPhase.RESET)
        await self._llm.reset_mm_cache()
        await self._llm.reset_encoder_cache()

    async def _canary(self, offer: WeightOffer) -> None:
        # The canary is a request too. Rollouts are still refused: `unavailable_reason` is set.
        await self._llm.resume_generation()
        probe = offer.canary
        # The learner computes them while the engines load, so they came after its weights and not
        # in the offer.
        if probe.expected_logprobs is None:
            probe = probe.with_logprobs(map(float, self._sync.reports[0].logprobs))
        if self._sync.scores_before is not None:
            self._noise = self._sync.noise = probe.measure(self._name, self._sync.scores_before)
        probe = replace(probe, noise=probe.noise or self._noise)
        scores = await self._score(probe, adapted=True)
        self._sync.canary = probe.check(self._name, *scores)
        if offer.sends_adapter:
            # Without the adapter: equal scores would mean that the engine ignores it.
            base = await self._score(probe, adapted=False)
            self._sync.adapter_effect = probe.check_adapter(self._name, scores, base)
        # Only now: a version that was not verified is never the label of a rollout.
        await self._llm.update_weight_version(str(offer.version))

    async def _abandon(self, limit: Timeout) -> None:
        """Leave the group, which ends the sender's wait, and make the model whole again.

        Else its next forward would kill the process. An engine that cannot do even this is stuck
        inside a collective: its actor has to be ended.
        """
        if self._group is not None:
            self._group.forget()
        await self._bounded(SyncPhase.WIRE, self._llm.collective_rpc("abandon_update"), limit)

    async def _bounded(self, phase: SyncPhase, work: Awaitable[object], limit: Timeout) -> None:
        try:
            # Margins grow outward (engine, client, pool): the innermost limit ends first, and its
            # error says most.
            await asyncio.wait_for(work, limit.seconds + ENGINE_MARGIN_S)
        except self._passed_on:
            raise
        except TimeoutError as error:
            check = (
                "whether it is stuck (then a server has to be ended and started again), and that"
                " the learner and every other engine are alive"
            )
            message = late("the engine", limit, check)
            raise self._error(message, phase) from error
        except RolloutError as error:
            raise self._error(error.message, phase) from error
        # vLLM reports whatever failed in its worker as a plain Exception
        except Exception as error:
            raise self._error(str(error), phase) from error

    def _error(self, message: str, phase: SyncPhase) -> WeightSyncError:
        return WeightSyncError(message, actor=self._name, phase=phase)
