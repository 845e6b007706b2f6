"""Reward functions: their arguments, groups, and how they are called."""

import asyncio
import math
import pickle
import re
import threading
from functools import partial

import numpy as np
import pytest
from environment_support import assistant, generated, user, without_place
from scripted_client import ScriptedClient, status_error

from rollout_actors.environments.group import EnvGroup
from rollout_actors.environments.multi_turn import SingleTurnEnv
from rollout_actors.environments.rubric import (
    Parser,
    Rubric,
    RubricGroup,
    relative_steps,
    settle,
)
from rollout_actors.environments.types import State


def state(said: str = "4", example_id: int = 0, steps: int = 1, **row):
    step = {
        "prompt": [],
        "completion": [],
        "response": None,
        "tokens": None,
        "reward": None,
        "advantage": None,
        "extras": {},
    }
    given = {
        "prompt": [user("2 + 2")],
        "answer": "4",
        "task": "sums",
        "info": {"k": 1},
        "example_id": example_id,
        **row,
    }
    trajectory = [dict(step) for _ in range(steps)]
    return State(
        input=given,
        completion=[assistant(said)],
        trajectory=trajectory,
        reward=None,
        advantage=None,
        metrics=None,
        error=None,
        turn=2,
    )


def scored(rubric: Rubric, one: State) -> State:
    asyncio.run(rubric.score_rollout(one))
    return one


def test_a_reward_function_gets_the_arguments_it_names():
    seen = {}

    def reward(prompt, completion, answer, info, task, example_id, state, parser, turn):
        seen.update({name: value for name, value in locals().items() if name != "seen"})
        return 1

    one, parser = state(), Parser()
    scored(Rubric([reward], parser=parser), one)
    assert seen == {
        "prompt": [user("2 + 2")],
        "completion": [assistant("4")],
        "answer": "4",
        "info": {"k": 1},
        "task": "sums",
        "example_id": 0,
        "state": one,
        "parser": parser,
        "turn": 2,
    }
    assert seen["state"] is one


def test_a_reward_function_that_takes_keywords_gets_all_of_them():
    seen = {}

    def reward(answer, **kwargs):
        seen.update(kwargs)
        return 1

    scored(Rubric([reward]), state())
    assert {"prompt", "completion", "info", "task", "state", "trajectory"} <= set(
        seen
    ) and "answer" not in seen


def test_a_default_holds_where_nothing_has_the_name():
    def reward(threshold=0.5, answer="other"):
        return threshold + (answer == "4")

    assert scored(Rubric([reward]), state())["reward"] == 1.5


def test_further_objects_are_given_by_name():
    rubric = Rubric([lambda judge: judge])
    rubric.class_objects["judge"] = 0.25
    assert scored(rubric, state())["reward"] == 0.25


def test_answer_and_info_are_empty_where_the_row_has_none():
    seen = {}

    def reward(answer, info):
        seen.update(answer=answer, info=info)
        return 0

    one = state()
    del one["answer"]
    del one["info"]
    scored(Rubric([reward]), one)
    assert seen == {"answer": "", "info": {}}


def test_the_reward_is_the_weighted_sum_and_the_metrics_are_the_plain_values():
    def right(completion, answer):
        return completion[-1]["content"] == answer

    async def length(completion):
        return len(completion[-1]["content"])

    one = scored(Rubric([right, length], [2.0, 0.0]), state("4"))
    assert one["reward"] == 2.0 and one["metrics"] == {"right": 1.0, "length": 1.0}


def test_steps_without_a_reward_get_the_rollouts():
    one = state(steps=2)
    one["trajectory"][0]["reward"] = 0.125
    scored(Rubric([lambda state: 1.0]), one)
    assert [step["reward"] for step in one["trajectory"]] == [0.125, 1.0]


def test_scoring_again_replaces_the_rollouts_reward_and_that_of_its_steps():
    one, values = state(), iter([1.0, 0.25])
    rubric = Rubric([lambda state: next(values)])
    scored(rubric, one)
    scored(rubric, one)
    assert one["reward"] == 0.25 and one["trajectory"][0]["reward"] == 0.25


