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
FUNCTION = Function(name="add", arguments='{"a": 1}')
FOREIGN_CALL = ChatCompletionMessageFunctionToolCall(id="c1", type="function", function=FUNCTION)
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
CALLING_OTHERWISE = {
    "with the library's calls": CALLING | {"tool_calls": [FOREIGN_CALL]},
    "with its function in a mapping": CALLING | {"tool_calls": [CALL | {"function": FUNCTION}]},
    "a message of the library": ChatCompletionMessage(role="assistant", tool_calls=[FOREIGN_CALL]),
    "without content": {"role": "assistant", "tool_calls": [CALL]},
}


def test_conversations_and_texts_are_joined_in_order_without_changing_any():
    first = [{"role": "user", "content": "a"}]
    second = [{"role": "assistant", "content": "b"}]
    joined = concat_messages([first, second])
    assert joined == [*first, *second]
    joined.append({})
    assert (len(first), len(second)) == (1, 1)
    assert concat_messages(["a", "b", "c"]) == "abc"
    with pytest.raises(TypeError, match="one message_type"):
        concat_messages([first, "b"])


@pytest.mark.parametrize(
    ("stored", "cleaned"),
    [
        (
            {"role": "user", "content": "a", "tool_calls": None, "tool_call_id": None},
            {"role": "user", "content": "a"},
        ),
        (
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "see", "image_url": None},
                    {"type": "image_url", "text": None, "image_url": {"url": "x", "detail": None}},
                    "as it is",
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "see"},
                    {"type": "image_url", "image_url": {"url": "x"}},
                    "as it is",
                ],
            },
        ),
        (CALLING, CALLING),
        (
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "assistant", "content": ""},
        ),
        ({"role": "user"}, {"role": "user", "content": ""}),
    ],
    ids=["fields", "parts of contents", "a call for tools alone", "no calls", "no content"],
)
def test_cleanup_drops_the_fields_that_a_table_filled_with_none(stored, cleaned):
    before = copy.deepcopy(stored)
    assert cleanup_messages([stored]) == [cleaned]
    assert stored == before


def test_cleanup_reads_back_what_sanitation_has_stored():
    messages = [
        {"role": "user", "content": "a"},
        CALLING,
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
    ]
    assert cleanup_messages(sanitize_messages(messages)) == messages
    assert sanitize_messages("a") == cleanup_messages("a") == "a"


def test_neither_changes_what_it_is_given():
    messages = [CALLING | {"name": None}]
    before = copy.deepcopy(messages)
    cleanup_messages(messages)
    sanitize_messages(messages)
    assert messages == before


@pytest.mark.parametrize("message", CALLING_OTHERWISE.values(), ids=CALLING_OTHERWISE)
def test_sanitation_stores_tool_calls_of_mappings_and_of_the_openai_library_alike(message):
    (stored,) = sanitize_messages([message])
    assert stored["content"] is None
    assert [json.loads(call) for call in stored["tool_calls"]] == [CALL]
    assert cleanup_messages([message]) == [CALLING]


def test_sanitize_tool_calls_writes_each_call_as_json_and_leaves_the_rest():
    answer = {"role": "assistant", "content": "sum", "tool_calls": [CALL, json.dumps(CALL)]}
    question = {"role": "user", "tool_calls": []}
    before = copy.deepcopy([question, answer])
    stored = sanitize_tool_calls([question, answer])
    assert stored == [{"role": "user"}, answer | {"tool_calls": [json.dumps(CALL)] * 2}]
    assert [question, answer] == before
    assert sanitize_tool_calls("a") == "a"


# What a model is told of tools


def test_a_model_is_told_of_tools_what_they_are_without_what_a_table_filled_in():
    def tool_with(properties, **more):
        parameters = {"type": "object", "properties": properties, **more}
        return {"type": "function", "function": {"name": "f", "parameters": parameters}}

    string = {"type": "string"}
    filled = tool_with(
        {
            "at": {"type": "object", "properties": {"x": {"enum": ["a", None]}, "y": None}},
            "either": {"type": None, "anyOf": [string | {"items": None}, string]},
            "enum": string,
            "elsewhere": None,
        },
        required=None,
        additionalProperties=False,
    )
    before = copy.deepcopy(filled)
    cleaned = tool_with(
        {
            "at": {"type": "object", "properties": {"x": {"enum": ["a", None]}}},
            "either": {"anyOf": [string, string]},
            "enum": string,
        },
        additionalProperties=False,
    )
    text = json.dumps(cleaned)
    assert cleanup_tools([filled, text]) == [cleaned, text]
    assert filled == before
