"""Tool calls in what a model has said, read by vLLM's own parsers: the same that its server has,
without one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai.types.chat import ChatCompletionMessageFunctionToolCall
from openai.types.chat.chat_completion_message_function_tool_call import Function

_LOGGER = logging.getLogger(__name__)

CHECKPOINTS_OWN = "hf"
"""vLLM's parser by the `response_template` that a checkpoint's tokenizer may carry."""
_RANDOM_ID = re.compile(r"chatcmpl-tool-\w+|[0-9A-Za-z]{9}")
"""Ids that vLLM draws. The others say what was called, and templates read them."""


@dataclass(frozen=True, slots=True)
class Said:
    """A model's message."""

    content: str | None
    tool_calls: tuple[ChatCompletionMessageFunctionToolCall, ...] = ()


class ToolCallReader:
    """One of vLLM's tool parsers, for one tokenizer."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        """Imports vllm, which takes some seconds. Raises ValueError where it has no parser of this
        name, with the key of a run that names one.
        """
        # Here and not above: most runs have no tools.
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        try:
            self._parser: Callable[..., Any] = ToolParserManager.get_tool_parser(name)
        except KeyError as error:
            known = ", ".join(
                sorted({*ToolParserManager.tool_parsers, *ToolParserManager.lazy_parsers})
            )
            raise ValueError(
                f"environment.tool_call_parser: vLLM has none of the name {name!r}; set it to one"
                f" of {known}"
            ) from error
        self._name, self._tokenizer, self._request = name, tokenizer, ChatCompletionRequest

    def read(
        self, token_ids: Sequence[int], text: str, tools: Sequence[Mapping[str, Any]], *, seed: int
    ) -> Said:
        """What was said with these tokens, of which `text` is what a reader sees. A text that the
        parser cannot read is content, as it stands.

        Calls whose id vLLM would draw get one that follows from `seed`, the request's: an id may be
        in the next prompt.
        """
        request = self._request(
            messages=[], tools=[dict(tool) for tool in tools], tool_choice="auto"
        )
        try:
            parser = self._parser(self._tokenizer, request.tools)
            request = parser.adjust_request(request)
            written = self._tokenizer.decode(
                list(token_ids),
                skip_special_tokens=request.skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
            found = parser.extract_tool_calls(written, request)
        except Exception as error:  # of any of many parsers, on any text that a model may write
            _LOGGER.warning(
                "vLLM's tool parser %s failed on %r, which stays text (%s: %s)",
                self._name,
                text[:200],
                type(error).__name__,
                error,
            )
            return Said(text)
        if not found.tools_called:
            return Said(text)
        calls = tuple(_tool_call(call, place, seed) for place, call in enumerate(found.tool_calls))
        return Said(found.content if (found.content or "").strip() else None, calls)


def reader_of(name: str | None, tokenizer: Any) -> ToolCallReader | None:
    """By this name, or where there is none, as the checkpoint says; None: it does not."""
    if name is None and isinstance(getattr(tokenizer, "response_template", None), Mapping):
        name = CHECKPOINTS_OWN
    return None if name is None else ToolCallReader(name, tokenizer)


def has_own_parser(checkpoint: Path) -> bool:
    """Whether `reader_of` would find one in this folder's tokenizer, without loading it."""
    path = checkpoint / "tokenizer_config.json"
    return path.is_file() and isinstance(
        json.loads(path.read_text(encoding="utf-8")).get("response_template"), Mapping
    )


def shows_tools(checkpoint: Path) -> bool:
    """Whether a chat template in this folder mentions `tools`; also where there is none, which is
    another matter.
    """
    written = [
        path.read_text(encoding="utf-8")
        for path in (
            checkpoint / "chat_template.jinja",
            *checkpoint.glob("additional_chat_templates/*.jinja"),
        )
        if path.is_file()
    ]
    config = checkpoint / "tokenizer_config.json"
    if not written and config.is_file():
        # One text, or a list of them with names.
        given = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
        written = [json.dumps(given)] if given else []
    return not written or any("tools" in text for text in written)


def num_tool_calls(state: Mapping[str, Any]) -> int | None:
    """What the model called in a rollout, of whatever it is offered; None where it is offered
    nothing.
    """
    if not state.get("oai_tools"):
        return None
    messages = [
        message
        for step in state.get("trajectory") or ()
        for message in step.get("completion") or ()
        if isinstance(message, Mapping)
    ]
    return sum(len(message.get("tool_calls") or ()) for message in messages)


FIRST_ROLLOUTS = 8
"""Fewer may have had no need of a tool."""


class UncalledTools:
    """Says that no rollout ever called a tool: when the first `FIRST_ROLLOUTS` have not, and again
    whenever twice as many have not.
    """

    def __init__(self) -> None:
        self._num_rollouts = self._told_of = 0
        self._has_called = False

    def problem(self, num_rollouts: int, num_calls: float) -> str | None:
        """Note so many more rollouts that could call a tool, and their calls. What is to be said
        now.
        """
        self._has_called = self._has_called or num_calls > 0
        self._num_rollouts += num_rollouts
        if (
            self._has_called
            or not num_rollouts
            or self._num_rollouts < max(FIRST_ROLLOUTS, 2 * self._told_of)
        ):
            return None
        self._told_of = self._num_rollouts
        return (
            f"none of {self._num_rollouts} rollouts called a tool, though they were offered some;"
            " read what the model answers: its chat template must show tools, and its calls must"
            " be read (by environment.tool_call_parser in training, by the endpoint's own parser"
            " with vf-eval)"
        )


def _tool_call(call: Any, place: int, seed: int) -> ChatCompletionMessageFunctionToolCall:
    # Nine characters, because some templates take no others.
    drawn = hashlib.sha256(f"{seed}/{place}".encode()).hexdigest()[:9]
    own = drawn if _RANDOM_ID.fullmatch(call.id) else call.id
    return ChatCompletionMessageFunctionToolCall(
        id=own,
        type="function",
        function=Function(name=call.function.name, arguments=call.function.arguments),
    )