def test_a_rubric_with_a_score_group_of_its_own_is_asked_for_groups():
    class Ranked(Rubric):
        async def score_group(self, states):
            for place, one in enumerate(states):
                one["reward"], one["metrics"] = float(place), {}

    env = SingleTurnEnv(rubric=Ranked())
    results = generated(
        env, [{"question": "q", "example_id": 0}] * 3, ScriptedClient(lambda call: "a")
    )
    assert results.reward == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    "plural",
    [
        "states",
        "prompts",
        "completions",
        "answers",
        "infos",
        "tasks",
        "example_ids",
        "ids",
        "timings",
        "trajectories",
    ],
)
def test_a_function_that_takes_states_or_another_plural_is_of_a_group(plural):
    seen = []
    source = f"def reward({plural}):\n    seen.append({plural})\n    return [0.0, 1.0]"
    names = {"seen": seen}
    exec(source, names)
    group = [state("3"), state("4")]
    for place, one in enumerate(group):
        one.update(id=f"r{place}", timing={"total_ms": place})
    rubric = Rubric([names["reward"]])
    assert rubric.compares_rollouts
    asyncio.run(rubric.score_group(group))
    singular = "trajectory" if plural == "trajectories" else plural.removesuffix("s")
    assert seen == [group if plural == "states" else [one[singular] for one in group]]
    assert [one["reward"] for one in group] == [0.0, 1.0]


def test_a_name_that_nothing_has_is_told_with_those_that_there_are():
    def right(completion, grader, strictness=1):
        return 1.0

    told = (
        r"TypeError: reward function right asks for grader; there are advantage, answer, .*turn;"
        r" add others to the rubric's class_objects"
    )
    assert re.match(told, scored(Rubric([right]), state())["error"])


def test_score_rollouts_scores_each_by_itself_so_many_at_a_time():
    under_way, most = [0], [0]

    async def right(completion, answer):
        under_way[0] += 1
        most[0] = max(most[0], under_way[0])
        await asyncio.sleep(0.001)
        under_way[0] -= 1
        return completion[-1]["content"] == answer

    for bound, expected in ((2, 2), (-1, 6)):
        most[0] = 0
        states = [state(str(i)) for i in range(6)]
        asyncio.run(Rubric([right]).score_rollouts(states, max_concurrent=bound))
        assert [one["reward"] for one in states] == [0.0, 0.0, 0.0, 0.0, 1.0, 0.0] and most == [
            expected
        ]
    asyncio.run(Rubric([right]).score_rollouts([]))


def test_score_rollouts_compares_those_of_each_example():
    states = [
        state(said, example_id, task=task)
        for said, example_id, task in (("a", 0, "t"), ("b", 1, "t"), ("cc", 0, "t"), ("d", 0, "u"))
    ]
    asyncio.run(
        RubricGroup(
            [Rubric([lambda completions: [float(len(one[-1]["content"])) for one in completions]])]
        ).score_rollouts(states)
    )
    assert [one["advantage"] for one in states] == [-0.5, 0.0, 0.5, 0.0]


def test_a_group_gets_rewards_metrics_and_the_advantage_over_its_mean():
    def longest(completions):
        sizes = [len(completion[-1]["content"]) for completion in completions]
        return [float(size == max(sizes)) for size in sizes]

    async def right(completion, answer):
        return completion[-1]["content"] == answer

    group = [state("4"), state("44")]
    asyncio.run(Rubric([longest, right], [1.0, 0.5]).score_group(group))
    assert [one["reward"] for one in group] == [0.5, 1.0]
    assert [one["metrics"] for one in group] == [
        {"longest": 0.0, "right": 1.0},
        {"longest": 1.0, "right": 0.0},
    ]
    assert [one["advantage"] for one in group] == [-0.25, 0.25]
    assert [one["trajectory"][0]["advantage"] for one in group] == [-0.25, 0.25]


def test_a_function_of_a_group_scores_a_rollout_by_itself_too_which_is_compared_with_nothing():
    one = scored(Rubric([lambda states: [1.0] * len(states)]), state())
    assert one["reward"] == 1.0 and one["advantage"] is None


def test_a_group_function_that_returns_too_few_rewards_is_refused_by_name():
    def first(states):
        return [1.0]

    group = [state(), state()]
    asyncio.run(Rubric([first]).score_group(group))
    for one in group:
        assert "first returned 1 rewards for a group of 2" in one["error"]


