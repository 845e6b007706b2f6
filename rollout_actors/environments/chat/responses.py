"""From an answer of the OpenAI API to messages and tokens (spec: trajectories, token extraction).
Nothing is tokenised here, or ever again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openai.types import Completion
from openai.types.chat import ChatCompletion

from rollout_actors.environments.types import Messages, TrajectoryStepTokens

TOKEN_ID = "token_id:"
"""How vLLM writes a token in place of its text, when asked for `return_tokens_as_token_ids`."""

RETURNS_TOKENS: dict[str, Any] = {
    "logprobs": True,
    "extra_body": {"return_token_ids": True, "return_tokens_as_token_ids": True},
}
"""Sampling arguments with which vLLM answers a chat with what `parse_response_tokens` reads."""


async def parse_response_messages(response: Any, message_type: str) -> Messages:
    """What the model said: one assistant message, or the text of a completion.

    Raises ValueError where the endpoint answered without either, as gateways do when what is behind
    them fails.
    """
    if not response.choices:
        said = _extra(response, "error") or "nothing else"
        raise ValueError(
            f"the endpoint's answer has no choices, and says {said}; look whether the model is"
            " served, and into the endpoint's log"
        )
    choice = response.choices[0]
    if message_type == "completion":
        assert isinstance(response, Completion), type(response)
        return choice.text or ""
    assert isinstance(response, ChatCompletion), type(response)
    message: dict[str, Any] = {"role": "assistant", "content": choice.message.content}
    if choice.message.tool_calls:
        message["tool_calls"] = [
            call.model_dump(exclude_none=True) for call in choice.message.tool_calls
        ]
    elif message["content"] is None:
        message["content"] = ""
    return [message]


async def parse_response_tokens(response: Any, message_type: str) -> TrajectoryStepTokens | None:
    """What the engine read and sampled; None where it does not say all of it.

    Raises ValueError where it contradicts itself: as many log-probabilities as sampled tokens, or
    nothing can be learned from any of them.
    """
    if not response.choices:
        return None
    choice = response.choices[0]
    completion_ids = _extra(choice, "token_ids")
    if message_type == "completion":
        assert isinstance(response, Completion), type(response)
        prompt_ids = _extra(choice, "prompt_token_ids")
        named, logprobs = (
            (None, None)
            if choice.logprobs is None
            else (choice.logprobs.tokens, choice.logprobs.token_logprobs)
        )
    else:
        assert isinstance(response, ChatCompletion), type(response)
        prompt_ids = _extra(response, "prompt_token_ids")
        named, logprobs = None, _extra(choice.logprobs, "token_logprobs")
        # Our own engines' answers have them as a list; an object for each token is what others
        # send.
        if (
            logprobs is None
            and choice.logprobs is not None
            and (content := choice.logprobs.content) is not None
        ):
            logprobs = [one.logprob for one in content]
            if completion_ids is None:
                named = [one.token for one in content]
    if completion_ids is None and named is not None:
        completion_ids = _named_ids(named)
    if prompt_ids is None or completion_ids is None or logprobs is None or None in logprobs:
        return None
    if len(completion_ids) != len(logprobs):
        raise ValueError(
            f"the endpoint returned {len(completion_ids)} token ids with {len(logprobs)}"
            " log-probabilities, which have to be as many"
        )
    return {
        "prompt_ids": list(prompt_ids),
        "prompt_mask": [0] * len(prompt_ids),
        "completion_ids": list(completion_ids),
        "completion_mask": [1] * len(completion_ids),
        "completion_logprobs": list(logprobs),
    }


def _extra(model: Any, name: str) -> Any:
    """A field that vLLM, or another endpoint, adds to OpenAI's; None: this one does not."""
    extra = getattr(model, "__pydantic_extra__", None)
    # As pydantic's `__getattr__` finds it, which takes long to say that there is none.
    return getattr(model, name, None) if extra is None else vars(model).get(name, extra.get(name))


def _named_ids(named: Sequence[str]) -> list[int] | None:
    if not all(token.startswith(TOKEN_ID) for token in named):
        return None
    return [int(token.removeprefix(TOKEN_ID)) for token in named]
