"""Conversations as the OpenAI API has them: put together, and made ready to be sent or to be stored."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollout_actors.environments.types import Message, Messages


def concat_messages(parts: Sequence[Messages]) -> Messages:
    """One conversation, or one text, of several in a row. Nothing is copied but the outermost list."""
    if all(isinstance(part, str) for part in parts):
        return "".join(map(str, parts))
    joined: list[Message] = []
    for part in parts:
        if isinstance(part, str):
            raise TypeError(f"text cannot be joined with messages: {part[:60]!r}; an environment has one message_type")
        joined.extend(part)
    return joined


def said(given: Any, by: str) -> Messages:
    """What an environment's method returned, with the OpenAI library's messages as mappings. TypeError where it is no conversation and no text."""
    if isinstance(given, str):
        return given
    if isinstance(given, Mapping) or not isinstance(given, Sequence):
        what = "nothing" if given is None else type(given).__name__
        raise TypeError(f"{by} returned {what}; return a list of messages, and [] where there is nothing to say")
    if wrong := [one for one in given if not isinstance(one, Mapping) and not hasattr(one, "model_dump")]:
        raise TypeError(f"{by} returned a list with {type(wrong[0]).__name__} in it; return a list of messages, each with a role and a content")
    return [one if isinstance(one, dict) else dict(as_mapping(one)) for one in given]


def copied(messages: Messages) -> Messages:
    """The same conversation in lists and mappings of its own."""
    return messages if isinstance(messages, str) else [_copied(message) for message in messages]


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(item) for item in value]
    return value


def cleanup_messages(messages: Messages) -> Messages:
    """As an endpoint takes them, from however a dataset stores them: without the fields that are None (a table has every column in every row), and with tool
    calls that are mappings, where they were stored as JSON."""
    if isinstance(messages, str):
        return messages
    cleaned = []
    for given in messages:
        message = {"content": None, **as_mapping(given)}
        one = {key: value for key, value in message.items() if value is not None or key == "content"}
        if "tool_calls" in one:
            one["tool_calls"] = [json.loads(call) if isinstance(call, str) else _without_none(call) for call in one["tool_calls"]]
            if not one["tool_calls"]:
                del one["tool_calls"]
        # A call for tools alone has no content; of any other message it is the user's mistake that the endpoint will name.
        if "content" in one and one["content"] is None and "tool_calls" not in one:
            one["content"] = ""
        cleaned.append(one)
    return cleaned


def sanitize_messages(messages: Messages) -> Messages:
    """As a table stores them, of prompt and completion alike: plain mappings, with every tool call as one JSON text, because no two tools' arguments have the
    same columns. `cleanup_messages` reads them back."""
    if isinstance(messages, str):
        return messages
    return [_sanitized(message) for message in messages]


def _sanitized(message: Any) -> Message:
    one = {"content": None, **as_mapping(message)}
    if one.get("tool_calls"):
        one["tool_calls"] = [call if isinstance(call, str) else json.dumps(as_mapping(call), ensure_ascii=False) for call in one["tool_calls"]]
    else:
        one.pop("tool_calls", None)
    return one


def as_mapping(value: Any) -> Mapping[str, Any]:
    """A message or a tool call of the OpenAI library as a mapping, and so what there is of it inside one that is a mapping already."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    dumped: Mapping[str, Any] = value.model_dump(exclude_none=True)
    return dumped


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return as_mapping(value) if isinstance(value, Mapping) or hasattr(value, "model_dump") else value


def _without_none(call: Any) -> Mapping[str, Any]:
    return {key: value for key, value in as_mapping(call).items() if value is not None}
