"""The model calls of one rollout to the run's own engine, as token ids.

Sampled tokens are never tokenised again: the next prompt begins with exactly the ids of the last
call. `Conversation.chat` and `.completions` offer the interface of `openai.AsyncOpenAI`, for
environments that do not handle tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.chat.chat_completion import ChoiceLogprobs
from openai.types.completion_choice import Logprobs

from rollout_actors.environments.chat.images import MessageImages
from rollout_actors.environments.chat.messages import as_mapping
from rollout_actors.environments.chat.responses import SENT_IMAGES, TOKEN_ID
from rollout_actors.environments.chat.template import ChatTemplate, PreviousCall
from rollout_actors.environments.chat.tools import AssistantMessage, ToolCallReader
from rollout_actors.environments.clients.openai import LIMITS, overlong_answer
from rollout_actors.environments.types import Arguments, Fields, GivenMessage
from shared.model_families import IMAGE_PLACEHOLDERS
from shared.records import ImageRef
from shared.rollouts import DecodeMode, DecodeSettings, Rollout, RolloutRequest
from shared.seeds import request_seed
from shared.trajectory import ModelCall

_ALWAYS_ANSWERED = frozenset(
    {"logprobs", "return_token_ids", "return_tokens_as_token_ids", "prompt_logprobs"}
)
"""Arguments that request tokens and log-probabilities, which every response has."""

Generate = Callable[[RolloutRequest], Awaitable[Rollout | None]]
"""Sends a request to an engine. Returns its rollout, or None if its images make the prompt too long
for the engine."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens that an engine sampled in one model call.

    Example:
        The response `(5, 6)` with the sampled stop token 2 has `token_ids=(5, 6, 2)`, three
        log-probabilities and `stop_token_id=2`. If the repeat guard forced the stop token, it has
        `token_ids=(5, 6)`, two log-probabilities and `stop_token_id=None`.
    """

    token_ids: tuple[int, ...]
    """[T] sampled tokens, with the stop token unless the repeat guard forced it."""
    logprobs: tuple[float, ...] | None
    """[T] log-probabilities of `token_ids`; None if the run's decoding returns none."""
    stop_token_id: int | None
    """The last of `token_ids`, if it is a stop token; else None."""

    @classmethod
    def from_rollout(cls, rollout: Rollout) -> Sampled:
        stop = rollout.stop_token_id
        # A forced token was not sampled, so it cannot be trained.
        if stop is None or len(rollout.response_token_ids) in rollout.forced_positions:
            return cls(rollout.response_token_ids, rollout.logprobs, None)
        logprobs = rollout.logprobs
        if logprobs is not None:
            assert rollout.stop_token_logprob is not None, "a sampled token has a log-probability"
            logprobs = (*logprobs, rollout.stop_token_logprob)
        return cls((*rollout.response_token_ids, stop), logprobs, stop)


@dataclass(frozen=True, slots=True)
class RolloutKey:
    """Identity of a rollout in a run. The seeds of its model calls derive from it."""

    run_seed: int
    step: int
    position: int
    """Index of the rollout in its step, over all learner ranks."""
    sample_id: str
    path: str = ""
    """Path of a rollout that was started inside another one, such as `/0`; empty: the outermost."""

    def request(self, turn: int, prompt: _Prompt, decode: DecodeSettings) -> RolloutRequest:
        seed = request_seed(self.run_seed, self.step, self.position, turn, self.path)
        return RolloutRequest(
            self.step, self.position, self.sample_id, prompt.token_ids, prompt.images, decode, seed
        )


