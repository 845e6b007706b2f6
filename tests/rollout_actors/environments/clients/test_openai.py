"""Calls of endpoints: the two names of the limit of new tokens, and what an endpoint says to a
prompt that is too long. (Real endpoints: `test_endpoints.py`.)
"""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import openai
import pytest
from scripted_client import Answer, Call, chat_response, status_error

from rollout_actors.environments.clients import openai as client_module
from rollout_actors.environments.clients.openai import OVERLONG as OVERLONG_ID
from rollout_actors.environments.clients.openai import ask, is_overlong, retry_after_s

NAMES = {"max_tokens", "max_completion_tokens"}


class Endpoint:
    """Answers with these statuses and bodies in turn, or by a function of the request's body; then
    with "yes".
    """

    def __init__(self, *answers: httpx.Response, script: Any = None) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._answers = list(answers)
        self._script = script
        self.client = openai.AsyncOpenAI(
            api_key="none",
            base_url="http://scripted/v1",
            max_retries=0,
            http_client=httpx.AsyncClient(transport=httpx.MockTransport(self._answer)),
        )

    def _answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.bodies.append(body)
        scripted = self._answers.pop(0) if self._answers else self._script and self._script(body)
        answer = chat_response(Call(0, "m", [], {}), Answer("yes"))
        return scripted or httpx.Response(200, json=answer.model_dump())

    def ask(self, *prompts: Any, **sampling_args: Any) -> Any:
        async def asked() -> Any:
            for prompt in prompts or ([],):
                answer = await ask(
                    self.client,
                    "m",
                    prompt,
                    message_type="chat",
                    tools=None,
                    sampling_args=sampling_args,
                )
            return answer

        return asyncio.run(asked())


def refused(message: str) -> httpx.Response:
    return httpx.Response(400, json={"error": {"message": message}})


def taking(name: str | None) -> Endpoint:
    """Make an endpoint that takes the limit under one name, and says so as OpenAI does."""

    def script(body: dict[str, Any]) -> httpx.Response | None:
        (sent,) = NAMES & set(body)
        (other,) = NAMES - {sent}
        problem = (
            f"Unsupported parameter: '{sent}' is not supported with this model. Use '{other}'"
            " instead."
        )
        return None if sent == name else refused(problem)

    return Endpoint(script=script)


@pytest.mark.parametrize(
    ("sent", "taken"),
    [("max_tokens", "max_completion_tokens"), ("max_completion_tokens", "max_tokens")],
)
def test_an_endpoint_that_wants_the_limit_under_its_other_name_is_sent_that_one_and_is_refused_it_once(
    sent, taken
):
    endpoint = taking(taken)
    endpoint.ask([], [], temperature=0.5, **{sent: 7})
    limits = [{name: body[name] for name in NAMES & set(body)} for body in endpoint.bodies]
    assert limits == [{sent: 7}, {taken: 7}, {taken: 7}]
    assert all(body["temperature"] == 0.5 for body in endpoint.bodies)


def test_an_endpoint_that_refuses_both_names_is_asked_twice_and_its_refusal_is_raised():
    endpoint = taking(None)
    with pytest.raises(openai.BadRequestError, match="'max_completion_tokens' is not supported"):
        endpoint.ask(max_tokens=7)
    assert len(endpoint.bodies) == 2


# Prompts that are too long

NO_ROOM = "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"
OVERLONG = [
    # vLLM 0.32: `renderers/params.py`, `entrypoints/serve/utils/api_utils.py`,
    # `v1/engine/input_processor.py`.
    "This model's maximum context length is 64 tokens. However, your prompt contains at least 65",
    "This model's maximum context length is 64 tokens. However, your prompt contains 99 characters",
    "Input length (99) exceeds model's maximum context length (64).",
    "The decoder prompt (length 99) is longer than the maximum model length of 64. Make sure that",
    NO_ROOM,
    # OpenAI's, without its code.
    "This model's maximum context length is 8192 tokens. However, your messages resulted in 9001",
]
OTHERS = [
    "max_tokens=9999 cannot be greater than max_model_len=64. Please request fewer output tokens.",
    "temperature must be non-negative, got -1.0.",
]
TOO_MANY_NEW_TOKENS = [
    (
        "This model's maximum context length is 4096 tokens. However, you requested 9010 tokens"
        " (10 in the messages, 9000 in the completion)."
    ),
    (
        "'max_tokens' or 'max_completion_tokens' is too large: 9000. This model's maximum context"
        " length is 4096 tokens and your request has 10 input tokens."
    ),
]


def refusal(message: str, code: str | None = None) -> openai.BadRequestError:
    error = status_error(400, message, code)
    assert isinstance(error, openai.BadRequestError)
    return error


