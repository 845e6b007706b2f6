"""The dialogue of two turns, by scripted clients."""

from __future__ import annotations

import asyncio
import re

import pytest
from environment_support import generated
from scripted_client import Answer, Call, ScriptedClient

from rollout_actors.environments.examples.copy_digits import row
from rollout_actors.environments.loading import load_environment


def copies(call: Call) -> str:
    """Knows what the first message was, also in the second turn."""
    digits = re.fullmatch(r"first of (\d+)", call.prompt[0]["content"])[1]
    return digits[0] if call.turn == 0 else digits[-1]


def numbers(examples) -> list[str]:
    return [one["prompt"][-1]["content"].removeprefix("first of ") for one in examples]


@pytest.mark.slow
def test_who_copies_gets_the_full_reward_in_two_turns_of_which_the_second_is_the_environment_s():
    environment = load_environment("copy_digits")
    results = asyncio.run(environment.evaluate(ScriptedClient(copies), "m", use_tqdm=False))
    assert results.metadata.num_errors == 0
    assert set(results.reward) == {1.0}
    for state in results.state:
        assert [message["role"] for message in state["completion"]] == [
            "assistant",
            "user",
            "assistant",
        ]
        assert state["completion"][1]["content"] == "last"
        assert (len(state["trajectory"]), state["stop_condition"]) == (2, "max_turns_reached")


def test_the_prompt_of_the_second_turn_begins_with_the_whole_first_turn():
    client = ScriptedClient(["3", "1"])
    generated(load_environment("copy_digits"), [row("341")], client)
    assert [(message["role"], message["content"]) for message in client.calls[1].prompt] == [
        ("user", "first of 341"),
        ("assistant", "3"),
        ("user", "last"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("said", "reward"),
    [
        (("3", "1"), 1.0),
        (("3", "3"), 0.5),
        (("1", "3"), 0.0),
        (("3", "12"), 0.75),
        (("3 of", "1"), 0.75),
        (("33", "11"), 0.5),
        (("of 3", "1"), 0.5),
        (("", ""), 0.0),
    ],
)
def test_each_turn_is_half_of_the_reward_and_the_digit_with_more_behind_it_half_of_a_turn(
    said, reward
):
    results = generated(load_environment("copy_digits"), [row("341")], ScriptedClient(list(said)))
    assert results.reward == [reward]
    assert results.metrics["first"][0] + results.metrics["last"][0] == pytest.approx(2 * reward)


def test_an_answer_that_was_cut_off_behind_the_digit_is_not_exact():
    client = ScriptedClient([Answer("3", finish_reason="length"), "1"])
    results = generated(load_environment("copy_digits"), [row("341")], client)
    assert results.metrics == {"first": [0.5], "last": [1.0]}


def test_a_second_turn_that_never_came_is_worth_nothing():
    environment = load_environment("copy_digits")
    environment.max_seq_len = 1
    results = generated(environment, [row("341")], ScriptedClient(["3"], returns_tokens=True))
    assert results.metrics == {"first": [1.0], "last": [0.0]}


@pytest.mark.parametrize("seed", range(5))
def test_no_number_that_is_held_out_is_among_those_to_train_on(seed):
    environment = load_environment("copy_digits", seed=seed)
    train, held_out = numbers(environment.get_dataset()), numbers(environment.get_eval_dataset())
    assert len({*train, *held_out}) == len(train) + len(held_out)
    assert {len(one) for one in train + held_out} == {3}
    assert set("".join(train)) == set("".join(held_out)) == set("0123456789")


def test_the_rows_follow_from_the_seed():
    def rows(seed: int) -> list[str]:
        environment = load_environment(
            "copy_digits", num_examples=50, num_eval_examples=20, seed=seed
        )
        return numbers(environment.get_dataset()) + numbers(environment.get_eval_dataset())

    assert rows(1) == rows(1)
    assert rows(1) != rows(2)
    assert len(rows(1)) == 70


def test_more_rows_than_there_are_numbers_are_refused():
    with pytest.raises(
        ValueError, match="1001 together; there are 1000 numbers of 3 digits below 10"
    ):
        load_environment("copy_digits", num_examples=901, num_eval_examples=100)


@pytest.mark.parametrize(("argument", "value"), [("num_digits", 1), ("base", 1), ("base", 11)])
def test_what_is_no_task_is_refused(argument, value):
    with pytest.raises(ValueError, match=f"{argument} is {value}"):
        load_environment("copy_digits", **{argument: value})
