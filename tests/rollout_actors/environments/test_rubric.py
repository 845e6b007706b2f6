"""Reward functions: their arguments, groups, and how they are called."""

import asyncio
import math
import pickle
import re
from functools import partial

import numpy as np
import pandas
import pytest
import torch
from environment_support import assistant, generated, user, without_place
from scripted_client import ScriptedClient

from rollout_actors.environments.answers.parsers import Parser
from rollout_actors.environments.group import EnvGroup
from rollout_actors.environments.multi_turn import SingleTurnEnv
from rollout_actors.environments.rewards import relative_steps, settle
from rollout_actors.environments.rubric import Rubric, RubricGroup
from rollout_actors.environments.types import State


def state(said="4", example_id=0, steps=1, **row):
    names = ("response", "tokens", "reward", "advantage")
    trajectory = [
        {"prompt": [], "completion": [], "extras": {}} | dict.fromkeys(names) for _ in range(steps)
    ]
    asked = {"prompt": [user("2 + 2")], "answer": "4", "task": "sums", "info": {"k": 1}}
    made = State(input=asked | {"example_id": example_id} | row, completion=[assistant(said)])
    made.update(dict.fromkeys(("reward", "advantage", "metrics", "error")))
    made.update(trajectory=trajectory, turn=2)
    return made


def scored(rubric, one=None):
    one = state() if one is None else one
    asyncio.run(rubric.score_rollout(one))
    settle([one], rubric)
    return one


def scored_group(rubric, *states):
    asyncio.run(rubric.score_group(states))
    settle(states, rubric)
    return states


def each(states, *names):
    rows = [tuple(one[name] for name in names) for one in states]
    return [row[0] for row in rows] if len(names) == 1 else rows


def of_steps(states, field):
    return [step[field] for one in states for step in one["trajectory"]]


def echo(call):
    return call.text


def length(completion):
    return float(len(completion[-1]["content"]))


def right(completion, answer):
    return completion[-1]["content"] == answer


def one_point(completion):
    return 1.0


def fails(completion):
    raise RuntimeError("no idea")


def zeros(states):
    return [0.0] * len(states)


# Arguments


def test_a_reward_function_gets_the_arguments_it_names():
    seen = {}

    def reward(prompt, completion, answer, info, task, example_id, state, parser, turn, judge):
        seen.update({name: value for name, value in locals().items() if name != "seen"})
        return 1

    one, parser = state(), Parser()
    rubric = Rubric([reward], parser=parser)
    rubric.class_objects["judge"] = 0.25
    scored(rubric, one)
    fields = ("prompt", "completion", "answer", "info", "task", "example_id", "turn")
    given = {name: one[name] for name in fields}
    assert seen == {**given, "state": one, "parser": parser, "judge": 0.25}
    assert seen["state"] is one


def test_a_reward_function_that_takes_keywords_gets_all_of_them():
    seen = {}

    def reward(answer, **kwargs):
        seen.update(kwargs)
        return 1

    scored(Rubric([reward]))
    assert {"prompt", "completion", "info", "task", "state", "trajectory"} <= set(seen)
    assert "answer" not in seen


def test_a_name_that_nothing_has_is_told_with_those_that_there_are():
    def wants(completion, grader, strictness=1):
        return 1.0

    error = (
        r"TypeError: reward function wants has unknown parameters: grader; known are advantage, .*turn;"
        r" put a row's own columns into its info \(.*\), and add others to the rubric's class_objects"
    )
    assert re.match(error, scored(Rubric([wants]))["error"])


@pytest.mark.parametrize("returned", ["0.5", "1_0", b"1", "x" * 10_000])
def test_a_text_is_no_reward_even_if_it_can_be_read_as_a_number(returned):
    one = scored(Rubric([lambda completion: returned]))
    assert (one["reward"], one["metrics"]) == (0.0, {})
    assert f"<lambda> returned {returned!r:.150}" in one["error"]
    assert len(one["error"]) < 300, "a reward function may return any amount of text"


