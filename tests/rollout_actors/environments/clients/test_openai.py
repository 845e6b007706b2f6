"""Calls of endpoints: the two names of the limit of new tokens, and what an endpoint says to a
prompt that is too long. (Real endpoints: `test_endpoints.py`.)
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from scripted_client import status_error

from rollout_actors.environments.clients.openai import ask, is_overlong

ANSWER = {
    "id": "a",
    "object": "chat.completion",
    "created": 0,
    "model": "m",
    "choices": [
        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "yes"}}
    ],
}


class Strict:
    """An endpoint that takes the limit under one name."""

    def __init__(self, takes: str | None) -> None:
        self.takes, self.bodies = takes, list[dict[str, Any]]()
        self.client = openai.AsyncOpenAI(
            api_key="none",
            base_url="http://strict/v1",
            max_retries=0,
            http_client=httpx.AsyncClient(transport=httpx.MockTransport(self.answer)),
        )

    def answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.bodies.append(body)
        (sent,) = {"max_tokens", "max_completion_tokens"} & set(body)
        if sent == self.takes:
            return httpx.Response(200, json=ANSWER)
        (other,) = {"max_tokens", "max_completion_tokens"} - {sent}
        # As OpenAI says it.
        text = (
            f"Unsupported parameter: '{sent}' is not supported with this model. Use '{other}'"
            " instead."
        )
        error = {
            "message": text,
            "type": "invalid_request_error",
            "param": sent,
            "code": "unsupported_parameter",
        }
        return httpx.Response(400, json={"error": error})

    def ask(self, times: int, **sampling_args: Any) -> None:
        async def asked() -> None:
            for _ in range(times):
                await ask(
                    self.client,
                    "m",
                    [],
                    message_type="chat",
                    tools=None,
                    sampling_args=sampling_args,
                )

        asyncio.run(asked())


@pytest.mark.parametrize(
    ("sent", "taken"),
    [("max_tokens", "max_completion_tokens"), ("max_completion_tokens", "max_tokens")],
)
def test_an_endpoint_that_wants_the_limit_under_its_other_name_is_sent_that_one_and_is_refused_it_once(
    sent: str, taken: str
) -> None:
    endpoint = Strict(taken)
    endpoint.ask(2, temperature=0.5, **{sent: 7})
    limits = [
        {name: value for name, value in body.items() if name.startswith("max_")}
        for body in endpoint.bodies
    ]
    assert limits == [{sent: 7}, {taken: 7}, {taken: 7}]
    assert all(body["temperature"] == 0.5 for body in endpoint.bodies)


def test_an_endpoint_that_refuses_both_names_is_asked_twice_and_its_refusal_is_raised() -> None:
    endpoint = Strict(None)
    with pytest.raises(openai.BadRequestError, match="'max_completion_tokens' is not supported"):
        endpoint.ask(1, max_tokens=7)
    assert len(endpoint.bodies) == 2


# Prompts that are too long

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
