"""Parsers, which extract the answer from a model's output.

Names are as in the package `verifiers`; docs/how_to/coming_from_verifiers.md lists the differences.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from functools import partialmethod
from types import SimpleNamespace
from typing import Any

from rollout_actors.environments.types import Message, Messages


class Parser:
    """Extracts the answer from a model's text; this class returns `extract_fn(text)`.

    Without `extract_fn`, the answer is the whole text. Subclasses look for tags.
    """

    logger = logging.getLogger(__name__)

    def __init__(self, extract_fn: Callable[[str], Any] = str) -> None:
        self.extract_fn = extract_fn

    def parse(self, text: str) -> Any:
        return self.extract_fn(text)

    def parse_answer(self, completion: Messages) -> Any:
        """Return the answer in the model's last message; None if there are no messages."""
        texts = self._texts(completion)
        return self._answer(texts[-1]) if texts else None

    def _messages(self, role: str, completion: Messages) -> list[Message]:
        if isinstance(completion, str):
            return []
        return [message for message in completion if message["role"] == role]

    get_assistant_messages = partialmethod(_messages, "assistant")
    get_system_messages = partialmethod(_messages, "system")
    get_tool_messages = partialmethod(_messages, "tool")
    get_user_messages = partialmethod(_messages, "user")

    def get_format_reward_func(self) -> Callable[..., float]:
        """Return a reward function for the format.

        Its value is the share of the model's messages that contain an answer for this parser.
        """

        def format_reward(completion: Messages) -> float:
            texts = self._texts(completion)
            num_read = sum(self._answer(text) is not None for text in texts)
            return num_read / len(texts) if texts else 0.0

        return format_reward

    def format_reward_func(self) -> Callable[..., float]:
        return self.get_format_reward_func()

    def _texts(self, completion: Messages) -> list[str]:
        if isinstance(completion, str):
            return [completion]
        return [text_of(message) for message in self.get_assistant_messages(completion)]

    def _answer(self, text: str) -> Any:
        return self.parse(text)


class ThinkParser(Parser):
    """A parser that returns the text after `</think>` as answer; None if the tag is missing."""

    def parse(self, text: str) -> Any:
        # The last tag, because a thought may quote it.
        _, end, answer = text.rpartition("</think>")
        return self.extract_fn(answer.strip()) if end else None


class MaybeThinkParser(Parser):
    """A parser that returns the text after `</think>` as answer; all text if the tag is missing."""

    def parse(self, text: str) -> Any:
        return self.extract_fn(text.rpartition("</think>")[2].strip())


class XMLParser(Parser):
    """A parser of texts in tags. The answer is the text in `<answer>`, or in `answer_field`.

    Example: with the fields `["plan", ("code", "answer")]` a text has a plan, and a code or an
    answer; `parse("<code>x</code>")` has plan None, code "x" and answer None.
    """

    def __init__(
        self,
        fields: Sequence[str | Sequence[str]] = ("think", "answer"),
        answer_field: str = "answer",
        extract_fn: Callable[[str], Any] = str,
    ) -> None:
        """
        Args:
            fields: each is a tag, or a tuple of alternative tags; the first tag is the field's
                name.
            answer_field: the tag that contains the answer.

        Raises:
            TypeError: a field is neither a tag nor a tuple of tags.
            ValueError: a tag occurs twice, or `answer_field` is not one of the tags.
        """
        super().__init__(extract_fn)
        tuples = [(field,) if isinstance(field, str) else field for field in fields]
        for tags in tuples:
            are_texts = isinstance(tags, Sequence) and all(isinstance(tag, str) for tag in tags)
            if not are_texts or not tags:
                raise TypeError(f"fields: {tags!r} is not a tag; give a text, or a tuple of texts")
        self.alternatives = {tags[0]: tuple(tags) for tags in tuples}
        """The tags of each field, by its name."""
        self.tags = [tag for tags in tuples for tag in tags]
        if twice := sorted({tag for tag in self.tags if self.tags.count(tag) > 1}):
            raise ValueError(f"fields: {', '.join(twice)} occurs twice; name each tag once")
        if answer_field not in self.tags:
            raise ValueError(f"answer_field: {answer_field!r} is not one of {', '.join(self.tags)}")
        self.answer_field = answer_field

    def get_fields(self) -> list[str]:
        return list(self.alternatives)

    def parse(self, text: str, last: bool = False) -> SimpleNamespace:
        """Return the text in each tag as attributes; None for a tag that is missing or not closed.

        If a tag occurs several times: the first text, or the last if `last`.
        """
        found = {tag: _between(tag, text) for tag in self.tags}
        return SimpleNamespace(
            **{tag: texts[-1 if last else 0] if texts else None for tag, texts in found.items()}
        )

    def _answer(self, text: str) -> Any:
        texts = _between(self.answer_field, text)
        return self.extract_fn(texts[-1]) if texts else None

    def format(self, **values: object) -> str:
        """Return a text with a tag for each field, whose values are given by field name.

        This is the reverse of `parse`.

        Raises ValueError if a field has no value, or a value has no field.
        """
        if unknown := values.keys() - set(self.tags):
            known = ", ".join(self.tags)
            raise ValueError(f"{', '.join(sorted(unknown))}: no such field; there are {known}")
        lines = []
        for name, tags in self.alternatives.items():
            given = [values[tag] for tag in tags if tag in values]
            if not given:
                raise ValueError(f"Missing value for field {name!r}; give {' or '.join(tags)}")
            lines += [f"<{name}>", str(given[0]), f"</{name}>"]
        return "\n".join(lines)

    def get_format_str(self) -> str:
        """Return a description of the format for a prompt: each field's tags around three dots."""
        names = [
            tags[0] if len(tags) == 1 else f"[ {' | '.join(tags)} ]"
            for tags in self.alternatives.values()
        ]
        return "\n".join(f"<{name}>\n...\n</{name}>" for name in names)


def _between(tag: str, text: str) -> list[str]:
    name = re.escape(tag)
    return [found.strip() for found in re.findall(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)]


def text_of(message: Message) -> str:
    """Return the text of a chat message, whose content may be a list of parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


# Answers of mathematical datasets: functions for `extract_fn`


BOXED_SYSTEM_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."
THINK_BOXED_SYSTEM_PROMPT = (
    "Think step-by-step inside <think>...</think> tags.     Then, give your final answer inside"
    " \\boxed{}."
)
"""System prompts, exactly as in `verifiers`, because models may have been trained with them."""


def extract_boxed_answer(text: str) -> str:
    r"""Return the content of the last `\boxed{...}`; the whole text without it, or if it is not
    closed.
    """
    _, box, rest = text.rpartition(r"\boxed{")
    depth = 1
    for index, character in enumerate(rest if box else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:index]
    return text


def extract_hash_answer(text: str) -> str:
    """Return the text after `####`, as in GSM8K; the whole text if there is no `####`."""
    _, mark, answer = text.partition("####")
    return answer.partition("####")[0].strip() if mark else text