@pytest.mark.parametrize("weight", [None, "1", math.nan, -math.inf])
def test_a_weight_that_is_no_finite_number_is_refused_with_its_reward_function(weight):
    problem = re.escape(f"weights: {weight!r} for reward function right; give a finite number")
    with pytest.raises(ValueError, match=problem):
        Rubric([right], [weight])
    with pytest.raises(ValueError, match=problem):
        Rubric().add_reward_func(right, weight)


def test_a_reward_function_in_place_of_a_list_of_them_is_refused():
    with pytest.raises(TypeError, match="funcs: is function; give a list of reward functions"):
        Rubric(right)


@pytest.mark.parametrize("bound", ["answer", "parser", "task", "info"])
def test_what_a_partial_has_bound_is_what_it_is_called_with(bound):
    def takes_all(completion, **given):
        return float(given[bound] == "mine")

    def names(completion, answer=None, parser=None, task=None, info=None):
        given = {"answer": answer, "parser": parser, "task": task, "info": info}
        return float(given[bound] == "mine")

    for function in (names, takes_all):
        rubric = Rubric([partial(function, **{bound: "mine"})], parser=Parser())
        assert scored(rubric)["reward"] == 1.0


def by_place(answer, /):
    return 1.0


@pytest.mark.parametrize(
    ("functions", "weights", "problem"),
    [
        ([one_point], [1.0, 2.0], "weights: 2 for 1"),
        ([length, length], None, "length exists already"),
        (
            [by_place],
            None,
            "reward function by_place: parameter answer is positional-only, .* remove the slash",
        ),
    ],
)
def test_functions_that_are_no_rubric_are_refused(functions, weights, problem):
    with pytest.raises(ValueError, match=problem):
        Rubric(functions, weights)


def test_lambdas_and_partials_are_numbered_from_the_second_of_their_kind():
    functions = [lambda state: 1.0, partial(sum, [2]), lambda state: 3.0, partial(sum, [4])]
    rubric = Rubric([*functions, lambda state: 5.0])
    assert rubric.reward_names == ["<lambda>", "partial", "<lambda>_2", "partial_2", "<lambda>_3"]


# Rewards of a rollout


def test_the_reward_is_the_weighted_sum_and_the_metrics_are_the_plain_values():
    async def size(completion):
        return len(completion[-1]["content"])

    one = scored(Rubric([right, size], [2.0, 0.0]))
    assert (one["reward"], one["metrics"]) == (2.0, {"right": 1.0, "size": 1.0})
    empty = scored(Rubric())
    assert (repr(empty["reward"]), empty["metrics"]) == ("0.0", {})


def test_steps_without_a_reward_get_the_rollouts():
    values = iter([1.0, 0.25])
    of_group = RubricGroup([Rubric(), Rubric([one_point]), Rubric()])
    for rubric, own in ((Rubric([lambda state: next(values)]), 0.125), (of_group, 0)):
        one = state(steps=2)
        one["trajectory"][0]["reward"] = own
        asyncio.run(rubric.score_rollouts([one]))
        assert of_steps([one], "reward") == [own, 1.0]
        asyncio.run(rubric.score_rollouts([one]))
        assert of_steps([one], "reward") == [own, one["reward"]], "and again the second time"


@pytest.mark.parametrize(
    ("rubric", "error", "reward"),
    [
        (Rubric([one_point, fails], [1.0, 0.0]), None, 1.0),
        (RubricGroup([Rubric([one_point]), Rubric([fails], [0.0])]), None, 1.0),
        (Rubric([one_point, fails]), "RuntimeError: no idea", 0.0),
        (RubricGroup([Rubric([fails]), Rubric([one_point])]), "RuntimeError: no idea", 0.0),
    ],
    ids=["weight 0", "weight 0 in a group", "with a weight", "with a weight in a group"],
)
def test_a_function_that_fails_costs_its_own_figure_and_with_a_weight_the_reward(
    rubric, error, reward
):
    one = scored(rubric, state())
    assert (without_place(one), one["reward"], one["metrics"]) == (
        error,
        reward,
        {"one_point": 1.0},
    )
    assert list(one["reward_errors"]) == ["fails"]
    assert one["reward_errors"]["fails"].startswith("RuntimeError: no idea")


