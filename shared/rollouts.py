"""What is asked of a rollout engine, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from shared.records import ImageRef
from shared.weight_sync.canary import CanaryProbe, Differences
from shared.weight_sync.offer import AdapterOffer, FullOffer

MAX_TEMPERATURE = 2.0
"""vLLM takes no higher one."""
REPETITION_PENALTIES = (0.01, 100.0)
"""Beyond these a logit that is divided or multiplied by it may be no number any more, and nothing
says so.
"""


class DecodeMode(StrEnum):
    GREEDY = "greedy"
    SAMPLE = "sample"
    BEAM = "beam"


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """How one response is decoded; the same for every request of a step."""

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
    """Never sampled (vision placeholders); the learner masks the same ids when it compares
    log-probabilities.
    """
    return_logprobs: bool


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    step: int
    """From 0, as seeds count; people and files count from 1."""
    position: int
    """The request's place in the step over all learner ranks: 0 .. rollouts_per_step - 1."""
    sample_id: str
    prompt_token_ids: tuple[int, ...]
    """Unexpanded: one image placeholder per image; the engine expands it."""
    images: tuple[ImageRef, ...]
    """An engine gets each with `data`; on the way to it the bytes are objects of their own
    (`shared.sent_requests`).
    """
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
"""Of one server; whoever has another server asks that one next (DESIGN 5, decision 14)."""


@dataclass(frozen=True, slots=True)
class Rollout:
    step: int
    position: int
    sample_id: str
    prompt_token_ids: tuple[int, ...]
    """As the engine used them: image placeholders expanded."""
    response_token_ids: tuple[int, ...]
    """Without the stop token."""
    stop_token_id: int | None
    logprobs: tuple[float, ...] | None
    """One per response token, under temperature, top-k and top-p as sampled."""
    stop_token_logprob: float | None
    """None where it was forced: nothing was sampled."""
    finish_reason: FinishReason
    forced_positions: tuple[int, ...]
    """Response positions set by the repeat guard, not sampled. It forces the stop token alone,
    whose position is `len(response_token_ids)`.
    """
    weight_version: int
    actor: str
    attempt: int
    """0 for the first try; each server before this one counts for `TRIES`."""
    seed: int
    generate_s: float
    """Seconds from the share's arrival at the engine to this response's own end; beams that are
    searched together end together.
    """
    started_s: float = 0.0
    """Unix time at which the share arrived at the engine."""


@dataclass(frozen=True, slots=True)
class WeightOffer:
    """The learner's invitation to one sync: what will come, over which transport, and its proof."""

    version: int
    transport: str
    """nccl, ipc, rollmatch_gloo or inproc; adapter: the weights are in the offer."""
    terms: FullOffer | AdapterOffer
    canary: CanaryProbe

    @property
    def sends_adapter(self) -> bool:
        """Whether an adapter is sent rather than full weights."""
        return isinstance(self.terms, AdapterOffer)

    def for_group(self, index: int) -> WeightOffer:
        """Return the same sync as the receivers of one process group are told of it."""
        if isinstance(self.terms, AdapterOffer):
            return self
        return replace(self, terms=replace(self.terms, groups=(self.terms.groups[index],)))


@dataclass(frozen=True, slots=True)
class SyncReport:
    """One verified sync. `phase_s` maps a phase (pause, wire, load, verify, canary, ...) to the
    slowest engine's seconds.
    """

    version: int
    bytes: int
    phase_s: Mapping[str, float]
    canary_max_abs: float
    """Largest absolute difference of a canary log-probability between the learner and any engine.
    """
    mode: Literal["full", "adapter"] = "full"
    """What was sent."""
    fell_back: str | None = None
    """Why a sync of the adapter failed before this one, which, like all that follow it, sent full
    weights; None: none failed.
    """
    adapter_effect: float | None = None
    """Of an adapter: the engine's effect of it over the learner's (`shared.weight_sync.canary`), of
    the engine that is farthest from 1. None: full weights, or too small an effect to tell."""
    canary_mean_abs: float = 0.0
    """Mean absolute difference of a canary log-probability, of the engine that is farthest away."""
    canary_noise: Differences | None = None
    """What rounding alone made of the same at version 0, where that was measured in this sync."""

    @classmethod
    def of_slowest(cls, reports: Sequence[SyncReport]) -> SyncReport:
        """One sync as several engines report it: each phase is the slowest one's, the bytes are
        those that one of them took.
        """
        phases = {
            phase: max(report.phase_s[phase] for report in reports) for phase in reports[0].phase_s
        }
        noises = [report.canary_noise for report in reports if report.canary_noise is not None]
        effects = [report.adapter_effect for report in reports if report.adapter_effect is not None]
        return cls(
            reports[0].version,
            reports[0].bytes,
            phases,
            max(report.canary_max_abs for report in reports),
            mode=reports[0].mode,
            adapter_effect=(
                max(effects, key=lambda effect: abs(effect - 1))
                if len(effects) == len(reports)
                else None
            ),
            canary_mean_abs=max(report.canary_mean_abs for report in reports),
            canary_noise=Differences.worst(noises) if noises else None,
        )

    @property
    def total_s(self) -> float:
        """Of the engines' phases; the sender's (`send_...`) run beside them."""
        return sum(
            seconds for phase, seconds in self.phase_s.items() if not phase.startswith("send_")
        )

    @property
    def wire_gb_per_s(self) -> float | None:
        """What one engine received per second of the slowest one's wire phase, in 1e9 bytes; None
        where nothing went over a wire.
        """
        return self.bytes / self.phase_s["wire"] / 1e9 if "wire" in self.phase_s else None

    def metrics(self) -> dict[str, float | str]:
        """As `shared.metrics` names them; what there is none of is absent."""
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
