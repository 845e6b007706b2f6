"""An engine's answer to one request, and its conversion to a rollout, for every backend."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from shared.rollouts import DecodeSettings, FinishReason, Rollout, RolloutRequest
from shared.tokens.repeat_guard import RepeatRule, mark_forced


@dataclass(frozen=True, slots=True)
class StartTime:
    """The time when an engine received its requests of a round, by two clocks."""

    unix_s: float
    counter_s: float
    """The same time by `time.perf_counter`."""

    @classmethod
    def now(cls) -> StartTime:
        return cls(time.time(), time.perf_counter())


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The facts that all rollouts of one call of an engine have in common."""

    actor: str
    version: int
    """Weight version that samples the rollouts."""
    rule: RepeatRule | None
    """The rule by which the engine ends repeating answers; None: the engine ends none."""
    started: StartTime


@dataclass(frozen=True, slots=True)
class Completion:
    """An engine's answer to one request, before it becomes a `Rollout`.

    Example: `Completion((1, 2, 2), (5, 6, 9), (-0.1, -0.2, -0.3), FinishReason.STOP)` is the
    response 5, 6 with the stop token 9.
    """

    prompt_token_ids: tuple[int, ...]
    """Prompt as the engine used it, with expanded image placeholders."""
    token_ids: Sequence[int]
    """Generated tokens, including the stop token if there is one."""
    logprobs: Sequence[float] | None
    """One log-probability per token of `token_ids`; None: they were not requested."""
    finish_reason: FinishReason
    """STOP: the last token is a stop token (sampled, or forced by the repeat guard), or the text
    ends with a stop text (`DecodeSettings.stop`)."""

    @classmethod
    def up_to_stop(
        cls,
        prompt_token_ids: tuple[int, ...],
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        decode: DecodeSettings,
    ) -> Completion:
        """Build the answer of an engine that gives no finish reason (`hf`, beam search).

        The answer is cut after its first stop token.
        """
        kept = cut_behind_stop(token_ids, decode)
        stopped = bool(kept) and kept[-1] in decode.stop_token_ids
        return cls(
            prompt_token_ids,
            kept,
            logprobs[: len(kept)] if decode.return_logprobs else None,
            FinishReason.STOP if stopped else FinishReason.LENGTH,
        )

    def rollout(self, request: RolloutRequest, origin: EngineInfo, end_s: float) -> Rollout:
        """Convert this answer to a rollout. `end_s` is the end of decoding, by `time.perf_counter`.

        Raises RolloutError if the repeat guard should have ended the response and did not.
        """
        stopped = self.finish_reason is FinishReason.STOP
        if stopped and request.decode.stop:  # a stop text remains in the response
            stopped = self.token_ids[-1] in request.decode.stop_token_ids
        # The response does not contain the stop token: a rollout has a separate field for it.
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
            # By perf_counter, which clock changes do not affect; `started_s` is for the timeline.
            generate_s=end_s - origin.started.counter_s,
            started_s=origin.started.unix_s,
        )
        # Without stop tokens the guard has nothing to force.
        if origin.rule is None or not request.decode.stop_token_ids:
            return rollout
        return mark_forced(rollout, origin.rule)


def cut_behind_stop(token_ids: Sequence[int], decode: DecodeSettings) -> list[int]:
    """Return the tokens up to the first stop token, including it."""
    for index, token_id in enumerate(token_ids):
        if token_id in decode.stop_token_ids:
            return list(token_ids[: index + 1])
    return list(token_ids)
