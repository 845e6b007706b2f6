"""Who answers an environment's calls: anything with the surface of `openai.AsyncOpenAI`."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard
from weakref import WeakKeyDictionary

import openai
from openai.types.chat import ChatCompletion

from rollout_actors.environments.types import Message, Messages, SamplingArgs, State

_LOGGER = logging.getLogger(__name__)

OVERLONG = "overlong-prompt"
"""The id of what stands for an answer to a prompt that has no room in the model's context."""
TRIES = 3
"""Of one call, where nothing but the way to the endpoint, or its load, is at fault. An
`AsyncOpenAI` that tries again itself (`max_retries`) is asked once.
"""
PAUSE_S = 0.5
"""Before the second try; doubled before each further one."""

_LIMITS = ("max_tokens", "max_completion_tokens")
_INSTEAD = re.compile(
    r"use ['\"`]?(max_tokens|max_completion_tokens)['\"`]? instead", re.IGNORECASE
)
_LIMIT_OF: WeakKeyDictionary[openai.AsyncOpenAI, dict[str, str]] = WeakKeyDictionary()
"""By client and model, the only name under which its endpoint takes the limit of new tokens: it has
refused the other.
"""

_CONTEXT = re.compile(r"maximum context length is (\d+)", re.IGNORECASE)

INFRASTRUCTURE = (
    openai.APIConnectionError,
    openai.RateLimitError,
    openai.ConflictError,  # of `launch.serve` while it takes new weights
    openai.InternalServerError,
    ConnectionError,
    TimeoutError,
)
"""Errors that the same call may not meet again: connections, timeouts, rate limits, failures of a
server.

A RolloutError is none of them: an engine of the run's own that has ended, that a failed sync has
shut, or that answers another prompt does so again, and its limit of time is long. A server that was
launched elsewhere has been tried again by then (`shared.rollouts.TRIES`); `EngineClient` asks the
next one.
"""


class KnowsRollouts(Protocol):
    """A client that wants to know which calls are of one rollout, so that they go to one engine and
    extend one sequence of tokens.
    """

    def conversation(
        self, state: State, *, of: Mapping[str, Any] | None = None, path: str = ""
    ) -> Any:
        """A client for the calls of this rollout. Its `num_splits`, where it has one, are calls
        whose prompt did not go on from the tokens of the one before.

        Args:
            of: the input of the outermost rollout in which it is begun; None: it is that itself.
            path: its own place in the outermost one.
        """
        ...


def knows_rollouts(client: Any) -> TypeGuard[KnowsRollouts]:
    """By what it has, and not by what it answers to: a stand-in that makes whatever attribute it is
    asked for is no such client.
    """
    # asked at every call, so not `inspect.getattr_static`
    return getattr(type(client), "conversation", None) is not None


def client_of(client: Any, state: State, *, of: Mapping[str, Any], path: str) -> Any:
    """The one that the calls of this rollout go to; the arguments are those of
    `KnowsRollouts.conversation`.
    """
    return client.conversation(state, of=of, path=path) if knows_rollouts(client) else client


def overlong_answer(model: str) -> ChatCompletion:
    """In place of an answer to a prompt that leaves no room for one token behind it."""
    return ChatCompletion(id=OVERLONG, choices=[], created=0, model=model, object="chat.completion")


