"""The next turn's prompt starts with exactly the previous prompt and completion ids, or the sample
is split and that is counted.
"""

from __future__ import annotations

import asyncio
import re
from itertools import pairwise
from typing import Any

import pytest
from environment_support import Talk, assistant, generated, user
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engines import (
    CHATML,
    Says,
    ScriptedEngines,
    client_over,
    conversation_over,
    demo_tokenizer,
)

from rollout_actors.environments.chat.responses import parse_response_messages
from rollout_actors.environments.clients.conversation import Conversation
from rollout_actors.environments.clients.openai import OVERLONG
from rollout_actors.environments.training.examples import merge_trajectories_for_training
from rollout_actors.environments.types import Messages, State
from shared.errors import RolloutError
from shared.rollouts import FinishReason

TOKENIZER = demo_tokenizer()
STOP = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
ANY_TOKEN = st.integers(0, len(TOKENIZER) - 1).filter(lambda token_id: token_id != STOP)
"""Pieces of characters, special tokens and coordinates too."""
RESPONSES = st.builds(
    Says,
    st.lists(ANY_TOKEN, max_size=8),
    st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION]),
)
SPECIAL_TEXTS = [
    "<|im_end|>",
    "<|im_start|>assistant\n",
    " <|endoftext|> ",
    "the-model-said-this",
    "<|coord_5|>",
    "\ufffd",
    "{{ messages }}",
    "",
]
ODD_TEXT = st.one_of(
    st.text(max_size=12),
    st.text(alphabet=" \n\t\u200b\u0301\u00a0🙂é{}", max_size=6),
    st.sampled_from(SPECIAL_TEXTS),
)


def encode(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def says(text: str, **fields: Any) -> Says:
    return Says(encode(text), **fields)


def fresh(messages: list[Any]) -> tuple[int, ...]:
    return encode(
        TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    )


async def answered(conversation: Conversation, messages: list[Any]) -> tuple[Any, list[Any]]:
    """Return the sampled tokens, and the conversation with the answer."""
    response = await conversation.chat.completions.create(model="m", messages=messages)
    sampled = tuple(response.choices[0].token_ids)
    return sampled, [*messages, *await parse_response_messages(response, "chat")]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(RESPONSES, min_size=2, max_size=5), st.lists(ODD_TEXT, min_size=5, max_size=5))
def test_the_next_turns_prompt_starts_with_exactly_the_previous_prompt_and_completion_ids(
    responses, texts
):
    engines = ScriptedEngines(responses)
    conversation = conversation_over(engines, TOKENIZER)

    async def talk() -> list[tuple[int, ...]]:
        messages = [user(texts[0])]
        all_sampled = []
        for text in texts[: len(responses)]:
            sampled, messages = await answered(conversation, messages)
            all_sampled.append(sampled)
            messages = [*messages, user(text)]
        return all_sampled

    all_sampled = asyncio.run(talk())
    assert conversation.num_splits == 0
    for text, sampled, (prompt, following) in zip(
        texts, all_sampled, pairwise(engines.prompts), strict=False
    ):
        assert following[: len(prompt) + len(sampled)] == prompt + sampled
        # Behind them, what the template writes: the end of the message where it was not sampled,
        # and what the environment says.
        ended = "" if sampled[-1:] == (STOP,) else "<|im_end|>"
        as_text = re.sub(r"<(\|(im_end|im_start)\|>)", r"< \1", text)
        added = f"{ended}\n<|im_start|>user\n{as_text}<|im_end|>\n<|im_start|>assistant\n"
        assert following[len(prompt) + len(sampled) :] == encode(added)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            RESPONSES,
            st.sampled_from(["go on", "edit the answer", "forget the beginning", "ask again"]),
        ),
        min_size=2,
        max_size=6,
    )
)
def test_a_prompt_that_does_not_go_on_from_the_last_call_is_tokenised_anew_and_counted(turns):
    engines = ScriptedEngines([response for response, _ in turns])
    conversation = conversation_over(engines, TOKENIZER)
    asked: list[list[Any]] = []

    async def talk() -> list[tuple[int, ...]]:
        messages = [user("hello")]
        all_sampled = []
        for number, (_, then) in enumerate(turns):
            asked.append(messages)
            sampled, messages = await answered(conversation, messages)
            all_sampled.append(sampled)
            if then == "edit the answer":
                messages = [*messages[:-1], assistant(f"edited {number}")]
            if then == "forget the beginning":
                messages = [user(f"new {number}")]
            messages = asked[-1] if then == "ask again" else [*messages, user("more")]
        return all_sampled

    all_sampled = asyncio.run(talk())
    num_splits = 0
    for messages, sampled, (prompt, following) in zip(
        asked[1:], all_sampled, pairwise(engines.prompts), strict=False
    ):
        if following[: len(prompt) + len(sampled)] != prompt + sampled:
            assert following == fresh(messages)
            num_splits += 1
    assert conversation.num_splits == num_splits


def test_messages_that_the_environment_changes_in_place_are_not_taken_for_what_was_said():
    trimming = CHATML.replace("message.content }}", "(message.content | trim) }}")
    engines = ScriptedEngines([says(" red")] * 2)
    conversation = conversation_over(engines, demo_tokenizer(trimming))

    async def talk() -> None:
        first = user("hello")
        _, messages = await answered(conversation, [first])
        first["content"] = "other"
        await answered(conversation, [*messages, user("more")])

    asyncio.run(talk())
    assert conversation.num_splits == 1