def test_a_plain_function_that_raises_stop_iteration_fails_and_does_not_hang():
    def first(completion):
        return next(iter(()))

    one = state()
    asyncio.run(asyncio.wait_for(Rubric([first]).score_rollout(one), 20))
    assert "StopIteration" in one["error"]


# Groups of rollouts


@pytest.mark.parametrize(
    ("plural", "singular"),
    [
        ("states", None),
        ("trajectories", "trajectory"),
        *(
            (f"{name}s", name)
            for name in ("prompt", "completion", "answer", "info", "task", "example_id", "id")
        ),
        ("timings", "timing"),
    ],
)
def test_a_function_that_takes_states_or_another_plural_is_of_a_group(plural, singular):
    names = {"seen": []}
    exec(f"def reward({plural}):\n    seen.append({plural})\n    return [0.0, 1.0]", names)
    group = [state("3"), state("4")]
    for place, one in enumerate(group):
        one.update(id=f"r{place}", timing={"total_ms": place})
    rubric = Rubric([names["reward"]])
    assert rubric.compares_rollouts
    asyncio.run(rubric.score_group(group))
    assert names["seen"] == [group if singular is None else [one[singular] for one in group]]
    assert each(group, "reward") == [0.0, 1.0]


def test_a_group_gets_rewards_metrics_and_the_advantage_over_its_mean():
    def longest(completions):
        sizes = [length(completion) for completion in completions]
        return [float(size == max(sizes)) for size in sizes]

    async def is_right(completion, answer):
        return right(completion, answer)

    group = scored_group(Rubric([longest, is_right], [1.0, 0.5]), state("4"), state("44"))
    assert each(group, "reward", "metrics") == [
        (0.5, {"longest": 0.0, "is_right": 1.0}),
        (1.0, {"longest": 1.0, "is_right": 0.0}),
    ]
    assert each(group, "advantage") == of_steps(group, "advantage") == [-0.25, 0.25]


def test_rollouts_of_equal_rewards_have_an_advantage_of_exactly_0():
    group = scored_group(Rubric([lambda states: [0.1] * 3]), state(), state(), state())
    assert each(group, "advantage") == [0.0] * 3, "and not what rounding leaves of the mean"


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ([1.0], "best returned 1 rewards for a group of 2"),
        (
            1.0,
            "best returned 1.0 for a group of 2 rollouts; return a list with one reward for each",
        ),
        (None, "best returned None for a group of 2 rollouts; return a list"),
        ({0: 1.0, 1: 0.0}, "best returned {0: 1.0, 1: 0.0} for a group of 2"),
        ({0.5, 1.0}, "best returned {"),
        ("10", "best returned '10' for a group of 2"),
        (b"10", "best returned b'10' for a group of 2"),
        (np.array(1.0), "best returned array(1.) for a group of 2"),
        (pandas.DataFrame({0: [1.0], 1: [0.0]}), "for a group of 2"),
    ],
)
def test_a_group_function_that_does_not_return_one_reward_for_each_is_refused_by_name(
    returned, problem
):
    def best(states):
        return returned

    for one in scored_group(Rubric([best]), state(), state()):
        assert problem in one["error"]


@pytest.mark.parametrize(
    "returned",
    [
        (1.0, 0.0),
        np.array([1, 0]),
        pandas.Series([1.0, 0.0], index=[7, 8]),
        torch.tensor([1.0, 0.0]),
        {"a": 1.0, "b": 0.0}.values(),
    ],
)
def test_a_group_function_may_return_any_list_of_rewards(returned):
    def best(states):
        return returned

    rewards = [one["reward"] for one in scored_group(Rubric([best]), state(), state())]
    assert rewards == [1.0, 0.0]


