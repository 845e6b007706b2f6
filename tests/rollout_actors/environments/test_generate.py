"""Orchestration: interleaving, bounds, order, failures as data, timing (spec: rollout
orchestration, testing plan and acceptance criteria).
"""

import asyncio
import math
import threading
import time

import pytest
from counted_time import counted
from environment_support import Talk, generated, rows, rubric_of, said_the_answer, user
from scripted_client import Answer, ScriptedClient, status_error

from rollout_actors.environments import concurrency as turns
from rollout_actors.environments.concurrency import Threads
from rollout_actors.environments.multi_turn import SingleTurnEnv
from rollout_actors.environments.rubric import Rubric

COLUMNS = ("prompt", "completion", "answer", "info", "task", "example_id", "reward", "metrics")


def echo(call):
    return call.text


def uneven(call):
    """Later rows come back earlier."""
    return Answer(call.text, delay_s=0.05 - 0.01 * int(call.text[1:]))


def counted_of(environment, inputs, client, **kwargs):
    """Outputs of `generate`, and the seconds that it would have taken; nobody waits for them.
    Reward functions are asynchronous.
    """
    return counted(environment.generate(inputs, client, "model", use_tqdm=False, **kwargs))


class Scorer:
    """A reward function that takes time, and knows when it began and how many of it are under
    way."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s, self.num, self.most, self.began_s = delay_s, 0, 0, []

    async def __call__(self, completion, answer):
        self.began_s.append(asyncio.get_running_loop().time())
        self.num += 1
        self.most = max(self.most, self.num)
        await asyncio.sleep(self.delay_s)
        self.num -= 1
        return said_the_answer(completion, answer)


# Order and outputs


def test_interleaving_is_at_least_25_percent_faster_on_mixed_latency_with_equal_results():
    def timed(interleaved):
        env = SingleTurnEnv(rubric=rubric_of(Scorer(0.1)))
        return counted_of(
            env,
            rows(6),
            ScriptedClient(echo, delay_s=0.1),
            max_concurrent=2,
            interleave_scoring=interleaved,
        )

    (one, fast_s), (other, slow_s) = timed(True), timed(False)
    assert fast_s <= 0.75 * slow_s
    assert {name: one[name] for name in COLUMNS} == {name: other[name] for name in COLUMNS}


def test_interleaved_scoring_begins_before_the_last_generation_ends_and_two_phase_scoring_does_not():
    for interleaved in (True, False):
        scorer, ended_s = Scorer(), []

        async def script(call, ended_s=ended_s):
            await asyncio.sleep(0.02)
            ended_s.append(asyncio.get_running_loop().time())
            return call.text

        counted_of(
            SingleTurnEnv(rubric=rubric_of(scorer)),
            rows(4),
            ScriptedClient(script),
            max_concurrent=2,
            interleave_scoring=interleaved,
        )
        assert (min(scorer.began_s) < max(ended_s)) is interleaved


def test_no_rows_are_no_results():
    results = generated(SingleTurnEnv(rubric=rubric_of(said_the_answer)), [], ScriptedClient([]))
    assert results.state == [] and math.isnan(results.metadata.avg_reward)


# Bounds


def test_max_concurrent_holds_for_both_where_they_are_not_set():
    scorer, client = Scorer(0.02), ScriptedClient(echo, delay_s=0.01)
    counted_of(SingleTurnEnv(rubric=rubric_of(scorer)), rows(9), client, max_concurrent=3)
    assert (client.most_under_way, scorer.most) == (3, 3)


def test_a_bound_of_its_own_wins_over_max_concurrent():
    scorer, client = Scorer(0.02), ScriptedClient(echo, delay_s=0.01)
    counted_of(
        SingleTurnEnv(rubric=rubric_of(scorer)),
        rows(9),
        client,
        max_concurrent=3,
        max_concurrent_scoring=1,
    )
    assert (client.most_under_way, scorer.most) == (3, 1)
    client = ScriptedClient(echo, delay_s=0.01)
    counted_of(SingleTurnEnv(), rows(9), client, max_concurrent=3, max_concurrent_generation=-1)
    assert client.most_under_way == 9


def test_without_a_bound_all_are_under_way_at_once():
    client = ScriptedClient(echo, delay_s=0.05)
    counted_of(SingleTurnEnv(), rows(50), client)
    assert client.most_under_way == 50


def test_a_rollout_keeps_its_place_among_the_generations_over_all_its_turns():
    under_way = set()
    most = []

    async def script(call):
        under_way.add(call.prompt[0]["content"])
        most.append(len(under_way))
        await asyncio.sleep(0.002)
        if call.turn == 2:
            under_way.discard(call.prompt[0]["content"])
        return "a"

    counted_of(Talk(max_turns=3), rows(6), ScriptedClient(script), max_concurrent=2)
    assert max(most) == 2


# Groups


def ranks(completions):
    order = sorted(range(len(completions)), key=lambda place: completions[place][-1]["content"])
    return [float(order.index(place)) for place in range(len(completions))]


@pytest.mark.parametrize("interleave_scoring", [True, False])
def test_group_functions_see_all_rollouts_of_one_example_and_only_those(interleave_scoring):
    groups = []

    def best(states):
        groups.append(
            [(state["example_id"], state["completion"][-1]["content"]) for state in states]
        )
        return ranks([state["completion"] for state in states])

    env = SingleTurnEnv(dataset=rows(2), rubric=rubric_of(best))
    client = ScriptedClient(lambda call: f"{call.text} {call.number % 3}")
    results = asyncio.run(
        env.evaluate(
            client,
            "model",
            rollouts_per_example=3,
            use_tqdm=False,
            interleave_scoring=interleave_scoring,
        )
    )
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


def test_rows_of_two_tasks_are_no_group_though_they_share_an_id():
    sizes = []

    def best(states):
        sizes.append(len(states))
        return [1.0] * len(states)

    given = [{"question": "a", "example_id": 0, "task": task} for task in ("one", "one", "other")]
    results = generated(SingleTurnEnv(rubric=rubric_of(best)), given, ScriptedClient(echo))
    assert sorted(sizes) == [1, 2] and results.metadata.num_examples == 2


def test_advantages_are_over_the_examples_mean_also_without_group_functions():
    given = [
        {"question": "a", "answer": "a", "example_id": 0},
        {"question": "b", "answer": "a", "example_id": 0},
        {"question": "c", "answer": "c"},
    ]
    results = generated(
        SingleTurnEnv(rubric=rubric_of(said_the_answer)), given, ScriptedClient(echo)
    )
    assert [state["advantage"] for state in results.state] == [0.5, -0.5, 0.0]
    assert [state["trajectory"][0]["advantage"] for state in results.state] == [0.5, -0.5, 0.0]


def test_advantages_that_a_rubric_of_the_users_own_has_given_stand():
    class LeaveOneOut(Rubric):
        async def score_group(self, states):
            await super().score_group(states)
            total = sum(state["reward"] for state in states)
            for state in states:
                state["advantage"] = state["reward"] - (total - state["reward"]) / (len(states) - 1)

    env = SingleTurnEnv(
        dataset=rows(1), rubric=LeaveOneOut([lambda completions: ranks(completions)])
    )
    client = ScriptedClient(lambda call: str(call.number))
    results = asyncio.run(env.evaluate(client, "model", rollouts_per_example=3, use_tqdm=False))
    assert [state["advantage"] for state in results.state] == [-1.5, 0.0, 1.5]


# Ids and timing


def test_ids_are_recorded_in_the_state():
    assert [
        state["id"] for state in generated(SingleTurnEnv(), rows(3), ScriptedClient(echo)).state
    ] == [0, 1, 2]
    given = [{"question": "a", "id": "x"}, {"question": "b", "example_id": "y"}]
    results = generated(SingleTurnEnv(), given, ScriptedClient(echo))
    assert (
        [state["id"] for state in results.state]
        == [state["example_id"] for state in results.state]
        == ["x", "y"]
    )
    (both,) = generated(
        SingleTurnEnv(), [{"question": "a", "id": "x", "example_id": 7}], ScriptedClient(echo)
    ).state
    assert (both["id"], both["example_id"]) == ("x", 7), (
        "a column of ids is carried through to the state"
    )


@pytest.mark.slow
@pytest.mark.parametrize("interleave_scoring", [True, False])
def test_timing_is_recorded_and_the_wait_for_a_turn_is_not_counted(interleave_scoring):
    env = SingleTurnEnv(rubric=rubric_of(Scorer(0.06)))
    began_s = time.time()
    results = generated(
        env,
        rows(6),
        ScriptedClient(echo, delay_s=0.06),
        max_concurrent=1,
        interleave_scoring=interleave_scoring,
    )
    for state in results.state:
        timing = state["timing"]
        assert timing["generation_ms"] > 55 and timing["scoring_ms"] > 55
        assert timing["total_ms"] == pytest.approx(timing["generation_ms"] + timing["scoring_ms"])
        assert began_s <= timing["start_time"] <= time.time()
    # One at a time: with the wait for a turn it would be more than all the time that there was.
    for name in ("generation_ms", "scoring_ms"):
        assert sum(state["timing"][name] for state in results.state) <= results.metadata.time_ms
    starts = [state["timing"]["start_time"] for state in results.state]
    assert starts == sorted(starts) and starts[-1] - starts[0] > 0.25


def test_a_rollout_by_itself_times_its_generation_too():
    began_s = time.time()
    state = asyncio.run(
        SingleTurnEnv().rollout(
            {"prompt": [user("a")], "example_id": 0}, ScriptedClient(echo, delay_s=0.05), "model"
        )
    )
    assert 45 < state["timing"]["generation_ms"] <= 1000 * (time.time() - began_s)


# Switches


def test_without_scoring_rewards_are_none_and_no_function_is_called():
    called = []
    env = SingleTurnEnv(rubric=rubric_of(lambda state: called.append(1) or 1.0))
    client = ScriptedClient(
        lambda call: status_error(400, "bad request") if call.text == "q1" else "a"
    )
    results = generated(env, rows(2), client, score_rollouts=False)
    assert (
        results.reward == [None, None]
        and called == []
        and results.metrics == {}
        and math.isnan(results.metadata.avg_reward)
    )
    assert results.metadata.num_errors == 1
    assert [step["reward"] for step in results.state[0]["trajectory"]] == [None]


def test_each_rollout_is_told_when_it_is_done():
    told = []
    env = SingleTurnEnv(rubric=rubric_of(said_the_answer))
    generated(
        env,
        rows(4),
        ScriptedClient(uneven),
        on_rollout=lambda place, state: told.append((place, state["reward"])),
    )
    assert told == [(3, 1.0), (2, 1.0), (1, 1.0), (0, 1.0)]


def test_without_scoring_each_rollout_is_told_too():
    told = []
    generated(
        SingleTurnEnv(),
        rows(3),
        ScriptedClient(echo),
        score_rollouts=False,
        on_rollout=lambda place, state: told.append(place),
    )
    assert sorted(told) == [0, 1, 2]


def test_synchronous_reward_functions_hold_up_neither_generation_nor_each_other():
    generated_all, together = threading.Event(), threading.Barrier(2)

    def script(call):
        if call.text == "q3":
            generated_all.set()
        return call.text

    def waits(completion):
        if completion[-1]["content"] in ("q0", "q1"):
            together.wait(60)
        return float(generated_all.wait(60))

    client = ScriptedClient(script, delay_s=0.01)
    results = generated(
        SingleTurnEnv(rubric=rubric_of(waits)), rows(4), client, max_concurrent_generation=1
    )
    assert results.reward == [1.0] * 4 and results.metadata.num_errors == 0


def test_it_works_off_the_main_thread():
    results = []
    env = Talk(max_turns=2, rubric=rubric_of(lambda completion: 1.0))
    thread = threading.Thread(
        target=lambda: results.append(generated(env, rows(3), ScriptedClient(lambda call: "a")))
    )
    thread.start()
    thread.join(60)
    assert results[0].reward == [1.0] * 3


@pytest.mark.slow
@pytest.mark.parametrize("interleave_scoring", [True, False])
def test_the_bound_of_scorings_holds_for_the_rollouts_of_a_group_too(interleave_scoring):
    scorer = Scorer(0.01)
    env = SingleTurnEnv(
        dataset=rows(3), rubric=rubric_of(scorer, lambda states: [0.0] * len(states))
    )
    results = asyncio.run(
        env.evaluate(
            ScriptedClient(echo),
            "m",
            rollouts_per_example=4,
            max_concurrent_scoring=2,
            interleave_scoring=interleave_scoring,
            use_tqdm=False,
        )
    )
    assert scorer.most == 2 and results.reward == [1.0] * 12
    # Four of each example, two at a time.
    assert all(state["timing"]["scoring_ms"] > 15 for state in results.state)


@pytest.mark.slow
def test_the_wait_for_a_thread_is_not_counted_as_scoring(monkeypatch):
    monkeypatch.setattr(turns, "THREADS", Threads(2))

    def slow(completion):
        time.sleep(0.03)
        return 1.0

    results = generated(SingleTurnEnv(rubric=rubric_of(slow)), rows(24), ScriptedClient(echo))
    spent_ms = [state["timing"]["scoring_ms"] for state in results.state]
    # Two at a time, it is twice the time that there was; with the wait for one of the threads,
    # twelve times.
    assert min(spent_ms) > 29 and sum(spent_ms) < 6 * results.metadata.time_ms


def test_rows_may_be_given_to_an_environment_of_one_turn_without_naming_them():
    assert (
        len(SingleTurnEnv(rows(3)).get_dataset()) == 3
        and len(SingleTurnEnv(rows(3), rows(2)).get_eval_dataset()) == 2
    )


def test_generate_sync_where_an_event_loop_runs_says_what_to_write():
    async def notebook():
        SingleTurnEnv().generate_sync(rows(1), ScriptedClient(["a"]), "m")

    with pytest.raises(
        RuntimeError,
        match=(
            r"generate_sync: an event loop runs here, as in a notebook; write `await"
            r" environment\.generate"
        ),
    ):
        asyncio.run(notebook())
