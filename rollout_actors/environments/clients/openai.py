"""Model calls of environments through a client with the interface of `openai.AsyncOpenAI`."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any
from weakref import WeakKeyDictionary

import openai
from openai.types.chat import ChatCompletion
from typing_extensions import TypeIs

from rollout_actors.environments.types import (
    Arguments,
    Client,
    ConversationClient,
    EndpointClient,
    Message,
    Messages,
    SamplingArgs,
)
from shared.config.secrets import redacted

_LOGGER = logging.getLogger(__name__)

OVERLONG = "overlong-prompt"
"""Id of the response that replaces the refusal of a prompt that is too long for the model."""
TRIES = 3
"""Attempts of a model call that fails only because of the connection or the endpoint's load."""
PAUSE_S = 0.5
"""Seconds before the second attempt of a model call; doubled before each further one."""
LIMITS = ("max_tokens", "max_completion_tokens")
"""The two argument names that endpoints use for the limit of new tokens."""

_INSTEAD = re.compile(
    r"use ['\"`]?(max_tokens|max_completion_tokens)['\"`]? instead", re.IGNORECASE
)
_CONTEXT = re.compile(r"(?:context|model) length is (?:only )?(\d+)", re.IGNORECASE)
_PROMPT = re.compile(
    r"(\d+) (?:tokens )?(?:in|from|of) (?:the |your )?(?:messages|prompt|input)"
    r"|(?:contains|has|passed)(?: at least)? (\d+) (?:input|prompt) tokens",
    re.IGNORECASE,
)
REASONING = ("reasoning", "reasoning_content")
"""The two message fields that endpoints use for the reasoning before an answer."""
LONGEST_PAUSE_S = 600.0
"""Longest wait before another attempt, even if an endpoint asks for more by Retry-After."""
_LIMIT_NAMES: WeakKeyDictionary[openai.AsyncOpenAI, dict[str, str]] = WeakKeyDictionary()
"""By client and model, the argument name for the limit of new tokens that the endpoint accepts."""
_NO_REASONING: WeakKeyDictionary[openai.AsyncOpenAI, set[str]] = WeakKeyDictionary()
"""Models whose endpoint refused a prompt because of the reasoning in it, by client."""

INFRASTRUCTURE = (
    openai.APIConnectionError,
    openai.RateLimitError,
    openai.ConflictError,  # openai's own client tries it again, too
    openai.InternalServerError,
    ConnectionError,
    TimeoutError,
)
"""Errors after which a model call is attempted again: connections, timeouts, rate limits, failures
of a server.

A RolloutError of the run's own engines is not among them: the request was tried again already
(`shared.rollouts.TRIES`), and `EngineClient` sends it to the next engine.
"""


def is_rollout_client(client: Client) -> TypeIs[ConversationClient]:
    """Return whether each rollout needs its own `conversation()` of this client.

    Of this package's clients only `EngineClient` has this method.
    """
    # Looked up in its class, because a mock has any attribute.
    return getattr(type(client), "conversation", None) is not None


def overlong_answer(model: str) -> ChatCompletion:
    return ChatCompletion(id=OVERLONG, choices=[], created=0, model=model, object="chat.completion")


async def ask(
    client: EndpointClient,
    model: str,
    prompt: Messages,
    *,
    message_type: str,
    tools: list[Message] | None,
    sampling_args: SamplingArgs,
) -> Any:
    """Make one model call and return its response.

    After an error of `INFRASTRUCTURE` it is attempted again, up to `TRIES` times in all.

    The response's id is `OVERLONG` if the prompt is too long. If the endpoint accepts only one of
    the two names of the limit of new tokens, it gets that name after its first refusal. If the
    prompt fits, but not that many new tokens, the call is repeated once with as many as fit. If the
    endpoint refuses the reasoning of earlier answers, it gets the messages without the reasoning.

    Raises:
        TypeError: the client is not asynchronous.
        Exception: the endpoint's refusal, or the error of the last attempt.
    """
    arguments = {name: value for name, value in sampling_args.items() if value is not None}
    known = client if isinstance(client, openai.AsyncOpenAI) else None
    # A client that repeats failed calls itself is called once.
    tries = 1 if known is not None and known.max_retries else TRIES
    limit_names = {} if known is None else _LIMIT_NAMES.setdefault(known, {})
    if model in limit_names:
        arguments = _with_limit_as(limit_names[model], arguments)
    refuses_reasoning = set() if known is None else _NO_REASONING.setdefault(known, set())
    if model in refuses_reasoning:
        prompt = without_reasoning(prompt)
    attempt = 1
    has_renamed = has_shortened = False
    while True:
        try:
            if message_type == "completion":
                answer = client.completions.create(model=model, prompt=prompt, **arguments)
            else:
                offered = {"tools": tools} if tools else {}
                create = client.chat.completions.create
                answer = create(model=model, messages=prompt, **offered, **arguments)
            # A synchronous client would block the event loop, and with it every other rollout.
            if not inspect.isawaitable(answer):
                raise TypeError(
                    f"client: calls of {type(client).__name__} are not asynchronous; give an"
                    " openai.AsyncOpenAI, or one like it"
                )
            return await answer
        except openai.BadRequestError as error:
            wanted = None if has_renamed else _wanted_limit(error, arguments)
            room = None if has_shortened else room_left(error, arguments)
            if wanted is not None:
                limit_names[model] = wanted
                arguments = _with_limit_as(wanted, arguments)
                has_renamed = True
            # Checked before the prompt is given up: its limit of new tokens may only be too high.
            elif room is not None and room > 0:
                arguments |= {name: room for name in LIMITS if name in arguments}
                has_shortened = True
            elif is_overlong(error, arguments):
                return overlong_answer(model)
            elif "reasoning" in str(error) and (bare := without_reasoning(prompt)) != prompt:
                refuses_reasoning.add(model)
                prompt = bare
            else:
                raise
        except INFRASTRUCTURE as error:
            if attempt == tries:
                raise
            pause_s = max(PAUSE_S * 2 ** (attempt - 1), retry_after_s(error))
            what = redacted(f"{type(error).__name__}: {error}")
            failure = "attempt %d of %d failed (%s); the next one is in %.1f s"
            _LOGGER.warning(failure, attempt, tries, what, pause_s)
            await asyncio.sleep(pause_s)
            attempt += 1


