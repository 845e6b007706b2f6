"""An endpoint with the surface of `openai.AsyncOpenAI` that answers by a script, with openai's own
types and errors, and with tokens when vLLM would.

Example:
    `ScriptedClient(["first", connection_error(), Answer("third", delay_s=0.1)])` answers in the
    order of the calls, `ScriptedClient(lambda call: call.text.upper())` by what was asked.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx
import openai
from openai.resources.chat.completions import AsyncCompletions as AsyncChatCompletions
from openai.resources.completions import AsyncCompletions
from openai.types import Completion
from openai.types.chat import ChatCompletion

URL = "http://scripted/v1"
CHAT_PARAMETERS = frozenset(inspect.signature(AsyncChatCompletions.create).parameters) - {"self"}
TEXT_PARAMETERS = frozenset(inspect.signature(AsyncCompletions.create).parameters) - {"self"}


@dataclass(frozen=True, slots=True)
class Call:
    """A question, as it was at that moment."""

    number: int
    """Of the calls to this client, from 0."""
    model: str
    prompt: Any
    """Messages, or text."""
    arguments: dict[str, Any]
    """All others: `tools`, `temperature`, `extra_body`, ..."""

    @property
    def text(self) -> str:
        """The end of the prompt."""
        return self.prompt if isinstance(self.prompt, str) else content_of(self.prompt[-1])

    @property
    def turn(self) -> int:
        """The number of the model's messages in the prompt."""
        messages = [] if isinstance(self.prompt, str) else self.prompt
        return sum(message["role"] == "assistant" for message in messages)


@dataclass(frozen=True, slots=True)
class Answer:
    """The model's answer; tokens are one for each character, unless they are given."""

    text: str | None = None
    tool_calls: Sequence[tuple[str, Any]] = ()
    """Name and arguments of each: a mapping, or the text that the model wrote for it."""
    delay_s: float | None = None
    """None: the client's."""
    finish_reason: str = "stop"
    prompt_ids: Sequence[int] | None = None
    completion_ids: Sequence[int] | None = None
    logprobs: Sequence[float | None] | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Of the whole response, beside or instead of the usual ones."""


Reply = str | Answer | BaseException | ChatCompletion | Completion
Script = Sequence[Reply] | Callable[[Call], Any]


class ScriptedClient:
    """`chat.completions.create` and `completions.create`; both refuse arguments that the real ones
    do not have.
    """

    def __init__(
        self, script: Script, *, delay_s: float = 0.0, returns_tokens: bool | None = None
    ) -> None:
        """
        Args:
            script: answers in the order of the calls (one more is an AssertionError), or a function
                of the call, which may be asynchronous. An exception is raised; a response of
                openai's is returned as it is.
            returns_tokens: whether with token ids and log-probabilities; None: with those that the
                call asks for, as vLLM does.
        """
        self._script = script
        self._delay_s = delay_s
        self._returns_tokens = returns_tokens
        self.calls: list[Call] = []
        self.num_under_way = 0
        self.most_under_way = 0
        self.num_cancelled = 0
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create_chat))
        self.completions = SimpleNamespace(create=self._create_text)

    @property
    def num_calls(self) -> int:
        return len(self.calls)

    async def _create_chat(self, *, model: str, messages: Any, **arguments: Any) -> Any:
        _refuse_unknown(arguments, CHAT_PARAMETERS)
        return await self._answer(model, messages, arguments, is_chat=True)

    async def _create_text(self, *, model: str, prompt: Any, **arguments: Any) -> Any:
        _refuse_unknown(arguments, TEXT_PARAMETERS)
        return await self._answer(model, prompt, arguments, is_chat=False)

    async def _answer(
        self, model: str, prompt: Any, arguments: dict[str, Any], *, is_chat: bool
    ) -> Any:
        call = Call(len(self.calls), model, deepcopy(prompt), deepcopy(arguments))
        self.calls.append(call)
        self.num_under_way += 1
        self.most_under_way = max(self.most_under_way, self.num_under_way)
        try:
            reply = await self._reply(call)
            answer = Answer(reply) if isinstance(reply, str) else reply
            own_delay_s = answer.delay_s if isinstance(answer, Answer) else None
            await asyncio.sleep(self._delay_s if own_delay_s is None else own_delay_s)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_under_way -= 1
        if isinstance(answer, BaseException):
            raise answer
        if not isinstance(answer, Answer):
            return answer
        response = chat_response if is_chat else text_response
        return response(call, answer, self._returns_tokens)

    async def _reply(self, call: Call) -> Any:
        if callable(self._script):
            reply = self._script(call)
            return await reply if inspect.isawaitable(reply) else reply
        assert call.number < len(self._script), (
            f"call {call.number} of a script of {len(self._script)}: {call.prompt!r}"
        )
        return self._script[call.number]


def _refuse_unknown(arguments: Mapping[str, Any], known: frozenset[str]) -> None:
    if unknown := sorted(set(arguments) - known):
        raise TypeError(f"create() got an unexpected keyword argument {unknown[0]!r}")


# Responses


def chat_response(call: Call, answer: Answer, returns_tokens: bool | None = None) -> ChatCompletion:
    """Answer a chat as vLLM does."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    reason = answer.finish_reason
    if answer.tool_calls:
        reason = "tool_calls"
        message["tool_calls"] = []
        for index, (name, arguments) in enumerate(answer.tool_calls):
            function = {"name": name, "arguments": _as_json(arguments)}
            call_id = f"call_{call.number}_{index}"
            message["tool_calls"].append({"id": call_id, "type": "function", "function": function})
    choice = {"index": 0, "finish_reason": reason, "message": message}
    fields = _fields("chat", call, choice)
    prompt_ids, ids, logprobs = tokens_of(call, answer)
    with_ids, with_logprobs, with_names = _asked(call, returns_tokens)
    if with_ids:
        fields["prompt_token_ids"] = prompt_ids
        choice["token_ids"] = ids
    if with_logprobs:
        names = _names(ids, with_names) + ["?"] * (len(logprobs) - len(ids))
        content = [
            {"token": name, "logprob": value, "top_logprobs": []}
            for name, value in zip(names, logprobs, strict=False)
        ]
        choice["logprobs"] = {"content": content}
    return ChatCompletion.construct(**{**fields, **answer.fields, "object": "chat.completion"})


