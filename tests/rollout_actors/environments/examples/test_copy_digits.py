"""The dialogue of two turns, by scripted clients (as one of all: `test_examples.py`)."""

from __future__ import annotations

import pytest
from environment_support import assistant, generated, user
from scripted_client import Answer, ScriptedClient

from rollout_actors.environments.examples.copy_digits import row
from rollout_actors.environments.loading import load_environment


def numbers(examples) -> list[str]:
    return [one["prompt"][-1]["content"].removeprefix("first of ") for one in examples]


def test_the_prompt_of_the_second_turn_begins_with_the_whole_first_turn():
    client = ScriptedClient(["3", "1"])
    (state,) = generated(load_environment("copy_digits"), [row("341")], client).state
    first_turn = [user("first of 341"), assistant("3"), user("last")]
    assert client.calls[1].prompt == first_turn
    assert state["completion"] == [*first_turn[1:], assistant("1")]


@pytest.mark.parametrize(
    ("said", "first", "last"),
    [
        (("3", "1"), 1.0, 1.0),
        (("3", "3"), 1.0, 0.0),
        (("1", "3"), 0.0, 0.0),
        (("3", "12"), 1.0, 0.5),
        (("3 of", "1"), 0.5, 1.0),
        (("33", "11"), 0.5, 0.5),
        (("of 3", "1"), 0.0, 1.0),
        (("", ""), 0.0, 0.0),
        ((Answer("3", finish_reason="length"), "1"), 0.5, 1.0),
    ],
)
def test_each_turn_is_half_of_the_reward_and_the_digit_with_more_behind_it_half_of_a_turn(
    said, first, last
):
    results = generated(load_environment("copy_digits"), [row("341")], ScriptedClient(said))
    assert results.metrics == {"first": [first], "last": [last]}
    assert results.reward == [(first + last) / 2]


def test_a_second_turn_that_never_came_is_worth_nothing():
    environment = load_environment("copy_digits")
    environment.max_seq_len = 1
    results = generated(environment, [row("341")], ScriptedClient(["3"], returns_tokens=True))
    assert results.metrics == {"first": [1.0], "last": [0.0]}


@pytest.mark.parametrize("seed", range(5))
def test_no_number_that_is_held_out_is_among_those_to_train_on(seed):
    environment = load_environment("copy_digits", seed=seed)
    train, held_out = numbers(environment.get_dataset()), numbers(environment.get_eval_dataset())
    assert (len(train), len(held_out)) == (800, 128)
    assert len({*train, *held_out}) == len(train) + len(held_out)
    assert {len(one) for one in train + held_out} == {3}
    assert set("".join(train)) == set("".join(held_out)) == set("0123456789")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            {"num_examples": 901, "num_eval_examples": 100},
            "1001 together; there are 1000 numbers of 3 digits below 10",
        ),
        ({"num_digits": 1}, "num_digits is 1"),
        ({"base": 1}, "base is 1"),
        ({"base": 11}, "base is 11"),
    ],
)
def test_what_is_no_task_is_refused(arguments, problem):
    with pytest.raises(ValueError, match=problem):
        load_environment("copy_digits", **arguments)
