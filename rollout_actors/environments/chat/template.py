"""Conversion of messages to token ids by a checkpoint's chat template.

The prompt of a model call begins with the tokens of the call before it: sampled tokens are never
tokenised again.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from rollout_actors.environments.chat.messages import as_mapping
from rollout_actors.environments.types import Fields, GivenMessage, Message
from shared.model_families import IMAGE_PLACEHOLDERS
from shared.tokens.hf_codec import EXAMPLE_ANSWER, control_tokens, example_conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreviousCall:
    """An earlier model call of a rollout, with the data that the next call needs to continue it.

    Example:
        The user said `hi`, the model `yo` and its stop token. Then `rendered` is
        `<|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n`, `text` is `yo`, `stop_text`
        is `<|im_end|>`, and `token_ids` are the tokens of these three texts.
    """

    rendered: str
    """Text of the call's prompt, from the chat template."""
    num_messages: int
    """Number of messages in that prompt; 0 for plain text."""
    token_ids: tuple[int, ...]
    """The tokens of the prompt, then all sampled tokens, including a sampled stop token."""
    text: str
    """The answer as text, including special tokens."""
    stop_token_id: int | None
    """The sampled stop token that ended the answer, last in `token_ids`; None: there is none."""
    stop_text: str
    answer: Message
    """The answer as the message that the environment received."""


