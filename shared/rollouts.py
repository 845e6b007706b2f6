"""The values that travel between learner and engines: requests, rollouts, offers, reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from shared.records import ImageRef
from shared.weight_sync.canary import CanaryProbe, Differences
from shared.weight_sync.offer import AdapterOffer, FullOffer

MAX_TEMPERATURE = 2.0
"""The highest that vLLM takes."""
REPETITION_PENALTIES = (0.01, 100.0)
"""Range outside which a scaled logit may silently be no number any more."""


class DecodeMode(StrEnum):
    GREEDY = "greedy"
    SAMPLE = "sample"
    BEAM = "beam"


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """The way a response is decoded; the same for every request of a step.

    Example: greedy decoding is `DecodeSettings(DecodeMode.GREEDY, 0.0, 1.0, -1, 1.0, 84, 1,
    (151645,), (151655,), True)`.
    """

    mode: DecodeMode
    temperature: float
    """0 exactly when `mode` is greedy or beam."""
    top_p: float
    top_k: int
    """-1: no limit."""
    repetition_penalty: float
    max_new_tokens: int
    num_beams: int
    stop_token_ids: tuple[int, ...]
    banned_token_ids: tuple[int, ...]
    """Never sampled (vision placeholders); the learner masks them when it compares log-probs."""
    return_logprobs: bool
    length_penalty: float = 1.0
    """Of beams: the exponent of the length that a log-probability is divided by."""
    stop: tuple[str, ...] = ()
    """Texts that end a response in addition to stop tokens. The text is part of the response."""


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One prompt for an engine.

    Example: the third request of the first step is `RolloutRequest(step=0, position=2,
    sample_id="coco-7", prompt_token_ids=(151644, ...), images=(ImageRef(...),), decode=...,
    seed=request_seed(17, 0, 2))`.
    """

    step: int
    """From 0, as seeds count; people and files count from 1."""
    position: int
    """Index in the step over all learner ranks: 0 .. rollouts_per_step - 1."""
    sample_id: str
    prompt_token_ids: tuple[int, ...]
    """Unexpanded: one image placeholder per image; the engine expands it."""
    images: tuple[ImageRef, ...]
    """Engines get each with `data`; the bytes travel apart (`shared.sent_requests`)."""
    decode: DecodeSettings
    seed: int
    """`request_seed(run_seed, step, position)`; used by sampling, recorded always."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"
    """The repeat guard forced the stop token."""
    ABORTED = "aborted"


TRIES = 2
"""Tries per server before another one is asked (decision 14)."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """The engine's answer to one request.

    Example: to a request for 3 tokens that ended by itself: `Rollout(step=0, position=2,
    sample_id="coco-7", prompt_token_ids=(...), response_token_ids=(90, 3, 7), stop_token_id=151645,
    logprobs=(-0.1, -0.3, -0.2), stop_token_logprob=-0.01, finish_reason=FinishReason.STOP, ...)`.
    """

    step: int
    position: int
    sample_id: str
    prompt_token_ids: tuple[int, ...]
    """As the engine used them: image placeholders expanded."""
    response_token_ids: tuple[int, ...]
    """Without the stop token."""
    stop_token_id: int | None
    """None: the response was cut by length, or a stop text ended it."""
    logprobs: tuple[float, ...] | None
    """One per response token, under temperature, top-k and top-p as sampled."""
    stop_token_logprob: float | None
    """None where it was forced: nothing was sampled."""
    finish_reason: FinishReason
    forced_positions: tuple[int, ...]
    """Response positions that the repeat guard set; only the stop token's, `len(response)`."""
    weight_version: int
    actor: str
    attempt: int
    """0 for the first try; each server before this one adds `TRIES`."""
    seed: int
    generate_s: float
    """Seconds from the share's arrival at the engine to this response's own end."""
    started_s: float = 0.0
    """Unix time at which the share arrived at the engine."""


