"""Token extraction (spec: trajectories): ids and log-probabilities come from the response, whole or
not at all.
"""

import asyncio

import pytest
from environment_support import user
from scripted_client import Answer, Call, chat_response, rendered_ids, text_response

from rollout_actors.environments.chat.responses import (
    RETURNS_TOKENS,
    parse_response_messages,
    parse_response_tokens,
)

CHAT = Call(0, "model", [user("hi")], dict(RETURNS_TOKENS))
TEXT = Call(0, "model", "hi", {"logprobs": 1, "extra_body": {"return_token_ids": True}})


def tokens(response, message_type="chat"):
    return asyncio.run(parse_response_tokens(response, message_type))


def messages(response, message_type="chat"):
    return asyncio.run(parse_response_messages(response, message_type))


def without(call: Call, *names: str) -> Call:
    arguments = {key: value for key, value in call.arguments.items() if key not in names}
    if "extra_body" in arguments:
        arguments["extra_body"] = {
            key: value for key, value in arguments["extra_body"].items() if key not in names
        }
    return Call(call.number, call.model, call.prompt, arguments)


def test_a_chats_tokens_are_those_of_the_response():
    answer = Answer("ok", completion_ids=[5, 6, 7], logprobs=[-0.1, -0.2, -0.3])
    assert tokens(chat_response(CHAT, answer)) == {
        "prompt_ids": rendered_ids(CHAT.prompt),
        "prompt_mask": [0] * len(rendered_ids(CHAT.prompt)),
        "completion_ids": [5, 6, 7],
        "completion_mask": [1, 1, 1],
        "completion_logprobs": [-0.1, -0.2, -0.3],
    }


def test_a_completions_tokens_are_those_of_its_choice():
    answer = Answer("ok", prompt_ids=[1, 2], completion_ids=[5, 6], logprobs=[-0.1, -0.2])
    assert tokens(text_response(TEXT, answer), "completion") == {
        "prompt_ids": [1, 2],
        "prompt_mask": [0, 0],
        "completion_ids": [5, 6],
        "completion_mask": [1, 1],
        "completion_logprobs": [-0.1, -0.2],
    }


@pytest.mark.parametrize("missing", ["logprobs", "return_token_ids"])
def test_without_a_piece_that_was_not_asked_for_tokens_are_none(missing):
    assert tokens(chat_response(without(CHAT, missing), Answer("ok"))) is None
    assert tokens(text_response(without(TEXT, missing), Answer("ok")), "completion") is None


def test_an_endpoint_that_knows_nothing_of_token_ids_gives_none():
    assert tokens(chat_response(without(CHAT, "extra_body"), Answer("ok"))) is None


def test_a_log_probability_that_is_missing_makes_tokens_none():
    assert (
        tokens(
            text_response(TEXT, Answer("ok", completion_ids=[5, 6], logprobs=[None, -0.2])),
            "completion",
        )
        is None
    )


def test_tokens_that_are_named_by_their_ids_are_read_where_the_ids_are_not_listed():
    response = chat_response(CHAT, Answer("ok", completion_ids=[5, 6], logprobs=[-0.1, -0.2]))
    response.choices[0].token_ids = None
    assert tokens(response)["completion_ids"] == [5, 6]


def test_tokens_that_are_named_by_their_text_are_not_read():
    response = chat_response(
        without(CHAT, "return_tokens_as_token_ids"), Answer("ok", completion_ids=[5, 6])
    )
    response.choices[0].token_ids = None
    assert tokens(response) is None


@pytest.mark.parametrize("logprobs", [[-0.1], [-0.1, -0.2, -0.3]])
def test_a_length_mismatch_is_refused_with_both_numbers(logprobs):
    with pytest.raises(ValueError, match=f"2 token ids with {len(logprobs)} log-probabilities"):
        tokens(chat_response(CHAT, Answer("ok", completion_ids=[5, 6], logprobs=logprobs)))
    with pytest.raises(ValueError, match=f"2 token ids with {len(logprobs)} log-probabilities"):
        tokens(
            text_response(TEXT, Answer("ok", completion_ids=[5, 6], logprobs=logprobs)),
            "completion",
        )


def test_an_empty_completion_has_tokens_none_of_which_is_sampled():
    assert tokens(chat_response(CHAT, Answer("", completion_ids=[])))["completion_ids"] == []


def test_what_is_returned_is_not_the_responses_own():
    response = chat_response(CHAT, Answer("ok"))
    tokens(response)["prompt_ids"].append(1)
    assert response.prompt_token_ids == rendered_ids(CHAT.prompt)


def test_a_chats_message_is_an_assistants():
    assert messages(chat_response(CHAT, Answer("ok"))) == [{"role": "assistant", "content": "ok"}]
    assert messages(chat_response(CHAT, Answer(None))) == [{"role": "assistant", "content": ""}]


def test_tool_calls_become_plain_mappings():
    (message,) = messages(chat_response(CHAT, Answer(None, tool_calls=[("add", {"a": 1})])))
    assert message["content"] is None
    assert message["tool_calls"] == [
        {"id": "call_0_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    ]


@pytest.mark.parametrize("nothing", [[], None])
def test_an_answer_without_choices_has_no_message_and_no_tokens(nothing):
    response = chat_response(CHAT, Answer(fields={"choices": nothing}))
    with pytest.raises(ValueError, match="has no choices, and says nothing else"):
        messages(response)
    assert tokens(response) is None


def test_a_completions_message_is_its_text():
    assert messages(text_response(TEXT, Answer(" there")), "completion") == " there"
