"""The small environments, played by clients that know how, that do not, and that do badly."""

from __future__ import annotations

import asyncio
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from environment_support import generated
from scripted_client import Answer, Call, ScriptedClient

from rollout_actors.environments import examples
from rollout_actors.environments.examples.key_value_store import NAMES
from rollout_actors.environments.group import EnvGroup
from rollout_actors.environments.loading import load_environment

MODULES = {one.name for one in pkgutil.iter_modules(examples.__path__)}
EXAMPLES = sorted(MODULES - {"grounding"})
"""Those that bring their own data."""


def result_of(question: str) -> int:
    a, sign, b = re.fullmatch(r"What is (\d+) ([-+*]) (\d+)\?", question).groups()
    return {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]


def calculates(call: Call) -> str:
    return f"Well. <answer>{result_of(call.text)}</answer>"


def adds(call: Call) -> str:
    numbers = re.findall(r"\d+", call.text)
    return f"{' + '.join(numbers)} = {sum(map(int, numbers))}."


def halves(call: Call) -> str:
    """Guesses the middle of what is left."""
    low, high = 1, int(re.search(r"from 1 to (\d+)", call.prompt[0]["content"])[1])
    for message in call.prompt[1:]:
        if hint := re.fullmatch(r"My number is (higher|lower) than (\d+)\.", message["content"]):
            low, high = (int(hint[2]) + 1, high) if hint[1] == "higher" else (low, int(hint[2]) - 1)
    return f"<guess>{(low + high) // 2}</guess>"


def keeps_the_store(call: Call) -> Any:
    """Looks up what it needs, changes it, and says so."""
    said = [message["content"] for message in call.prompt if message["role"] == "tool"]
    names = re.findall("|".join(NAMES), call.prompt[1]["content"])
    question = call.prompt[1]["content"]
    asked = names[1:] if question.startswith("Set") else names
    if call.turn == 0:
        return Answer(None, tool_calls=[("get", {"name": name}) for name in asked])
    if call.turn == 2:
        return "Done."
    first, second = map(int, said)
    if question.startswith("Set"):
        return Answer(None, tool_calls=[("put", {"name": names[0], "number": first + second})])
    if question.startswith("Swap"):
        swapped = zip(names[:2], (second, first), strict=True)
        puts = [("put", {"name": name, "number": number}) for name, number in swapped]
        return Answer(None, tool_calls=puts)
    return Answer(None, tool_calls=[("remove", {"name": names[0] if first < second else names[1]})])


def copies(call: Call) -> str:
    """Reads the first message also in the second turn."""
    digits = re.fullmatch(r"first of (\d+)", call.prompt[0]["content"])[1]
    return digits[-call.turn]


def peeks(call: Call) -> Any:
    return call.text if call.turn else Answer(None, tool_calls=[("peek", {})])


def uses_tools(call: Call) -> Any:
    if call.prompt[-1]["role"] == "tool":
        return call.text
    a, sign, b = re.fullmatch(r"What is (\d+) ([+*]) (\d+)\?", call.text).groups()
    name = {"+": "add", "*": "multiply"}[sign]
    return Answer(None, tool_calls=[(name, {"a": int(a), "b": int(b)})])


PLAYERS: dict[str, Callable[[Call], Any]] = {
    "arithmetic": calculates,
    "calculator": uses_tools,
    "sums": adds,
    "copy_digits": copies,
    "guess_number": halves,
    "hidden_digit": peeks,
    "key_value_store": keeps_the_store,
}


def test_every_example_is_played_and_small():
    assert sorted(EXAMPLES) == sorted(PLAYERS)
    for name in EXAMPLES:
        file = Path(examples.__path__[0], f"{name}.py")
        assert len(file.read_text().splitlines()) <= 140


def evaluated(environment, script):
    client = ScriptedClient(script)
    results = asyncio.run(environment.evaluate(client, "m", use_tqdm=False))
    assert results.metadata.num_errors == 0
    return results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("arithmetic", 1.1),
        ("calculator", 1.0),
        ("copy_digits", 1.0),
        ("guess_number", 1.6),
        ("hidden_digit", 1.0),
        ("key_value_store", 1.0),
        ("sums", 1.0),
    ],
)
def test_who_plays_well_gets_the_full_reward(name, full):
    results = evaluated(
        load_environment(name, num_examples=60, num_eval_examples=40), PLAYERS[name]
    )
    assert results.reward == pytest.approx([full] * 40)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_who_says_nothing_that_can_be_read_gets_nothing(name):
    environment = load_environment(name, num_eval_examples=10)
    assert evaluated(environment, lambda call: "I would rather not.").reward == [0.0] * 10


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_data_follow_from_the_seed_and_those_held_out_are_others(name):
    def data(seed: int) -> tuple[list[Any], list[Any]]:
        environment = load_environment(name, num_examples=50, num_eval_examples=50, seed=seed)
        return list(environment.get_dataset()), list(environment.get_eval_dataset())

    train, held_out = data(1)
    assert data(1) == (train, held_out) != data(2)
    assert train != held_out