def without_reasoning(prompt: Messages) -> Messages:
    """Remove the model's reasoning from the messages."""
    if isinstance(prompt, str):
        return prompt
    return [
        {name: value for name, value in message.items() if name not in REASONING}
        for message in prompt
    ]


def retry_after_s(error: BaseException) -> float:
    """Return how many seconds an endpoint asks to wait before another attempt; 0 if it does not.

    Retry-After is a number of seconds or a date (RFC 9110). The rollout's own timeout ends a wait
    that is too long.
    """
    if not isinstance(error, openai.APIStatusError):
        return 0.0
    written = error.response.headers.get("retry-after", "")
    try:
        seconds = float(written)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(written).timestamp() - time.time()
        except ValueError:
            return 0.0
    # NaN becomes 0, too.
    return min(seconds, LONGEST_PAUSE_S) if seconds > 0 else 0.0


def room_left(error: openai.BadRequestError, sampling_args: SamplingArgs) -> int | None:
    """Return how many new tokens fit after a prompt that an endpoint refused as too long.

    Return None if the refusal does not name the lengths of context and prompt, or if the call does
    not limit its new tokens. Also return None if this limit fits after the prompt, or is not below
    the context length.
    """
    limits = [sampling_args[name] for name in LIMITS if name in sampling_args]
    context = _CONTEXT.search(str(error))
    prompt = _PROMPT.search(str(error))
    if context is None or prompt is None or not limits:
        return None
    length = int(context[1])
    if any(not isinstance(limit, int) or limit >= length for limit in limits):
        return None
    room = length - int(prompt[1] or prompt[2])
    return room if room < max(limits) else None


def require_asynchronous(client: object) -> None:
    """Raise TypeError for OpenAI's synchronous client, with which every rollout would fail."""
    if isinstance(client, openai.OpenAI):
        raise TypeError(
            "client: is a synchronous openai.OpenAI; give an openai.AsyncOpenAI with the same"
            " arguments"
        )


def _wanted_limit(error: openai.BadRequestError, arguments: SamplingArgs) -> str | None:
    found = _INSTEAD.search(str(error))
    if found is None or not any(name in arguments for name in LIMITS):
        return None
    wanted = found[1].lower()
    return None if wanted in arguments else wanted


def _with_limit_as(name: str, arguments: SamplingArgs) -> Arguments:
    return {name if key in LIMITS else key: value for key, value in arguments.items()}


def is_overlong(error: openai.BadRequestError, sampling_args: SamplingArgs) -> bool:
    """Return whether an endpoint refused a prompt because of its length.

    OpenAI has an error code for it; vLLM and others only describe it. A call that asks for more new
    tokens than the context has does not count: it is wrong for every prompt.
    """
    limits = [sampling_args[name] for name in LIMITS if name in sampling_args]
    if context := _CONTEXT.search(str(error)):
        length = int(context[1])
        if any(isinstance(limit, int) and limit >= length for limit in limits):
            return False
    if error.code == "context_length_exceeded" or says_overlong(str(error)):
        return True
    # vLLM reports no more than this about a prompt that leaves no room for a single token, and the
    # same about a call that asks for no tokens.
    return "max_tokens must be at least 1, got 0" in str(error).lower() and 0 not in limits


def says_overlong(refusal: str) -> bool:
    """Return whether an endpoint's error message says that the prompt is too long."""
    phrases = (
        "context length",
        "context_length",
        "maximum model length",
        "prompt is too long",
        "longer than the maximum",
        "too many tokens",
    )
    return any(phrase in refusal.lower() for phrase in phrases)


def merged(*levels: SamplingArgs | None) -> Arguments:
    """Merge sampling arguments. Later levels take precedence; `extra_body` is merged key by key.

    A value None is kept here, and later not sent. With it a caller can remove an argument that an
    environment sets.

    Example:
        `merged({"n": 1, "extra_body": {"a": 1}}, {"n": None, "extra_body": {"b": 2}})` is
        `{"n": None, "extra_body": {"a": 1, "b": 2}}`.
    """
    result: Arguments = {}
    for level in levels:
        for key, value in (level or {}).items():
            if key == "extra_body" and isinstance(value, Mapping):
                value = {**(result.get(key) or {}), **value}
            result[key] = value
    return result