def test_a_rollout_that_is_not_split_is_one_training_example_with_every_sampled_token_once():
    answers = [
        says(" red ", version=2),
        says("box", finish_reason=FinishReason.LENGTH, version=2),
        says("", version=2),
    ]
    client = client_over(ScriptedEngines(answers), TOKENIZER)
    (state,) = generated(Talk(max_turns=3), [{"question": "hello"}], client).state
    steps = [step["tokens"] for step in state["trajectory"]]
    assert steps[2]["completion_ids"] == [STOP]
    merged = merge_trajectories_for_training([state])
    (example,) = merged.examples
    assert merged.num_splits == state["num_splits"] == 0
    assert example.token_ids == steps[2]["prompt_ids"] + steps[2]["completion_ids"]
    pairs = zip(example.token_ids, example.mask, strict=True)
    learned = [token for token, is_learned in pairs if is_learned]
    assert learned == [token for tokens in steps for token in tokens["completion_ids"]]
    assert example.weight_version == 2


def test_calls_of_one_rollout_are_answered_one_after_the_other():
    engines = ScriptedEngines([says("red", delay_s=0.01)] * 3)
    conversation = conversation_over(engines, TOKENIZER)

    async def ask_at_once() -> None:
        await asyncio.gather(*(answered(conversation, [user(f"{i}")]) for i in range(3)))

    asyncio.run(ask_at_once())
    assert engines.most_under_way == [1]
    assert len({request.seed for _, request in engines.requests}) == 3


def test_a_failed_or_overlong_call_leaves_the_conversation_as_it_was():
    gone = RolloutError("gone", actor="actor-0", phase="generate")
    engines = ScriptedEngines([says("red"), gone, says("blue")])
    conversation = conversation_over(engines, TOKENIZER, max_model_len=40)

    async def talk() -> None:
        _, messages = await answered(conversation, [user("hello")])
        more = [*messages, user("more")]
        with pytest.raises(RolloutError):
            await answered(conversation, more)
        overlong = [*messages, user("more " * 40)]
        answer = await conversation.chat.completions.create(model="m", messages=overlong)
        assert answer.id == OVERLONG
        await answered(conversation, more)

    asyncio.run(talk())
    assert conversation.num_splits == 0
    first, failed, again = engines.prompts
    assert failed == again
    assert again[: len(first)] == first


# Plain text


def story(reason: FinishReason) -> State:
    """Three turns of ` red box`, between which the environment says ` and`."""

    class Story(Talk):
        async def env_response(self, messages: Messages, state: Any, **kwargs: Any) -> Messages:
            return " and"

    engines = ScriptedEngines([says(" red box", finish_reason=reason, version=5)] * 3)
    environment = Story(max_turns=3, message_type="completion")
    client = client_over(engines, TOKENIZER)
    (state,) = generated(environment, [{"prompt": "Once"}], client).state
    return state


def test_plain_text_goes_on_from_what_was_sampled():
    state = story(FinishReason.LENGTH)
    assert (state["error"], state["num_splits"]) == (None, 0)
    assert state["completion"] == " red box and red box and red box"
    steps = [step["tokens"] for step in state["trajectory"]]
    for earlier, later in pairwise(steps):
        so_far = earlier["prompt_ids"] + earlier["completion_ids"]
        assert later["prompt_ids"] == so_far + list(encode(" and"))
    num_sampled = len(steps[0]["completion_ids"])
    assert steps[0]["completion_logprobs"] == [-(i + 1) / 8 for i in range(num_sampled)]
    response = state["trajectory"][0]["response"]
    assert (response.weight_version, response.engine) == (5, "actor-0")


def test_plain_text_behind_a_stop_token_is_a_split():
    state = story(FinishReason.STOP)
    assert state["num_splits"] == 2
    assert [tuple(step["tokens"]["prompt_ids"]) for step in state["trajectory"]] == [
        encode(text) for text in ("Once", "Once red box and", "Once red box and red box and")
    ]


def test_a_plain_prompt_that_is_overlong_or_no_text_is_told():
    create = conversation_over(ScriptedEngines([]), TOKENIZER, max_model_len=1).completions.create
    assert asyncio.run(create(model="m", prompt="Once upon")).id == OVERLONG
    with pytest.raises(ValueError, match=r"^prompt: .*text, .*list"):
        asyncio.run(create(model="m", prompt=["Once"]))


def test_edited_messages_are_a_split_and_what_follows_goes_on_from_there():
    engines = ScriptedEngines([says("red")] * 3)
    conversation = conversation_over(engines, TOKENIZER)

    async def talk() -> None:
        _, messages = await answered(conversation, [user("hello")])
        edited = [*messages[:-1], assistant("blue"), user("more")]
        _, messages = await answered(conversation, edited)
        await answered(conversation, [*messages, user("more")])

    asyncio.run(talk())
    assert conversation.num_splits == 1
    _, second, third = engines.prompts
    assert second == fresh([user("hello"), assistant("blue"), user("more")])
    assert third[: len(second)] == second