def test_score_rollouts_scores_each_by_itself_so_many_at_a_time():
    under_way, most = set(), []

    async def is_right(completion, answer, state):
        under_way.add(id(state))
        most.append(len(under_way))
        await asyncio.sleep(0.001)
        under_way.discard(id(state))
        return right(completion, answer)

    for bound, expected in ((2, 2), (-1, 6)):
        most.clear()
        states = [state(str(i)) for i in range(6)]
        asyncio.run(Rubric([is_right]).score_rollouts(states, max_concurrent=bound))
        assert each(states, "reward") == [0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
        assert max(most) == expected
    asyncio.run(Rubric([is_right]).score_rollouts([]))


def test_score_rollouts_compares_those_of_each_example():
    given = (("a", 0, "t"), ("b", 1, "t"), ("cc", 0, "t"), ("d", 0, "u"))
    states = [state(said, example_id, task=task) for said, example_id, task in given]
    compared = Rubric([lambda completions: [length(one) for one in completions]])
    asyncio.run(RubricGroup([compared]).score_rollouts(states))
    assert each(states, "advantage") == [-0.5, 0.0, 0.5, 0.0]


# Groups of rubrics


def test_rubrics_in_a_group_add_up_and_so_do_metrics_of_one_name():
    def early(state):
        return 0.5

    group = RubricGroup([Rubric([one_point]), Rubric([one_point, early], [2.0, 1.0])])
    one = scored(group, state())
    assert (one["reward"], one["metrics"]) == (3.5, {"one_point": 2.0, "early": 0.5})
    assert of_steps([one], "reward") == [3.5]
    assert group.reward_names == ["one_point", "early"] and not group.compares_rollouts
    with pytest.raises(ValueError, match="at least one"):
        RubricGroup([])


def test_a_sum_of_two_metrics_of_one_name_is_missing_where_one_of_them_is():
    def wrong(state):
        raise RuntimeError("no idea")

    wrong.__name__ = "one_point"
    one = scored(RubricGroup([Rubric([one_point]), Rubric([wrong], [0.0])]), state())
    assert (one["metrics"], one["reward"]) == ({}, 1.0)


def test_a_group_of_rubrics_compares_rollouts_where_one_of_them_does():
    group = RubricGroup([Rubric([one_point]), Rubric([lambda states: [0.0, 1.0]])])
    assert group.compares_rollouts
    both = scored_group(group, state(), state())
    assert each(both, "reward") == of_steps(both, "reward") == [1.0, 2.0]
    assert each(both, "advantage") == of_steps(both, "advantage") == [-0.5, 0.5]


# Rubrics of users, which change what they were given


EXAMPLE = [
    {"question": "a", "answer": "a", "example_id": 0},
    {"question": "bbb", "answer": "b", "example_id": 0},
]
"""Two rollouts of it, which `length` rewards with 1 and 3."""


def scored_example(rubric):
    return generated(SingleTurnEnv(rubric=rubric), EXAMPLE, ScriptedClient(echo)).state


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


class Places(Rubric):
    """Rewards by place, and gives no metrics."""

    async def score_group(self, states):
        for place, one in enumerate(states):
            one.update(reward=float(place), metrics={})


@pytest.mark.parametrize(
    ("rubric", "rewards", "advantages"),
    [
        (Bonus([length]), [6.0, 3.0], [1.5, -1.5]),
        (GroupBonus([length]), [6.0, 3.0], [1.5, -1.5]),
        (Tenfold([length]), [1.0, 3.0], [-10.0, 10.0]),
        (Places(), [0.0, 1.0], [-0.5, 0.5]),
        (RubricGroup([Bonus([length]), Rubric([length])]), [7.0, 6.0], [0.5, -0.5]),
        (RubricGroup([GroupBonus([length]), Rubric([length])]), [7.0, 6.0], [0.5, -0.5]),
    ],
    ids=[
        "a reward is changed after it was given",
        "a reward is changed after it was compared",
        "an advantage is changed",
        "a score_group of its own",
        "a reward is changed in a group of rubrics",
        "a compared one is changed in a group of rubrics",
    ],
)
def test_what_a_rubric_sets_itself_is_that_of_the_steps_too_and_is_compared_again(
    rubric, rewards, advantages
):
    states = scored_example(rubric)
    assert each(states, "reward") == of_steps(states, "reward") == rewards
    assert each(states, "advantage") == of_steps(states, "advantage") == advantages


def test_an_advantage_that_a_rubric_sets_itself_stays_where_rewards_are_compared_again():
    class Own(GroupBonus):
        async def score_group(self, states):
            await super().score_group(states)
            states[1]["advantage"] = 0.25

    states = scored_example(Own([length]))
    assert each(states, "advantage") == of_steps(states, "advantage") == [1.5, 0.25]
    settle(states, Rubric())
    assert each(states, "advantage") == [1.5, 0.25]


def test_an_advantage_of_its_own_that_equals_the_groups_is_not_computed_anew_by_the_learner():
    class Own(Rubric):
        async def score_rollout(self, state):
            await super().score_rollout(state)
            state["advantage"] = {3.0: 1.0, 1.0: None}[state["reward"]]

    states = scored_example(Own([length]))
    assert each(states, "advantage") == [1.0, -1.0] or each(states, "advantage") == [-1.0, 1.0]
    assert sorted(map(relative_steps, states)) == [[], [0]]


def test_a_step_holds_the_groups_advantage_until_a_rubric_or_somebody_sets_another():
    compared = scored_example(Rubric([length, zeros]))
    own = scored_example(Tenfold([length]))
    assert [relative_steps(one) for one in (*compared, *own, state())] == [[0], [0], [], [], []]
    again = pickle.loads(pickle.dumps(compared[0]))
    assert relative_steps(again) == relative_steps(compared[0].copy()) == [0]
    again["trajectory"][0]["advantage"] = 9.0
    assert relative_steps(again) == []


FIGURES = {
    "reward": "the reward",
    "judge": "the metric judge =",
    "advantage": "the advantage",
    "step's reward": "the reward of step 0",
    "step's advantage": "the advantage of step 0",
}


class Leaves(Rubric):
    """Leaves a figure of the last of three rollouts as it is told to."""

    def __init__(self, figure, value):
        super().__init__()
        self.figure, self.value = figure, value

    async def score_rollout(self, state):
        state.update(reward=1.0, metrics={})
        if state["answer"] == "2":
            step = state["trajectory"][0]
            owner = {"judge": state["metrics"], "reward": state, "advantage": state}
            name = self.figure.removeprefix("step's ")
            owner.get(self.figure, step)[name] = self.value


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        *(
            (value, "a finite number")
            for value in (None, "good", [1.0], math.nan, math.inf, 10**400)
        ),
        *(
            (value, "a number of at most 1e+30 in size")
            for value in (1e308, -1e31, np.float32(2e30))
        ),
    ],
    ids=lambda value: str(value)[:9],
)
@pytest.mark.parametrize("is_in_a_group", [False, True])
def test_an_unsound_figure_that_a_rubric_leaves_is_the_error_of_its_rollout_alone(
    value, remedy, is_in_a_group
):
    given = [{"question": "a", "answer": str(place), "example_id": "same"} for place in range(3)]
    for figure, name in FIGURES.items():
        if value is None and figure not in ("reward", "judge"):
            continue  # there is none
        rubric = Leaves(figure, value)
        env = SingleTurnEnv(rubric=RubricGroup([rubric]) if is_in_a_group else rubric)
        results = generated(env, given, ScriptedClient(echo))
        error = f"ValueError: Leaves gave {name} {value!r}; give {remedy}"
        error += "" if figure == "reward" else ", or leave it out"
        assert each(results.state, "error", "reward", "metrics", "advantage") == [
            *[(None, 1.0, {}, 0.0)] * 2,
            (error, 0.0, {}, None),
        ]
        assert results.metadata.avg_reward == 1.0


