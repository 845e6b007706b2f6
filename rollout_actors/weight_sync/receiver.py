"""The engine's side of a weight sync, through vLLM's weight-transfer API (decision 38)."""

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

# Imports vllm, which the client of a server does not have.
if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

    from rollout_actors.weight_sync.adapters import AdapterLoader


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A vLLM worker's report about the weights that it loaded in one weight sync.

    Example: `LoadReport(checksums=[5, 9], sent=[5, 9], missing=[], unexpected=[], load_s=0.2,
    verify_s=0.1, logprobs=["-0.5"])` reports two buckets that arrived unchanged.
    """

    checksums: list[int]
    """For each bucket (a packed part of the weights): checksum of the tensors that arrived."""
    sent: list[int]
    """For each bucket: checksum of the tensors that the learner sent."""
    missing: list[str]
    """Parameters of the engine that were not loaded."""
    unexpected: list[str]
    """Names of received tensors that the engine has no parameter for."""
    load_s: float
    """Seconds that the worker spent on loading tensors into the model."""
    verify_s: float
    """Seconds that the worker spent on computing checksums."""
    logprobs: list[str]
    """The learner's log-probabilities of the canary; empty if the offer has them. As text, because
    the JSON of a stock server has no NaN."""


def check_load_reports(reports: Sequence[LoadReport], actor: str) -> None:
    """Raise WeightSyncError unless every vLLM worker has loaded all parameters unchanged."""

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
                " engine run the same version of rollmatch"
            )
            raise error(message, "number of buckets")
        pairs = zip(report.checksums, report.sent, strict=True)
        wrong = [i for i, (arrived, sent) in enumerate(pairs) if arrived != sent]
        if wrong:
            message = f"buckets {wrong} of {num_sent} did not arrive as they were sent"
            message += "; resume the run, and if this happens again check network and memory"
            raise error(message, "bucket checksums", len(wrong))


# Copies of vLLM's `WeightTransferInitRequest` and `WeightTransferUpdateRequest`, because their
# module imports all of vLLM.
@dataclass(frozen=True, slots=True)
class InitRequest:
    """How an engine joins the process group of a weight sync, as arguments for vLLM."""

    init_info: dict[str, object]


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """The tensors that an engine receives in a weight sync, as arguments for vLLM."""

    update_info: dict[str, object]


class UpdatedEngine(Protocol):
    """The methods of vLLM's `AsyncLLM` that a weight sync calls, directly or over HTTP."""

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
    """The methods of vLLM's `AsyncLLM` for joining and leaving a process group."""

    async def init_weight_transfer_engine(self, request: InitRequest) -> None: ...
    async def shutdown_weight_transfer_engine(self) -> None: ...


@dataclass(slots=True)
class TransferGroup:
    """An engine's membership in the learner's process group for weight syncs.

    The engine stays in the group after a weight sync, because the next sync may use it again.
    """

    llm: GroupedEngine
    _: KW_ONLY
    transport: TransportKind
    rank_offset: int
    """Rank of the engine's first worker in the process group; the sender has rank 0."""
    _joined: str = field(init=False, default="")

    async def join(self, terms: FullOffer) -> None:
        """Join the process group that the learner offers, unless the engine is in it already."""
        group = terms.group
        if self._joined == group.key:
            return
        # Forget the group first, so that a failure midway does not count as joined.
        self.forget()
        await self.llm.shutdown_weight_transfer_engine()
        info: dict[str, object] = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": self.rank_offset,
            "world_size": group.world_size,
            "packed_buffer_size_bytes": terms.bucket_bytes,
        }
        # vLLM's NCCL transport has no limits, so the limit of the phase must be enough.
        if self.transport is TransportKind.GLOO:
            info |= {"join_s": terms.join_limit.seconds, "timeout_s": terms.timeout_s}
        else:
            info |= {"packed": True, "packed_num_buffers": 2}
        await self.llm.init_weight_transfer_engine(InitRequest(init_info=info))
        self._joined = group.key

    def forget(self) -> None:
        """Make the next `join` join again, even if the learner offers the same process group."""
        self._joined = ""


@dataclass(slots=True)
class _SyncInProgress:
    """The results so far of the current sync."""

    measures_noise: bool = False
    scores_before: Scores | None = None
    """The canary's scores with the checkpoint's weights, if the noise is measured; else None."""
    reports: list[LoadReport] = field(default_factory=list)
    phase_s: dict[str, float] = field(default_factory=dict)
    finish_s: float = 0.0
    canary: Differences = field(default_factory=lambda: Differences(0.0, 0.0))
    noise: Differences | None = None
    adapter_effect: float | None = None