def test_a_right_number_in_the_wrong_form_is_not_an_answer():
    environment = load_environment("arithmetic")
    row = {"question": "What is 2 + 3?", "answer": "5"}
    said = ["5", "<answer>6</answer>", "<answer>5</answer>", "<answer> 5\n</answer>"]
    results = generated(environment, [row] * 4, ScriptedClient(said), max_concurrent=1)
    assert results.reward == pytest.approx([0.0, 0.1, 1.1, 1.1])


def test_the_last_number_of_a_sums_answer_counts_and_no_more_sums_are_asked_for_than_exist():
    environment = load_environment("sums", terms=3)
    row = {"question": "What is 1 + 2 + 3?", "answer": "6"}
    said = ["6", "1 + 2 + 3 = 6", "6, because 1 + 2 is 3", "16", "six"]
    results = generated(environment, [row] * 5, ScriptedClient(said), max_concurrent=1)
    assert results.reward == [1.0, 1.0, 0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match=r"101 .* 100 sums of 2 numbers up to 9"):
        load_environment("sums", num_examples=69)


def test_a_calculators_result_must_be_said_after_the_tools_answer():
    environment = load_environment("calculator")
    row = {"question": "What is 3 * 50?", "answer": "150"}
    calls = [("multiply", {"a": 3, "b": 50})]
    said = [[Answer(None, tool_calls=calls), last] for last in ("150", "It is 150.", "15")]
    results = [generated(environment, [row], ScriptedClient(one)) for one in said]
    assert [one.reward[0] for one in results] == [1.0, 1.0, 0.0]
    assert results[0].state[0]["completion"][1]["content"] == "150"
    unsaid = ScriptedClient([Answer(None, tool_calls=calls)] * 2)
    assert generated(environment, [row], unsaid).reward == [0.0]


def test_a_game_ends_when_the_number_is_found_and_later_guesses_are_worth_less():
    environment = load_environment("guess_number", largest=7)
    said = ["hm" if guess is None else f"<guess>{guess}</guess>" for guess in (1, None, 7, 2, 4, 3)]
    row = {"question": "from 1 to 7", "answer": "3"}
    results = generated(environment, [row], ScriptedClient(said))
    state = results.state[0]
    assert state["stop_condition"] == "number_found"
    assert [message["content"] for message in state["completion"] if message["role"] == "user"] == [
        "My number is higher than 1.",
        "I see no guess. Write it as <guess>number</guess>.",
        "My number is lower than 7.",
        "My number is higher than 2.",
        "My number is lower than 4.",
    ]
    assert results.metrics == {"found": [1.0], "early": [0.5], "read": [pytest.approx(5 / 6)]}


def test_a_game_ends_with_its_last_turn_and_the_guess_of_that_turn_counts():
    environment = load_environment("guess_number", max_turns=2)
    row = {"question": "?", "answer": "9"}
    for guesses, found in (([101, 101], 0.0), ([8, 9], 1.0)):
        client = ScriptedClient([f"<guess>{guess}</guess>" for guess in guesses])
        results = generated(environment, [row], client)
        assert (results.metrics["found"], results.state[0]["guesses"]) == ([found], guesses)


def test_a_store_is_judged_by_all_that_is_in_it():
    environment = load_environment("key_value_store")
    row = {
        "question": "Set figs to 3.",
        "info": {"store": {"figs": 1, "eggs": 2}, "wanted": {"figs": 3, "eggs": 2}},
    }
    put = ("put", {"name": "figs", "number": 3})
    spoilt = ("put", {"name": "extra", "number": 3})
    results = [
        generated(environment, [row], ScriptedClient([Answer(None, tool_calls=calls), "done"]))
        for calls in ([put], [put, spoilt], [("get", {"name": "x"})])
    ]
    assert [one.reward[0] for one in results] == [1.0, 0.0, 0.0]
    assert [one.metrics["num_tool_errors"][0] for one in results] == [0.0, 0.0, 1.0]
    assert row["info"]["store"] == {"figs": 1, "eggs": 2}


def test_every_task_of_the_store_changes_it():
    for row in load_environment("key_value_store", num_examples=500).get_dataset():
        assert row["info"]["store"] != row["info"]["wanted"]


def test_the_examples_together_are_one_environment():
    group = EnvGroup([load_environment(name, num_eval_examples=4) for name in EXAMPLES])

    def plays(call: Call) -> Any:
        if "tools" in call.arguments:
            names = {tool["function"]["name"] for tool in call.arguments["tools"]}
            if "add" in names:
                return uses_tools(call)
            return keeps_the_store(call) if "put" in names else peeks(call)
        if call.prompt[0]["content"].startswith("first"):
            return copies(call)
        return halves(call) if "Guess" in call.prompt[0]["content"] else calculates(call)

    assert min(evaluated(group, plays).reward) >= 1.0


def test_a_game_with_one_number_is_refused():
    with pytest.raises(ValueError, match="largest is 1"):
        load_environment("guess_number", largest=1)
