"""Orchestration: bounds, groups, advantages, and what each rollout is told (spec: rollout
orchestration; order and interleaving: `test_orchestration.py`).
"""

import asyncio
import math
import time

import pytest
from counted_time import counted
from environment_support import generated, rows, rubric_of, said_the_answer, user
from scripted_client import ScriptedClient, status_error

from rollout_actors.environments import concurrency
from rollout_actors.environments.multi_turn import SingleTurnEnv
from rollout_actors.threads import Threads

BOTH_WAYS = pytest.mark.parametrize("interleave_scoring", [True, False])


def echo(call):
    return call.text


def evaluated(env, client, number, **kwargs):
    """What `number` rollouts of each row come to."""
    work = env.evaluate(client, "model", rollouts_per_example=number, use_tqdm=False, **kwargs)
    return asyncio.run(work)


class Scorer:
    """A reward function that takes time, and knows how many of it are under way."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s, self.num, self.most = delay_s, 0, 0

    async def __call__(self, completion, answer):
        self.num += 1
        self.most = max(self.most, self.num)
        await asyncio.sleep(self.delay_s)
        self.num -= 1
        return said_the_answer(completion, answer)


# Bounds


@pytest.mark.parametrize(
    ("bounds", "generated_at_once", "scored_at_once"),
    [
        ({"max_concurrent": 3}, 3, 3),
        ({"max_concurrent": 3, "max_concurrent_scoring": 1}, 3, 1),
        ({"max_concurrent": 3, "max_concurrent_generation": -1}, 9, 3),
        ({}, 9, 9),
    ],
    ids=["of both", "a bound of its own wins", "none of its own wins", "no bound"],
)
def test_max_concurrent_holds_for_both_where_they_are_not_set(
    bounds, generated_at_once, scored_at_once
):
    scorer, client = Scorer(0.02), ScriptedClient(echo, delay_s=0.01)
    env = SingleTurnEnv(rubric=rubric_of(scorer))
    counted(env.generate(rows(9), client, "model", use_tqdm=False, **bounds))
    assert (client.most_under_way, scorer.most) == (generated_at_once, scored_at_once)


@pytest.mark.slow
@BOTH_WAYS
def test_the_bound_of_scorings_holds_for_the_rollouts_of_a_group_too(interleave_scoring):
    scorer = Scorer(0.01)
    rubric = rubric_of(scorer, lambda states: [0.0] * len(states))
    env = SingleTurnEnv(dataset=rows(3), rubric=rubric)
    ways = {"max_concurrent_scoring": 2, "interleave_scoring": interleave_scoring}
    results = evaluated(env, ScriptedClient(echo), 4, **ways)
    assert (scorer.most, results.reward) == (2, [1.0] * 12)
    # Four of each example, two at a time.
    assert all(state["timing"]["scoring_ms"] > 15 for state in results.state)


# Groups


def ranks(completions):
    order = sorted(range(len(completions)), key=lambda place: completions[place][-1]["content"])
    return [float(order.index(place)) for place in range(len(completions))]


@BOTH_WAYS
def test_group_functions_see_all_rollouts_of_one_example_and_only_those(interleave_scoring):
    groups = []

    def best(states):
        groups.append([(one["example_id"], one["completion"][-1]["content"]) for one in states])
        return ranks([one["completion"] for one in states])

    env = SingleTurnEnv(dataset=rows(2), rubric=rubric_of(best))
    client = ScriptedClient(lambda call: f"{call.text} {call.number % 3}")
    results = evaluated(env, client, 3, interleave_scoring=interleave_scoring)
    assert sorted(groups) == [[(i, f"q{i} {k}") for k in range(3)] for i in range(2)]
    assert results.reward == [0.0, 1.0, 2.0] * 2
    assert [state["advantage"] for state in results.state] == [-1.0, 0.0, 1.0] * 2


def test_a_group_is_scored_as_soon_as_it_is_complete():
    scored_s, ended_s = [], []

    async def best(states):
        scored_s.append(asyncio.get_running_loop().time())
        return [0.0] * len(states)

    async def script(call):
        await asyncio.sleep(0.2 if call.text == "q1" else 0.0)
        ended_s.append(asyncio.get_running_loop().time())
        return "a"

    env = SingleTurnEnv(dataset=rows(2), rubric=rubric_of(best))
    counted(env.evaluate(ScriptedClient(script), "model", rollouts_per_example=2, use_tqdm=False))
    assert min(scored_s) < max(ended_s) <= max(scored_s)


# Timing


def test_a_rollout_by_itself_times_its_generation_too():
    began_s = time.time()
    row = {"prompt": [user("a")], "example_id": 0}
    work = SingleTurnEnv().rollout(row, ScriptedClient(echo, delay_s=0.05), "model")
    state = asyncio.run(work)
    assert 45 < state["timing"]["generation_ms"] <= 1000 * (time.time() - began_s)


@pytest.mark.slow
def test_the_wait_for_a_thread_is_not_counted_as_scoring(monkeypatch):
    monkeypatch.setattr(concurrency, "THREADS", Threads(2))

    def slow(completion):
        time.sleep(0.03)
        return 1.0

    results = generated(SingleTurnEnv(rubric=rubric_of(slow)), rows(24), ScriptedClient(echo))
    spent_ms = [state["timing"]["scoring_ms"] for state in results.state]
    # Two at a time, it is twice the time that there was; with the wait for one of the threads,
    # twelve times.
    assert min(spent_ms) > 29 and sum(spent_ms) < 6 * results.metadata.time_ms


# Switches


def test_without_scoring_rewards_are_none_and_no_function_is_called():
    called, done = [], []
    env = SingleTurnEnv(rubric=rubric_of(lambda state: called.append(1) or 1.0))
    client = ScriptedClient(lambda call: status_error(400, "no") if call.text == "q1" else "a")
    ways = {"score_rollouts": False, "on_rollout": lambda place, state: done.append(place)}
    results = generated(env, rows(2), client, **ways)
    assert (results.reward, results.metrics, called) == ([None, None], {}, [])
    assert math.isnan(results.metadata.avg_reward)
    assert results.metadata.num_errors == 1
    assert [step["reward"] for step in results.state[0]["trajectory"]] == [None]
    assert sorted(done) == [0, 1]