@dataclass(frozen=True, slots=True)
class WeightOffer:
    """The learner's offer of weights: which, over which transport, and the canary that proves them.

    Example: `WeightOffer(version=3, transport="rollmatch_gloo", terms=FullOffer(...),
    canary=CanaryProbe(...))`.
    """

    version: int
    transport: str
    """nccl, ipc, rollmatch_gloo or inproc; adapter: the weights are in the offer."""
    terms: FullOffer | AdapterOffer
    canary: CanaryProbe

    @property
    def sends_adapter(self) -> bool:
        """Tell whether an adapter is sent rather than full weights."""
        return isinstance(self.terms, AdapterOffer)

    def for_group(self, index: int) -> WeightOffer:
        """Return the same sync as the receivers of one process group are told of it."""
        if isinstance(self.terms, AdapterOffer):
            return self
        return replace(self, terms=replace(self.terms, groups=(self.terms.groups[index],)))


@dataclass(frozen=True, slots=True)
class SyncReport:
    """One verified sync.

    Example: `SyncReport(3, 8_000_000, {"pause": 0.1, "wire": 0.5, "load": 0.2}, 2e-5)`.
    """

    version: int
    bytes: int
    phase_s: Mapping[str, float]
    """Seconds of the slowest engine by phase (pause, wire, load, verify, canary, ...)."""
    canary_max_abs: float
    """Largest difference of a canary log-probability between learner and engines, in nats."""
    mode: Literal["full", "adapter"] = "full"
    fell_back: str | None = None
    """Reason why an adapter sync failed before this one, of full weights; None: none did."""
    adapter_effect: float | None = None
    """The engine's effect of an adapter over the learner's, farthest from 1; None: full weights, or
    too small to tell (`shared.weight_sync.canary`)."""
    canary_mean_abs: float = 0.0
    """Mean difference of a canary log-probability, of the engine that is farthest away."""
    canary_noise: Differences | None = None
    """The same differences by rounding alone, at version 0, where this sync measured them."""
    ports: tuple[int, ...] = ()
    """Ports of the process groups that carried full weights, in the order of the servers."""

    @classmethod
    def of_slowest(cls, reports: Sequence[SyncReport]) -> SyncReport:
        """Merge the reports of several engines: each phase is the slowest one's."""
        first = reports[0]
        phases = {
            phase: max(report.phase_s[phase] for report in reports) for phase in first.phase_s
        }
        noises = [report.canary_noise for report in reports if report.canary_noise is not None]
        effects = [report.adapter_effect for report in reports if report.adapter_effect is not None]
        farthest = None
        if len(effects) == len(reports):
            farthest = max(effects, key=lambda effect: abs(effect - 1))
        return cls(
            first.version,
            first.bytes,
            phases,
            max(report.canary_max_abs for report in reports),
            mode=first.mode,
            adapter_effect=farthest,
            canary_mean_abs=max(report.canary_mean_abs for report in reports),
            canary_noise=Differences.worst(noises) if noises else None,
        )

    @property
    def total_s(self) -> float:
        """Seconds of the engines' phases; the sender's (`send_...`) run beside them."""
        phases = self.phase_s.items()
        return sum(seconds for phase, seconds in phases if not phase.startswith("send_"))

    @property
    def wire_gb_per_s(self) -> float | None:
        """Rate of the slowest engine's wire phase in 1e9 bytes/s; None where there was no wire."""
        return self.bytes / self.phase_s["wire"] / 1e9 if "wire" in self.phase_s else None

    def metrics(self) -> dict[str, float | str]:
        """Return the values by their names in `shared.metrics`, without those that are None."""
        values = {
            "sync/version": self.version,
            "sync/mode": self.mode,
            "sync/bytes": self.bytes,
            "sync/canary_max_abs": self.canary_max_abs,
            "sync/canary_mean_abs": self.canary_mean_abs,
            "sync/adapter_effect": self.adapter_effect,
            "sync/wire_gb_per_s": self.wire_gb_per_s,
            "time/sync_s": self.total_s,
            **{f"sync/{phase}_s": seconds for phase, seconds in self.phase_s.items()},
        }
        return {name: value for name, value in values.items() if value is not None}