@dataclass(frozen=True)
class ConversationSettings:
    """The chat template, decode settings and limits that all conversations of a run share.

    Raises ValueError if the decode mode is beam search, which does not sample token by token.
    """

    template: ChatTemplate
    """The checkpoint's tokenizer and chat template."""
    decode: DecodeSettings
    """Decode settings of every model call. A call may only lower the number of new tokens."""
    max_model_len: int
    """Largest number of tokens of a prompt and its answer together in the run's engines."""
    tool_calls: ToolCallReader | None = None
    """Parses the tool calls in the model's answers; None: they stay text."""

    def __post_init__(self) -> None:
        if self.decode.mode is DecodeMode.BEAM:
            raise ValueError(
                "decode.mode: beam search samples no tokens; use greedy or sample in environments"
            )

    @cached_property
    def placeholder(self) -> int | None:
        """Token id that stands for an image in a prompt; None: the tokenizer has no such token."""
        encoded = map(self.template.encode, IMAGE_PLACEHOLDERS)
        return next((token_ids[0] for token_ids in encoded if len(token_ids) == 1), None)

    @cached_property
    def _fixed(self) -> Arguments:
        """Sampling arguments that the run fixes. A call may repeat them, but not change them."""
        return {
            "temperature": self.decode.temperature,
            "top_p": self.decode.top_p,
            "top_k": self.decode.top_k,
            "repetition_penalty": self.decode.repetition_penalty,
            "stop_token_ids": sorted(self.decode.stop_token_ids),
            "chat_template_kwargs": self.template.template_args,
            "n": 1,
            "stream": False,
            "stop": list(self.decode.stop),
            "include_stop_str_in_output": bool(self.decode.stop),
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "min_p": 0,
            "top_logprobs": 0,
            "presence_penalty": 0,
            "frequency_penalty": 0,
        }

    def max_tokens(self, arguments: Fields) -> int:
        """Return how many tokens a model call with these sampling arguments may sample.

        Raises ValueError if an argument is unknown, or contradicts the run's decode settings.
        """
        most = self.decode.max_new_tokens
        limit = most
        asked = {**arguments, **(arguments.get("extra_body") or {})}
        for name, value in asked.items():
            if value is None or name in ("extra_body", *_ALWAYS_ANSWERED):
                continue
            if name in LIMITS:
                if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                    raise ValueError(
                        f"{name}: must be a whole number from 1 to the run's max_new_tokens ="
                        f" {most}, got {value!r}"
                    )
                limit = min(limit, value)
            elif name in self._fixed:
                # Compared as a set, because the order means nothing.
                if name == "stop_token_ids":
                    value = sorted(value)
                elif name == "stop":
                    value = [value] if isinstance(value, str) else list(value)
                if value != self._fixed[name]:
                    key = " (rollout_matching.decoding.stop)" if name == "stop" else ""
                    raise ValueError(
                        f"{name}: got {value!r}, but this run has {self._fixed[name]!r}; leave it"
                        f" out, or change the value of the run{key}"
                    )
            else:  # a seed, too: the engines' seeds are derived from the rollout's place in the run
                known = ", ".join(sorted({*self._fixed, *LIMITS, *_ALWAYS_ANSWERED}))
                raise ValueError(
                    f"{name}: the engines of a run have no such sampling argument; leave it out."
                    f" They accept {known}"
                )
        if asked.get("logprobs") and not self.decode.return_logprobs:
            raise ValueError(
                "logprobs: this run's decoding returns no log-probabilities; leave it out, or"
                " switch on return_logprobs"
            )
        return limit


@dataclass(frozen=True, slots=True)
class _Prompt:
    text: str
    token_ids: tuple[int, ...]
    """As sent to the engine: one placeholder for each image."""
    images: tuple[ImageRef, ...]
    is_split: bool
    """Whether there was an earlier call that the prompt does not continue."""


