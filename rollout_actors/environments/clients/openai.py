"""Calls of an endpoint through a client with the surface of `openai.AsyncOpenAI`."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import openai
from openai.types.chat import ChatCompletion

from rollout_actors.environments.types import Message, Messages, SamplingArgs

_LOGGER = logging.getLogger(__name__)

OVERLONG = "overlong-prompt"
"""The id of what stands for an answer to a prompt that leaves no room in the model's context."""
TRIES = 3
"""Times that a call is made, while only the way to the endpoint, or its load, is at fault."""
PAUSE_S = 0.5
"""Pause before the second try; doubled before each further one."""
LIMITS = ("max_tokens", "max_completion_tokens")
"""The two names that endpoints know for the limit of new tokens."""

_INSTEAD = re.compile(
    r"use ['\"`]?(max_tokens|max_completion_tokens)['\"`]? instead", re.IGNORECASE
)
_CONTEXT = re.compile(r"maximum context length is (\d+)", re.IGNORECASE)
_LIMIT_NAMES: WeakKeyDictionary[openai.AsyncOpenAI, dict[str, str]] = WeakKeyDictionary()
"""The one name of the limit that an endpoint takes, by client and model, once it refused the other.
"""

INFRASTRUCTURE = (
    openai.APIConnectionError,
    openai.RateLimitError,
    openai.ConflictError,  # from `launch.serve` while it takes new weights
    openai.InternalServerError,
    ConnectionError,
    TimeoutError,
)
"""Errors that the same call may not meet again: connections, timeouts, rate limits, a server's
failures.

A RolloutError of the run's own engines is not among them: they were tried again by then
(`shared.rollouts.TRIES`), and `EngineClient` asks the next engine.
"""


def is_rollout_client(client: Any) -> bool:
    """Tell whether a client has to know which calls belong to one rollout (`EngineClient`)."""
    # By its class: a mock has any attribute that it is asked for.
    return getattr(type(client), "conversation", None) is not None


def overlong_answer(model: str) -> ChatCompletion:
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
    """Call the model once; again where only the way to the endpoint failed.

    The answer's id is `OVERLONG` where the prompt is too long. An endpoint that takes the limit of
    new tokens under one of its two names alone gets that name from its first refusal on.

    Raises:
        TypeError: the client is not asynchronous.
        Exception: the endpoint's refusal, or after `TRIES`, what was wrong with the way to it.
    """
    arguments = {name: value for name, value in sampling_args.items() if value is not None}
    is_openai = isinstance(client, openai.AsyncOpenAI)
    # One that tries again itself is asked once.
    tries = 1 if is_openai and client.max_retries else TRIES
    limit_names = _LIMIT_NAMES.setdefault(client, {}) if is_openai else {}
    if model in limit_names:
        arguments = _with_limit_as(limit_names[model], arguments)
    attempt = 1
    has_renamed = False
    while True:
        try:
            if message_type == "completion":
                answer = client.completions.create(model=model, prompt=prompt, **arguments)
            else:
                offered = {"tools": tools} if tools else {}
                create = client.chat.completions.create
                answer = create(model=model, messages=prompt, **offered, **arguments)
            if not inspect.isawaitable(answer):
                raise TypeError(
                    f"client: calls of {type(client).__name__} are not asynchronous; give an"
                    " openai.AsyncOpenAI, or one like it"
                )
            return await answer
        except openai.BadRequestError as error:
            wanted = None if has_renamed else _wanted_limit(error, arguments)
            if wanted is None:
                if is_overlong(error, arguments):
                    return overlong_answer(model)
                raise
            limit_names[model] = wanted
            arguments = _with_limit_as(wanted, arguments)
            has_renamed = True
        except INFRASTRUCTURE as error:
            if attempt == tries:
                raise
            pause_s = PAUSE_S * 2 ** (attempt - 1)
            what = f"{type(error).__name__}: {error}"
            failure = "call %d of %d failed (%s); again in %.1f s"
            _LOGGER.warning(failure, attempt, tries, what, pause_s)
            await asyncio.sleep(pause_s)
            attempt += 1


def require_asynchronous(client: Any) -> None:
    """Raise TypeError for OpenAI's synchronous client, with which every rollout would fail."""
    if isinstance(client, openai.OpenAI):
        raise TypeError(
            "client: is a synchronous openai.OpenAI; give an openai.AsyncOpenAI with the same"
            " arguments"
        )


def _wanted_limit(error: openai.BadRequestError, arguments: Mapping[str, Any]) -> str | None:
    found = _INSTEAD.search(str(error))
    if found is None or not any(name in arguments for name in LIMITS):
        return None
    wanted = found[1].lower()
    return None if wanted in arguments else wanted


def _with_limit_as(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name if key in LIMITS else key: value for key, value in arguments.items()}


def is_overlong(error: openai.BadRequestError, sampling_args: SamplingArgs) -> bool:
    """Tell whether an endpoint refused a prompt for its length.

    OpenAI has a code for it; vLLM and others only say so. A call that asks for more new tokens
    than the context has is another matter: it is wrong for every prompt.
    """
    limits = [sampling_args[name] for name in LIMITS if name in sampling_args]
    if context := _CONTEXT.search(str(error)):
        length = int(context[1])
        if any(isinstance(limit, int) and limit >= length for limit in limits):
            return False
    if error.code == "context_length_exceeded" or says_overlong(str(error)):
        return True
    # vLLM says no more than this of a prompt that leaves no room for a single token, and says the
    # same to a call that asks for none.
    return "max_tokens must be at least 1, got 0" in str(error).lower() and 0 not in limits


def says_overlong(refusal: str) -> bool:
    """Tell whether a refusal is for a prompt's length, in the words of vLLM or of others."""
    phrases = (
        "context length",
        "context_length",
        "maximum model length",
        "prompt is too long",
        "longer than the maximum",
        "too many tokens",
    )
    return any(phrase in refusal.lower() for phrase in phrases)


def merged(*levels: SamplingArgs | None) -> dict[str, Any]:
    """Merge sampling arguments: later levels win, `extra_body` is merged key by key.

    A None stays and is not sent at the end: so a caller takes back what an environment asks for.

    Example:
        `merged({"n": 1, "extra_body": {"a": 1}}, {"n": None, "extra_body": {"b": 2}})` is
        `{"n": None, "extra_body": {"a": 1, "b": 2}}`.
    """
    result: dict[str, Any] = {}
    for level in levels:
        for key, value in (level or {}).items():
            if key == "extra_body" and isinstance(value, Mapping):
                value = {**(result.get(key) or {}), **value}
            result[key] = value
    return result