class WeightReceiver:
    """Receives and verifies an engine's new weights, phase by phase.

    Its `unavailable_reason` says that a weight sync is running or has failed.
    """

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
        """Store the arguments for the phases.

        Args:
            group: the engine's process group; None: the learner is in the same process.
            score: `await score(probe, adapted=True)` scores the probe with the adapter that is
                served, if there is one; `adapted=False` scores it without.
            adapter: None: the engine does not accept adapters.
            fatal: errors that mean that the engine is lost. Every phase raises them unchanged.
        """
        self.version = 0
        """Version of the last verified weights; 0: the checkpoint's."""
        self.unavailable_reason = ""
        """Reason why the engine must not generate rollouts; empty if it may."""
        self._name = name
        self._llm = llm
        self._group = group
        self._score = score
        self.adapter = adapter
        self._passed_on: tuple[type[Exception], ...] = (WeightSyncError, *fatal)
        # A new sync waits until the clean-up of a failed one has finished.
        self._lock = asyncio.Lock()
        self._sync = _SyncInProgress()
        self._noise: Differences | None = None
        """The noise that this run's first sync measured, for later offers that contain none."""
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
        """The loaded LoRA adapter, for every request to vLLM; None: only the base weights."""
        return None if self.adapter is None else self.adapter.request

    def measures_noise(self, offer: WeightOffer) -> bool:
        """Return whether a weight sync with this offer measures the canary's noise first.

        The noise is how far log-probabilities of engine and learner differ with the same weights.
        It is measured with the checkpoint's weights, before they are replaced.
        """
        # That is possible only for the run's first offer, when the engine has the checkpoint. If
        # the first sync fails, the engine no longer has it. The next sync and all later ones are
        # then checked against the usual bounds.
        probe = offer.canary
        is_first = offer.version == 1 and self.version == 0 and not self.unavailable_reason
        return is_first and probe.needs_noise

    async def run_all_phases(
        self, offer: WeightOffer, handed: ChecksummedWeights | None = None
    ) -> SyncReport:
        """Run every phase of a weight sync in order, and return its report.

        `handed` are the weights if the learner is in this process. Raises as `run_phase` does.
        """
        for phase in SyncPhase:
            report = await self.run_phase(phase, offer, handed)
        assert report is not None, "the last phase returns a report"
        return report

    async def run_phase(
        self, phase: SyncPhase, offer: WeightOffer, handed: ChecksummedWeights | None = None
    ) -> SyncReport | None:
        """Run one phase of a weight sync. The last phase returns the report, others None.

        `handed` are the weights if the learner is in this process. Raises WeightSyncError, at the
        latest after the phase's time limit, and the fatal errors.
        """
        limit = phase_limit(offer, phase)
        async with self._lock:
            if phase is SyncPhase.PAUSE:
                self._sync = _SyncInProgress(measures_noise=self.measures_noise(offer))
                if offer.version == 1:
                    # Left from a first sync that failed, or from another run of the server.
                    self._noise = None
                self.unavailable_reason = (
                    f"its sync to version {offer.version} is running, or did not complete"
                )
            started = time.perf_counter()
            try:
                await self._bounded(phase, self._phases[phase](offer), limit)
            except WeightSyncError:
                # Only these phases can leave a half-joined group or a half-loaded model.
                if phase in (SyncPhase.RENDEZVOUS, SyncPhase.WIRE) and not offer.sends_adapter:
                    await self._abandon(phase_limit(offer, SyncPhase.WIRE))
                raise
            self._sync.phase_s[str(phase)] = time.perf_counter() - started
            if phase is not SyncPhase.CANARY:
                return None
            # The canary has passed, so rollouts may now have the new version.
            self.version = offer.version
            self.unavailable_reason = ""
            return self._report(offer, handed)

    def _report(self, offer: WeightOffer, handed: ChecksummedWeights | None) -> SyncReport:
        """Return the report of the sync. It divides the time of the phase `wire` into parts.

        Receiving, checksums and loading alternate within one call to vLLM. The measurements of the
        worker (and of the sender, if it is in this process) separate them:

            reported    over a network                      within the process
            wire        the remainder: waiting              -
            gather      -                                   the sender's
            load        the worker's, and vLLM's finish     the same
            verify      names, and the worker's checksums   and the sender's

        An adapter is received and loaded by one call, which is reported as `load`.
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
        # An adapter is part of the offer, so it needs no transport.
        if expected not in (None, offer.transport) and not offer.sends_adapter:
            raise self._error(
                f"the learner offers {offer.transport}, but the engine was started for {expected};"
                f" start the server with transport={offer.transport}",
                SyncPhase.PAUSE,
            )
        if self._sync.measures_noise:
            self._sync.scores_before = await self._score(offer.canary, adapted=True)
        # The caches are cleared after the weights have changed (`_reset`).
        # "wait": running requests finish with the old weights.
        await self._llm.pause_generation(mode="wait", clear_cache=False)

    async def _rendezvous(self, offer: WeightOffer) -> None:
        # An adapter is part of the offer, so the engine joins no group.
        if self._group is None or not isinstance(offer.terms, FullOffer):
            return
        try:
            await self._group.join(offer.terms)
        except (RolloutError, TimeoutError):
            raise
        except self._passed_on:
            raise
        except Exception as error:
            group = offer.terms.group
            raise self._error(
                f"{error}; if this is a failed connection, check that this machine can connect to"
                f" {group.host}:{group.port}, where the learner waits (is there a firewall?)",
                SyncPhase.RENDEZVOUS,
            ) from error

    async def _wire(self, offer: WeightOffer) -> None:
        terms = offer.terms
        if isinstance(terms, AdapterOffer):
            if self.adapter is None:
                raise ValueError(
                    "this kind of engine does not accept adapters; set"
                    " rollout_matching.vllm.sync.mode: full"
                )
            await self.adapter.take(terms)
            return
        # The merged weights contain the adapter. Served on top of them it would count twice.
        if self.adapter is not None:
            await self.adapter.drop()
        # Before the update, which moves the parameters to the meta device. The worker records their
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
            assert self.adapter is not None, "the wire phase has loaded it"
            await self.adapter.verify()
        else:
            check_load_reports(self._sync.reports, self._name)

    async def _reset(self, offer: WeightOffer) -> None:
        # Loading does not clear the caches, which were computed with the old weights. Without this
        # step rollouts would silently mix both.
        if not await self._llm.reset_prefix_cache():
            raise self._error(
                "the prefix cache is in use, although no request may run; this is a bug: report it"
                " with error.txt",
                SyncPhase.RESET,
            )
        await self._llm.reset_mm_cache()
        await self._llm.reset_encoder_cache()

    async def _canary(self, offer: WeightOffer) -> None:
        # The canary is a request too. Other requests are refused, as `unavailable_reason` is set.
        await self._llm.resume_generation()
        probe = offer.canary
        # The learner computes the log-probabilities while the engines load. Then they arrive after
        # its weights and not in the offer.
        if probe.expected_logprobs is None:
            probe = probe.with_logprobs(map(float, self._sync.reports[0].logprobs))
        if self._sync.scores_before is not None:
            self._noise = self._sync.noise = probe.measure(self._name, self._sync.scores_before)
        probe = replace(probe, noise=probe.noise or self._noise)
        scores = await self._score(probe, adapted=True)
        self._sync.canary = probe.check(self._name, *scores)
        if offer.sends_adapter:
            # Compare with the scores without the adapter. If they are equal, it has no effect.
            base = await self._score(probe, adapted=False)
            self._sync.adapter_effect = probe.check_adapter(self._name, scores, base)
        # Set last, so that no rollout is labelled with an unverified version.
        await self._llm.update_weight_version(str(offer.version))

    async def _abandon(self, limit: Timeout) -> None:
        """Leave the process group, which ends the sender's wait, and restore the model.

        If the model is not restored, its next forward pass kills the process. An engine that cannot
        leave is stuck inside a collective operation, and its actor must be ended.
        """
        if self._group is not None:
            self._group.forget()
        await self._bounded(SyncPhase.WIRE, self._llm.collective_rpc("abandon_update"), limit)

    async def _bounded(self, phase: SyncPhase, work: Awaitable[object], limit: Timeout) -> None:
        try:
            # The limits increase outward (engine, client, pool). The innermost ends first, and its
            # error says most.
            await asyncio.wait_for(work, limit.seconds + ENGINE_MARGIN_S)
        except self._passed_on:
            raise
        except TimeoutError as error:
            check = (
                "whether it is stuck (if it is a server, restart it), and that the learner"
                " and every other engine are alive"
            )
            message = late("the engine", limit, check)
            raise self._error(message, phase) from error
        except RolloutError as error:
            raise self._error(error.message, phase) from error
        # vLLM reports any failure in its worker as a plain Exception.
        except Exception as error:
            raise self._error(str(error), phase) from error

    def _error(self, message: str, phase: SyncPhase) -> WeightSyncError:
        return WeightSyncError(message, actor=self._name, phase=phase)