# All rollouts at once: what `generate` calls with `interleave_scoring=False` (spec: orchestration)


class Ranked(Rubric):
    """Rewards each rollout by its place among all, longest last."""

    def __init__(self, asks_super, leaves=None):
        super().__init__([length])
        self.asks_super, self.leaves = asks_super, leaves
        self.calls = []

    async def score_rollouts(self, states, max_concurrent=-1):
        self.calls.append((len(states), max_concurrent))
        if self.asks_super:
            await super().score_rollouts(states, max_concurrent)
        for place, one in enumerate(sorted(states, key=lambda one: length(one["completion"]))):
            one["reward"] = float(place)
        if self.leaves is not None:
            states[self.leaves]["reward"] = None


THREE = [{"question": question, "answer": "?"} for question in ("ccc", "a", "bb")]


def scored_at_once(rubric, client=None, **kwargs):
    env = SingleTurnEnv(rubric=rubric)
    client = client or ScriptedClient(echo)
    return generated(env, THREE, client, **kwargs)


@pytest.mark.parametrize("interleaves", [True, False])
@pytest.mark.parametrize("asks_super", [True, False])
def test_a_score_rollouts_of_a_subclass_is_what_scores_when_all_are_generated(
    asks_super, interleaves
):
    done, rubric = [], Ranked(asks_super)
    results = scored_at_once(
        rubric,
        interleave_scoring=interleaves,
        max_concurrent_scoring=2,
        on_rollout=lambda place, one: done.append((place, one["reward"])),
    )
    assert rubric.calls == [(3, 2)]
    assert results.reward == of_steps(results.state, "reward") == [2.0, 0.0, 1.0]
    assert sorted(done) == [(0, 2.0), (1, 0.0), (2, 1.0)], "of no reward before it is final"
    assert results.metrics == ({"length": [3.0, 1.0, 2.0]} if asks_super else {})
    for timing in each(results.state, "timing"):
        assert timing["total_ms"] == timing["generation_ms"] + timing["scoring_ms"]


