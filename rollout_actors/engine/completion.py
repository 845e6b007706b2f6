"""What a backend has generated for one request, and how it becomes a rollout: the same for every
backend.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from shared.rollouts import DecodeSettings, FinishReason, Rollout, RolloutRequest
from shared.tokens.repeat_guard import RepeatRule, mark_forced


@dataclass(frozen=True, slots=True)
class StartTime:
    """When a share arrived at its engine, by both clocks."""

    unix_s: float
    counter_s: float
    """By `time.perf_counter`."""

    @classmethod
    def now(cls) -> StartTime:
        return cls(time.time(), time.perf_counter())


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the rollouts of one share have in common."""

    actor: str
    version: int
    """Of the weights."""
    rule: RepeatRule | None
    """The repeat guard's; None: the engine has none."""
    started: StartTime


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine said to one request."""

    prompt_token_ids: tuple[int, ...]
    """As the engine used them: image placeholders expanded."""
    token_ids: Sequence[int]
    """As generated."""
    logprobs: Sequence[float] | None
    """One per token of `token_ids`; None: not asked for."""
    finish_reason: FinishReason
    """STOP: the last token is the stop token. A stop token that the repeat guard has forced is told
    apart later.
    """

    @classmethod
    def up_to_stop(
        cls,
        prompt_token_ids: tuple[int, ...],
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        decode: DecodeSettings,
    ) -> Completion:
        """From an engine that does not say why a response ended: at its first stop token, else at
        its limit. What follows that token is dropped.
        """
        kept = cut_behind_stop(token_ids, decode)
        stopped = bool(kept) and kept[-1] in decode.stop_token_ids
        logprobs_asked_for = logprobs[: len(kept)] if decode.return_logprobs else None
        return cls(
            prompt_token_ids,
            kept,
            logprobs_asked_for,
            FinishReason.STOP if stopped else FinishReason.LENGTH,
        )

    def rollout(self, request: RolloutRequest, origin: EngineInfo, end_s: float) -> Rollout:
        """`end_s` is the response's own end, by `time.perf_counter`. Raises RolloutError where the
        guard should have ended the response and did not.
        """
        stopped = self.finish_reason is FinishReason.STOP
        end = len(self.token_ids) - stopped
        rollout = Rollout(
            step=request.step,
            position=request.position,
            sample_id=request.sample_id,
            prompt_token_ids=self.prompt_token_ids,
            response_token_ids=tuple(self.token_ids[:end]),
            stop_token_id=self.token_ids[-1] if stopped else None,
            logprobs=None if self.logprobs is None else tuple(self.logprobs[:end]),
            stop_token_logprob=self.logprobs[-1] if stopped and self.logprobs is not None else None,
            finish_reason=self.finish_reason,
            forced_positions=(),
            weight_version=origin.version,
            actor=origin.actor,
            attempt=0,
            seed=request.seed,
            generate_s=end_s - origin.started.counter_s,
            started_s=origin.started.unix_s,
        )
        # Without a stop token there was nothing to force.
        return (
            mark_forced(rollout, origin.rule)
            if origin.rule is not None and request.decode.stop_token_ids
            else rollout
        )


def cut_behind_stop(token_ids: Sequence[int], decode: DecodeSettings) -> list[int]:
    """The tokens up to the first stop token, which is kept; all of them where there is none."""
    end = next(
        (
            number
            for number, token_id in enumerate(token_ids, 1)
            if token_id in decode.stop_token_ids
        ),
        len(token_ids),
    )
    return list(token_ids[:end])
