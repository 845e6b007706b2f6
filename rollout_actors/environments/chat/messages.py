"""Messages of the OpenAI API: checked, joined, prepared for sending, and converted for tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, TypeVar

from rollout_actors.environments.types import Fields, GivenMessage, JsonObject, Message, Messages

if TYPE_CHECKING:
    from rollout_actors.environments.environment import Environment

T = TypeVar("T")

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""The roles of messages in the OpenAI API. Chat templates leave out messages of other roles, or
write turns that the model does not know."""

# Immutable types, which a copy shares.
_ATOMS = frozenset({str, int, float, bool, type(None)})


def concat_messages(parts: Sequence[Messages]) -> Messages:
    """Return lists of messages, or texts, joined in order. The messages are not copied."""
    texts: list[str] = []
    joined: list[Message] = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        else:
            joined += part
    if len(texts) == len(parts):
        return "".join(texts)
    if texts:
        raise TypeError(
            f"text cannot be joined with messages: {texts[0][:60]!r}; an environment has one"
            " message_type"
        )
    return joined


def checked_messages(value: object, method: str, environment: Environment) -> Messages:
    """Return the messages that an environment's method has returned, each converted to a dict.

    Raises:
        TypeError: `value` is neither a list of messages nor a text.
        ValueError: a message is not a mapping, or has no known role.
    """
    if isinstance(value, str):
        return value
    if type(value) is list and all(
        type(message) is dict and message.get("role") in ROLES for message in value
    ):
        return list(value)  # the usual case
    by = f"{method} of {environment.name}"
    if isinstance(value, Mapping) or not isinstance(value, Sequence):
        kind = "nothing" if value is None else type(value).__name__
        raise TypeError(
            f"{by} returned {kind}; return a list of messages, and [] if there is nothing to say"
        )
    require_roles(value, f"what {by} returned")
    return [
        message if isinstance(message, dict) else dict(as_mapping(message)) for message in value
    ]


def require_roles(messages: object, where: str) -> None:
    """Check that a value is a list of messages with known roles.

    Raises:
        ValueError: it is not. The error's text begins with `where`.
    """
    form = 'write it like {"role": "user", "content": "..."}'
    if not isinstance(messages, list) and (  # a list, the usual case, is found at once
        isinstance(messages, Mapping) or not isinstance(messages, Iterable)
    ):
        raise ValueError(
            f"{where} is {type(messages).__name__}, not text or a list of messages; {form}, in a"
            " list"
        )
    for number, message in enumerate(messages):
        if not isinstance(message, (dict, Mapping)) and not hasattr(message, "model_dump"):
            raise ValueError(f"{where}: message {number} is {type(message).__name__}; {form}")
        fields = message if isinstance(message, (dict, Mapping)) else as_mapping(message)
        if fields.get("role") is None:
            raise ValueError(
                f"{where}: message {number} has no role, only {', '.join(fields) or 'nothing'};"
                f" {form}"
            )
        if fields["role"] not in ROLES:
            raise ValueError(
                f"{where}: message {number} has the unknown role {fields['role']!r}; use one of"
                f" {', '.join(ROLES)}"
            )


def copied(value: T) -> T:
    """Return a deep copy, several times as fast as `copy.deepcopy` for the types of JSON."""
    copy: Any = value
    if type(copy) is dict:
        copy = copy.copy()
        for key, item in copy.items():
            if type(item) not in _ATOMS:  # most values in a message are text
                copy[key] = copied(item)
    elif type(copy) is list:
        copy = [item if type(item) in _ATOMS else copied(item) for item in copy]
    elif type(copy) not in _ATOMS:
        copy = deepcopy(copy)
    result: T = copy
    return result


def cleanup_messages(messages: Messages) -> Messages:
    """Convert messages from a dataset to the form that endpoints accept.

    A table has every column in every row, so fields that are None are removed: from messages, from
    tool calls and, at any depth, from the parts of a content. Tool calls in JSON become mappings.
    """
    if isinstance(messages, str):
        return messages
    cleaned = []
    for message in messages:
        # Endpoints require the key `content` in every message, even if it is null.
        fields = {"content": None, **_without_none_fields(message)}
        if "tool_calls" in fields:
            fields["tool_calls"] = [
                json.loads(call) if isinstance(call, str) else _without_none_fields(call)
                for call in fields["tool_calls"]
            ]
            if not fields["tool_calls"]:
                del fields["tool_calls"]
        if isinstance(fields["content"], list):
            fields["content"] = _without_none(fields["content"])
        # A message with only tool calls has no content. In any other message a missing content is
        # a mistake, and becomes an empty text.
        if fields["content"] is None and "tool_calls" not in fields:
            fields["content"] = ""
        cleaned.append(fields)
    return cleaned


def _without_none_fields(value: GivenMessage) -> JsonObject:
    return {key: item for key, item in as_mapping(value).items() if item is not None}


def _without_none(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_none(one) for one in value]
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


def cleanup_tools(tools: Sequence[JsonObject]) -> list[JsonObject]:
    """Remove the nulls that a dataset's table has added to the descriptions of tools.

    In a table each tool has the fields and parameters of all tools, and None for missing ones.
    Nulls in a list, such as an `enum`, are kept.
    """
    return [_without_none(tool) for tool in tools]


def sanitize_messages(messages: Messages) -> Messages:
    """Convert messages to a form that a dataset's table can hold.

    All become mappings with a `content`, and tool calls become JSON text (`sanitize_tool_calls`).
    `cleanup_messages` reverses this.
    """
    if isinstance(messages, str):
        return messages
    return sanitize_tool_calls([{"content": None, **as_mapping(message)} for message in messages])


def sanitize_tool_calls(messages: Messages) -> Messages:
    """Convert every tool call in the messages to one JSON text. Remove empty lists of tool calls.

    The arguments of different tools have different columns, so a table could not hold the calls as
    mappings. The given messages are not changed.
    """
    if isinstance(messages, str):
        return messages
    result = []
    for message in messages:
        fields = dict(as_mapping(message))
        calls = fields.pop("tool_calls", None)
        if calls:
            fields["tool_calls"] = [
                call if isinstance(call, str) else json.dumps(as_mapping(call), ensure_ascii=False)
                for call in calls
            ]
        result.append(fields)
    return result


def as_mapping(value: GivenMessage) -> Fields:
    """Convert a message or a tool call to a mapping.

    Objects of the OpenAI library inside it become mappings too.
    """
    if isinstance(value, (dict, Mapping)):  # a dict is recognised at once
        return {key: item if type(item) is str else _plain(item) for key, item in value.items()}
    # OpenAI's classes have every field of the API; None means that this message lacks the field.
    dumped: Fields = value.model_dump(exclude_none=True)
    return dumped


def _plain(value: Any) -> object:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping) or hasattr(value, "model_dump"):
        return as_mapping(value)
    return value
