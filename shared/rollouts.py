"""Values exchanged between learner and engines: requests, rollouts, weight offers, sync reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from shared.records import ImageRef
from shared.weight_sync.canary import CanaryProbe, Differences
from shared.weight_sync.offer import AdapterOffer, FullOffer

MAX_TEMPERATURE = 2.0
"""The highest temperature that vLLM accepts."""
REPETITION_PENALTIES = (0.01, 100.0)
"""Least and greatest repetition penalty; others may make logits infinite or NaN silently."""


class DecodeMode(StrEnum):
    """How an engine chooses the next token of an answer."""

    GREEDY = "greedy"
    SAMPLE = "sample"
    BEAM = "beam"


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """How an engine decodes answers; the same for all requests of a step.

    Example: greedy decoding is `DecodeSettings(DecodeMode.GREEDY, 0.0, 1.0, -1, 1.0, 84, 1,
    (151645,), (151655,), True)`.
    """

    mode: DecodeMode
    temperature: float
    """Sampling temperature; 0 if and only if `mode` is greedy or beam."""
    top_p: float
    """Sample only from the most probable tokens with this total probability; 1: from all."""
    top_k: int
    """Sample only from this many most probable tokens; -1: no limit."""
    repetition_penalty: float
    """Factor that makes tokens of the prompt and the answer less probable; 1: none."""
    max_new_tokens: int
    num_beams: int
    """Number of beams of beam search; other modes ignore it."""
    stop_token_ids: tuple[int, ...]
    banned_token_ids: tuple[int, ...]
    """Tokens that are never sampled: the placeholders of images.

    The learner masks their logits before it compares log-probabilities with the engine's.
    """
    return_logprobs: bool
    """Whether rollouts have the log-probabilities of their tokens."""
    length_penalty: float = 1.0
    """Exponent of beam search: a beam's log-probability is divided by length ** exponent."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer, in addition to stop tokens. The text is part of the answer."""


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """A request of the learner to an engine: a prompt that the engine answers with one rollout.

    Example: the third request of the first step is `RolloutRequest(step=0, position=2,
    sample_id="coco-7", prompt_token_ids=(151644, ...), images=(ImageRef(...),), decode=...,
    seed=request_seed(17, 0, 2))`.
    """

    step: int
    """Optimizer step, from 0, as in seeds; messages and files count from 1."""
    position: int
    """Index of the request in the step, over all learner ranks: 0 .. rollouts_per_step - 1."""
    sample_id: str
    prompt_token_ids: tuple[int, ...]
    """The prompt with one placeholder token per image; the engine repeats it as often as needed."""
    images: tuple[ImageRef, ...]
    """The prompt's images, which engines receive with `data`.

    Their bytes are sent separately (`shared.sent_requests`).
    """
    decode: DecodeSettings
    seed: int
    """`request_seed(run_seed, step, position)`: the engine samples with it, and records it."""


class FinishReason(StrEnum):
    """Why an engine ended an answer."""

    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"
    """The repeat guard ended an answer that repeated itself, by forcing the stop token."""
    ABORTED = "aborted"


TRIES = 2
"""How often a request is tried at one server before it goes to another server (decision 14)."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """An engine's answer to one request: its token ids, log-probabilities and weight version.

    Example: for a request of at most 3 tokens that ended with a stop token: `Rollout(step=0,
    position=2, sample_id="coco-7", prompt_token_ids=(...), response_token_ids=(90, 3, 7),
    stop_token_id=151645, logprobs=(-0.1, -0.3, -0.2), stop_token_logprob=-0.01, ...)`.
    """

    step: int
    position: int
    sample_id: str
    prompt_token_ids: tuple[int, ...]
    """The prompt as the engine read it, with expanded image placeholders."""
    response_token_ids: tuple[int, ...]
    """The answer without the stop token."""
    stop_token_id: int | None
    """The token that ended the answer; None if its length or a stop text ended it."""
    logprobs: tuple[float, ...] | None
    """Log-probability of each token of the answer, under the temperature, top-k and top-p."""
    stop_token_logprob: float | None
    """Log-probability of the stop token; None if it was forced, not sampled."""
    finish_reason: FinishReason
    forced_positions: tuple[int, ...]
    """Positions in the answer that the repeat guard set: only the stop token's, `len(response)`."""
    weight_version: int
    """Version of the weights that sampled the answer."""
    actor: str
    """Name of the actor whose engine sampled it."""
    attempt: int
    """Number of tries before this one: 0 for the first. A server that failed counts `TRIES`."""
    seed: int
    generate_s: float
    """Seconds from `started_s` to the end of this answer."""
    started_s: float = 0.0
    """Unix time when the engine received its part of the round with this request."""


