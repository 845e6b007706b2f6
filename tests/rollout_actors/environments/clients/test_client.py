"""The limit of new tokens, which an endpoint may take under one of its two names alone."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from rollout_actors.environments.clients.openai import ask

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