class ChatTemplate:
    """Converts messages to token ids by the tokenizer and the chat template of a checkpoint."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, template_args: Fields | None = None
    ) -> None:
        """
        Args:
            tokenizer: a tokenizer of transformers (`apply_chat_template`, `encode`, `decode`).
            template_args: arguments of the chat template in addition to messages and tools, such as
                `enable_thinking`.
        """
        self.tokenizer = tokenizer
        self.template_args = dict(template_args or {})
        self._has_warned = False

    def render(
        self,
        messages: Sequence[GivenMessage],
        tools: Sequence[Fields] | None,
        *,
        asks: bool = True,
    ) -> str:
        """Return the messages as one text; if `asks`, with the beginning of the next answer.

        If a message that the model did not write has a control token of the template, a space is
        written after the token's first character. Otherwise the token would end the message.
        """
        text: str = self.tokenizer.apply_chat_template(
            [self._as_data(_for_template(message)) for message in messages],
            tools=list(tools) if tools else None,
            add_generation_prompt=asks,
            tokenize=False,
            **self.template_args,
        )
        return text

    def encode(self, text: str, *, is_plain: bool = False) -> tuple[int, ...]:
        """Return the token ids of a text that contains special tokens.

        `is_plain`: the text was not rendered by a chat template, so the tokens with which the
        tokenizer begins a text are added.
        """
        # A chat template writes the first token itself, so it would occur twice.
        return tuple(self.tokenizer.encode(text, add_special_tokens=is_plain))

    def decode(self, token_ids: Sequence[int], *, with_special: bool) -> str:
        # Without clean-up, which would remove sampled spaces.
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
        messages: Sequence[GivenMessage],
        tools: Sequence[Fields] | None,
    ) -> tuple[int, ...] | None:
        """Return the token ids of these messages as a prompt that continues the last model call.

        It begins with the exact tokens of that call.

        Args:
            rendered: the messages as text, from `render`.

        Returns:
            The token ids; None if the messages do not continue the last call, or the chat template
            now writes the earlier messages differently.
        """
        added = self._added(last, rendered, messages, tools)
        if added is None:
            return None
        if last.stop_token_id is not None and added:
            # Some tokenizers encode the beginning of a text differently, so the added text is
            # encoded together with the stop token before it.
            token_ids = self.encode(last.stop_text + added)
            if token_ids[0] == last.stop_token_id:
                return last.token_ids + token_ids[1:]
        return last.token_ids + self.encode(added)

    def continued_text(self, last: PreviousCall, text: str) -> tuple[int, ...] | None:
        """Return the token ids of a plain text as a prompt that continues the last model call.

        Return None if the text does not begin with the last prompt, its answer and its stop text.
        """
        seen = last.rendered + last.text + last.stop_text
        return last.token_ids + self.encode(text[len(seen) :]) if text.startswith(seen) else None

    def _added(
        self,
        last: PreviousCall,
        rendered: str,
        messages: Sequence[GivenMessage],
        tools: Sequence[Fields] | None,
    ) -> str | None:
        seen = last.rendered + last.text + last.stop_text
        if rendered.startswith(seen):
            # An answer without a stop token gets the template's end of a message here, too.
            return rendered[len(seen) :]
        # The template may write the answer differently than it was sampled: without spaces at its
        # ends, or with other spaces in a tool call. The sampled tokens stay; new text is added.
        end = self._end_of_message
        if end is None or not end.startswith(last.stop_text):
            return None
        index = last.num_messages
        if len(messages) <= index or not _is_answer(messages[index], last.answer):
            return None
        if self.render(messages[:index], tools) != last.rendered:
            return None
        until = self.render(messages[: index + 1], tools, asks=False)
        if not until.endswith(end) or not rendered.startswith(until):
            return None
        return end[len(last.stop_text) :] + rendered[len(until) :]

    def _as_data(self, message: Message) -> Message:
        """Return the message without control tokens; unchanged if the model wrote it."""
        content = message["content"]
        if message.get("role") == "assistant":
            return message
        if isinstance(content, str):
            return {**message, "content": self._as_text(content)}
        if isinstance(content, list):
            parts = [
                {**part, "text": self._as_text(part["text"])}
                if isinstance(part, dict) and isinstance(part.get("text"), str)
                else part
                for part in content
            ]
            return {**message, "content": parts}
        return message

    def _as_text(self, text: str) -> str:
        found = self._control_token.search(text)
        if found is None:
            return text
        if not self._has_warned:
            self._has_warned = True
            _LOGGER.warning(
                "a message of a row, a tool or an environment has %s, a control token of the chat"
                " template; prompts have a space after the first character of such tokens, so that"
                " the model reads them as text",
                found[0],
            )
        return self._control_token.sub(lambda token: f"{token[0][0]} {token[0][1:]}", text)

    @cached_property
    def _control_token(self) -> re.Pattern[str]:
        """Pattern of the control tokens with which the chat template writes a conversation.

        Other tokens, such as those that were added for an environment, stay as they are. So do
        placeholders of images, whose number is checked elsewhere.
        """
        tokenizer = self.tokenizer
        written = f"{tokenizer.chat_template} {tokenizer.bos_token} {tokenizer.eos_token}"
        written += self._example
        tokens = [
            re.escape(token)
            for token in control_tokens(tokenizer).values()
            if token in written and token not in IMAGE_PLACEHOLDERS
        ]
        return re.compile("|".join(tokens) or "(?!)")

    @cached_property
    def _end_of_message(self) -> str | None:
        """Text after the model's last message; None: the template changes the message's text."""
        _, found, end = self._example.rpartition(EXAMPLE_ANSWER)
        return end if found else None

    @cached_property
    def _example(self) -> str:
        return example_conversation(self.tokenizer, **self.template_args)


def _for_template(message: GivenMessage) -> Message:
    """Prepare a message for templates as vLLM's server does: missing content becomes an empty text,
    and a tool call's arguments become a mapping.
    """
    result = dict(as_mapping(message))
    if result.get("content") is None:
        result["content"] = ""
    if calls := result.pop("tool_calls", None):
        result["tool_calls"] = []
        for call in map(as_mapping, calls):
            function = as_mapping(call["function"])
            arguments = function.get("arguments")
            if isinstance(arguments, str):
                # A model wrote it, so it may be invalid; the conversation continues.
                with suppress(json.JSONDecodeError):
                    arguments = json.loads(arguments)
            if not isinstance(arguments, Mapping):
                arguments = {}
            result["tool_calls"].append({**call, "function": {**function, "arguments": arguments}})
    return result


def _is_answer(message: GivenMessage, answer: Message) -> bool:
    found = as_mapping(message)
    is_assistant = found.get("role") == "assistant"
    return is_assistant and _content_and_calls(found) == _content_and_calls(answer)


def _content_and_calls(message: Fields) -> tuple[object, list[tuple[object, object]]]:
    functions = [
        as_mapping(as_mapping(call)["function"]) for call in message.get("tool_calls") or ()
    ]
    calls = [(function.get("name"), function.get("arguments")) for function in functions]
    return message.get("content") or "", calls
