"""Conversations of the OpenAI API: put together, sent, and stored in tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from rollout_actors.environments.types import Message, Messages

_FIELDS_BY_NAME = frozenset(
    {
        "properties",
        "patternProperties",
        "$defs",
        "definitions",
        "dependentSchemas",
        "dependentRequired",
    }
)
"""Fields of a JSON schema that are mappings from names, which may be those of its fields too."""
_FIELDS_OF_VALUES = frozenset({"default", "const", "enum", "examples"})
"""Fields of a JSON schema in which a null is a value."""
_ATOMS = frozenset({str, int, float, bool, type(None)})


def concat_messages(parts: Sequence[Messages]) -> Messages:
    """Join conversations, or texts, in order. Nothing is copied but the outermost list."""
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


def checked_messages(value: Any, method: str, environment: Any) -> Messages:
    """Return what an environment's method returned, with every message as a dict.

    Raises:
        TypeError: it is neither a conversation nor a text.
        ValueError: a message is none, or has no role.
    """
    if isinstance(value, str):
        return value
    if type(value) is list and all(
        type(message) is dict and message.get("role") is not None for message in value
    ):
        return list(value)  # as nearly always
    by = f"{method} of {environment.name}"
    if isinstance(value, Mapping) or not isinstance(value, Sequence):
        kind = "nothing" if value is None else type(value).__name__
        raise TypeError(
            f"{by} returned {kind}; return a list of messages, and [] where there is nothing to say"
        )
    require_roles(value, f"what {by} returned")
    return [
        message if isinstance(message, dict) else dict(as_mapping(message)) for message in value
    ]


def require_roles(messages: Any, where: str) -> None:
    """Refuse what is no conversation, and a message that does not say who says it.

    Raises:
        ValueError: it begins with `where`.
    """
    form = 'write it like {"role": "user", "content": "..."}'
    if isinstance(messages, Mapping) or not isinstance(messages, Iterable):
        raise ValueError(
            f"{where} is {type(messages).__name__}, not a list of messages; {form}, in a list"
        )
    for number, message in enumerate(messages):
        if not isinstance(message, dict | Mapping) and not hasattr(message, "model_dump"):
            raise ValueError(f"{where}: message {number} is {type(message).__name__}; {form}")
        fields = message if isinstance(message, dict | Mapping) else as_mapping(message)
        if fields.get("role") is None:
            raise ValueError(
                f"{where}: message {number} has no role, only {', '.join(fields) or 'nothing'};"
                f" {form}"
            )


def copied(messages: Messages) -> Messages:
    """Return the same conversation in lists and mappings of its own."""
    return messages if isinstance(messages, str) else [_copied(message) for message in messages]


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        result = value.copy()
        for key, item in result.items():
            if type(item) is not str:  # nearly all there is in a message is text
                result[key] = _copied(item)
        return result
    if isinstance(value, list | tuple):
        return [_copied(item) for item in value]
    return value


def deeply_copied(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """Do what `copy.deepcopy` does, several times as fast for what JSON has."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is not dict and kind is not list:
        return deepcopy(value, memo)
    memo = {} if memo is None else memo
    if (known := memo.get(id(value))) is not None:
        return known
    if kind is list:
        items: list[Any] = []
        memo[id(value)] = items
        items.extend([one if type(one) in _ATOMS else deeply_copied(one, memo) for one in value])
        return items
    fields: dict[Any, Any] = {}
    memo[id(value)] = fields
    for key, item in value.items():
        own_key = key if type(key) is str else deeply_copied(key, memo)
        fields[own_key] = item if type(item) in _ATOMS else deeply_copied(item, memo)
    return fields


def cleanup_messages(messages: Messages) -> Messages:
    """Return messages as an endpoint takes them, from however a dataset stores them.

    A table has every column in every row: fields that are None go, of messages, of tool calls and,
    at any depth, of the parts of a content. Tool calls that are JSON become mappings.
    """
    if isinstance(messages, str):
        return messages
    cleaned = []
    for message in messages:
        fields = {"content": None, **as_mapping(message)}
        fields = {"content": fields["content"], **_without_none_fields(fields)}
        if "tool_calls" in fields:
            fields["tool_calls"] = [
                json.loads(call) if isinstance(call, str) else _without_none_fields(call)
                for call in fields["tool_calls"]
            ]
            if not fields["tool_calls"]:
                del fields["tool_calls"]
        if isinstance(fields["content"], list):
            fields["content"] = _without_none(fields["content"])
        # A call for tools alone has no content. In any other message that is the user's mistake,
        # which the endpoint will name.
        if fields["content"] is None and "tool_calls" not in fields:
            fields["content"] = ""
        cleaned.append(fields)
    return cleaned


def _without_none_fields(value: Any) -> dict[str, Any]:
    return {key: item for key, item in as_mapping(value).items() if item is not None}


def _without_none(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_none(one) for one in value]
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


def cleanup_tools(tools: Sequence[Any]) -> list[Any]:
    """Return tools without what a table filled in: there each has the fields and the parameters of
    all, and None for what is not its own.

    Null stays where JSON schema means it:

    - inside `enum`, `examples`, and a `default` or `const` that is a list or a mapping;
    - as the `default` of what may be left out. A parameter that is `required` has none;
    - as the `const` of a schema that says nothing else of its values, but that its type is `null`.

    No rule tells the null defaults of a table from those that were put into it: info that must come
    back to the letter is stored as JSON.
    """
    return [_without_filled(tool) for tool in tools]


def _without_filled(schema: Any, *, is_required: bool = False) -> Any:
    if isinstance(schema, list | tuple):
        return [_without_filled(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    required = schema.get("required")
    names = required if isinstance(required, list | tuple) else ()
    other_fields = {
        key: value
        for key, value in schema.items()
        if value is not None and key not in ("title", "description")
    }
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if value is None:
            is_null_constant = key == "const" and other_fields in ({}, {"type": "null"})
            if is_null_constant or (key == "default" and not is_required):
                result[key] = None
        elif key in _FIELDS_OF_VALUES:
            result[key] = value
        elif key in _FIELDS_BY_NAME and isinstance(value, Mapping):
            result[key] = {
                name: _without_filled(one, is_required=name in names)
                for name, one in value.items()
                if one is not None
            }
        else:
            result[key] = _without_filled(value)
    return result


def sanitize_messages(messages: Messages) -> Messages:
    """Return messages as a table stores them: mappings with a `content`, and with tool calls as
    `sanitize_tool_calls` writes them. `cleanup_messages` reads them back.
    """
    if isinstance(messages, str):
        return messages
    return sanitize_tool_calls([{"content": None, **as_mapping(message)} for message in messages])


def sanitize_tool_calls(messages: Messages) -> Messages:
    """Return messages with every tool call as one JSON text, and without empty lists of them.

    No two tools' arguments have the same columns, so that a table could not hold the calls as they
    are. The given messages stay as they were.
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


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Return a message or a tool call as a mapping, with the OpenAI library's objects, itself or
    inside it, as mappings too.
    """
    if isinstance(value, dict | Mapping):  # a dict is found at once
        return {key: item if type(item) is str else _plain(item) for key, item in value.items()}
    dumped: Mapping[str, Any] = value.model_dump(exclude_none=True)
    return dumped


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping) or hasattr(value, "model_dump"):
        return as_mapping(value)
    return value