@pytest.mark.parametrize("returned", [1.0, None])
def test_a_group_function_that_returns_no_list_is_refused_by_name(returned):
    def best(states):
        return returned

    group = [state(), state()]
    asyncio.run(Rubric([best]).score_group(group))
    for one in group:
        assert (
            f"best returned {returned} for a group of 2 rollouts; return a list with one reward for"
            " each" in one["error"]
        )


@pytest.mark.parametrize("wrong", [math.nan, None, "good", 10**400])
def test_a_figure_of_a_group_function_that_is_no_number_fails_its_own_rollout_alone(wrong):
    def best(states):
        return [1.0, wrong, 3.0]

    group = [state(), state(), state()]
    asyncio.run(Rubric([length, best], [0.0, 1.0]).score_group(group))
    assert [one["error"] is None for one in group] == [True, False, True]
    assert [one["metrics"].get("best") for one in group] == [1.0, None, 3.0]
    assert [list(one.get("reward_errors", {})) for one in group] == [[], ["best"], []]
    assert [(one["reward"], one["advantage"]) for one in group] == [
        (1.0, -1.0),
        (0.0, None),
        (3.0, 1.0),
    ]


def test_rollouts_of_equal_rewards_have_an_advantage_of_exactly_0():
    states = [state() for _ in range(3)]
    asyncio.run(Rubric([lambda states: [0.1] * 3]).score_group(states))
    assert [one["advantage"] for one in states] == [0.0] * 3, (
        "and not what rounding leaves of the mean"
    )


@pytest.mark.parametrize("value", [None, "good", [1.0], float("nan"), float("inf")])
def test_what_is_no_number_is_refused_by_the_functions_name(value):
    def odd(state):
        return value

    one = scored(Rubric([odd]), state())
    assert one["error"].startswith("ValueError: reward function odd returned")
    assert (one["reward"], one["metrics"], list(one["reward_errors"])) == (0.0, {}, ["odd"])


def test_synchronous_reward_functions_do_not_block_the_event_loop():
    seen = threading.Event()

    def waits(state):
        return float(seen.wait(20))

    async def scored_while_the_loop_goes_on():
        one = state()
        scoring = asyncio.create_task(Rubric([waits]).score_rollout(one))
        for _ in range(5):
            await asyncio.sleep(0.001)
        assert not scoring.done()
        seen.set()
        await scoring
        return one

    assert asyncio.run(scored_while_the_loop_goes_on())["reward"] == 1.0


def test_synchronous_reward_functions_run_off_the_loops_thread_and_asynchronous_ones_on_it():
    threads = {}

    def plain(state):
        threads["plain"] = threading.current_thread()
        return 0

    async def on_loop(state):
        threads["loop"] = threading.current_thread()
        return 0

    scored(Rubric([plain, on_loop]), state())
    assert threads["loop"] is threading.current_thread() is not threads["plain"]


def test_a_function_of_one_rollout_is_called_at_once_for_all_rollouts_of_a_group():
    under_way = [0]

    async def all_of_them(state):
        under_way[0] += 1
        while under_way[0] < 8:
            await asyncio.sleep(0.001)
        return 1.0

    rubric = Rubric([all_of_them, lambda states: [0.0] * len(states)])
    asyncio.run(asyncio.wait_for(rubric.score_group([state() for _ in range(8)]), 20))


def test_what_a_function_raises_costs_no_other_rollout_of_its_group_anything():
    ended = []

    async def reward(state, answer):
        if state["completion"][-1]["content"] == "bad":
            raise RuntimeError("no")
        await asyncio.sleep(0.02)
        ended.append(answer)
        return 1.0

    group = [state("bad"), state("4")]
    asyncio.run(Rubric([reward, lambda states: [0.0, 0.5]]).score_group(group))
    assert ended == ["4"]
    assert [without_place(one) for one in group] == ["RuntimeError: no", None]
    assert [one["metrics"] for one in group] == [
        {"<lambda>": 0.0},
        {"reward": 1.0, "<lambda>": 0.5},
    ]
    assert [(one["reward"], one["advantage"]) for one in group] == [(0.0, None), (1.5, 0.0)]


def fails(completion):
    raise RuntimeError("no idea")


def one_point(completion):
    return 1.0


