"""What endpoints say to a prompt that is too long, and to a call that is wrong in another way. (The
real ones: `test_endpoints.py`.)
"""

from __future__ import annotations

import openai
import pytest
from scripted_client import status_error

from rollout_actors.environments.clients.openai import is_overlong

NO_ROOM = "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"
OVERLONG = [
    # vLLM 0.32: `renderers/params.py`, `entrypoints/serve/utils/api_utils.py`,
    # `v1/engine/input_processor.py`.
    (
        "This model's maximum context length is 64 tokens. However, your prompt contains at least"
        " 65 input tokens, which exceeds this limit even without any output tokens. Please reduce"
        " the length of the input prompt. (parameter=input_tokens, value=65)"
    ),
    (
        "This model's maximum context length is 64 tokens. However, your prompt contains 99"
        " characters (more than 64 characters, which is the upper bound for 64 input tokens)."
        " Please reduce the length of the input prompt. (parameter=input_text, value=99)"
    ),
    "Input length (99) exceeds model's maximum context length (64).",
    (
        "The decoder prompt (length 99) is longer than the maximum model length of 64. Make sure"
        " that `max_model_len` is no smaller than the number of tokens."
    ),
    NO_ROOM,
    # OpenAI's, without its code.
    (
        "This model's maximum context length is 8192 tokens. However, your messages resulted in"
        " 9001 tokens. Please reduce the length of the messages."
    ),
]
OTHERS = [
    (
        "max_tokens=9999 cannot be greater than max_model_len=64. Please request fewer output"
        " tokens. (parameter=max_tokens, value=9999)"
    ),
    "temperature must be non-negative, got -1.0.",
]


def refusal(message: str, code: str | None = None) -> openai.BadRequestError:
    error = status_error(400, message, code)
    assert isinstance(error, openai.BadRequestError)
    return error


@pytest.mark.parametrize("message", OVERLONG)
def test_a_prompt_that_is_too_long_is_known_by_what_is_said(message: str) -> None:
    assert is_overlong(refusal(message), {"max_tokens": 4})


def test_a_prompt_that_is_too_long_is_known_by_its_code() -> None:
    assert is_overlong(refusal("No.", "context_length_exceeded"), {})


@pytest.mark.parametrize("message", OTHERS)
def test_a_call_that_is_wrong_in_another_way_is_no_prompt_that_is_too_long(message: str) -> None:
    assert not is_overlong(refusal(message), {})


@pytest.mark.parametrize(
    "message",
    [
        (
            "This model's maximum context length is 4096 tokens. However, you requested 9010 tokens"
            " (10 in the messages, 9000 in the completion)."
        ),
        (
            "'max_tokens' or 'max_completion_tokens' is too large: 9000. This model's maximum"
            " context length is 4096 tokens and your request has 10 input tokens."
        ),
    ],
)
def test_a_call_that_asks_for_more_tokens_than_the_context_has_is_wrong_for_every_prompt(
    message: str,
) -> None:
    assert not is_overlong(refusal(message, "context_length_exceeded"), {"max_tokens": 9000})
    assert is_overlong(refusal(message), {"max_tokens": 4000}), (
        "of that many there may be room behind another prompt"
    )


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_call_that_asks_for_no_tokens_is_no_prompt_that_is_too_long(name: str) -> None:
    assert not is_overlong(refusal(NO_ROOM), {name: 0})
