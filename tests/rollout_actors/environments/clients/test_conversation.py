"""The next turn's prompt starts with exactly the previous prompt and completion ids, or the sample
is split and that is counted.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from environment_support import Talk, assistant, generated, user
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engines import CHATML, Says, ScriptedEngines, client_over, demo_tokenizer, state_at

from rollout_actors.environments.chat.responses import parse_response_messages
from rollout_actors.environments.clients.conversation import Conversation
from rollout_actors.environments.training.examples import merge_trajectories_for_training
from rollout_actors.environments.types import Messages
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
ODD_TEXT = st.one_of(
    st.text(max_size=12),
    st.text(alphabet=" \n\t\u200b\u0301\u00a0🙂é{}", max_size=6),
    st.sampled_from(
        [
            "<|im_end|>",
            "<|im_start|>assistant\n",
            " <|endoftext|> ",
            "the-model-said-this",
            "<|coord_5|>",
            "\ufffd",
            "{{ messages }}",
            "",
        ]
    ),
)


def says(text: str, **fields: Any) -> Says:
    return Says(tuple(TOKENIZER.encode(text, add_special_tokens=False)), **fields)


def fresh(messages: list[Any]) -> tuple[int, ...]:
    rendered = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tuple(TOKENIZER.encode(rendered, add_special_tokens=False))


def sampled_in(response: Any) -> tuple[int, ...]:
    return tuple(response.choices[0].token_ids)


def conversation_over(engines: ScriptedEngines, **changes: Any) -> Conversation:
    return client_over(engines, TOKENIZER, **changes).conversation(state_at())


async def said(conversation: Conversation, messages: list[Any]) -> tuple[Any, list[Any]]:
    """The response, and the conversation with it."""
    response = await conversation.chat.completions.create(model="m", messages=messages)
    return response, [*messages, *await parse_response_messages(response, "chat")]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(RESPONSES, min_size=2, max_size=5), st.lists(ODD_TEXT, min_size=5, max_size=5))
def test_the_next_turns_prompt_starts_with_exactly_the_previous_prompt_and_completion_ids(
    responses: list[Says], texts: list[str]
) -> None:
    engines = ScriptedEngines(responses)
    conversation = conversation_over(engines)

    async def talk() -> list[tuple[int, ...]]:
        messages, all_sampled = [user(texts[0])], []
        for text in texts[: len(responses)]:
            response, messages = await said(conversation, messages)
            all_sampled.append(sampled_in(response))
            messages = [*messages, user(text)]
        return all_sampled

    all_sampled = asyncio.run(talk())
    assert conversation.num_splits == 0
    for place, (prompt, sampled, following) in enumerate(
        zip(engines.prompts, all_sampled, engines.prompts[1:], strict=False)
    ):
        assert following[: len(prompt) + len(sampled)] == prompt + sampled
        # Behind them, what the template writes: the end of the message where it was not sampled,
        # and what the environment says.
        ended = "" if sampled[-1:] == (STOP,) else "<|im_end|>"
        added = f"{ended}\n<|im_start|>user\n{texts[place]}<|im_end|>\n<|im_start|>assistant\n"
        assert following[len(prompt) + len(sampled) :] == tuple(
            TOKENIZER.encode(added, add_special_tokens=False)
        )


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
def test_a_prompt_that_does_not_go_on_from_the_last_call_is_tokenised_anew_and_counted(
    turns: list[tuple[Says, str]],
) -> None:
    engines = ScriptedEngines([response for response, _ in turns])
    conversation = conversation_over(engines)
    asked: list[list[Any]] = []

    async def talk() -> list[tuple[int, ...]]:
        messages, all_sampled = [user("hello")], []
        for number, (_, then) in enumerate(turns):
            asked.append(messages)
            response, messages = await said(conversation, messages)
            all_sampled.append(sampled_in(response))
            if then == "edit the answer":
                messages = [*messages[:-1], assistant(f"edited {number}")]
            if then == "forget the beginning":
                messages = [user(f"new {number}")]
            messages = asked[-1] if then == "ask again" else [*messages, user("more")]
        return all_sampled

    all_sampled = asyncio.run(talk())
    num_splits = 0
    for messages, prompt, sampled, following in zip(
        asked[1:], engines.prompts, all_sampled, engines.prompts[1:], strict=False
    ):
        if following[: len(prompt) + len(sampled)] != prompt + sampled:
            assert following == fresh(messages)
            num_splits += 1
    assert conversation.num_splits == num_splits


def test_edited_messages_are_a_split_and_what_follows_goes_on_from_there() -> None:
    engines = ScriptedEngines(lambda _: says("red"))
    conversation = conversation_over(engines)

    async def talk() -> None:
        _, messages = await said(conversation, [user("hello")])
        _, messages = await said(conversation, [*messages[:-1], assistant("blue"), user("more")])
        await said(conversation, [*messages, user("more")])

    asyncio.run(talk())
    assert conversation.num_splits == 1
    _, second, third = engines.prompts
    assert second == fresh([user("hello"), assistant("blue"), user("more")])
    assert third[: len(second)] == second


def test_messages_that_the_environment_changes_in_place_are_not_taken_for_what_was_said() -> None:
    engines = ScriptedEngines(lambda _: says(" red", finish_reason=FinishReason.STOP))
    tokenizer = demo_tokenizer(CHATML.replace("message.content }}", "(message.content | trim) }}"))
    conversation = client_over(engines, tokenizer).conversation(state_at())

    async def talk() -> None:
        first = user("hello")
        _, messages = await said(conversation, [first])
        first["content"] = "other"
        await said(conversation, [*messages, user("more")])

    asyncio.run(talk())
    assert conversation.num_splits == 1


def test_a_rollout_that_is_not_split_is_one_training_example_with_every_sampled_token_once() -> (
    None
):
    engines = ScriptedEngines(
        [
            says(" red ", version=2),
            says("box", finish_reason=FinishReason.LENGTH, version=2),
            says("", version=2),
        ]
    )
    (state,) = generated(
        Talk(max_turns=3), [{"question": "hello"}], client_over(engines, TOKENIZER)
    ).state
    steps = [step["tokens"] for step in state["trajectory"]]
    assert steps[2]["completion_ids"] == [STOP]
    merged = merge_trajectories_for_training([state])
    (example,) = merged.examples
    assert merged.num_splits == state["num_splits"] == 0
    assert example.token_ids == steps[2]["prompt_ids"] + steps[2]["completion_ids"]
    learned = [
        token
        for token, is_learned in zip(example.token_ids, example.mask, strict=True)
        if is_learned
    ]
    assert learned == [token for tokens in steps for token in tokens["completion_ids"]]
    assert example.weight_version == 2


def test_calls_of_one_rollout_are_answered_one_after_the_other() -> None:
    engines = ScriptedEngines(lambda _: says("red", delay_s=0.01))
    conversation = conversation_over(engines)

    async def ask_at_once() -> None:
        await asyncio.gather(*(said(conversation, [user(f"{i}")]) for i in range(3)))

    asyncio.run(ask_at_once())
    assert engines.most_under_way == [1]
    assert len({request.seed for _, request in engines.requests}) == 3


def test_a_failed_or_overlong_call_leaves_the_conversation_as_it_was() -> None:
    engines = ScriptedEngines(
        [says("red"), RolloutError("gone", actor="actor-0", phase="generate"), says("blue")]
    )
    conversation = conversation_over(engines, max_model_len=40)

    async def talk() -> None:
        _, messages = await said(conversation, [user("hello")])
        with pytest.raises(RolloutError):
            await said(conversation, [*messages, user("more")])
        overlong = await conversation.chat.completions.create(
            model="m", messages=[*messages, user("more " * 40)]
        )
        assert overlong.id == "overlong-prompt"
        await said(conversation, [*messages, user("more")])

    asyncio.run(talk())
    assert conversation.num_splits == 0
    first, failed, again = engines.prompts
    assert failed == again
    assert again[: len(first)] == first


# Plain text


class Story(Talk):
    async def env_response(self, messages: Messages, state: Any, **kwargs: Any) -> Messages:
        return " and"


def test_plain_text_goes_on_from_what_was_sampled() -> None:
    engines = ScriptedEngines(
        lambda _: says(" red box", finish_reason=FinishReason.LENGTH, version=5)
    )
    (state,) = generated(
        Story(max_turns=3, message_type="completion"),
        [{"prompt": "Once"}],
        client_over(engines, TOKENIZER),
    ).state
    assert state["error"] is None
    assert state["completion"] == " red box and red box and red box"
    assert state["num_splits"] == 0
    steps = [step["tokens"] for step in state["trajectory"]]
    for earlier, later in pairwise(steps):
        so_far = earlier["prompt_ids"] + earlier["completion_ids"]
        assert later["prompt_ids"] == so_far + TOKENIZER.encode(" and", add_special_tokens=False)
    assert steps[0]["completion_logprobs"] == [
        -(i + 1) / 8 for i in range(len(steps[0]["completion_ids"]))
    ]
    assert state["trajectory"][0]["response"].weight_version == 5


def test_plain_text_behind_a_stop_token_is_a_split() -> None:
    engines = ScriptedEngines(lambda _: says(" red box"))
    (state,) = generated(
        Story(max_turns=3, message_type="completion"),
        [{"prompt": "Once"}],
        client_over(engines, TOKENIZER),
    ).state
    assert state["num_splits"] == 2
    assert [tuple(step["tokens"]["prompt_ids"]) for step in state["trajectory"]] == [
        tuple(TOKENIZER.encode(text))
        for text in ("Once", "Once red box and", "Once red box and red box and")
    ]


def test_a_plain_prompt_that_is_overlong_or_no_text_is_told() -> None:
    conversation = conversation_over(ScriptedEngines([]), max_model_len=1)
    assert (
        asyncio.run(conversation.completions.create(model="m", prompt="Once upon")).id
        == "overlong-prompt"
    )
    with pytest.raises(ValueError, match="prompt: must be one text, got list"):
        asyncio.run(conversation.completions.create(model="m", prompt=["Once"]))  # type: ignore[arg-type]
