"""Conversations put together, sent and stored."""

import copy
import json

import pytest
from openai.types.chat import ChatCompletionMessage
from openai.types.chat.chat_completion_message_function_tool_call import (
    ChatCompletionMessageFunctionToolCall,
    Function,
)

from rollout_actors.environments.chat.messages import (
    cleanup_messages,
    cleanup_tools,
    concat_messages,
    sanitize_messages,
    sanitize_tool_calls,
)

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def test_conversations_are_joined_in_order_without_changing_any():
    first, second = [{"role": "user", "content": "a"}], [{"role": "assistant", "content": "b"}]
    joined = concat_messages([first, second])
    assert joined == [*first, *second]
    joined.append({})
    assert (len(first), len(second)) == (1, 1)


def test_texts_are_joined_as_text():
    assert concat_messages(["a", "b", "c"]) == "abc"


def test_text_and_messages_are_not_joined():
    with pytest.raises(TypeError, match="one message_type"):
        concat_messages([[{"role": "user", "content": "a"}], "b"])


def test_cleanup_drops_the_fields_that_a_table_filled_with_none():
    stored = [
        {"role": "user", "content": "a", "tool_calls": None, "tool_call_id": None, "name": None}
    ]
    assert cleanup_messages(stored) == [{"role": "user", "content": "a"}]


def test_cleanup_drops_the_fields_of_content_parts_that_a_table_filled_with_none():
    parts = [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "data:x"}},
        "as it is",
    ]
    filled = [
        {"type": "text", "text": "see", "image_url": None},
        {"type": "image_url", "text": None, "image_url": {"url": "data:x", "detail": None}},
        "as it is",
    ]
    stored = [{"role": "user", "content": filled}]
    before = copy.deepcopy(stored)
    assert cleanup_messages(stored) == [{"role": "user", "content": parts}]
    assert stored == before


def test_cleanup_keeps_the_missing_content_of_a_call_for_tools():
    assert cleanup_messages([{"role": "assistant", "content": None, "tool_calls": [CALL]}]) == [
        {"role": "assistant", "content": None, "tool_calls": [CALL]}
    ]


def test_cleanup_makes_an_empty_text_of_a_missing_content():
    assert cleanup_messages([{"role": "assistant", "content": None, "tool_calls": []}]) == [
        {"role": "assistant", "content": ""}
    ]


def test_cleanup_reads_back_what_sanitation_has_stored():
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
    ]
    assert cleanup_messages(sanitize_messages(messages)) == messages


def test_neither_changes_what_it_is_given():
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [copy.deepcopy(CALL)], "name": None}
    ]
    before = copy.deepcopy(messages)
    cleanup_messages(messages)
    sanitize_messages(messages)
    assert messages == before


def test_sanitation_stores_tool_calls_of_mappings_and_of_the_openai_library_alike():
    foreign = ChatCompletionMessageFunctionToolCall(
        id="c1", type="function", function=Function(name="add", arguments='{"a": 1}')
    )
    for message in (
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "content": None, "tool_calls": [foreign]},
    ):
        assert [json.loads(call) for call in sanitize_messages([message])[0]["tool_calls"]] == [
            CALL
        ]
    message = ChatCompletionMessage(role="assistant", content=None, tool_calls=[foreign])
    stored = sanitize_messages([message])
    assert [json.loads(call) for call in stored[0]["tool_calls"]] == [CALL]


def test_sanitize_tool_calls_writes_each_call_as_json_and_leaves_the_rest():
    told = {"role": "assistant", "content": "sum", "tool_calls": [CALL, json.dumps(CALL)]}
    asked = {"role": "user", "tool_calls": []}
    before = copy.deepcopy([asked, told])
    made = sanitize_tool_calls([asked, told])
    assert made == [{"role": "user"}, told | {"tool_calls": [json.dumps(CALL)] * 2}]
    assert [asked, told] == before
    assert sanitize_tool_calls("a") == "a"


