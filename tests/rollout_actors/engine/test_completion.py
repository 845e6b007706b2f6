"""One reading of how a response ended, for every backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rollout_actors.engine.completion import Completion, EngineInfo, StartTime
from rollout_actors.engine.sampling import finish_reason, sampling_fields
from shared.errors import RolloutError
from shared.rollouts import DecodeMode, DecodeSettings, FinishReason, Rollout, RolloutRequest
from shared.tokens.repeat_guard import RepeatGuardSettings, RepeatRule

STOP = 9
DECODE = DecodeSettings(
    DecodeMode.SAMPLE,
    0.7,
    0.9,
    50,
    1.1,
    8,
    1,
    (STOP, 8),
    banned_token_ids=(4, 5),
    return_logprobs=True,
)
REQUEST = RolloutRequest(3, 7, "a", (1, 2), (), DECODE, seed=11)
RULE = RepeatRule(RepeatGuardSettings(0, 3, 5, 2, None))
LOGPROBS = (-0.1, -0.2, -0.3, -0.4, -0.5)


def rollout(
    token_ids: tuple[int, ...],
    reason: FinishReason,
    rule: RepeatRule | None = None,
    logprobs: tuple[float, ...] | None = LOGPROBS,
    request: RolloutRequest = REQUEST,
) -> Rollout:
    logprobs = None if logprobs is None else logprobs[: len(token_ids)]
    info = EngineInfo("a-0", 2, rule, StartTime(unix_s=100.0, counter_s=7.0))
    return Completion((1, 2, 2), token_ids, logprobs, reason).rollout(request, info, 7.5)


END, LIMIT, REPEATED = FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION


@pytest.mark.parametrize(
    ("found", "response", "stop", "logprobs", "of_stop", "reason", "forced"),
    [
        (rollout((5, 6, STOP), END), (5, 6), STOP, (-0.1, -0.2), -0.3, END, ()),
        (rollout((5, STOP), LIMIT), (5, STOP), None, (-0.1, -0.2), None, LIMIT, ()),
        (rollout((5, STOP), REPEATED), (5, STOP), None, (-0.1, -0.2), None, REPEATED, ()),
        (rollout((5, STOP), END, logprobs=None), (5,), STOP, None, None, END, ()),
        (rollout((5, 5, 5, 9), END, RULE), (5,) * 3, 9, LOGPROBS[:3], None, REPEATED, (3,)),
    ],
    ids=[
        "the stop token is kept apart with its log-probability",
        "a response that ended at its limit is kept whole",
        "a response that an engine ended for repeating itself too",
        "without log-probabilities there are none",
        "a stop token behind a repetition was forced and has no log-probability",
    ],
)
def test_a_rollout_is_read_from_how_its_response_ended(
    found: Rollout,
    response: tuple[int, ...],
    stop: int | None,
    logprobs: tuple[float, ...] | None,
    of_stop: float | None,
    reason: FinishReason,
    forced: tuple[int, ...],
) -> None:
    of_request = (3, 7, "a", (1, 2, 2), response, stop, logprobs, of_stop, reason, forced)
    assert found == Rollout(*of_request, 2, "a-0", 0, 11, generate_s=0.5, started_s=100.0)


def test_a_repetition_that_went_on_was_not_guarded() -> None:
    endless = ((5, 5, 5, 5), FinishReason.LENGTH)
    with pytest.raises(RolloutError, match="was not active"):
        rollout(*endless, RULE)
    free = replace(REQUEST, decode=replace(DECODE, stop_token_ids=()))
    assert rollout(*endless, RULE, request=free).response_token_ids == (5, 5, 5, 5), (
        "without a stop token there is nothing to force"
    )
    assert rollout(*endless).response_token_ids == (5, 5, 5, 5), "no guard was configured"


@pytest.mark.parametrize(
    ("token_ids", "kept", "reason"),
    [
        ([5, 6, STOP, 0, 0], [5, 6, STOP], FinishReason.STOP),
        ([5, 8, STOP, 0, 0], [5, 8], FinishReason.STOP),
        ([STOP], [STOP], FinishReason.STOP),
        ([5, 6, 7], [5, 6, 7], FinishReason.LENGTH),
        ([], [], FinishReason.LENGTH),
    ],
)
def test_an_engine_that_does_not_say_why_a_response_ended_is_read_by_its_first_stop_token(
    token_ids: list[int], kept: list[int], reason: FinishReason
) -> None:
    def read(**changes: Any) -> Completion:
        return Completion.up_to_stop((1,), token_ids, LOGPROBS, replace(DECODE, **changes))

    assert read() == Completion((1,), kept, LOGPROBS[: len(kept)], reason)
    assert read(return_logprobs=False).logprobs is None
    assert read(stop_token_ids=()).token_ids == token_ids


@pytest.mark.parametrize("reason", ["abort", "error", None])
def test_a_request_that_vllm_gave_up_is_no_rollout(reason: str | None) -> None:
    with pytest.raises(
        RolloutError,
        match=f"generate on a-0: sample a: .* the reason {reason!r}; see the engine's log",
    ):
        finish_reason(reason, REQUEST, "a-0")


def test_a_stop_text_is_kept_in_the_response_and_is_no_stop_token():
    decode = replace(DECODE, stop=("</a>",))
    request = replace(REQUEST, decode=decode)
    by_text = rollout((5, 6), END, request=request)
    assert (by_text.response_token_ids, by_text.stop_token_id) == ((5, 6), None)
    assert (by_text.logprobs, by_text.stop_token_logprob) == ((-0.1, -0.2), None)
    assert by_text.finish_reason is END
    by_token = rollout((5, 6, STOP), END, request=request)
    assert (by_token.response_token_ids, by_token.stop_token_id) == ((5, 6), STOP)
    fields = sampling_fields(decode, 3)
    assert (fields["stop"], fields["include_stop_str_in_output"]) == (["</a>"], True)
    assert (fields["detokenize"], fields["skip_special_tokens"]) == (True, False)


def test_a_request_says_everything_that_a_servers_defaults_could_fill() -> None:
    assert sampling_fields(DECODE, 3) == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 50,
        "repetition_penalty": 1.1,
        "max_tokens": 8,
        "seed": 3,
        "stop_token_ids": [STOP, 8],
        "ignore_eos": True,
        "logit_bias": {4: -100.0, 5: -100.0},
        "logprobs": 0,
        "detokenize": False,
    }
    silent = sampling_fields(replace(DECODE, banned_token_ids=(), return_logprobs=False), 3)
    assert (silent["logit_bias"], silent["logprobs"]) == (None, None)
