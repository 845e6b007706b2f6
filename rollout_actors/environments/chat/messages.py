"""Conversations as the OpenAI API has them: put together, and made ready to be sent or to be
stored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from rollout_actors.environments.types import Message, Messages

_OF_NAMES = frozenset(
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
_OF_VALUES = frozenset({"default", "const", "enum", "examples"})
"""Fields of a JSON schema in which a null is a value."""
_ATOMS = frozenset({str, int, float, bool, type(None)})


def concat_messages(parts: Sequence[Messages]) -> Messages:
    """One conversation, or one text, of several in a row. Nothing is copied but the outermost
    list."""
    joined: list[Message] = []
    for part in parts:
        if type(part) is list:
            joined += part
            continue
        if isinstance(part, str):
            if all(isinstance(one, str) for one in parts):
                return "".join(map(str, parts))
            raise TypeError(
                f"text cannot be joined with messages: {part[:60]!r}; an environment has one"
                " message_type"
            )
        joined.extend(part)
    return joined if parts else ""


def said(given: Any, method: str, environment: Any) -> Messages:
    """What an environment's method returned, with the OpenAI library's messages as mappings.
    TypeError where it is no conversation and no text.
    """
    if isinstance(given, str):
        return given
    if type(given) is list and all(
        type(one) is dict and one.get("role") is not None for one in given
    ):
        return list(given)  # as nearly always
    by = f"{method} of {environment.name}"
    if not isinstance(given, list) and (
        isinstance(given, Mapping) or not isinstance(given, Sequence)
    ):
        what = "nothing" if given is None else type(given).__name__
        raise TypeError(
            f"{by} returned {what}; return a list of messages, and [] where there is nothing to say"
        )
    if wrong := [
        one
        for one in given
        if not isinstance(one, dict | Mapping) and not hasattr(one, "model_dump")
    ]:
        raise TypeError(
            f"{by} returned a list with {type(wrong[0]).__name__} in it; return a list of messages,"
            " each with a role and a content"
        )
    require_roles(given, f"what {by} returned")
    return [one if isinstance(one, dict) else dict(as_mapping(one)) for one in given]


def require_roles(messages: Any, where: str) -> None:
    """Refuse what is no conversation, and a message that does not say who says it.

    Raises:
        ValueError: it begins with `where`.
    """
    form = 'write it like {"role": "user", "content": "..."}'
    if type(messages) is not list and (
        isinstance(messages, Mapping) or not isinstance(messages, Iterable)
    ):
        raise ValueError(
            f"{where} is {type(messages).__name__}, not a list of messages; {form}, in a list"
        )
    for number, message in enumerate(messages):
        if type(message) is dict or isinstance(message, Mapping):
            one = message
        elif hasattr(message, "model_dump"):
            one = as_mapping(message)
        else:
            raise ValueError(f"{where}: message {number} is {type(message).__name__}; {form}")
        if one.get("role") is None:
            raise ValueError(
                f"{where}: message {number} has no role, only {', '.join(one) or 'nothing'}; {form}"
            )


def copied(messages: Messages) -> Messages:
    """The same conversation in lists and mappings of its own."""
    if isinstance(messages, str):
        return messages
    made = []
    for message in messages:
        if type(message) is not dict:
            made.append(_copied(message))
            continue
        one = message.copy()
        for key, item in one.items():
            if type(item) is not str:  # nearly all there is in a message is text
                one[key] = _copied(item)
        made.append(one)
    return made


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(item) for item in value]
    return value


def deeply_copied(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """The same as `copy.deepcopy`, several times as fast for what JSON has."""
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
    made: dict[Any, Any] = {}
    memo[id(value)] = made
    for key, item in value.items():
        made[key if type(key) is str else deeply_copied(key, memo)] = (
            item if type(item) in _ATOMS else deeply_copied(item, memo)
        )
    return made


def cleanup_messages(messages: Messages) -> Messages:
    """As an endpoint takes them, from however a dataset stores them: without the fields that are
    None, of messages, of tool calls and, at any depth, of the parts of a content (a table has every
    column in every row), and with tool calls that are mappings, where they were stored as JSON."""
    if isinstance(messages, str):
        return messages
    cleaned = []
    for given in messages:
        message = {"content": None, **as_mapping(given)}
        one = {
            key: value for key, value in message.items() if value is not None or key == "content"
        }
        if "tool_calls" in one:
            one["tool_calls"] = [
                json.loads(call) if isinstance(call, str) else _without_none(call)
                for call in one["tool_calls"]
            ]
            if not one["tool_calls"]:
                del one["tool_calls"]
        if isinstance(one["content"], list):
            one["content"] = [_filled(part) for part in one["content"]]
        # A call for tools alone has no content; of any other message it is the user's mistake that
        # the endpoint will name.
        if one["content"] is None and "tool_calls" not in one:
            one["content"] = ""
        cleaned.append(one)
    return cleaned


def cleanup_tools(tools: Sequence[Any]) -> list[Any]:
    """What a model is told of tools, without what a table filled in: there each has the fields and
    the parameters of all, and None for what is not its own.

    What is None goes: a field of a tool or of a JSON schema, and a name in `properties`, `$defs`
    and the like. It stays where JSON schema has a null:

    - inside `enum`, `examples`, and a `default` or `const` that is a list or a mapping;
    - as the `default` of what may be left out. A parameter that is `required` has none;
    - as the `const` of a schema that says nothing else of its values, but that its type is `null`.

    No rule tells the null defaults of a table from those that were put into it: info that must come
    back to the letter is stored as JSON.
    """
    return [_told(tool) for tool in tools]


def _told(schema: Any, *, is_required: bool = False) -> Any:
    if isinstance(schema, list | tuple):
        return [_told(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    required = schema.get("required")
    names = required if isinstance(required, list | tuple) else ()
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if value is None and not (
            _is_constant_null(schema) if key == "const" else key == "default" and not is_required
        ):
            continue
        if key in _OF_VALUES:
            made[key] = value
        elif key in _OF_NAMES and isinstance(value, Mapping):
            made[key] = {
                name: _told(one, is_required=name in names)
                for name, one in value.items()
                if one is not None
            }
        else:
            made[key] = _told(value)
    return made


def _is_constant_null(schema: Mapping[str, Any]) -> bool:
    said = {
        key: value
        for key, value in schema.items()
        if value is not None and key not in ("title", "description")
    }
    return said in ({}, {"type": "null"})


def sanitize_messages(messages: Messages) -> Messages:
    """Return messages as a table stores them, of prompt and completion alike.

    Each is a plain mapping with a `content`, and its tool calls are those of `sanitize_tool_calls`.
    `cleanup_messages` reads them back.
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
    return [_with_calls_as_text(as_mapping(message)) for message in messages]