@dataclass(frozen=True, slots=True)
class WeightOffer:
    """The message with which the learner begins a weight sync at the engines.

    The canary is a test prompt whose log-probabilities are compared after the sync.

    Example: `WeightOffer(version=3, transport="rollmatch_gloo", terms=FullOffer(...),
    canary=CanaryProbe(...))`.
    """

    version: int
    transport: str
    """How the weights are sent: nccl, ipc, rollmatch_gloo or inproc; adapter: in the offer."""
    terms: FullOffer | AdapterOffer
    canary: CanaryProbe

    @property
    def sends_adapter(self) -> bool:
        """Return whether an adapter is sent instead of full weights."""
        return isinstance(self.terms, AdapterOffer)

    def for_group(self, index: int) -> WeightOffer:
        """Return the offer as one engine receives it, with only process group number `index`."""
        if isinstance(self.terms, AdapterOffer):
            return self
        return replace(self, terms=replace(self.terms, groups=(self.terms.groups[index],)))


@dataclass(frozen=True, slots=True)
class SyncReport:
    """The result of a weight sync whose weights were verified: version, bytes, times, differences.

    Example: `SyncReport(3, 8_000_000, {"pause": 0.1, "wire": 0.5, "load": 0.2}, 2e-5)`.
    """

    version: int
    bytes: int
    phase_s: Mapping[str, float]
    """Seconds of each phase (pause, wire, load, verify, canary, ...), in the slowest engine."""
    canary_max_abs: float
    """Largest difference of a canary log-probability between learner and engines, in nats."""
    mode: Literal["full", "adapter"] = "full"
    fell_back: str | None = None
    """Why the adapter sync before this full sync failed; None: there was no such failure."""
    adapter_effect: float | None = None
    """Effect of the adapter in an engine divided by its effect in the learner.

    It is the value of the engine that is farthest from 1. None: full weights were sent, or the
    effect is too small to measure (`shared.weight_sync.canary`).
    """
    canary_mean_abs: float = 0.0
    """Mean difference of a canary log-probability, in the engine that differs most, in nats."""
    canary_noise: Differences | None = None
    """Mean and largest difference at weight version 0, where only rounding can differ.

    None if they were not measured.
    """
    ports: tuple[int, ...] = ()
    """Ports of the process groups that carried full weights, in the order of servers."""

    @classmethod
    def of_slowest(cls, reports: Sequence[SyncReport]) -> SyncReport:
        """Merge the reports of several engines on one sync into one.

        For each phase of the sync it has the slowest engine's time.
        """
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
        """Seconds of all phases in the engines, without the learner's phases (`send_...`).

        The learner's phases run at the same time.
        """
        phases = self.phase_s.items()
        return sum(seconds for phase, seconds in phases if not phase.startswith("send_"))

    @property
    def wire_gb_per_s(self) -> float | None:
        """Rate at which the slowest engine received the weights, in 1e9 bytes/s.

        None if the sync has no phase `wire` (engines receive weights).
        """
        return self.bytes / self.phase_s["wire"] / 1e9 if "wire" in self.phase_s else None

    def metrics(self) -> dict[str, float | str]:
        """Return the report as metrics of the step, by their names in `shared.metrics`.

        Values that are None are left out.
        """
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