@pytest.mark.parametrize(
    ("message", "code"),
    [*((message, None) for message in OVERLONG), ("No.", "context_length_exceeded")],
)
def test_a_prompt_that_is_too_long_is_known_by_what_is_said_or_by_its_code(message, code):
    assert is_overlong(refusal(message, code), {"max_tokens": 4})


@pytest.mark.parametrize(
    ("message", "sampling_args"),
    [
        *((message, {}) for message in OTHERS),
        *((NO_ROOM, {name: 0}) for name in sorted(NAMES)),
    ],
)
def test_a_call_that_is_wrong_in_another_way_is_no_prompt_that_is_too_long(message, sampling_args):
    assert not is_overlong(refusal(message), sampling_args)


@pytest.mark.parametrize("message", TOO_MANY_NEW_TOKENS)
def test_a_call_that_asks_for_more_tokens_than_the_context_has_is_wrong_for_every_prompt(message):
    assert not is_overlong(refusal(message, "context_length_exceeded"), {"max_tokens": 9000})
    assert is_overlong(refusal(message), {"max_tokens": 4000}), (
        "of that many there may be room behind another prompt"
    )


ROOM = [
    (
        "This model's maximum context length is 100 tokens. However, you requested 80 output tokens"
        " and your prompt contains at least 30 input tokens, for a total of at least 110 tokens."
    ),
    (
        "This model's maximum context length is 100 tokens. However, you requested 110 tokens (30 in"
        " the messages, 80 in the completion). Please reduce the length of the messages."
    ),
    (
        "'max_tokens' or 'max_completion_tokens' is too large: 80. This model's maximum context"
        " length is 100 tokens and your request has 30 input tokens (80 > 100 - 30)."
    ),
    (
        "You passed 30 input tokens and requested 80 output tokens. However, the model's context"
        " length is only 100 tokens, resulting in a maximum input length of 20 tokens."
    ),
]


@pytest.mark.parametrize("message", ROOM)
def test_a_prompt_that_leaves_less_room_than_was_asked_for_gets_the_room_that_is_left(message):
    endpoint = Endpoint(refused(message))
    answer = endpoint.ask(max_tokens=80)
    assert [body["max_tokens"] for body in endpoint.bodies] == [80, 70]
    assert answer.choices[0].message.content == "yes"


def test_a_prompt_is_overlong_if_no_room_is_left_or_the_room_was_refused_too():
    full = ROOM[0].replace("30 input", "100 input")
    for refusals in ([full], [ROOM[0], ROOM[0]]):
        endpoint = Endpoint(*map(refused, refusals))
        assert endpoint.ask(max_tokens=80).id == OVERLONG_ID
        assert len(endpoint.bodies) == len(refusals)


def test_reasoning_is_sent_back_until_an_endpoint_refuses_it():
    said = {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}
    endpoint = Endpoint()
    endpoint.ask([said])
    assert endpoint.bodies[0]["messages"] == [said]
    endpoint = Endpoint(refused("reasoning_content is not permitted in input messages"))
    endpoint.ask([said], [said])
    bare = {"role": "assistant", "content": "4"}
    assert [body["messages"] for body in endpoint.bodies] == [[said], [bare], [bare]]


def test_an_endpoint_that_says_when_to_come_back_is_not_asked_before(monkeypatch):
    slept = []
    here, real_sleep = threading.current_thread(), asyncio.sleep

    async def sleep(seconds: float) -> None:
        if threading.current_thread() is not here:  # a server of another test
            await real_sleep(seconds)
            return
        slept.append(seconds)

    monkeypatch.setattr(client_module.asyncio, "sleep", sleep)
    busy = {"error": {"message": "busy"}}
    endpoint = Endpoint(
        httpx.Response(429, json=busy, headers={"Retry-After": "7"}), httpx.Response(503, json=busy)
    )
    endpoint.ask()
    assert slept == [7.0, 1.0]


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("12", 12),
        ("0.25", 0.25),
        ("Fri, 01 Jan 2100 00:00:00 GMT", 600),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0),
        ("-3", 0),
        ("1e9", 600),
        ("nan", 0),
        ("soon", 0),
        ("", 0),
    ],
)
def test_retry_after_is_seconds_or_a_date_within_bounds(written, seconds):
    headers = {"Retry-After": written}
    response = httpx.Response(429, headers=headers, request=httpx.Request("POST", "http://x"))
    error = openai.RateLimitError("busy", response=response, body=None)
    assert retry_after_s(error) == seconds
    assert retry_after_s(ConnectionError()) == 0
