"""The calls of one rollout: to one engine, token by token one sequence, under the surface of
`openai.AsyncOpenAI`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionTokenLogprob
from openai.types.chat.chat_completion import ChoiceLogprobs

from rollout_actors.environments.chat.images import MessageImages
from rollout_actors.environments.chat.messages import as_mapping
from rollout_actors.environments.chat.responses import TOKEN_ID
from rollout_actors.environments.chat.template import ChatTemplate, PreviousCall
from rollout_actors.environments.chat.tool_calls import Said, ToolCallReader
from rollout_actors.environments.clients.openai import overlong_answer, says_overlong
from rollout_actors.environments.types import Message, State
from shared.errors import RolloutError
from shared.records import ImageRef
from shared.rollouts import DecodeSettings, Rollout, RolloutRequest
from shared.seeds import request_seed
from shared.trajectory import ModelCall

# What a call may ask of an engine whose decoding the run has fixed.


READ_ANYWAY = frozenset(
    {"logprobs", "return_token_ids", "return_tokens_as_token_ids", "prompt_logprobs"}
)
"""Ask for tokens and log-probabilities. Every answer has them but the prompt's, which nothing
reads.
"""
LIMITS = ("max_tokens", "max_completion_tokens")


class CallArguments:
    """Checks the sampling arguments of calls against what the run has fixed."""

    def __init__(self, decode: DecodeSettings, template_args: Mapping[str, Any]) -> None:
        self._decode = decode
        self._fixed: dict[str, Any] = {
            "temperature": decode.temperature,
            "top_p": decode.top_p,
            "top_k": decode.top_k,
            "repetition_penalty": decode.repetition_penalty,
            "stop_token_ids": sorted(decode.stop_token_ids),
            "chat_template_kwargs": dict(template_args),
            "n": 1,
            "stream": False,
            "stop": [],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "min_p": 0,
            "top_logprobs": 0,
            "presence_penalty": 0,
            "frequency_penalty": 0,
        }

    def max_tokens(self, arguments: Mapping[str, Any]) -> int:
        """Most tokens that a call with these arguments may sample. What is None is not given.

        Raises ValueError for what the run has fixed otherwise, and for what is unknown.
        """
        body = arguments.get("extra_body") or {}
        given = {
            name: value
            for name, value in {**arguments, **body}.items()
            if value is not None and name != "extra_body"
        }
        limit = self._decode.max_new_tokens
        for name, value in given.items():
            if name in LIMITS:
                limit = self._limit(name, value, limit)
            elif name == "seed":
                raise ValueError(
                    "seed: the engines' own follow from the run's seed, the step, the rollout's"
                    " place in it and the turn; leave it out"
                )
            elif name in self._fixed:
                self._agree(name, value)
            elif name not in READ_ANYWAY:
                known = ", ".join(sorted({*self._fixed, *LIMITS, *READ_ANYWAY}))
                raise ValueError(
                    f"{name}: the engines of a run take no such sampling argument; leave it out."
                    f" They know {known}"
                )
        if given.get("logprobs") and not self._decode.return_logprobs:
            raise ValueError(
                "logprobs: were asked for, and this run's decoding returns none (return_logprobs);"
                " leave them out, or switch them on"
            )
        return limit

    def _limit(self, name: str, value: Any, limit: int) -> int:
        most = self._decode.max_new_tokens
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ValueError(
                f"{name}: must be a whole number from 1 to the run's max_new_tokens = {most}, got"
                f" {value!r}"
            )
        return min(limit, value)

    def _agree(self, name: str, value: Any) -> None:
        fixed = self._fixed[name]
        if name == "stop_token_ids":
            value = sorted(value)
        if value != fixed:
            raise ValueError(
                f"{name}: {value!r} was asked for, and this run has {fixed!r}; leave it out, or"
                " change what the run has"
            )


# Rollouts of the engines as answers of the OpenAI API, with the fields that vLLM's server adds:
# nobody needs to know where one comes from.


@dataclass(frozen=True, slots=True)
class Sampled:
    """What an engine has sampled in one call, token by token."""

    token_ids: tuple[int, ...]
    """With the stop token, unless the repeat guard has forced it: that one was not sampled."""
    logprobs: tuple[float, ...] | None
    """One each; None: the run's decoding returns none."""
    stop_token_id: int | None
    """The last one, where it is a stop token."""

    @classmethod
    def of(cls, rollout: Rollout) -> Sampled:
        is_forced = len(rollout.response_token_ids) in rollout.forced_positions
        stop = None if is_forced else rollout.stop_token_id
        ending = () if stop is None else (stop,)
        logprobs = rollout.logprobs
        if logprobs is not None and stop is not None:
            assert rollout.stop_token_logprob is not None, (
                "it was sampled, and the others have theirs"
            )
            logprobs = (*logprobs, rollout.stop_token_logprob)
        return cls((*rollout.response_token_ids, *ending), logprobs, stop)