def test_text_stays_text():
    assert cleanup_messages("a") == "a"
    assert sanitize_messages("a") == "a"


def test_what_the_openai_library_has_inside_mappings_becomes_plain_too():
    function = Function(name="add", arguments='{"a": 1}')
    told = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }
    (stored,) = sanitize_messages([told])
    assert stored["content"] is None and [json.loads(call) for call in stored["tool_calls"]] == [
        CALL
    ]


def test_content_is_there_always_whoever_made_the_message():
    call = ChatCompletionMessageFunctionToolCall.model_validate(CALL)
    made = [
        ChatCompletionMessage(role="assistant", tool_calls=[call]),
        {"role": "assistant", "tool_calls": [CALL]},
    ]
    for stored in sanitize_messages(made):
        assert stored["content"] is None and [
            json.loads(call) for call in stored["tool_calls"]
        ] == [CALL]
    assert (
        cleanup_messages(made) == [{"role": "assistant", "content": None, "tool_calls": [CALL]}] * 2
    )
    assert cleanup_messages([{"role": "user"}]) == [{"role": "user", "content": ""}]


# What a model is told of tools


def tool_with(properties, **more):
    return {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": properties, **more},
        },
    }


def test_what_a_table_filled_into_tools_is_not_told_to_a_model():
    point = {"type": "object", "properties": {"x": {"type": "integer"}}}
    told = tool_with(
        {
            "at": point,
            "many": {"type": "array", "items": {"type": "string"}},
            "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        }
    )
    filled = tool_with(
        {
            "at": {
                "type": "object",
                "properties": {"x": {"type": "integer", "enum": None}, "y": None},
                "items": None,
                "anyOf": None,
                "const": None,
            },
            "many": {
                "type": "array",
                "properties": None,
                "items": {"type": "string", "enum": None},
                "anyOf": None,
            },
            "either": {
                "type": None,
                "properties": None,
                "items": None,
                "anyOf": [{"type": "string", "items": None}, {"type": "null", "items": None}],
            },
            "elsewhere": None,
        },
        required=None,
        additionalProperties=None,
    )
    filled["function"] |= {"description": None, "strict": None}
    before = copy.deepcopy(filled)
    assert cleanup_tools([filled]) == [told]
    assert filled == before


def test_a_parameter_may_have_the_name_of_a_field_of_json_schema():
    names = ["default", "enum", "const", "properties", "required", "items"]
    told = {name: {"type": "string"} for name in names}
    filled = {name: {"type": "string", "enum": None} for name in names} | {
        "examples": None,
        "anyOf": None,
    }
    assert cleanup_tools([tool_with(filled)]) == [tool_with(told)]


def test_a_null_that_is_a_value_is_told_to_a_model():
    said = {
        "default": {"type": "string", "default": None},
        "allowed": {"enum": ["a", None]},
        "shown": {
            "type": ["object", "null"],
            "examples": [None, {"a": None}],
            "default": {"a": None},
        },
        "none": {"anyOf": [{"type": "integer"}, {"const": None}, {"type": "null", "const": None}]},
    }
    assert cleanup_tools([tool_with(said)]) == [tool_with(said)]


def test_a_required_parameter_has_no_default():
    filled = {
        "x": {"type": "integer", "default": None},
        "y": {"type": "integer", "default": None},
        "z": {"type": "integer", "default": 0},
    }
    told = {
        "x": {"type": "integer"},
        "y": {"type": "integer", "default": None},
        "z": {"type": "integer", "default": 0},
    }
    assert cleanup_tools([tool_with(filled, required=["x", "z"])]) == [
        tool_with(told, required=["x", "z"])
    ]


def test_what_is_no_schema_is_left_as_it_is():
    tools = [
        '{"type": "function"}',
        {"type": "function", "function": {"name": "f", "parameters": True}},
        tool_with({"x": {"required": True}}, additionalProperties=False),
    ]
    assert cleanup_tools(tools) == tools
