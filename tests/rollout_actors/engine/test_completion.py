"""One reading of how a response ended, for every backend."""

from __future__ import annotations

from dataclasses import replace

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
    stop_token_ids=(STOP, 8),
    banned_token_ids=(4, 5),
    return_logprobs=True,
)
REQUEST = RolloutRequest(3, 7, "a", (1, 2), (), DECODE, seed=11)
RULE = RepeatRule(RepeatGuardSettings(0, 3, 5, 2, None))
LOGPROBS = (-0.1, -0.2, -0.3, -0.4, -0.5)


def rollout(
    answer: Completion, *, rule: RepeatRule | None = None, request: RolloutRequest = REQUEST
) -> Rollout:
    return answer.rollout(
        request, EngineInfo("a-0", 2, rule, StartTime(unix_s=100.0, counter_s=7.0)), 7.5
    )


def test_the_stop_token_is_kept_apart_with_its_log_probability() -> None:
    said = rollout(Completion((1, 2, 2), (5, 6, STOP), LOGPROBS[:3], FinishReason.STOP))
    assert said == Rollout(
        3,
        7,
        "a",
        (1, 2, 2),
        (5, 6),
        STOP,
        (-0.1, -0.2),
        -0.3,
        FinishReason.STOP,
        (),
        2,
        "a-0",
        0,
        11,
        0.5,
        100.0,
    )


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.REPETITION])
def test_a_response_that_ended_otherwise_is_kept_whole(reason: FinishReason) -> None:
    said = rollout(Completion((1,), (5, STOP), LOGPROBS[:2], reason))
    assert (
        said.response_token_ids,
        said.stop_token_id,
        said.logprobs,
        said.stop_token_logprob,
    ) == ((5, STOP), None, (-0.1, -0.2), None)
    assert said.finish_reason is reason


def test_without_log_probabilities_there_are_none() -> None:
    said = rollout(Completion((1,), (5, STOP), None, FinishReason.STOP))
    assert (said.logprobs, said.stop_token_logprob, said.response_token_ids) == (None, None, (5,))


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
    answer = Completion.up_to_stop((1,), token_ids, LOGPROBS, DECODE)
    assert (answer.token_ids, answer.finish_reason, answer.logprobs) == (
        kept,
        reason,
        LOGPROBS[: len(kept)],
    )
    assert (
        Completion.up_to_stop(
            (1,), token_ids, LOGPROBS, replace(DECODE, return_logprobs=False)
        ).logprobs
        is None
    )
    assert (
        Completion.up_to_stop(
            (1,), token_ids, LOGPROBS, replace(DECODE, stop_token_ids=())
        ).token_ids
        == token_ids
    )


def test_a_stop_token_behind_a_repetition_was_forced_and_has_no_log_probability() -> None:
    said = rollout(Completion((1,), (5, 5, 5, STOP), LOGPROBS[:4], FinishReason.STOP), rule=RULE)
    assert (said.finish_reason, said.forced_positions, said.stop_token_logprob) == (
        FinishReason.REPETITION,
        (3,),
        None,
    )
    assert said.logprobs == LOGPROBS[:3]


def test_a_repetition_that_went_on_was_not_guarded() -> None:
    endless = Completion((1,), (5, 5, 5, 5), LOGPROBS[:4], FinishReason.LENGTH)
    with pytest.raises(RolloutError, match="was not active"):
        rollout(endless, rule=RULE)
    free = replace(REQUEST, decode=replace(DECODE, stop_token_ids=()))
    assert rollout(endless, rule=RULE, request=free).response_token_ids == (5, 5, 5, 5), (
        "without a stop token there is nothing to force"
    )
    assert rollout(endless).response_token_ids == (5, 5, 5, 5), "no guard was configured"


@pytest.mark.parametrize("said", ["abort", "error", None])
def test_a_request_that_vllm_gave_up_is_no_rollout(said: str | None) -> None:
    with pytest.raises(
        RolloutError,
        match=f"generate on a-0: sample a was ended with {said!r}, and half an answer is none",
    ):
        finish_reason(said, REQUEST, "a-0")


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