@pytest.mark.parametrize("asks_super", [True, False])
@pytest.mark.parametrize("compares", [True, False])
def test_in_a_group_of_rubrics_each_ones_own_score_rollouts_is_asked_and_the_rewards_are_added(
    asks_super, compares
):
    def picky(completion):
        if length(completion) == 1:
            raise RuntimeError("no idea")
        return 0.25

    done, ranked = [], Ranked(asks_super)
    half = Rubric([lambda states: [0.5] * len(states)] if compares else [])
    group = RubricGroup([Rubric([one_point, picky], [1.0, 0.0]), ranked, half])
    results = scored_at_once(
        group,
        max_concurrent_scoring=2,
        on_rollout=lambda place, one: done.append((place, one["reward"])),
    )
    more = 0.5 * compares
    assert ranked.calls == [(3, 2)]
    assert results.reward == of_steps(results.state, "reward") == [3 + more, 1 + more, 2 + more]
    assert sorted(done) == list(enumerate(results.reward))
    assert results.metrics["one_point"] == [1.0] * 3
    assert results.metrics["picky"] == [0.25, None, 0.25]
    assert results.metrics.get("length") == ([3.0, 1.0, 2.0] if asks_super else None)
    assert results.metadata.num_reward_errors == {"picky": 1}
    assert each(results.state, "error", "advantage") == [(None, 0.0)] * 3


@pytest.mark.parametrize("is_in_a_group", [False, True])
def test_what_a_score_rollouts_leaves_unsound_is_one_rollouts_failure_and_no_other_rubric_is_asked(
    is_in_a_group,
):
    leaves, last = Ranked(True, leaves=1), Ranked(True)
    results = scored_at_once(RubricGroup([leaves, last]) if is_in_a_group else leaves)
    error = "ValueError: Ranked gave the reward None; give a finite number"
    assert each(results.state, "error") == [None, error, None]
    if is_in_a_group:
        assert last.calls == [(2, -1)]
        assert results.reward == [3.0, 0.0, 1.0]
        assert each(results.state, "metrics") == [{"length": 6.0}, {}, {"length": 4.0}]


def test_each_environment_of_a_group_has_its_rollouts_scored_by_its_own_rubric_when_all_are_there():
    rubrics = [Ranked(True), Ranked(True), Rubric([length])]
    envs = [SingleTurnEnv(THREE[: 1 + i % 2], rubric=rubric) for i, rubric in enumerate(rubrics)]
    group = EnvGroup(envs, ["one", "two", "three"])
    results = generated(group, group.get_dataset(), ScriptedClient(echo))
    assert [rubric.calls for rubric in rubrics[:2]] == [[(1, -1)], [(2, -1)]]
    assert results.reward == [0.0, 1.0, 0.0, 3.0]


def test_a_rollout_that_is_scored_again_when_its_function_is_mended_has_no_error():
    answers = iter(["none", 1.0])

    def judge(completion):
        return next(answers)

    one, rubric = state(), Rubric([judge])
    assert scored(rubric, one)["error"] is not None
    scored(rubric, one)
    assert (one["error"], one["reward"], one["metrics"]) == (None, 1.0, {"judge": 1.0})
    assert "reward_errors" not in one