def _with_calls_as_text(message: Mapping[str, Any]) -> Message:
    one = {key: value for key, value in message.items() if key != "tool_calls"}
    if calls := message.get("tool_calls"):
        one["tool_calls"] = [
            call if isinstance(call, str) else json.dumps(as_mapping(call), ensure_ascii=False)
            for call in calls
        ]
    return one


def as_mapping(value: Any) -> Mapping[str, Any]:
    """A message or a tool call of the OpenAI library as a mapping, and so what there is of it
    inside one that is a mapping already.
    """
    if type(value) is dict or isinstance(value, Mapping):  # the first is found at once
        return {key: item if type(item) is str else _plain(item) for key, item in value.items()}
    dumped: Mapping[str, Any] = value.model_dump(exclude_none=True)
    return dumped


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return (
        as_mapping(value) if isinstance(value, Mapping) or hasattr(value, "model_dump") else value
    )


def _without_none(call: Any) -> Mapping[str, Any]:
    return {key: value for key, value in as_mapping(call).items() if value is not None}


def _filled(part: Any) -> Any:
    """What of it is not None, at any depth."""
    if isinstance(part, list):
        return [_filled(one) for one in part]
    return (
        {key: _filled(value) for key, value in part.items() if value is not None}
        if isinstance(part, Mapping)
        else part
    )
