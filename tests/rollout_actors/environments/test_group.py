"""Several environments as one."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from environment_support import (
    Talk,
    generated,
    rolled_out,
    rows,
    rubric_of,
    said_the_answer,
    user,
)
from scripted_client import ScriptedClient

from rollout_actors.environments.answers.parsers import Parser
from rollout_actors.environments.group import EnvGroup
from rollout_actors.environments.lifecycle import cleanup, teardown
from rollout_actors.environments.multi_turn import SingleTurnEnv
from rollout_actors.environments.rubric import Rubric
from rollout_actors.environments.types import Messages, State


def length(completion: Messages) -> float:
    return float(len(completion))


def longest(completions: list[Messages]) -> list[float]:
    sizes = [len(completion[-1]["content"]) for completion in completions]
    return [float(size == max(sizes)) for size in sizes]


def repeat() -> ScriptedClient:
    return ScriptedClient(lambda call: call.text)


def echo_env(**kwargs: Any) -> SingleTurnEnv:
    return SingleTurnEnv(**{"dataset": rows(3), "rubric": Rubric([said_the_answer])} | kwargs)


def talk_env(**kwargs: Any) -> Talk:
    return Talk(**{"max_turns": 2, "dataset": rows(2), "rubric": Rubric([length])} | kwargs)


def test_datasets_are_concatenated_with_their_environments_names_as_tasks():
    group = EnvGroup([echo_env(env_id="echo"), talk_env()])
    dataset = group.get_dataset()
    questions = [(row["task"], row["prompt"][0]["content"]) for row in dataset]
    talk = [("env_1", "q0"), ("env_1", "q1")]
    assert questions == [("echo", "q0"), ("echo", "q1"), ("echo", "q2"), *talk]
    assert [row["example_id"] for row in dataset] == [0, 1, 2, 3, 4]
    assert group.get_dataset(2, seed=3)[0]["task"] in ("echo", "env_1")


def test_rows_for_evaluation_are_those_that_each_environment_has_for_it():
    held_out = echo_env(eval_dataset=[{"question": "held out"}])
    dataset = EnvGroup([held_out, talk_env()], ["echo", "talk"]).get_eval_dataset()
    assert [row["prompt"][0]["content"] for row in dataset] == ["held out", "q0", "q1"]
    members = [echo_env(dataset=None, eval_dataset=rows(1)), talk_env(dataset=None)]
    only = EnvGroup(members, ["echo", "talk"])
    assert len(only.get_eval_dataset()) == 1
    with pytest.raises(ValueError, match="EnvGroup has no dataset"):
        only.get_dataset()


def test_a_runs_system_prompt_stands_before_the_rows_of_every_environment():
    own = {"prompt": [{"role": "system", "content": "own"}, user("a")]}
    group = EnvGroup([echo_env(dataset=[*rows(1), own]), talk_env()], ["a", "b"])
    group.add_system_prompt("Think.")
    system = {"role": "system", "content": "Think."}
    assert [row["prompt"] for row in group.get_dataset()[:3]] == [
        [system, user("q0")],
        own["prompt"],
        [system, user("q0")],
    ]
    assert group.get_eval_dataset()[0]["prompt"][0] == system


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"system_prompt": "Mine."}, "has the system prompt 'Mine.'"),
        (
            {"dataset": [{"prompt": [{"role": "system", "content": "own"}, user("a")]}]},
            "has a system message in its first row",
        ),
        ({"message_type": "completion", "dataset": [{"prompt": "a"}]}, "has plain-text prompts"),
    ],
)
def test_a_second_system_prompt_is_refused_by_its_key(changes, found):
    with pytest.raises(ValueError, match=rf"{found}; leave environment\.system_prompt out"):
        echo_env(**changes).add_system_prompt("Think.")


def numbered(count, name):
    rows = [{"question": f"{name}{number}"} for number in range(count)]
    return SingleTurnEnv(dataset=rows, env_id=name, rubric=rubric_of(length))


def test_the_first_rows_are_of_each_environment_in_proportion_and_more_go_on_from_fewer():
    group = EnvGroup([numbered(60, "a"), numbered(30, "b"), numbered(10, "c")])
    assert Counter(group.get_eval_dataset(20)["task"]) == {"a": 12, "b": 6, "c": 2}
    assert Counter(group.get_dataset(10)["task"]) == {"a": 6, "b": 3, "c": 1}
    firsts = [row["example_id"] for row in group.get_eval_dataset(50)]
    assert [row["example_id"] for row in group.get_eval_dataset(20)] == firsts[:20]
    assert sorted(firsts)[:30] == list(range(30)), "each one's own first rows"
    assert [row["example_id"] for row in group.get_eval_dataset()] == list(range(100))
    assert len(group.get_eval_dataset(1000)) == 100
    only = numbered(9, "a")
    assert [row["example_id"] for row in only.get_eval_dataset(4)] == [0, 1, 2, 3]


def test_weights_make_a_mixture_and_are_refused_where_they_make_none():
    envs = [numbered(6, "a"), numbered(4, "b")]
    assert EnvGroup(envs).mixture == ()
    assert EnvGroup(envs, weights=[3, 1]).mixture == ((6, 3), (4, 1))
    for wrong in ([1], [0, 1], [1.5, 1], [True, 1]):
        with pytest.raises(ValueError, match=r"^weights: "):
            EnvGroup(envs, weights=wrong)
    empty = SingleTurnEnv(eval_dataset=[{"question": "q"}], env_id="b")
    with pytest.raises(ValueError, match=r"^weights: b has no rows"):
        EnvGroup([envs[0], empty], weights=[1, 1])


def test_a_rollout_is_routed_by_its_task_and_scored_by_its_own_environments_rubric():
    group = EnvGroup([echo_env(), talk_env()], ["echo", "talk"])
    results = generated(group, group.get_dataset(), repeat())
    assert results.task == ["echo"] * 3 + ["talk"] * 2
    assert results.reward == [1.0, 1.0, 1.0, 3.0, 3.0]
    assert results.metrics == {
        "said_the_answer": [1.0, 1.0, 1.0, None, None],
        "length": [None, None, None, 3.0, 3.0],
    }
    assert results.metadata.avg_metrics == {"said_the_answer": 1.0, "length": 3.0}


@pytest.mark.parametrize("interleave_scoring", [True, False])
def test_group_functions_see_the_rollouts_of_one_example_of_their_own_environment(
    interleave_scoring,
):
    seen: list[list[Any]] = []

    def see(states: list[State]) -> list[float]:
        seen.append([(state["task"], state["example_id"]) for state in states])
        return [0.0] * len(states)

    compared = echo_env(dataset=rows(2), rubric=Rubric([longest, see]))
    group = EnvGroup([talk_env(), compared], ["talk", "compared"])
    client = ScriptedClient(lambda call: "x" * (1 + call.number % 2))
    ways = {"use_tqdm": False, "interleave_scoring": interleave_scoring}
    results = asyncio.run(group.evaluate(client, "m", rollouts_per_example=2, **ways))
    assert sorted(seen) == [[("compared", 2)] * 2, [("compared", 3)] * 2]
    assert (results.reward[:4], sum(results.reward[4:])) == ([3.0] * 4, 2.0)
    advantages = [state["advantage"] for state in results.state]
    assert advantages[:4] == [0.0] * 4
    assert sorted(advantages[4:]) == [-0.5, -0.5, 0.5, 0.5]


class Held(Talk):
    def __init__(self, log: list[str], name: str) -> None:
        super().__init__(max_turns=1, dataset=rows(1), env_id=name)
        self.log = log

    @cleanup
    async def put_away(self, state: State) -> None:
        self.log.append(f"cleanup {self.env_id}")

    @teardown
    async def close(self) -> None:
        self.log.append(f"teardown {self.env_id}")


def test_members_clean_up_after_their_rollouts_and_are_torn_down_once_with_the_group():
    log: list[str] = []

    async def use() -> None:
        async with EnvGroup([Held(log, "a"), Held(log, "b")]) as group:
            await group.generate(group.get_dataset(), repeat(), "m", use_tqdm=False)
        await group.aclose()
        for env in group.envs:
            await env.aclose()

    asyncio.run(use())
    assert sorted(log) == ["cleanup a", "cleanup b", "teardown a", "teardown b"]


@pytest.mark.parametrize(
    ("refused", "error", "problem"),
    [
        (lambda: EnvGroup([]), ValueError, "at least one"),
        (
            lambda: EnvGroup([echo_env(), talk_env()], ["a"]),
            ValueError,
            "env_names: 1 for 2 environments",
        ),
        (
            lambda: EnvGroup([echo_env(), talk_env()], ["a", "a"]),
            ValueError,
            "env_names: must be distinct, got a, a",
        ),
        (
            lambda: EnvGroup([EnvGroup([echo_env()])], ["a"]),
            ValueError,
            "envs: a is an EnvGroup",
        ),
        (
            lambda: EnvGroup([echo_env(), SingleTurnEnv(message_type="completion")], ["a", "b"]),
            ValueError,
            "message_type is chat of some and completion of other environments",
        ),
        (
            lambda: EnvGroup([echo_env()]).rubric.add_reward_func(length),
            ValueError,
            "an EnvGroup has no reward functions",
        ),
        (
            lambda: EnvGroup([echo_env()], system_prompt="Think."),
            TypeError,
            "unexpected keyword argument 'system_prompt'",
        ),
    ],
)
def test_what_cannot_be_a_group_is_refused(refused, error, problem):
    with pytest.raises(error, match=problem):
        refused()


def test_a_task_that_names_no_environment_is_refused_with_those_that_there_are():
    group = EnvGroup([echo_env(), talk_env()], ["echo", "talk"])
    known = "names no environment of the EnvGroup; it has echo, talk"
    given = [{"question": "q", "task": "echo"}, {"question": "q", "task": "sing"}]
    with pytest.raises(ValueError, match=f"row 1: task 'sing' {known}"):
        generated(group, given, repeat())
    with pytest.raises(ValueError, match="row 0: task None"):
        generated(group, [{"question": "q"}], repeat())
    for task, row in ((None, {}), ("sing", {"task": "sing"})):
        with pytest.raises(ValueError, match=f"task {task!r}"):
            rolled_out(group, {"prompt": [user("q")], "example_id": 0, **row}, repeat())


def test_ids_that_rows_of_an_environment_have_are_carried_through():
    named = echo_env(dataset=[{"question": "q", "id": "r7"}, {"question": "q", "id": "r8"}])
    group = EnvGroup([echo_env(), named])
    work = group.evaluate(repeat(), "model", rollouts_per_example=2, use_tqdm=False)
    results = asyncio.run(work)
    assert [state["id"] for state in results.state] == [0, 0, 1, 1, 2, 2, "r7", "r7", "r8", "r8"]
    assert results.example_id == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def parsed(parser: Parser, completion: Messages) -> float:
    return float(parser.parse_answer(completion))


def compared(parser: Parser, completions: list[Messages]) -> list[float]:
    return [float(parser.parse_answer(completion)) for completion in completions]


@pytest.mark.parametrize("function", [parsed, compared])
def test_reward_functions_get_the_parser_of_the_environment_whose_rollouts_they_score(function):
    shared = Rubric([function])

    def env_adding(more: int) -> SingleTurnEnv:
        parser = Parser(lambda text: int(text) + more)
        return SingleTurnEnv(dataset=[{"question": "5"}], rubric=shared, parser=parser)

    one, two = env_adding(10), env_adding(20)
    for env, rewards in ((two, [25.0]), (one, [15.0]), (EnvGroup([one, two]), [15.0, 25.0])):
        assert generated(env, env.dataset, repeat()).reward == rewards