class EngineLogprobs(ChoiceLogprobs):
    """Log-probabilities as plain lists, `token_ids` and `token_logprobs`, since an object for each
    token takes longer than all else about an answer. `content` has those objects as soon as
    somebody asks for it; until then nothing that writes the answer out has them."""

    token_ids: tuple[int, ...]
    token_logprobs: tuple[float, ...]

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "content" and value is None:
            both = zip(self.token_ids, self.token_logprobs, strict=True)
            value = [
                ChatCompletionTokenLogprob(
                    token=f"{TOKEN_ID}{token_id}", logprob=logprob, top_logprobs=[]
                )
                for token_id, logprob in both
            ]
            self.content = value
        return value


def chat_answer(
    answer_id: str, model: str, rollout: Rollout, sampled: Sampled, said: Said
) -> ChatCompletion:
    """`weight_version` is the one of the weights that sampled it, `engine` the actor."""
    logprobs = None
    if sampled.logprobs is not None:
        # What it is made of needs no check.
        logprobs = EngineLogprobs.model_construct(
            None, content=None, token_ids=sampled.token_ids, token_logprobs=sampled.logprobs
        )
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "message": {
            "role": "assistant",
            "content": said.content,
            "tool_calls": list(said.tool_calls) or None,
        },
        "logprobs": logprobs,
        "token_ids": list(sampled.token_ids),
    }
    answer = ChatCompletion.model_validate(
        {
            "id": answer_id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "choices": [choice],
            "usage": _usage(rollout, sampled),
            "prompt_token_ids": list(rollout.prompt_token_ids),
            "weight_version": rollout.weight_version,
            "engine": rollout.actor,
        }
    )
    reason: Any = "tool_calls" if said.tool_calls else rollout.finish_reason.value
    # Afterwards: vLLM has more reasons than OpenAI's type.
    answer.choices[0].finish_reason = reason
    return answer


def text_answer(
    answer_id: str, model: str, rollout: Rollout, sampled: Sampled, text: str
) -> Completion:
    """The same of plain text."""
    tokens = [f"{TOKEN_ID}{token_id}" for token_id in sampled.token_ids]
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "text": text,
        "logprobs": (
            None
            if sampled.logprobs is None
            else {"tokens": tokens, "token_logprobs": sampled.logprobs}
        ),
        "token_ids": list(sampled.token_ids),
        "prompt_token_ids": list(rollout.prompt_token_ids),
    }
    answer = Completion.model_validate(
        {
            "id": answer_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "choices": [choice],
            "usage": _usage(rollout, sampled),
            "weight_version": rollout.weight_version,
            "engine": rollout.actor,
        }
    )
    reason: Any = rollout.finish_reason.value
    answer.choices[0].finish_reason = reason
    return answer


