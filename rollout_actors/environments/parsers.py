"""From what a model said to what is scored."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from rollout_actors.environments.types import Message, Messages


class Parser:
    """The answer is the text itself, or what `extract_fn` makes of it."""

    def __init__(self, extract_fn: Callable[[str], Any] = str) -> None:
        self.extract_fn = extract_fn

    def parse(self, text: str) -> Any:
        return self.extract_fn(text)

    def parse_answer(self, completion: Messages) -> Any:
        """Of the last thing that the model said; None where it said nothing."""
        if isinstance(completion, str):
            return self.parse(completion)
        said = self.assistant_messages(completion)
        return self.parse(text_of(said[-1])) if said else None

    def assistant_messages(self, completion: Messages) -> list[Message]:
        return [] if isinstance(completion, str) else [message for message in completion if message["role"] == "assistant"]

    def format_reward_func(self) -> Callable[..., float]:
        """A reward function: the share of the model's messages from which an answer can be read."""

        def format_reward(completion: Messages) -> float:
            texts = [completion] if isinstance(completion, str) else [text_of(message) for message in self.assistant_messages(completion)]
            return sum(self.parse(text) is not None for text in texts) / len(texts) if texts else 0.0

        return format_reward


class ThinkParser(Parser):
    """The answer stands behind `</think>`; there is none without it."""

    def parse(self, text: str) -> Any:
        _, end, answer = text.rpartition("</think>")
        return self.extract_fn(answer.strip()) if end else None


class XMLParser(Parser):
    """The answer stands between `<answer>` and `</answer>`, or another of `fields`."""

    def __init__(self, fields: Sequence[str] = ("think", "answer"), answer_field: str = "answer", extract_fn: Callable[[str], Any] = str) -> None:
        if answer_field not in fields:
            raise ValueError(f"answer_field: {answer_field!r} is none of the fields {', '.join(fields)}")
        super().__init__(extract_fn)
        self.fields, self.answer_field = tuple(fields), answer_field

    def parse_fields(self, text: str) -> dict[str, str | None]:
        """What stands last in each field; None where the field is not there, or not closed."""
        found = {field: re.findall(rf"<{re.escape(field)}>(.*?)</{re.escape(field)}>", text, re.DOTALL) for field in self.fields}
        return {field: values[-1].strip() if values else None for field, values in found.items()}

    def parse(self, text: str) -> Any:
        answer = self.parse_fields(text)[self.answer_field]
        return None if answer is None else self.extract_fn(answer)


def text_of(message: Message) -> str:
    """What a message says, in its parts of text."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""