async def ask(
    client: Any,
    model: str,
    prompt: Messages,
    *,
    message_type: str,
    tools: list[Message] | None,
    sampling_args: SamplingArgs,
) -> Any:
    """One call, repeated where the way to the endpoint failed. An answer with the id `OVERLONG`
    where the prompt is too long.

    Of `max_tokens` and `max_completion_tokens` an endpoint may take one alone: where it says so, it
    is asked with that one, from then on.

    Raises what the endpoint says is wrong with the call, and after `TRIES` what was wrong with the
    way to it; TypeError for a client that is not asynchronous.
    """
    arguments = {key: value for key, value in sampling_args.items() if value is not None}
    tries = 1 if isinstance(client, openai.AsyncOpenAI) and client.max_retries else TRIES
    limit_of = _LIMIT_OF.setdefault(client, {}) if isinstance(client, openai.AsyncOpenAI) else {}
    if model in limit_of:
        arguments = _limited_by(limit_of[model], arguments)
    number, has_changed = 1, False
    while True:
        try:
            if message_type == "completion":
                answer = client.completions.create(model=model, prompt=prompt, **arguments)
            else:
                with_tools = {"tools": tools} if tools else {}
                answer = client.chat.completions.create(
                    model=model, messages=prompt, **with_tools, **arguments
                )
            if not inspect.isawaitable(answer):
                raise TypeError(
                    f"client: calls of {type(client).__name__} are not asynchronous; give an"
                    " openai.AsyncOpenAI, or one like it"
                )
            return await answer
        except openai.BadRequestError as error:
            wanted = None if has_changed else _wanted_limit(error, arguments)
            if wanted is not None:
                if model not in limit_of:
                    _LOGGER.info("%s takes the limit of new tokens as %s alone", model, wanted)
                limit_of[model], has_changed = wanted, True
                arguments = _limited_by(wanted, arguments)
                continue
            if not is_overlong(error, arguments):
                raise
            return overlong_answer(model)
        except INFRASTRUCTURE as error:
            if number == tries:
                raise
            _LOGGER.warning(
                "call %d of %d failed (%s: %s); again in %.1f s",
                number,
                tries,
                type(error).__name__,
                error,
                PAUSE_S * 2 ** (number - 1),
            )
            await asyncio.sleep(PAUSE_S * 2 ** (number - 1))
            number += 1


def require_asynchronous(client: Any) -> None:
    """TypeError for OpenAI's synchronous client: every rollout would fail at its first call, and
    hold up all others until then.
    """
    if isinstance(client, openai.OpenAI):
        raise TypeError(
            "client: is a synchronous openai.OpenAI; give an openai.AsyncOpenAI with the same"
            " arguments"
        )


def _wanted_limit(error: openai.BadRequestError, arguments: Mapping[str, Any]) -> str | None:
    """The limit's name that the endpoint asks for; None: it was sent that one, or none, or has
    something else against the call.
    """
    found = _INSTEAD.search(str(error))
    if (
        found is None
        or found[1].lower() in arguments
        or not any(name in arguments for name in _LIMITS)
    ):
        return None
    return found[1].lower()


def _limited_by(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name if key in _LIMITS else key: value for key, value in arguments.items()}


def is_overlong(error: openai.BadRequestError, sampling_args: SamplingArgs) -> bool:
    """Whether an endpoint refused a prompt for its length. OpenAI has a code for it; vLLM and
    others only say so.

    A call that asks for more new tokens than the context has is another matter: it is wrong for
    every prompt.
    """
    asked = max(
        (number for name in _LIMITS if isinstance(number := sampling_args.get(name), int)),
        default=0,
    )
    if (context := _CONTEXT.search(str(error))) is not None and asked >= int(context[1]):
        return False
    if error.code == "context_length_exceeded" or says_overlong(str(error)):
        return True
    # Of a prompt that leaves no room for a single token vLLM says no more than this; so it does of
    # a call that asks for none.
    asks_for_none = any(sampling_args.get(name) == 0 for name in _LIMITS)
    return "max_tokens must be at least 1, got 0" in str(error).lower() and not asks_for_none


def says_overlong(refusal: str) -> bool:
    """Whether it is of a prompt's length, in the words of vLLM or of others."""
    told = (
        "context length",
        "context_length",
        "maximum model length",
        "prompt is too long",
        "longer than the maximum",
        "too many tokens",
    )
    return any(words in refusal.lower() for words in told)


def merged(*given: SamplingArgs | None) -> dict[str, Any]:
    """Later ones win; `extra_body` is merged key by key. What is None at the end is not sent: so a
    caller takes back what an environment asks for.
    """
    made: dict[str, Any] = {}
    for one in given:
        for key, value in (one or {}).items():
            made[key] = (
                {**(made.get(key) or {}), **value}
                if isinstance(value, Mapping) and key == "extra_body"
                else value
            )
    return made