def text_response(call: Call, answer: Answer, returns_tokens: bool | None = None) -> Completion:
    """Go on with a text as vLLM does."""
    choice = {"index": 0, "finish_reason": answer.finish_reason, "text": answer.text or ""}
    prompt_ids, ids, logprobs = tokens_of(call, answer)
    with_ids, with_logprobs, with_names = _asked(call, returns_tokens)
    if with_ids:
        choice["prompt_token_ids"] = prompt_ids
        choice["token_ids"] = ids
    if with_logprobs:
        choice["logprobs"] = {"tokens": _names(ids, with_names), "token_logprobs": logprobs}
    fields = _fields("text", call, choice)
    return Completion.construct(**{**fields, **answer.fields, "object": "text_completion"})


def _fields(kind: str, call: Call, choice: dict[str, Any]) -> dict[str, Any]:
    return {"id": f"{kind}-{call.number}", "created": 0, "model": call.model, "choices": [choice]}


def _names(ids: Sequence[int], with_names: bool) -> list[str]:
    return [f"token_id:{one}" if with_names else "?" for one in ids]


def _asked(call: Call, returns_tokens: bool | None) -> tuple[bool, bool, bool]:
    """Tell whether to return token ids, log-probabilities, and tokens written as their ids."""
    if returns_tokens is not None:
        return returns_tokens, returns_tokens, returns_tokens
    asked = {**call.arguments, **(call.arguments.get("extra_body") or {})}
    names = ("return_token_ids", "logprobs", "return_tokens_as_token_ids")
    with_ids, with_logprobs, with_names = (bool(asked.get(name)) for name in names)
    return with_ids, with_logprobs, with_names


def tokens_of(call: Call, answer: Answer) -> tuple[list[int], list[int], list[float | None]]:
    """Return the tokens of prompt and answer, and log-probabilities: those that are given, or one
    token for each character of the rendered conversation. A prompt begins with the one before and
    its answer.
    """
    prompt_ids = rendered_ids(call.prompt) if answer.prompt_ids is None else list(answer.prompt_ids)
    ids = answer_ids(call, answer) if answer.completion_ids is None else list(answer.completion_ids)
    logprobs = [-0.5] * len(ids) if answer.logprobs is None else list(answer.logprobs)
    return prompt_ids, ids, logprobs


def rendered_ids(prompt: Any) -> list[int]:
    """Return the prompt's characters as numbers; of messages, `<role>content` and a line's end
    each, and the beginning of an assistant's.
    """
    if isinstance(prompt, str):
        return list(map(ord, prompt))
    lines = [f"<{message['role']}>{content_of(message)}\n" for message in prompt]
    return list(map(ord, "".join(lines) + "<assistant>"))


def answer_ids(call: Call, answer: Answer) -> list[int]:
    """Return the answer's characters as numbers; of a chat, with the line's end."""
    text = answer.text or ""
    if not isinstance(call.prompt, str):
        text += "".join(f"{name}{_as_json(arguments)}" for name, arguments in answer.tool_calls)
        text += "\n"
    return list(map(ord, text))


def content_of(message: Mapping[str, Any]) -> str:
    """Return what a message says, and what it calls."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part.get("text", "") for part in content)
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return content + "".join(one["name"] + one["arguments"] for one in functions)


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


# Failures


def connection_error() -> openai.APIConnectionError:
    request = httpx.Request("POST", URL)
    return openai.APIConnectionError(message="Connection error.", request=request)


def timeout_error() -> openai.APITimeoutError:
    return openai.APITimeoutError(request=httpx.Request("POST", URL))


def status_error(status: int, message: str, code: str | None = None) -> openai.APIStatusError:
    """Make what openai's library raises for an answer with this HTTP status."""
    kinds: dict[int, type[openai.APIStatusError]] = {
        400: openai.BadRequestError,
        401: openai.AuthenticationError,
        404: openai.NotFoundError,
        409: openai.ConflictError,
        429: openai.RateLimitError,
    }
    kind = kinds.get(status, openai.InternalServerError if status >= 500 else openai.APIStatusError)
    body = {"message": message, "type": "invalid_request_error", "code": code}
    response = httpx.Response(status, json={"error": body}, request=httpx.Request("POST", URL))
    return kind(message=f"Error code: {status} - {message}", response=response, body=body)


def overlong_error() -> openai.APIStatusError:
    """Refuse in vLLM's words."""
    message = "This model's maximum context length is 64 tokens. However, your request has 80 input"
    return status_error(400, message)
