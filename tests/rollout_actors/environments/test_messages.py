"""Conversations put together, sent and stored."""

import copy
import json

import pytest
from openai.types.chat import ChatCompletionMessage
from openai.types.chat.chat_completion_message_function_tool_call import ChatCompletionMessageFunctionToolCall, Function

from rollout_actors.environments.messages import cleanup_messages, concat_messages, sanitize_messages

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
    stored = [{"role": "user", "content": "a", "tool_calls": None, "tool_call_id": None, "name": None}]
    assert cleanup_messages(stored) == [{"role": "user", "content": "a"}]


def test_cleanup_keeps_the_missing_content_of_a_call_for_tools():
    assert cleanup_messages([{"role": "assistant", "content": None, "tool_calls": [CALL]}]) == [{"role": "assistant", "content": None, "tool_calls": [CALL]}]


def test_cleanup_makes_an_empty_text_of_a_missing_content():
    assert cleanup_messages([{"role": "assistant", "content": None, "tool_calls": []}]) == [{"role": "assistant", "content": ""}]


def test_cleanup_reads_back_what_sanitation_has_stored():
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
    ]
    assert cleanup_messages(sanitize_messages(messages)) == messages


def test_neither_changes_what_it_is_given():
    messages = [{"role": "assistant", "content": None, "tool_calls": [copy.deepcopy(CALL)], "name": None}]
    before = copy.deepcopy(messages)
    cleanup_messages(messages)
    sanitize_messages(messages)
    assert messages == before


def test_sanitation_stores_tool_calls_of_mappings_and_of_the_openai_library_alike():
    foreign = ChatCompletionMessageFunctionToolCall(id="c1", type="function", function=Function(name="add", arguments='{"a": 1}'))
    for message in ({"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "assistant", "content": None, "tool_calls": [foreign]}):
        assert [json.loads(call) for call in sanitize_messages([message])[0]["tool_calls"]] == [CALL]
    message = ChatCompletionMessage(role="assistant", content=None, tool_calls=[foreign])
    stored = sanitize_messages([message])
    assert [json.loads(call) for call in stored[0]["tool_calls"]] == [CALL]


def test_text_stays_text():
    assert cleanup_messages("a") == "a"
    assert sanitize_messages("a") == "a"


def test_what_the_openai_library_has_inside_mappings_becomes_plain_too():
    function = Function(name="add", arguments='{"a": 1}')
    told = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]}
    (stored,) = sanitize_messages([told])
    assert stored["content"] is None and [json.loads(call) for call in stored["tool_calls"]] == [CALL]


def test_content_is_there_always_whoever_made_the_message():
    call = ChatCompletionMessageFunctionToolCall.model_validate(CALL)
    made = [ChatCompletionMessage(role="assistant", tool_calls=[call]), {"role": "assistant", "tool_calls": [CALL]}]
    for stored in sanitize_messages(made):
        assert stored["content"] is None and [json.loads(call) for call in stored["tool_calls"]] == [CALL]
    assert cleanup_messages(made) == [{"role": "assistant", "content": None, "tool_calls": [CALL]}] * 2
    assert cleanup_messages([{"role": "user"}]) == [{"role": "user", "content": ""}]