def test_a_function_of_weight_0_that_fails_costs_a_rollout_nothing_but_its_own_figure():
    for rubric in (
        Rubric([one_point, fails], [1.0, 0.0]),
        RubricGroup([Rubric([one_point]), Rubric([fails], [0.0])]),
    ):
        one = scored(rubric, state())
        assert (one["error"], one["reward"], one["metrics"]) == (None, 1.0, {"one_point": 1.0})
        assert one["reward_errors"]["fails"].startswith("RuntimeError: no idea")


def test_where_a_function_with_a_weight_fails_there_is_no_reward_and_the_other_figures_stay():
    for rubric in (Rubric([one_point, fails]), RubricGroup([Rubric([fails]), Rubric([one_point])])):
        one = scored(rubric, state())
        assert without_place(one) == "RuntimeError: no idea"
        assert (one["reward"], one["metrics"], list(one["reward_errors"])) == (
            0.0,
            {"one_point": 1.0},
            ["fails"],
        )


def test_a_sum_of_two_metrics_of_one_name_is_missing_where_one_of_them_is():
    one = scored(
        RubricGroup([Rubric([one_point, fails], [1.0, 0.0]), Rubric([lambda state: 2.0])]), state()
    )
    assert one["metrics"] == {"one_point": 1.0, "<lambda>": 2.0}

    def wrong(state):
        raise RuntimeError("no idea")

    wrong.__name__ = "one_point"
    one = scored(RubricGroup([Rubric([one_point]), Rubric([wrong], [0.0])]), state())
    assert (one["metrics"], one["reward"]) == ({}, 1.0)


def test_a_rollout_that_is_scored_again_when_its_function_is_mended_has_no_error():
    answers = iter(["none", 1.0])

    def judge(completion):
        return next(answers)

    one, rubric = state(), Rubric([judge])
    scored(rubric, one)
    assert one["error"] is not None
    scored(rubric, one)
    assert (one["error"], one["reward"], one["metrics"], "reward_errors" in one) == (
        None,
        1.0,
        {"judge": 1.0},
        False,
    )


