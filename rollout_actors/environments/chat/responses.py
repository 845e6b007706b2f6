"""Extraction of the model's message and its tokens from a response of the OpenAI API.

The tokens are the engine's own; nothing is tokenised again.
"""

from __future__ import annotations

from typing import Any

from openai.types import Completion
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

from rollout_actors.environments.clients.openai import REASONING
from rollout_actors.environments.types import (
    Arguments,
    JsonObject,
    Message,
    Messages,
    ModelResponse,
    TrajectoryStepTokens,
)

TOKEN_ID = "token_id:"
"""Prefix of a token that vLLM returns as its id, if `return_tokens_as_token_ids` is set."""

SENT_IMAGES = "image_sha256"
"""Field in responses of the run's own engines: hashes of the prompt's images, in order."""

RETURNS_TOKENS: Arguments = {
    "logprobs": True,
    "extra_body": {"return_token_ids": True, "return_tokens_as_token_ids": True},
}
"""Sampling arguments that make vLLM return token ids and log-probabilities in chat responses."""


def is_cut(response: object) -> bool:
    """Return whether the answer in a response was cut: at `max_tokens`, or at the context's end.

    Environments may store any object as a response. Without `choices` it counts as not cut.
    """
    for choice in getattr(response, "choices", None) or ():
        if getattr(choice, "finish_reason", None) == "length":
            return True
    return False


async def parse_response_messages(response: ModelResponse, message_type: str) -> Messages:
    """Return the model's answer in a response: a list of one assistant message, or a text.

    `message_type`: `chat` for a message, `completion` for a text.

    Raises:
        ValueError: the response has no choices, as from gateways whose backend fails.
    """
    if not response.choices:
        reason = _fields(response).get("error") or "nothing else"
        raise ValueError(
            f"the endpoint's response has no choices, and says {reason}; check that the model is"
            " served, and read the endpoint's log"
        )
    if message_type == "completion":
        assert isinstance(response, Completion), type(response)
        return response.choices[0].text or ""
    assert isinstance(response, ChatCompletion), type(response)
    choice = response.choices[0]
    message: Message = {"role": "assistant", "content": choice.message.content}
    # Kept under the endpoint's field name, which the endpoint also expects back.
    fields = _fields(choice.message)
    for name in REASONING:
        if reasoning := fields.get(name):
            message[name] = reasoning
    if choice.message.tool_calls:
        message["tool_calls"] = [
            call.model_dump(exclude_none=True) for call in choice.message.tool_calls
        ]
    elif message["content"] is None:
        message["content"] = ""
    return [message]


async def parse_response_tokens(response: Any, message_type: str) -> TrajectoryStepTokens | None:
    """Return the tokens in a response that the engine read and sampled, with log-probabilities.

    Return None if the response lacks some of them. `message_type`: `chat` or `completion`, which
    have them in different fields.

    Raises:
        ValueError: the numbers of sampled tokens and log-probabilities differ, so that the tokens
            cannot be trained.
    """
    if not response.choices:
        return None
    choice = response.choices[0]
    fields = _fields(choice)
    completion_ids = fields.get("token_ids")
    names: list[str] | None = None
    if message_type == "completion":
        assert isinstance(response, Completion), type(response)
        prompt_ids = fields.get("prompt_token_ids")
        logprobs = choice.logprobs and choice.logprobs.token_logprobs
        names = choice.logprobs and choice.logprobs.tokens
    else:
        assert isinstance(response, ChatCompletion), type(response)
        prompt_ids = _fields(response).get("prompt_token_ids")
        # Our own engines return a list; other endpoints return an object for each token.
        logprobs = fields.get("token_logprobs")
        content = choice.logprobs and choice.logprobs.content
        if logprobs is None and content is not None:
            logprobs = [one.logprob for one in content]
            names = None if completion_ids is not None else [one.token for one in content]
    if completion_ids is None and names and all(name.startswith(TOKEN_ID) for name in names):
        completion_ids = [int(name.removeprefix(TOKEN_ID)) for name in names]
    if prompt_ids is None or completion_ids is None or logprobs is None or None in logprobs:
        return None
    if len(completion_ids) != len(logprobs):
        raise ValueError(
            f"the endpoint returned {len(completion_ids)} token ids with {len(logprobs)}"
            " log-probabilities; both numbers must be equal"
        )
    return {
        "prompt_ids": list(prompt_ids),
        "prompt_mask": [0] * len(prompt_ids),
        "completion_ids": list(completion_ids),
        "completion_mask": [1] * len(completion_ids),
        "completion_logprobs": list(logprobs),
    }


def _fields(model: BaseModel) -> JsonObject:
    """Return OpenAI's fields of an object and those that vLLM or another endpoint adds.

    pydantic's `__getattr__` finds the same fields, but is slow if a field is missing.
    """
    extra = model.__pydantic_extra__
    return {**vars(model), **extra} if extra else vars(model)