def _usage(rollout: Rollout, sampled: Sampled) -> dict[str, int]:
    prompt, completion = len(rollout.prompt_token_ids), len(sampled.token_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


IMAGE = "<|image_pad|>"
"""The placeholder of an image, as the templates of Qwen's models write it. In a text it is the same
token.
"""
SENT_IMAGES = "image_sha256"
"""The field of an answer that has the hashes of its prompt's images, in order: what a step's prompt
shows may be changed by the environment later.
"""

Generate = Callable[[RolloutRequest], Awaitable[Rollout]]


@dataclass(frozen=True, slots=True)
class RolloutKey:
    """Where a rollout stands in the run: with the turn, what the seeds of its calls follow from."""

    run_seed: int
    step: int
    position: int
    """In the step, over all learner ranks."""
    sample_id: str
    path: str = ""
    """In the rollout of this position: empty, or of one that an environment begins inside of it."""

    def request(self, turn: int, prompt: _Prompt, decode: DecodeSettings) -> RolloutRequest:
        seed = request_seed(self.run_seed, self.step, self.position, turn, self.path)
        return RolloutRequest(
            self.step, self.position, self.sample_id, prompt.token_ids, prompt.images, decode, seed
        )


@dataclass(frozen=True)
class ConversationSettings:
    """What all conversations of a client have in common: how tokens become messages, and messages
    tokens.
    """

    tokens: ChatTemplate
    arguments: CallArguments
    tool_calls: ToolCallReader | None
    decode: DecodeSettings
    max_model_len: int
    """Most tokens of a prompt and its answer together."""

    @cached_property
    def placeholder(self) -> int | None:
        """Of an image; None: the tokenizer does not know it, and no text has one."""
        encoded = self.tokens.encode(IMAGE)
        return encoded[0] if len(encoded) == 1 else None


@dataclass(frozen=True, slots=True)
class _Prompt:
    token_ids: tuple[int, ...]
    """As the engine gets them: one placeholder for each image."""
    images: tuple[ImageRef, ...]
    is_split: bool
    """It does not go on from the last call, though there was one."""


class Conversation:
    """Of one rollout. Its calls are answered one after the other, and each prompt begins with
    exactly the tokens of the call before it where it can.

    Where it cannot, because the messages do not go on from that call or the template writes them
    otherwise now, the prompt is tokenised anew, which `state["num_splits"]` counts: its tokens are
    read by the model and never learned.
    """

    def __init__(
        self,
        place: RolloutKey,
        reading: ConversationSettings,
        generate: Generate,
        state: State,
        calls: dict[tuple[str, int], ModelCall],
    ) -> None:
        """Begin without a call. `calls` is where each is noted, by its path and turn."""
        self._place, self._reading, self._generate, self._state = place, reading, generate, state
        self._calls = calls
        # Another client may count its own there.
        self._state.setdefault("num_splits", 0)
        self.num_splits = 0
        """Calls whose prompt did not begin with the tokens of the one before."""
        self._images = MessageImages()
        self._turn = 0
        self._last: PreviousCall | None = None
        self._shown: tuple[ImageRef, ...] = ()
        """In the last call."""
        self._expansion = 0
        """By how many tokens the last call's prompt was longer in the engine."""
        # By whom it is waited for: other calls of this rollout. Unblocked by this call's end, for
        # which the engine has a limit.
        self._one_at_a_time = asyncio.Lock()
        self.chat = _Chat(_ChatCompletions(self))
        self.completions = _TextCompletions(self)

    async def answer_chat(
        self,
        model: str,
        messages: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None,
        arguments: Mapping[str, Any],
    ) -> Any:
        """See `AsyncOpenAI.chat.completions.create`. The id is `overlong-prompt` where the prompt
        leaves no room for a token.

        `model` is what the answer says that it is of, and chooses nothing: the engines of a run
        have one model.

        Raises ValueError for arguments that contradict the run, RolloutError where the engine
        fails.
        """
        most, tokens = self._reading.arguments.max_tokens(arguments), self._reading.tokens
        async with self._one_at_a_time:
            rendered = tokens.render(messages, tools)
            continued = (
                None
                if self._last is None
                else tokens.continued(self._last, rendered, messages, tools)
            )
            prompt = self._prompt(continued, rendered, self._images.of(messages))
            rollout = await self._ask(prompt, most)
            if rollout is None:
                return overlong_answer(model)
            sampled, said = Sampled.of(rollout), self._said(rollout, tools)
            self._note(prompt, rendered, len(messages), rollout, sampled, _message(said))
            return _with_images(
                chat_answer(self._answer_id(), model, rollout, sampled, said), prompt
            )

    async def answer_text(self, model: str, text: str, arguments: Mapping[str, Any]) -> Any:
        """See `AsyncOpenAI.completions.create`; otherwise as `answer_chat`."""
        if not isinstance(text, str):
            raise ValueError(f"prompt: must be one text, got {type(text).__name__}")
        most, tokens = self._reading.arguments.max_tokens(arguments), self._reading.tokens
        async with self._one_at_a_time:
            continued = None if self._last is None else tokens.continued_text(self._last, text)
            prompt = self._prompt(continued, text, (), is_plain=True)
            rollout = await self._ask(prompt, most)
            if rollout is None:
                return overlong_answer(model)
            sampled = Sampled.of(rollout)
            self._note(prompt, text, 0, rollout, sampled, {})
            text = tokens.decode(rollout.response_token_ids, with_special=False)
            return _with_images(
                text_answer(self._answer_id(), model, rollout, sampled, text), prompt
            )

    def _prompt(
        self,
        continued: tuple[int, ...] | None,
        text: str,
        images: tuple[ImageRef, ...],
        *,
        is_plain: bool = False,
    ) -> _Prompt:
        # The same tokens may stand for another image now.
        if (
            self._last is not None
            and continued is not None
            and images[: len(self._shown)] == self._shown
        ):
            # Only what is new is looked at: a model of text may have sampled a placeholder, which
            # stands for nothing.
            self._require_places(
                continued[len(self._last.token_ids) :], images, num_before=len(self._shown)
            )
            return _Prompt(continued, images, is_split=False)
        token_ids = self._reading.tokens.encode(text, is_plain=is_plain)
        self._require_places(token_ids, images)
        return _Prompt(token_ids, images, is_split=self._last is not None)

    def _require_places(
        self, token_ids: tuple[int, ...], images: tuple[ImageRef, ...], *, num_before: int = 0
    ) -> None:
        """ValueError where there are more or fewer placeholders than images: one of them would
        stand for another image, or for none.
        """
        number = num_before + token_ids.count(self._reading.placeholder)
        if number != len(images):
            remedy = (
                "leave that out of the text of messages"
                if number > len(images)
                else "the chat template writes none for some; show images where it does"
            )
            if not number:
                remedy = (
                    "this model's chat template shows none there; take a model with a vision tower,"
                    " or show images where the template does"
                )
            raise ValueError(
                f"prompt: has {number} x {IMAGE} and {len(images)} x an image; {remedy}"
            )

    async def _ask(self, prompt: _Prompt, max_tokens: int) -> Rollout | None:
        """None: there is no room for an answer."""
        # The images that are not of the call that this one goes on from are counted with one token
        # each: the engine may refuse what seems to have room.
        room = (
            self._reading.max_model_len
            - len(prompt.token_ids)
            - (0 if prompt.is_split else self._expansion)
        )
        if room < 1:
            return None
        decode = replace(self._reading.decode, max_new_tokens=min(max_tokens, room))
        request = self._place.request(self._turn, prompt, decode)
        call = ModelCall(self._place.path, self._turn, request.seed)
        self._calls[call.path, call.turn] = call
        try:
            rollout = await self._generate(request)
        except RolloutError as error:
            if prompt.images and says_overlong(error.message):
                return None
            raise
        self._calls[call.path, call.turn] = replace(call, engine=rollout.actor)
        require_own_prompt(rollout, request)
        if (
            len(rollout.prompt_token_ids) + len(Sampled.of(rollout).token_ids)
            > self._reading.max_model_len
        ):
            # The engine takes longer ones than this client may, and only now it is known that it
            # did.
            return None
        return rollout

    def _said(self, rollout: Rollout, tools: Sequence[Mapping[str, Any]] | None) -> Said:
        text = self._reading.tokens.decode(rollout.response_token_ids, with_special=False)
        if not tools or self._reading.tool_calls is None:
            return Said(text)
        return self._reading.tool_calls.read(
            rollout.response_token_ids, text, tools, seed=rollout.seed
        )

    def _note(
        self,
        prompt: _Prompt,
        rendered: str,
        num_messages: int,
        rollout: Rollout,
        sampled: Sampled,
        answer: Message,
    ) -> None:
        tokens = self._reading.tokens
        self._last = PreviousCall(
            rendered,
            num_messages,
            prompt.token_ids + sampled.token_ids,
            tokens.decode(rollout.response_token_ids, with_special=True),
            sampled.stop_token_id,
            (
                ""
                if sampled.stop_token_id is None
                else tokens.decode((sampled.stop_token_id,), with_special=True)
            ),
            answer,
        )
        self._shown = prompt.images
        self._expansion = len(rollout.prompt_token_ids) - len(prompt.token_ids)
        self._turn += 1
        self.num_splits += prompt.is_split
        self._state["num_splits"] += prompt.is_split

    def _answer_id(self) -> str:
        return (
            f"rollout-{self._place.step}-{self._place.position}{self._place.path}-{self._turn - 1}"
        )


@dataclass(frozen=True, slots=True)
class _ChatCompletions:
    conversation: Conversation

    async def create(
        self,
        *,
        model: str,
        messages: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **arguments: Any,
    ) -> Any:
        return await self.conversation.answer_chat(model, messages, tools, arguments)


@dataclass(frozen=True, slots=True)
class _Chat:
    completions: _ChatCompletions


@dataclass(frozen=True, slots=True)
class _TextCompletions:
    conversation: Conversation

    async def create(self, *, model: str, prompt: str, **arguments: Any) -> Any:
        return await self.conversation.answer_text(model, prompt, arguments)


def require_own_prompt(rollout: Rollout, request: RolloutRequest) -> None:
    """RolloutError where the engine answered another one. Of a prompt with images, placeholder for
    placeholder, the learner says so (`learner.segments`)."""
    if not request.images and rollout.prompt_token_ids != request.prompt_token_ids:
        told = (
            f"answered another prompt than the one of example {request.sample_id}; engines must"
            " have the tokenizer of model.path"
        )
        raise RolloutError(told, actor=rollout.actor, phase="check")


def _with_images(answer: Any, prompt: _Prompt) -> Any:
    setattr(answer, SENT_IMAGES, [image.sha256 for image in prompt.images])
    return answer


def _message(said: Said) -> Message:
    return {
        "role": "assistant",
        "content": said.content,
        "tool_calls": [dict(as_mapping(call)) for call in said.tool_calls],
    }