def test_weights_have_to_be_as_many_as_functions_and_names_have_to_differ():
    with pytest.raises(ValueError, match="weights: 2 for 1"):
        Rubric([lambda state: 1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="length is there already"):
        Rubric([length, length])


def test_rubrics_in_a_group_add_up_and_so_do_metrics_of_one_name():
    def right(state):
        return 1.0

    def early(state):
        return 0.5

    group = RubricGroup([Rubric([right]), Rubric([right, early], [2.0, 1.0])])
    one = scored(group, state())
    assert one["reward"] == 3.5 and one["metrics"] == {"right": 2.0, "early": 0.5}
    assert one["trajectory"][0]["reward"] == 3.5
    assert group.reward_names == ["right", "early"] and not group.compares_rollouts


def test_a_group_of_rubrics_compares_rollouts_where_one_of_them_does():
    def best(states):
        return [float(place) for place in range(len(states))]

    def right(state):
        return 1.0

    group = RubricGroup([Rubric([right]), Rubric([best])])
    both = [state(), state()]
    assert group.compares_rollouts
    asyncio.run(group.score_group(both))
    assert [one["reward"] for one in both] == [1.0, 2.0]
    assert [one["advantage"] for one in both] == [-0.5, 0.5]
    assert [one["trajectory"][0]["reward"] for one in both] == [1.0, 2.0]
    assert [one["trajectory"][0]["advantage"] for one in both] == [-0.5, 0.5]


def test_a_group_of_rubrics_has_at_least_one():
    with pytest.raises(ValueError, match="at least one"):
        RubricGroup([])


def test_a_steps_own_reward_outlives_every_rubric_of_a_group():
    one = state(steps=2)
    one["trajectory"][0]["reward"] = 0
    scored(RubricGroup([Rubric(), Rubric([lambda state: 1.0]), Rubric()]), one)
    assert [step["reward"] for step in one["trajectory"]] == [0, 1.0]


def test_the_reward_of_no_functions_is_0():
    one = scored(Rubric(), state())
    assert one["reward"] == 0.0 and isinstance(one["reward"], float) and one["metrics"] == {}


def test_lambdas_and_partials_are_numbered_from_the_second_of_their_kind():
    rubric = Rubric(
        [
            lambda state: 1.0,
            partial(sum, [2]),
            lambda state: 3.0,
            partial(sum, [4]),
            lambda state: 5.0,
        ]
    )
    assert rubric.reward_names == ["<lambda>", "partial", "<lambda>_2", "partial_2", "<lambda>_3"]


def test_states_with_the_keys_of_the_documents_own_init_state_are_scored():
    """Without `advantage`, without a reward in the steps, and without a trajectory at all."""

    def made(**fields):
        row = {
            "prompt": [user("2 + 2")],
            "answer": "4",
            "task": "sums",
            "info": {},
            "example_id": 0,
        }
        return State(
            input=row,
            is_completed=False,
            oai_tools=[],
            completion=[assistant("4")],
            reward=None,
            metrics=None,
            **fields,
        )

    group = [made(trajectory=[{"prompt": [], "completion": [], "tokens": None}]), made()]
    asyncio.run(Rubric([lambda states: [1.0, 0.0]]).score_group(group))
    assert [one["advantage"] for one in group] == [0.5, -0.5]
    assert (group[0]["trajectory"][0]["reward"], group[0]["trajectory"][0]["advantage"]) == (
        1.0,
        0.5,
    )
    bare = State(completion="4", task="sums", example_id=0)
    asyncio.run(Rubric([lambda completion: float(completion)]).score_rollouts([bare]))
    assert bare["reward"] == 4.0


def test_a_plain_function_that_raises_stop_iteration_fails_and_does_not_hang():
    def first(completion):
        return next(iter(()))

    one = state()
    asyncio.run(asyncio.wait_for(Rubric([first]).score_rollout(one), 20))
    assert "StopIteration" in one["error"]


# Rubrics of users, which change what they were given


EXAMPLE = [
    {"question": "a", "answer": "a", "example_id": 0},
    {"question": "bbb", "answer": "b", "example_id": 0},
]
"""Two rollouts of it, which `length` rewards with 1 and 3."""


def length(completion):
    return float(len(completion[-1]["content"]))


def scored_example(rubric: Rubric) -> list[State]:
    return generated(SingleTurnEnv(rubric=rubric), EXAMPLE, ScriptedClient(echo)).state


def echo(call):
    return call.text


def of_steps(states: list[State], field: str) -> list[float | None]:
    return [step[field] for one in states for step in one["trajectory"]]


class Bonus(Rubric):
    """5 more for the question a."""

    async def score_rollout(self, state):
        await super().score_rollout(state)
        state["reward"] += 5.0 if state["answer"] == "a" else 0.0


class GroupBonus(Rubric):
    """5 more for the first."""

    async def score_group(self, states):
        await super().score_group(states)
        states[0]["reward"] += 5.0


class Tenfold(Rubric):
    async def score_group(self, states):
        await super().score_group(states)
        for one in states:
            one["advantage"] *= 10


def test_a_reward_that_a_rubric_changes_after_it_was_given_is_that_of_the_steps_too():
    states = scored_example(Bonus([length]))
    assert [one["reward"] for one in states] == of_steps(states, "reward") == [6.0, 3.0]
    assert [one["advantage"] for one in states] == of_steps(states, "advantage") == [1.5, -1.5]


def test_a_reward_that_a_rubric_sets_itself_is_that_of_the_steps_without_one():
    class Own(Rubric):
        async def score_rollout(self, state):
            state["reward"], state["metrics"] = 2.0, {}

    assert of_steps(scored_example(Own()), "reward") == [2.0, 2.0]


def test_an_advantage_that_a_rubric_changes_after_it_was_given_is_that_of_the_steps_too():
    states = scored_example(Tenfold([length]))
    assert [one["advantage"] for one in states] == of_steps(states, "advantage") == [-10.0, 10.0]


def test_a_step_that_a_rubric_has_set_since_keeps_its_own():
    class Own(Rubric):
        async def score_group(self, states):
            await super().score_group(states)
            states[0]["trajectory"][0].update(reward=0.5, advantage=0.125)
            for one in states:
                one["reward"] += 1.0
                one["advantage"] *= 10

    states = scored_example(Own([length]))
    assert of_steps(states, "reward") == [0.5, 4.0] and of_steps(states, "advantage") == [
        0.125,
        10.0,
    ]


def test_rewards_that_a_rubric_changes_after_they_were_compared_are_compared_again():
    states = scored_example(GroupBonus([length]))
    assert [one["reward"] for one in states] == of_steps(states, "reward") == [6.0, 3.0]
    assert [one["advantage"] for one in states] == of_steps(states, "advantage") == [1.5, -1.5]


def test_an_advantage_that_a_rubric_sets_itself_stays_where_rewards_are_compared_again():
    class Own(GroupBonus):
        async def score_group(self, states):
            await super().score_group(states)
            states[1]["advantage"] = 0.25

    states = scored_example(Own([length]))
    assert [one["advantage"] for one in states] == of_steps(states, "advantage") == [1.5, 0.25]
    settle(states, Rubric())
    assert [one["advantage"] for one in states] == [1.5, 0.25]


@pytest.mark.parametrize("bonus", [Bonus, GroupBonus])
def test_in_a_group_of_rubrics_steps_have_the_sum_whatever_one_of_them_changes(bonus):
    states = scored_example(RubricGroup([bonus([length]), Rubric([length])]))
    assert [one["reward"] for one in states] == of_steps(states, "reward") == [7.0, 6.0]
    assert [one["advantage"] for one in states] == of_steps(states, "advantage") == [0.5, -0.5]


def test_a_step_holds_the_groups_advantage_until_a_rubric_or_somebody_sets_another():
    compared, own = (
        scored_example(Rubric([length, lambda states: [0.0] * len(states)])),
        scored_example(Tenfold([length])),
    )
    assert [relative_steps(one) for one in (*compared, *own, state())] == [[0], [0], [], [], None]
    again = pickle.loads(pickle.dumps(compared[0]))
    assert relative_steps(again) == relative_steps(compared[0].copy()) == [0]
    again["trajectory"][0]["advantage"] = 9.0
    assert relative_steps(again) == []


@pytest.mark.parametrize("made", [lambda score: score, asyncio.ensure_future])
def test_a_score_rollout_may_be_a_plain_function_or_give_a_task(made):
    class Own(Rubric):
        def score_rollout(self, state):
            return made(super().score_rollout(state))

    class Plain(Rubric):
        def score_rollout(self, state):
            state["reward"] = 1.0

    asyncio.run(Plain().score_rollouts([state(), state()]))
    for rubric in (Own([length]), Plain(), RubricGroup([Own([length]), Plain()])):
        results = generated(SingleTurnEnv(rubric=rubric), EXAMPLE, ScriptedClient(echo))
        assert results.metadata.num_errors == 0 and all(results.reward)


@pytest.mark.parametrize("bound", ["answer", "parser", "task", "info"])
def test_what_a_partial_has_bound_is_what_it_is_called_with(bound):
    def says(completion, **given):
        return float(given[bound] == "mine")

    def names(completion, answer=None, parser=None, task=None, info=None):
        return float(
            {"answer": answer, "parser": parser, "task": task, "info": info}[bound] == "mine"
        )

    for function in (names, says):
        rubric = Rubric([partial(function, **{bound: "mine"})], parser=Parser())
        assert scored(rubric, state())["reward"] == 1.0


def test_a_function_that_takes_its_arguments_by_position_alone_is_refused_with_the_remedy():
    def by_place(answer, /):
        return 1.0

    with pytest.raises(
        ValueError,
        match=(
            r"reward function by_place: answer can only be given by position; .* leave out the"
            r" slash"
        ),
    ):
        Rubric([by_place])


@pytest.mark.parametrize("base", [Rubric, RubricGroup])
def test_a_score_group_of_a_subclass_is_called_with_the_rollouts_of_an_example(base):
    numbers = []

    class Own(base):
        async def score_group(self, states):
            numbers.append(len(states))
            await super().score_group(states)

    rubric = Own([length]) if base is Rubric else Own([Rubric([length])])
    assert [one["advantage"] for one in scored_example(rubric)] == [-1.0, 1.0]
    scored(rubric, state())
    scored(RubricGroup([rubric]), state())
    assert numbers == [2, 1], "by itself, a rollout is in no group"


class Left(Rubric):
    """Leaves what it is told to."""

    def __init__(self, **fields):
        super().__init__()
        self._fields = {"reward": 1.0, "metrics": {}} | fields

    async def score_rollout(self, state):
        state.update(self._fields)


@pytest.mark.parametrize(
    "value", [None, "good", math.nan, [1.0], 10**400], ids=["none", "text", "nan", "list", "huge"]
)
@pytest.mark.parametrize(
    "wrapped",
    [lambda rubric: rubric, lambda rubric: RubricGroup([rubric])],
    ids=["alone", "in_a_group"],
)
def test_a_reward_or_metric_that_a_rubric_leaves_and_that_is_no_number_is_the_error_of_its_rollout(
    value, wrapped
):
    states = scored_example(wrapped(Left(reward=value)))
    assert [one["error"] for one in states] == [
        f"ValueError: Left gave the reward {value!r}; give a finite number"
    ] * 2
    states = scored_example(wrapped(Left(metrics={"judge": value})))
    assert [one["error"] for one in states] == [
        f"ValueError: Left gave the metric judge = {value!r}; give a finite number, or leave it out"
    ] * 2
    assert [(one["reward"], one["metrics"]) for one in states] == [(0.0, {})] * 2


def test_truth_values_and_numbers_of_numpy_are_numbers():
    rubric = Left(
        reward=np.float32(0.5), metrics={"right": True, "close": np.True_, "size": np.int64(3)}
    )
    results = generated(SingleTurnEnv(rubric=RubricGroup([rubric])), EXAMPLE, ScriptedClient(echo))
    assert [one["error"] for one in results.state] == [None, None] and results.reward == [0.5, 0.5]
    assert results.metadata.avg_metrics == {"right": 1.0, "close": 1.0, "size": 3.0}


# All rollouts at once: what `generate` calls with `interleave_scoring=False` (spec: orchestration)


class Ranked(Rubric):
    """Rewards each rollout by its place among all, longest last."""

    def __init__(self, asks_super):
        super().__init__([length])
        self.asks_super = asks_super
        self.calls = []

    async def score_rollouts(self, states, max_concurrent=-1):
        self.calls.append((len(states), max_concurrent))
        if self.asks_super:
            await super().score_rollouts(states, max_concurrent)
        for place, one in enumerate(sorted(states, key=lambda one: length(one["completion"]))):
            one["reward"] = float(place)


THREE = [{"question": question, "answer": "?"} for question in ("ccc", "a", "bb")]


@pytest.mark.parametrize("asks_super", [True, False])
def test_a_score_rollouts_of_a_subclass_is_what_scores_in_the_two_phase_way(asks_super):
    told, rubric = [], Ranked(asks_super)
    results = generated(
        SingleTurnEnv(rubric=rubric),
        THREE,
        ScriptedClient(echo),
        interleave_scoring=False,
        max_concurrent_scoring=2,
        on_rollout=lambda place, one: told.append((place, one["reward"])),
    )
    assert rubric.calls == [(3, 2)]
    assert results.reward == [2.0, 0.0, 1.0] == of_steps(results.state, "reward")
    assert sorted(told) == [(0, 2.0), (1, 0.0), (2, 1.0)], (
        "nobody hears of a reward before it is final"
    )
    assert results.metrics == ({"length": [3.0, 1.0, 2.0]} if asks_super else {})
    assert all(
        one["timing"]["total_ms"] == one["timing"]["generation_ms"] + one["timing"]["scoring_ms"]
        for one in results.state
    )
    generated(SingleTurnEnv(rubric=rubric), THREE, ScriptedClient(echo))
    assert rubric.calls == [(3, 2)], "interleaved, each is scored as soon as it is there"


@pytest.mark.parametrize("asks_super", [True, False])
@pytest.mark.parametrize("compares", [True, False])
def test_in_a_group_of_rubrics_each_ones_own_score_rollouts_is_asked_and_the_rewards_are_added(
    asks_super, compares
):
    def picky(completion):
        if length(completion) == 1:
            raise RuntimeError("no idea")
        return 0.25

    told, ranked = [], Ranked(asks_super)
    group = RubricGroup(
        [
            Rubric([one_point, picky], [1.0, 0.0]),
            ranked,
            Rubric([lambda states: [0.5] * len(states)] if compares else []),
        ]
    )
    env = SingleTurnEnv(rubric=group)
    given = {"interleave_scoring": False, "max_concurrent_scoring": 2}
    results = generated(
        env,
        THREE,
        ScriptedClient(echo),
        on_rollout=lambda place, one: told.append((place, one["reward"])),
        **given,
    )
    more = 0.5 * compares
    assert ranked.calls == [(3, 2)]
    assert (
        results.reward == [3.0 + more, 1.0 + more, 2.0 + more] == of_steps(results.state, "reward")
    )
    assert sorted(told) == list(enumerate(results.reward))
    assert (results.metrics["one_point"], results.metrics["picky"]) == (
        [1.0] * 3,
        [0.25, None, 0.25],
    )
    assert results.metrics.get("length") == ([3.0, 1.0, 2.0] if asks_super else None)
    assert [one["error"] for one in results.state] == [
        None
    ] * 3 and results.metadata.num_reward_errors == {"picky": 1}
    assert [one["advantage"] for one in results.state] == [0.0] * 3
    generated(env, THREE, ScriptedClient(echo))
    assert ranked.calls == [(3, 2)], "interleaved, each is scored as soon as it is there"


def test_what_one_rubric_of_a_group_leaves_unsound_is_one_rollouts_failure_and_the_next_is_not_asked_for_it():
    class Leaves(Ranked):
        async def score_rollouts(self, states, max_concurrent=-1):
            await super().score_rollouts(states, max_concurrent)
            states[1]["reward"] = None

    last = Ranked(True)
    group = RubricGroup([Leaves(True), last])
    results = generated(
        SingleTurnEnv(rubric=group), THREE, ScriptedClient(echo), interleave_scoring=False
    )
    assert [one["error"] for one in results.state] == [
        None,
        "ValueError: Leaves gave the reward None; give a finite number",
        None,
    ]
    assert last.calls == [(2, -1)]
    assert results.reward == [3.0, 0.0, 1.0] and [one["metrics"] for one in results.state] == [
        {"length": 6.0},
        {},
        {"length": 4.0},
    ]


def test_rollouts_that_failed_are_not_scored_in_the_two_phase_way_either():
    def script(call):
        return status_error(400, "bad") if call.text == "a" else call.text

    rubric = Ranked(asks_super=True)
    results = generated(
        SingleTurnEnv(rubric=rubric), THREE, ScriptedClient(script), interleave_scoring=False
    )
    assert rubric.calls == [(2, -1)]
    assert results.reward == [1.0, 0.0, 0.0] and results.metrics == {"length": [3.0, None, 2.0]}


def test_a_score_rollouts_that_fails_fails_what_it_scores_and_what_it_leaves_unsound_is_one_rollouts_failure():
    class Fails(Rubric):
        async def score_rollouts(self, states, max_concurrent=-1):
            raise RuntimeError("no idea")

    class Leaves(Ranked):
        async def score_rollouts(self, states, max_concurrent=-1):
            await super().score_rollouts(states, max_concurrent)
            states[1]["reward"] = None

    results = generated(
        SingleTurnEnv(rubric=Fails([length])), THREE, ScriptedClient(echo), interleave_scoring=False
    )
    assert [without_place(one) for one in results.state] == ["RuntimeError: no idea"] * 3
    assert results.reward == [0.0] * 3
    results = generated(
        SingleTurnEnv(rubric=Leaves(True)), THREE, ScriptedClient(echo), interleave_scoring=False
    )
    assert [one["error"] for one in results.state] == [
        None,
        "ValueError: Leaves gave the reward None; give a finite number",
        None,
    ]


def test_each_environment_of_a_group_has_its_rollouts_scored_by_its_own_rubric_in_the_two_phase_way():
    rubrics = [Ranked(True), Ranked(True)]
    envs = [
        SingleTurnEnv(dataset=THREE[: place + 1], rubric=rubric)
        for place, rubric in enumerate(rubrics)
    ]
    group = EnvGroup(envs, ["one", "two"])
    results = generated(group, group.get_dataset(), ScriptedClient(echo), interleave_scoring=False)
    assert [rubric.calls for rubric in rubrics] == [[(1, -1)], [(2, -1)]]
    assert results.reward == [0.0, 1.0, 0.0]
