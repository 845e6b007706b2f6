"""Several environments as one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from environment_support import (
    Talk,
    assistant,
    generated,
    rolled_out,
    rows,
    said_the_answer,
    user,
    without_place,
)
from scripted_client import ScriptedClient

from rollout_actors.environments.group import EnvGroup
from rollout_actors.environments.lifecycle import cleanup, teardown
from rollout_actors.environments.multi_turn import SingleTurnEnv
from rollout_actors.environments.rubric import Parser, Rubric
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
    group = EnvGroup([echo_env(), talk_env()], ["echo", "talk"])
    assert [(row["task"], row["prompt"][0]["content"]) for row in group.get_dataset()] == [
        ("echo", "q0"),
        ("echo", "q1"),
        ("echo", "q2"),
        ("talk", "q0"),
        ("talk", "q1"),
    ]
    assert [row["example_id"] for row in group.get_dataset()] == [0, 1, 2, 3, 4]
    assert group.get_dataset(2, seed=3)[0]["task"] in ("echo", "talk")


def test_rows_for_evaluation_are_those_that_each_environment_has_for_it():
    group = EnvGroup(
        [echo_env(eval_dataset=[{"question": "held out"}]), talk_env()], ["echo", "talk"]
    )
    assert [row["prompt"][0]["content"] for row in group.get_eval_dataset()] == [
        "held out",
        "q0",
        "q1",
    ]
    only = EnvGroup(
        [echo_env(dataset=None, eval_dataset=rows(1)), talk_env(dataset=None)], ["echo", "talk"]
    )
    assert len(only.get_eval_dataset()) == 1
    with pytest.raises(ValueError, match="EnvGroup has no dataset"):
        only.get_dataset()


def test_each_row_keeps_the_prompt_of_its_own_environment():
    few_shot = [user("1?"), assistant("1")]
    group = EnvGroup(
        [
            echo_env(system_prompt="repeat", few_shot=few_shot),
            echo_env(few_shot=few_shot),
            talk_env(),
        ],
        ["a", "b", "c"],
    )
    prompts = [group.get_dataset()[place]["prompt"] for place in (0, 3, 6)]
    assert prompts == [
        [{"role": "system", "content": "repeat"}, *few_shot, user("q0")],
        [*few_shot, user("q0")],
        [user("q0")],
    ]
    client = repeat()
    generated(
        group, [{"question": "mine", "task": "a"}, {"question": "yours", "task": "c"}], client
    )
    assert sorted(len(call.prompt) for call in client.calls) == [1, 3, 4]


def test_a_rollout_is_routed_by_its_task_and_scored_by_its_own_environments_rubric():
    group = EnvGroup([echo_env(), talk_env()], ["echo", "talk"])
    results = generated(group, group.get_dataset(), repeat())
    assert results.task == ["echo"] * 3 + ["talk"] * 2
    assert results.reward == [1.0, 1.0, 1.0, 3.0, 3.0]
    assert [state["stop_condition"] for state in results.state] == ["max_turns_reached"] * 5
    assert [state["metrics"] for state in results.state[2:4]] == [
        {"said_the_answer": 1.0},
        {"length": 3.0},
    ]


def test_results_have_the_metrics_of_all_and_averages_of_those_that_have_them():
    group = EnvGroup([echo_env(), talk_env()], ["echo", "talk"])
    results = generated(group, group.get_dataset(), repeat())
    assert results.metrics == {
        "said_the_answer": [1.0, 1.0, 1.0, None, None],
        "length": [None, None, None, 3.0, 3.0],
    }
    assert results.metadata.avg_metrics == {"said_the_answer": 1.0, "length": 3.0}


@pytest.mark.parametrize("interleave_scoring", [True, False])
def test_group_functions_see_the_rollouts_of_one_example_of_their_own_environment(
    interleave_scoring,
):
    sizes: list[int] = []

    def seen(states: list[State]) -> list[float]:
        sizes.append(len(states))
        assert len({(state["task"], state["example_id"]) for state in states}) == 1
        return [0.0] * len(states)

    compared = echo_env(dataset=rows(2), rubric=Rubric([longest, seen]))
    group = EnvGroup([talk_env(), compared], ["talk", "compared"])
    client = ScriptedClient(lambda call: "x" * (1 + call.number % 2))
    results = asyncio.run(
        group.evaluate(
            client,
            "m",
            rollouts_per_example=2,
            use_tqdm=False,
            interleave_scoring=interleave_scoring,
        )
    )
    assert sizes == [2, 2]
    assert results.reward[:4] == [3.0] * 4
    assert sum(results.reward[4:]) == 2.0
    assert [state["advantage"] for state in results.state[:4]] == [0.0] * 4
    assert sorted(state["advantage"] for state in results.state[4:]) == [-0.5, -0.5, 0.5, 0.5]


def test_a_reward_function_that_fails_fails_its_own_rollout_alone_where_another_environment_compares_rollouts():
    def picky(completion: Messages) -> float:
        return 1.0 / len(completion[-1]["content"])

    group = EnvGroup(
        [echo_env(rubric=Rubric([longest])), echo_env(dataset=rows(1), rubric=Rubric([picky]))],
        ["compared", "picky"],
    )
    client = ScriptedClient(lambda call: "x" * (call.number % 2))
    results = generated(group, [{"question": "q", "task": "picky", "id": 1}] * 4, client)
    assert [without_place(state) for state in results.state] == [
        "ZeroDivisionError: float division by zero",
        None,
    ] * 2
    assert results.reward == [0.0, 1.0, 0.0, 1.0]


def test_sampling_arguments_of_the_environments_hold_and_those_of_the_group_win():
    client = repeat()
    group = EnvGroup(
        [echo_env(sampling_args={"temperature": 0.5, "top_p": 0.9})],
        ["echo"],
        sampling_args={"temperature": 1.0},
    )
    generated(group, group.get_dataset(1), client)
    assert client.calls[0].arguments == {"temperature": 1.0, "top_p": 0.9}


class Held(Talk):
    def __init__(self, log: list[str], name: str, **kwargs: Any) -> None:
        super().__init__(max_turns=1, dataset=rows(1), env_id=name)
        self.log, self.fails = log, kwargs.get("fails", False)

    @cleanup
    async def put_away(self, state: State) -> None:
        self.log.append(f"cleanup {self.env_id}")

    @teardown
    async def close(self) -> None:
        self.log.append(f"teardown {self.env_id}")
        if self.fails:
            raise RuntimeError(self.env_id)


def test_members_clean_up_after_their_rollouts_and_are_torn_down_once_with_the_group():
    log: list[str] = []

    async def use() -> None:
        async with EnvGroup([Held(log, "a"), Held(log, "b")]) as group:
            await group.generate(group.get_dataset(), repeat(), "m", use_tqdm=False)
        await group.aclose()
        for env in group.envs.values():
            await env.aclose()

    asyncio.run(use())
    assert sorted(log) == ["cleanup a", "cleanup b", "teardown a", "teardown b"]


def test_a_member_that_cannot_be_torn_down_does_not_keep_the_others_open():
    log: list[str] = []
    group = EnvGroup([Held(log, "a", fails=True), Held(log, "b")])
    with pytest.raises(RuntimeError, match="a"):
        asyncio.run(group.aclose())
    assert sorted(log) == ["teardown a", "teardown b"]


def test_environments_go_by_their_ids_or_else_by_their_places():
    assert list(EnvGroup([echo_env(env_id="echo"), talk_env()]).envs) == ["echo", "env_1"]


def test_what_cannot_be_a_group_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        EnvGroup([])
    with pytest.raises(ValueError, match="env_names: 1 for 2 environments"):
        EnvGroup([echo_env(), talk_env()], ["a"])
    with pytest.raises(ValueError, match="env_names: a, a; give each a name of its own"):
        EnvGroup([echo_env(), talk_env()], ["a", "a"])
    with pytest.raises(ValueError, match="envs: a is a group itself"):
        EnvGroup([EnvGroup([echo_env()])], ["a"])
    with pytest.raises(ValueError, match="message_type is chat of some and completion of others"):
        EnvGroup([echo_env(), SingleTurnEnv(message_type="completion")], ["a", "b"])
    with pytest.raises(TypeError, match="system_prompt"):
        EnvGroup([echo_env()], system_prompt="mine")
    with pytest.raises(ValueError, match="add them to the rubrics of its environments"):
        EnvGroup([echo_env()]).rubric.add_reward_func(length)


def test_a_task_that_names_no_environment_is_refused_with_those_that_there_are():
    group = EnvGroup([echo_env(), talk_env()], ["echo", "talk"])
    with pytest.raises(
        ValueError, match="row 1: task 'sing' is no environment of the group, which has echo, talk"
    ):
        generated(
            group, [{"question": "q", "task": "echo"}, {"question": "q", "task": "sing"}], repeat()
        )
    with pytest.raises(ValueError, match="row 0: task None"):
        generated(group, [{"question": "q"}], repeat())
    with pytest.raises(ValueError, match="task None"):
        rolled_out(group, {"prompt": [user("q")], "example_id": 0}, repeat())
    with pytest.raises(ValueError, match="task 'sing'"):
        rolled_out(group, {"prompt": [user("q")], "example_id": 0, "task": "sing"}, repeat())


def test_ids_that_rows_of_an_environment_have_are_carried_through():
    named = echo_env(dataset=[{"question": "q", "id": "r7"}, {"question": "q", "id": "r8"}])
    results = asyncio.run(
        EnvGroup([echo_env(), named]).evaluate(
            repeat(), "model", rollouts_per_example=2, use_tqdm=False
        )
    )
    assert [state["id"] for state in results.state] == [0, 0, 1, 1, 2, 2, "r7", "r7", "r8", "r8"]
    assert results.example_id == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize("argument", ["max_seq_len", "rubric", "parser", "dataset"])
def test_what_a_group_has_none_of_is_refused_by_name(argument):
    with pytest.raises(
        TypeError, match=f"{argument}: a group has none of its own; give it to its environments"
    ):
        EnvGroup([echo_env()], **{argument: None})


def test_reward_functions_get_the_parser_of_the_environment_whose_rollouts_they_score():
    def parsed(parser: Parser, completion: Messages) -> float:
        return float(parser.parse_answer(completion))

    def compared(parser: Parser, completions: list[Messages]) -> list[float]:
        return [float(parser.parse_answer(completion)) for completion in completions]

    for shared in (Rubric([parsed]), Rubric([compared])):
        one, two = (
            SingleTurnEnv(
                dataset=[{"question": "5"}],
                rubric=shared,
                parser=Parser(lambda text, add=add: int(text) + add),
            )
            for add in (10, 20)
        )
        results = [generated(env, env.dataset, repeat()).reward[0] for env in (two, one)]
        group = EnvGroup([one, two])
        assert results == [25.0, 15.0] and generated(group, group.dataset, repeat()).reward == [
            15.0,
            25.0,
        ]
        later = SingleTurnEnv(parser=Parser(lambda text: int(text) + 30))
        later.rubric = Rubric([parsed])
        assert generated(later, [{"question": "5"}], repeat()).reward == [35.0]