class Conversation:
    """The client of one rollout, with the interface of `openai.AsyncOpenAI`, on the run's engine.

    A prompt begins with the exact token ids of the call before it. If the messages do not continue
    that call, or the template now writes them differently, the whole prompt is tokenised again.
    Such a prompt counts as a split (`num_splits`). The model reads its tokens, and they are never
    trained.

    Calls take the arguments of `AsyncOpenAI`; `model` has no effect, because the engines of a run
    have one model. A response has vLLM's `token_ids` and `prompt_token_ids`, and in addition
    `token_logprobs`, `weight_version`, `engine` and `image_sha256`; its id is `overlong-prompt` if
    the prompt leaves no room for a token. A call raises ValueError for arguments that contradict
    the run, and RolloutError if the engine fails.
    """

    def __init__(
        self,
        key: RolloutKey,
        settings: ConversationSettings,
        generate: Generate,
        calls: dict[tuple[str, int], ModelCall],
    ) -> None:
        """`calls`: the conversation records each model call here, by rollout path and turn."""
        self._key = key
        self._settings = settings
        self._template = settings.template
        self._generate = generate
        self._calls = calls
        self.num_splits = 0
        """Number of calls whose prompt did not begin with the tokens of the call before it."""
        self._images = MessageImages()
        self._turn = 0
        self._last: PreviousCall | None = None
        self._last_images: tuple[ImageRef, ...] = ()
        self._expansion = 0
        """Number of tokens that the engine added to the last prompt, because it expands images."""
        # Other calls of this rollout wait until a call ends; the engine has a time limit.
        self._one_at_a_time = asyncio.Lock()
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create_chat))
        self.completions = SimpleNamespace(create=self._create_completion)

    async def _create_chat(
        self,
        *,
        model: str,
        messages: Sequence[GivenMessage],
        tools: Sequence[Fields] | None = None,
        **arguments: Any,
    ) -> ChatCompletion:
        max_tokens = self._settings.max_tokens(arguments)
        async with self._one_at_a_time:
            text = self._template.render(messages, tools)
            continued = None
            if self._last is not None:
                continued = self._template.continued(self._last, text, messages, tools)
            prompt = self._prompt(text, continued, self._images.of(messages))
            rollout = await self._sample(prompt, max_tokens)
            if rollout is None:
                return overlong_answer(model)
            message = self._read(rollout, tools)
            sampled = self._remember(prompt, len(messages), rollout, message)
            choice = {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": message.content,
                    "tool_calls": list(message.tool_calls) or None,
                },
                "finish_reason": (
                    "tool_calls" if message.tool_calls else rollout.finish_reason.value
                ),
                "logprobs": _openai_logprobs(sampled) if arguments.get("logprobs") else None,
                "token_ids": list(sampled.token_ids),
                "token_logprobs": sampled.logprobs and list(sampled.logprobs),
            }
            # Not validated, because vLLM has more finish reasons than OpenAI's type.
            return ChatCompletion.construct(
                object="chat.completion",
                choices=[choice],
                prompt_token_ids=list(rollout.prompt_token_ids),
                **self._answer(model, prompt, rollout, sampled),
            )

    async def _create_completion(
        self, *, model: str, prompt: str, **arguments: Any
    ) -> ChatCompletion | Completion:
        if not isinstance(prompt, str):
            raise ValueError(f"prompt: must be one text, got {type(prompt).__name__}")
        max_tokens = self._settings.max_tokens(arguments)
        async with self._one_at_a_time:
            continued = None
            if self._last is not None:
                continued = self._template.continued_text(self._last, prompt)
            asked = self._prompt(prompt, continued, (), is_plain=True)
            rollout = await self._sample(asked, max_tokens)
            if rollout is None:
                return overlong_answer(model)
            message = self._read(rollout, None)
            sampled = self._remember(asked, 0, rollout, message)
            logprobs = None
            if sampled.logprobs is not None:
                names = [f"{TOKEN_ID}{token_id}" for token_id in sampled.token_ids]
                logprobs = Logprobs(tokens=names, token_logprobs=list(sampled.logprobs))
            choice = {
                "index": 0,
                "text": message.content,
                "finish_reason": rollout.finish_reason.value,
                "logprobs": logprobs,
                "token_ids": list(sampled.token_ids),
                "prompt_token_ids": list(rollout.prompt_token_ids),
            }
            fields = self._answer(model, asked, rollout, sampled)
            return Completion.construct(object="text_completion", choices=[choice], **fields)

    def _prompt(
        self,
        text: str,
        continued: tuple[int, ...] | None,
        images: tuple[ImageRef, ...],
        *,
        is_plain: bool = False,
    ) -> _Prompt:
        num_before = len(self._last_images)
        # The same tokens may now stand for other images, which is a split too.
        if self._last and continued is not None and images[:num_before] == self._last_images:
            # Only new tokens are checked: a text model may have sampled a placeholder, which stands
            # for no image.
            added = continued[len(self._last.token_ids) :]
            self._check_placeholders(added, images, num_before=num_before)
            return _Prompt(text, continued, images, is_split=False)
        token_ids = self._template.encode(text, is_plain=is_plain)
        self._check_placeholders(token_ids, images)
        return _Prompt(text, token_ids, images, is_split=self._last is not None)

    def _check_placeholders(
        self, token_ids: tuple[int, ...], images: tuple[ImageRef, ...], *, num_before: int = 0
    ) -> None:
        # A wrong placeholder would stand for another image, or for no image.
        placeholder = self._settings.placeholder
        number = num_before + token_ids.count(placeholder)
        if number == len(images):
            return
        remedy = "remove this placeholder from the text of messages"
        if number < len(images):
            remedy = (
                "the chat template writes no placeholder for some images; show images only in"
                " messages for which it does (mostly the user's), or use a model with a vision"
                " tower"
            )
        name = IMAGE_PLACEHOLDERS[-1]
        if placeholder is not None:
            name = self._template.decode([placeholder], with_special=True)
        raise ValueError(f"prompt: has {number} x {name}, but {len(images)} images; {remedy}")

    async def _sample(self, prompt: _Prompt, max_tokens: int) -> Rollout | None:
        max_model_len = self._settings.max_model_len
        # Images that the last call did not show count as one token each, so the engine may refuse a
        # prompt that seems to fit.
        expansion = 0 if prompt.is_split else self._expansion
        room = max_model_len - len(prompt.token_ids) - expansion
        if room < 1:
            return None
        decode = replace(self._settings.decode, max_new_tokens=min(max_tokens, room))
        request = self._key.request(self._turn, prompt, decode)
        call = ModelCall(self._key.path, self._turn, request.seed)
        self._calls[call.path, call.turn] = call
        rollout = await self._generate(request)
        if rollout is None:
            return None
        self._calls[call.path, call.turn] = replace(call, engine=rollout.actor)
        # The engine accepts longer prompts than this client may, and the length is known only now.
        length = len(rollout.prompt_token_ids) + len(Sampled.from_rollout(rollout).token_ids)
        return None if length > max_model_len else rollout

    def _read(self, rollout: Rollout, tools: Sequence[Fields] | None) -> AssistantMessage:
        text = self._template.decode(rollout.response_token_ids, with_special=False)
        reader = self._settings.tool_calls
        if not tools or reader is None:
            return AssistantMessage(text)
        return reader.read(rollout.response_token_ids, text, tools, seed=rollout.seed)

    def _remember(
        self, prompt: _Prompt, num_messages: int, rollout: Rollout, message: AssistantMessage
    ) -> Sampled:
        sampled = Sampled.from_rollout(rollout)
        decode = self._template.decode
        stop = sampled.stop_token_id
        calls = [dict(as_mapping(call)) for call in message.tool_calls]
        self._last = PreviousCall(
            rendered=prompt.text,
            num_messages=num_messages,
            token_ids=prompt.token_ids + sampled.token_ids,
            text=decode(rollout.response_token_ids, with_special=True),
            stop_token_id=stop,
            stop_text="" if stop is None else decode([stop], with_special=True),
            answer={"role": "assistant", "content": message.content, "tool_calls": calls},
        )
        self._last_images = prompt.images
        self._expansion = len(rollout.prompt_token_ids) - len(prompt.token_ids)
        self._turn += 1
        self.num_splits += prompt.is_split
        return sampled

    def _answer(self, model: str, prompt: _Prompt, rollout: Rollout, sampled: Sampled) -> Arguments:
        key = self._key
        num_prompt = len(rollout.prompt_token_ids)
        num_sampled = len(sampled.token_ids)
        return {
            "id": f"rollout-{key.step}-{key.position}{key.path}-{self._turn - 1}",
            "created": int(time.time()),
            "model": model,
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_sampled,
                "total_tokens": num_prompt + num_sampled,
            },
            "weight_version": rollout.weight_version,
            "engine": rollout.actor,
            SENT_IMAGES: [image.sha256 for image in prompt.images],
        }


def _openai_logprobs(sampled: Sampled) -> ChoiceLogprobs | None:
    # An object for each token costs more than the rest of a response, so it is made on request.
    if sampled.logprobs is None:
        return None
    content = [
        {"token": f"{TOKEN_ID}{token_id}", "logprob": logprob, "top_logprobs": []}
        for token_id, logprob in zip(sampled.token_ids, sampled.logprobs, strict=True)
    ]
    return ChoiceLogprobs.model_validate({"content": content})
