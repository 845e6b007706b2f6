"""Token extraction (spec: trajectories): ids and log-probabilities come from the response, whole or
not at all.
"""

import asyncio

import pytest
from environment_support import user
from openai.types.chat import ChatCompletion
from scripted_client import Answer, Call, chat_response, rendered_ids, text_response

from rollout_actors.environments.chat.responses import (
    RETURNS_TOKENS,
    parse_response_messages,
    parse_response_tokens,
)
from rollout_actors.environments.clients.openai import REASONING

ARGUMENTS = {
    "chat": RETURNS_TOKENS,
    "completion": {"logprobs": 1, "extra_body": {"return_token_ids": True}},
}
RENDERED = rendered_ids([user("hi")])


def response_of(answer, message_type="chat", without=()):
    """Answer a call that asks for tokens, but for the arguments `without`."""
    arguments = {
        name: value for name, value in ARGUMENTS[message_type].items() if name not in without
    }
    body = arguments.get("extra_body", {})
    arguments["extra_body"] = {name: body[name] for name in body if name not in without}
    if message_type == "chat":
        return chat_response(Call(0, "model", [user("hi")], arguments), answer)
    return text_response(Call(0, "model", "hi", arguments), answer)


def tokens(response, message_type="chat"):
    return asyncio.run(parse_response_tokens(response, message_type))


def messages(response, message_type="chat"):
    return asyncio.run(parse_response_messages(response, message_type))


@pytest.mark.parametrize(("message_type", "prompt_ids"), [("chat", None), ("completion", [1, 2])])
def test_the_tokens_of_a_chat_are_those_of_the_response_and_of_a_completion_those_of_its_choice(
    message_type, prompt_ids
):
    answer = Answer(
        "ok", prompt_ids=prompt_ids, completion_ids=[5, 6, 7], logprobs=[-0.1, -0.2, -0.3]
    )
    expected_ids = prompt_ids or RENDERED
    assert tokens(response_of(answer, message_type), message_type) == {
        "prompt_ids": expected_ids,
        "prompt_mask": [0] * len(expected_ids),
        "completion_ids": [5, 6, 7],
        "completion_mask": [1, 1, 1],
        "completion_logprobs": [-0.1, -0.2, -0.3],
    }


@pytest.mark.parametrize(
    ("message_type", "without", "logprobs"),
    [
        ("chat", ["logprobs"], None),
        ("chat", ["return_token_ids"], None),
        ("chat", ["extra_body"], None),
        ("completion", ["logprobs"], None),
        ("completion", ["return_token_ids"], None),
        ("completion", [], [None, -0.2]),
    ],
)
def test_without_any_piece_tokens_are_none(message_type, without, logprobs):
    answer = Answer("ok", completion_ids=[5, 6], logprobs=logprobs)
    assert tokens(response_of(answer, message_type, without), message_type) is None


@pytest.mark.parametrize(
    ("without", "expected"), [([], [5, 6]), (["return_tokens_as_token_ids"], None)]
)
def test_where_ids_are_not_listed_tokens_that_are_named_by_their_ids_are_read_and_texts_are_not(
    without, expected
):
    response = response_of(Answer("ok", completion_ids=[5, 6]), without=without)
    response.choices[0].token_ids = None
    assert (tokens(response) or {}).get("completion_ids") == expected


@pytest.mark.parametrize("message_type", ["chat", "completion"])
@pytest.mark.parametrize("logprobs", [[-0.1], [-0.1, -0.2, -0.3]])
def test_a_length_mismatch_is_refused_with_both_numbers(message_type, logprobs):
    response = response_of(Answer("ok", completion_ids=[5, 6], logprobs=logprobs), message_type)
    with pytest.raises(ValueError, match=f"2 token ids with {len(logprobs)} log-probabilities"):
        tokens(response, message_type)


def test_an_empty_completion_has_tokens_none_of_which_is_sampled():
    assert tokens(response_of(Answer("", completion_ids=[])))["completion_ids"] == []


def test_what_is_returned_is_not_the_responses_own():
    response = response_of(Answer("ok"))
    tokens(response)["prompt_ids"].append(1)
    assert response.prompt_token_ids == RENDERED


def test_a_chats_message_is_an_assistants_and_a_completions_its_text():
    assert messages(response_of(Answer("ok"))) == [{"role": "assistant", "content": "ok"}]
    assert messages(response_of(Answer(None))) == [{"role": "assistant", "content": ""}]
    assert messages(response_of(Answer(" there"), "completion"), "completion") == " there"


def test_tool_calls_become_plain_mappings():
    (message,) = messages(response_of(Answer(None, tool_calls=[("add", {"a": 1})])))
    function = {"name": "add", "arguments": '{"a": 1}'}
    call = {"id": "call_0_0", "type": "function", "function": function}
    assert message == {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize("choices", [[], None])
def test_an_answer_without_choices_has_no_message_and_no_tokens(choices):
    response = response_of(Answer(fields={"choices": choices}))
    with pytest.raises(ValueError, match=r"no choices, .*nothing else"):
        messages(response)
    assert tokens(response) is None


@pytest.mark.parametrize("names", [("reasoning",), ("reasoning_content",), REASONING])
def test_what_the_model_thought_stays_in_its_message_under_the_endpoints_name(names):
    answer = chat_response(Call(0, "m", [], {}), Answer("4")).model_dump()
    answer["choices"][0]["message"] |= dict.fromkeys(names, "2 and 2 is 4")
    (message,) = messages(ChatCompletion.model_validate(answer))
    thought = dict.fromkeys(names, "2 and 2 is 4")
    assert message == {"role": "assistant", "content": "4", **thought}
