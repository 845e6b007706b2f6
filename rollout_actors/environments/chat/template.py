"""Conversations as tokens, by a checkpoint's own template, so that a call's prompt begins with the
tokens of the call before it and nothing that was sampled is ever tokenised again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rollout_actors.environments.chat.messages import as_mapping
from rollout_actors.environments.types import Message

ANSWER_MARKER = "the-model-said-this"
"""Stands for an answer where only what the template writes behind it is of interest: text that no
template changes.
"""


@dataclass(frozen=True, slots=True)
class PreviousCall:
    """An answered call, as far as the next one may go on from it."""

    rendered: str
    """The call's prompt as text, as the template wrote it."""
    num_messages: int
    """Of that prompt; 0 where it was plain text."""
    token_ids: tuple[int, ...]
    """The prompt's, and behind them all that were sampled, with the stop token where it was."""
    text: str
    """What was sampled, with the special tokens in it."""
    stop_token_id: int | None
    """The last of `token_ids`, where it was sampled and ended the answer."""
    stop_text: str
    answer: Message
    """What the environment was told."""


class ChatTemplate:
    """Template and tokenizer of one checkpoint."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            tokenizer: of transformers: `apply_chat_template`, `encode`, `decode`.
            chat_template: in place of the tokenizer's own.
            template_args: what the template asks for besides messages and tools, such as
            `enable_thinking`.
        """
        self.tokenizer, self._chat_template = tokenizer, chat_template
        self.template_args = dict(template_args or {})

    def render(
        self,
        messages: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        asks: bool = True,
    ) -> str:
        """The conversation as text, and where it `asks`, the beginning of an answer. Raises what
        the template raises where it refuses the messages.
        """
        text: str = self.tokenizer.apply_chat_template(
            [_for_template(message) for message in messages],
            tools=list(tools) if tools else None,
            chat_template=self._chat_template,
            add_generation_prompt=asks,
            tokenize=False,
            **self.template_args,
        )
        return text

    def encode(self, text: str, *, is_plain: bool = False) -> tuple[int, ...]:
        """Special tokens that are written in the text are those tokens. None is added, but where it
        `is_plain`, those that the tokenizer begins a text with.
        """
        return tuple(self.tokenizer.encode(text, add_special_tokens=is_plain))

    def decode(self, token_ids: Sequence[int], *, with_special: bool) -> str:
        text: str = self.tokenizer.decode(
            list(token_ids),
            skip_special_tokens=not with_special,
            clean_up_tokenization_spaces=False,
        )
        return text

    def continued(
        self,
        last: PreviousCall,
        rendered: str,
        messages: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> tuple[int, ...] | None:
        """The prompt of a call with these messages, rendered so: the tokens of the last call, then
        those of what the template adds. None: it does not go on from the last call, or the template
        writes otherwise what has been said already."""
        added = self._added(last, rendered, messages, tools)
        return None if added is None else (*last.token_ids, *self._encode_behind(last, added))

    def continued_text(self, last: PreviousCall, text: str) -> tuple[int, ...] | None:
        """The same of plain text. A stop token is not in it, so that what goes on behind one is
        another prompt.
        """
        seen = last.rendered + last.text + last.stop_text
        return (*last.token_ids, *self.encode(text[len(seen) :])) if text.startswith(seen) else None

    def _added(
        self,
        last: PreviousCall,
        rendered: str,
        messages: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> str | None:
        seen = last.rendered + last.text + last.stop_text
        if rendered.startswith(seen):
            # An answer that ended without a stop token gets the template's end of a message here,
            # too.
            return rendered[len(seen) :]
        # The template writes the answer otherwise than it was sampled: without spaces at its ends,
        # or a tool call with others inside. It was sampled as it was, and what is added follows it.
        place, end = last.num_messages, self._end_of_message
        if (
            end is None
            or not end.startswith(last.stop_text)
            or len(messages) <= place
            or not _same_answer(messages[place], last.answer)
        ):
            return None
        if self.render(messages[:place], tools) != last.rendered:
            return None
        until = self.render(messages[: place + 1], tools, asks=False)
        if not until.endswith(end) or not rendered.startswith(until):
            return None
        return end[len(last.stop_text) :] + rendered[len(until) :]

    def _encode_behind(self, last: PreviousCall, text: str) -> tuple[int, ...]:
        """Tokens of a text that follows the last call's: behind a stop token as behind one, for a
        tokenizer that writes a text's beginning differently.
        """
        if last.stop_token_id is not None and text:
            token_ids = self.encode(last.stop_text + text)
            if token_ids[0] == last.stop_token_id:
                return token_ids[1:]
        return self.encode(text)

    @cached_property
    def _end_of_message(self) -> str | None:
        """What the template writes behind the last message of a conversation where it is the
        model's; None: it does not write that message as it is.
        """
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": ANSWER_MARKER},
        ]
        _, found, end = self.render(messages, None, asks=False).rpartition(ANSWER_MARKER)
        return end if found else None


def _for_template(message: Any) -> Message:
    """As templates read it, and as vLLM's server gives it to them: no content is an empty one, and
    a tool call's arguments are a mapping.
    """
    one = dict(as_mapping(message))
    if one.get("content") is None:
        one["content"] = ""
    if one.get("tool_calls"):
        one["tool_calls"] = [_with_mapping(as_mapping(call)) for call in one["tool_calls"]]
    else:
        one.pop("tool_calls", None)
    return one


def _with_mapping(call: Mapping[str, Any]) -> dict[str, Any]:
    function = as_mapping(call["function"])
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(given: Any) -> Mapping[str, Any]:
    """What cannot be read is an empty mapping: a model wrote it, and the conversation goes on."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except json.JSONDecodeError:
            return {}
    return given if isinstance(given, Mapping) else {}


def _same_answer(message: Any, answer: Message) -> bool:
    one = as_mapping(message)
    same_content = (one.get("content") or "") == (answer.get("content") or "")
    return one.get("role") == "assistant" and same_content and _calls(one) == _calls(answer)


def _calls(message: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    functions = [
        as_mapping(as_mapping(call)["function"]) for call in message.get("tool_calls") or ()
    ]
    return [(function.get("name"), function.get("arguments")) for function in functions]
