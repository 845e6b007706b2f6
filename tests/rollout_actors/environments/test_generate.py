"""Orchestration: interleaving, bounds, order, failures as data, timing (spec: rollout orchestration, testing plan and acceptance criteria)."""

import asyncio
import math
import statistics
import threading
import time

import pytest
from environment_support import Talk, assistant, generated, rows, rubric_of, said_the_answer, user
from scripted_client import Answer, ScriptedClient, connection_error, overlong_error, status_error

from rollout_actors.environments.lifecycle import cleanup
from rollout_actors.environments.responses import RETURNS_TOKENS
from rollout_actors.environments.rubric import RubricGroup
from rollout_actors.environments.single_turn import SingleTurnEnv
from rollout_actors.environments.training_examples import merge_trajectories_for_training, process_trajectories_for_training
from rollout_actors.environments.types import State

COLUMNS = ("prompt", "completion", "answer", "info", "task", "example_id", "reward", "metrics")


def echo(call):
    return call.text


def uneven(call):
    """Later rows come back earlier."""
    return Answer(call.text, delay_s=0.05 - 0.01 * int(call.text[1:]))


def length(completion):
    return len(completion[-1]["content"])


class Scorer:
    """A reward function that takes time, and knows how many of it are under way."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s, self.num, self.most, self.began_s, self.ended_s = delay_s, 0, 0, [], []

    async def __call__(self, completion, answer):
        self.began_s.append(time.perf_counter())
        self.num += 1
        self.most = max(self.most, self.num)
        await asyncio.sleep(self.delay_s)
        self.num -= 1
        self.ended_s.append(time.perf_counter())
        return said_the_answer(completion, answer)


# Order and outputs


@pytest.mark.parametrize("interleave_scoring", [True, False])
def test_list_ordering_is_preserved_and_aligned_across_all_columns(interleave_scoring):
    given = [{"question": f"q{i}", "answer": f"q{i}" if i % 2 else "other", "info": {"i": i}, "task": f"t{i}"} for i in range(5)]
    env = SingleTurnEnv(rubric=rubric_of(said_the_answer, length))
    results = generated(env, given, ScriptedClient(uneven), interleave_scoring=interleave_scoring)
    assert [prompt[0]["content"] for prompt in results.prompt] == [completion[0]["content"] for completion in results.completion] == [f"q{i}" for i in range(5)]
    assert results.answer == [row["answer"] for row in given] and results.info == [row["info"] for row in given]
    assert results.task == [f"t{i}" for i in range(5)] and results.example_id == list(range(5))
    assert results.reward == [2.0, 3.0, 2.0, 3.0, 2.0]
    assert results.metrics == {"said_the_answer": [0.0, 1.0, 0.0, 1.0, 0.0], "length": [2.0] * 5}
    assert [state["reward"] for state in results.state] == results.reward


def test_interleaved_outputs_match_two_phase_ones_for_deterministic_reward_functions():
    env = Talk(max_turns=2, rubric=rubric_of(said_the_answer, length, weights=[1.0, 0.5]))

    def script(call):
        return status_error(400, "bad") if call.text == "q3" else Answer(call.text, delay_s=0.001 * (call.number % 4))

    one, other = (generated(env, rows(8), ScriptedClient(script), interleave_scoring=interleaved, max_concurrent=3) for interleaved in (True, False))
    assert {name: one[name] for name in COLUMNS} == {name: other[name] for name in COLUMNS}
    fields = ("id", "stop_condition", "is_completed", "is_truncated", "error", "advantage")
    assert [[state[name] for name in fields] for state in one.state] == [[state[name] for name in fields] for state in other.state]
    assert (one.metadata.avg_reward, one.metadata.num_errors) == (other.metadata.avg_reward, other.metadata.num_errors)


def test_interleaving_is_at_least_25_percent_faster_on_mixed_latency_with_equal_results():
    def timed(interleaved):
        env = SingleTurnEnv(rubric=rubric_of(Scorer(0.1)))
        began_s = time.perf_counter()
        results = generated(env, rows(6), ScriptedClient(echo, delay_s=0.1), max_concurrent=2, interleave_scoring=interleaved)
        return time.perf_counter() - began_s, results

    # Of several: the machine may be busy with something else.
    pairs = [(timed(True), timed(False))]
    while len(pairs) < 6 and pairs[-1][0][0] > 0.75 * pairs[-1][1][0]:
        pairs.append((timed(True), timed(False)))
    assert min(fast / slow for (fast, _), (slow, _) in pairs) <= 0.75
    (_, one), (_, other) = pairs[0]
    assert {name: one[name] for name in COLUMNS} == {name: other[name] for name in COLUMNS}


def test_interleaved_scoring_begins_before_the_last_generation_ends_and_two_phase_scoring_does_not():
    for interleaved in (True, False):
        scorer, ended_s = Scorer(), []

        async def script(call, ended_s=ended_s):
            await asyncio.sleep(0.02)
            ended_s.append(time.perf_counter())
            return call.text

        generated(SingleTurnEnv(rubric=rubric_of(scorer)), rows(4), ScriptedClient(script), max_concurrent=2, interleave_scoring=interleaved)
        assert (min(scorer.began_s) < max(ended_s)) is interleaved


def test_no_rows_are_no_results():
    results = generated(SingleTurnEnv(rubric=rubric_of(said_the_answer)), [], ScriptedClient([]))
    assert results.state == [] and math.isnan(results.metadata.avg_reward)


# Bounds


@pytest.mark.parametrize("interleave_scoring", [True, False])
@pytest.mark.parametrize(("generation", "scoring"), [(2, 5), (5, 2), (1, 1)])
def test_generations_and_scorings_are_bound_separately(generation, scoring, interleave_scoring):
    scorer, client = Scorer(0.02), ScriptedClient(echo, delay_s=0.01)
    bounds = {"max_concurrent_generation": generation, "max_concurrent_scoring": scoring, "interleave_scoring": interleave_scoring}
    results = generated(SingleTurnEnv(rubric=rubric_of(scorer)), rows(12), client, **bounds)
    assert client.most_under_way == generation
    # While rollouts trickle in one by one, fewer than the bound may be there to score.
    assert scorer.most <= scoring and (interleave_scoring or scorer.most == scoring)
    assert results.reward == [1.0] * 12


def test_max_concurrent_holds_for_both_where_they_are_not_set():
    scorer, client = Scorer(0.02), ScriptedClient(echo, delay_s=0.01)
    generated(SingleTurnEnv(rubric=rubric_of(scorer)), rows(9), client, max_concurrent=3)
    assert (client.most_under_way, scorer.most) == (3, 3)


def test_a_bound_of_its_own_wins_over_max_concurrent():
    scorer, client = Scorer(0.02), ScriptedClient(echo, delay_s=0.01)
    generated(SingleTurnEnv(rubric=rubric_of(scorer)), rows(9), client, max_concurrent=3, max_concurrent_scoring=1)
    assert (client.most_under_way, scorer.most) == (3, 1)
    client = ScriptedClient(echo, delay_s=0.01)
    generated(SingleTurnEnv(), rows(9), client, max_concurrent=3, max_concurrent_generation=-1)
    assert client.most_under_way == 9


def test_without_a_bound_all_are_under_way_at_once():
    client = ScriptedClient(echo, delay_s=0.05)
    generated(SingleTurnEnv(), rows(50), client)
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

    generated(Talk(max_turns=3), rows(6), ScriptedClient(script), max_concurrent=2)
    assert max(most) == 2


# Failures are data


def bad_q1(call):
    return status_error(400, "bad request") if call.text == "q1" else echo(call)


@pytest.mark.parametrize("interleave_scoring", [True, False])
def test_one_failing_rollout_is_data_with_reward_0_and_counted(interleave_scoring):
    env = SingleTurnEnv(rubric=rubric_of(said_the_answer, length))
    results = generated(env, rows(3), ScriptedClient(bad_q1), interleave_scoring=interleave_scoring)
    assert results.reward == [3.0, 0.0, 3.0]
    assert results.metrics == {"said_the_answer": [1.0, 0.0, 1.0], "length": [2.0, 0.0, 2.0]}
    assert [state["error"] for state in results.state] == [None, "BadRequestError: Error code: 400 - bad request", None]
    assert results.metadata.num_errors == 1 and results.metadata.avg_reward == 2.0
    failed = results.state[1]
    assert failed["is_completed"] and failed["stop_condition"] == "error" and results.completion[1] == []


def test_a_rollout_that_fails_later_keeps_the_steps_that_it_had():
    def script(call):
        return status_error(400, "bad") if call.turn == 1 and call.prompt[0]["content"] == "q1" else "a"

    results = generated(Talk(max_turns=2), rows(2), ScriptedClient(script), sampling_args=RETURNS_TOKENS)
    failed = results.state[1]
    assert len(failed["trajectory"]) == 1 and failed["trajectory"][0]["tokens"] is not None and failed["trajectory"][0]["reward"] == 0.0
    assert failed["completion"] == [assistant("a"), user("yes")] and failed["example_id"] == 1


def test_a_rollout_that_fails_leaves_the_state_that_its_setup_made():
    class Fresh(Talk):
        async def setup_state(self, state):
            return State({**state, "trajectory": [], "fresh": True})

    def script(call):
        return status_error(400, "bad") if call.turn == 1 else "a"

    (failed,) = generated(Fresh(), rows(1), ScriptedClient(script)).state
    assert failed["fresh"] and len(failed["trajectory"]) == 1 and "bad" in failed["error"]


class FailsIn(Talk):
    """At one place, for the row `q1`."""

    def __init__(self, place: str, **kwargs):
        super().__init__(max_turns=2, **kwargs)
        self.place = place

    def _at(self, place, state):
        if self.place == place and state["prompt"][0]["content"] == "q1":
            raise RuntimeError(f"broken {place}")

    async def init_state(self, input, **kwargs):
        self._at("init_state", input)
        return await super().init_state(input, **kwargs)

    async def setup_state(self, state):
        self._at("setup_state", state)
        return state

    async def env_response(self, messages, state, **kwargs):
        self._at("env_response", state)
        return await super().env_response(messages, state, **kwargs)

    async def is_completed(self, state, **kwargs):
        self._at("is_completed", state)
        return await super().is_completed(state, **kwargs)

    async def _render_completion(self, state):
        self._at("_render_completion", state)
        await super()._render_completion(state)

    @cleanup
    async def put_away(self, state):
        self._at("put_away", state)


@pytest.mark.parametrize("place", ["init_state", "setup_state", "env_response", "is_completed", "_render_completion", "put_away"])
def test_wherever_an_environment_fails_the_other_rollouts_go_on(place):
    results = generated(FailsIn(place, rubric=rubric_of(lambda state: 1.0)), rows(3), ScriptedClient(lambda call: "a"))
    assert results.reward == [1.0, 0.0, 1.0] and results.example_id == [0, 1, 2]
    assert results.state[1]["error"] == f"RuntimeError: broken {place}"


def test_info_that_is_no_json_is_one_rollouts_failure():
    given = [{"question": "q0", "info": '{"k": 1}'}, {"question": "q1", "info": "{k"}]
    results = generated(SingleTurnEnv(), given, ScriptedClient(echo))
    assert results.state[0]["error"] is None and "JSONDecodeError" in results.state[1]["error"] and results.example_id == [0, 1]


def test_a_length_mismatch_of_tokens_is_one_rollouts_failure():
    def script(call):
        return Answer("a", completion_ids=[1, 2], logprobs=[-0.1]) if call.text == "q1" else "a"

    results = generated(SingleTurnEnv(), rows(2), ScriptedClient(script), sampling_args=RETURNS_TOKENS)
    assert results.state[0]["error"] is None and "2 token ids with 1 log-probabilities" in results.state[1]["error"]


@pytest.mark.parametrize("interleave_scoring", [True, False])
def test_a_reward_function_that_fails_is_one_rollouts_failure(interleave_scoring):
    def picky(completion):
        if completion[-1]["content"] == "q1":
            raise RuntimeError("no idea")
        return 1.0

    results = generated(SingleTurnEnv(rubric=rubric_of(picky)), rows(3), ScriptedClient(echo), interleave_scoring=interleave_scoring)
    assert results.reward == [1.0, 0.0, 1.0] and results.state[1]["error"] == "RuntimeError: no idea"
    assert results.metadata.num_errors == 1 and results.state[1]["trajectory"][0]["reward"] == 0.0


def test_an_endpoint_that_cannot_be_reached_leaves_every_rollout_as_data():
    client = ScriptedClient(lambda call: connection_error())
    results = generated(SingleTurnEnv(rubric=rubric_of(said_the_answer)), rows(3), client)
    assert results.metadata.num_errors == 3 and results.reward == [0.0] * 3 and client.num_calls == 9


def test_retries_are_for_infrastructure_errors_only():
    seen = {}

    def script(call):
        seen[call.text] = seen.get(call.text, 0) + 1
        failures = {"q0": connection_error(), "q1": status_error(400, "bad"), "q2": ValueError("mine")}
        return failures[call.text] if seen[call.text] == 1 else "a"

    results = generated(SingleTurnEnv(), rows(3), ScriptedClient(script))
    assert seen == {"q0": 2, "q1": 1, "q2": 1}
    assert [state["error"] is None for state in results.state] == [True, False, False]


def test_truncated_rollouts_are_counted_and_scored_and_are_no_errors():
    def script(call):
        return overlong_error() if call.prompt[0]["content"] == "q1" and call.turn == 1 else "a"

    env = Talk(max_turns=2, rubric=rubric_of(lambda completion: float(len(completion))))
    results = generated(env, rows(2), ScriptedClient(script))
    assert (results.metadata.num_truncated, results.metadata.num_errors) == (1, 0)
    assert results.reward == [3.0, 1.0] and [state["is_truncated"] for state in results.state] == [False, True]


def test_a_failing_batch_is_told_with_its_first_error(caplog):
    generated(SingleTurnEnv(), rows(3), ScriptedClient(bad_q1))
    assert "1 of 3 rollouts failed, the first of example 1: BadRequestError" in caplog.text


def test_cancelling_the_batch_cancels_its_calls():
    client = ScriptedClient(echo, delay_s=30)

    async def cancelled():
        task = asyncio.create_task(SingleTurnEnv().generate(rows(4), client, "model", use_tqdm=False))
        while client.num_under_way < 4:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert (client.num_cancelled, client.num_under_way) == (4, 0)


# Groups


def ranks(completions):
    order = sorted(range(len(completions)), key=lambda place: completions[place][-1]["content"])
    return [float(order.index(place)) for place in range(len(completions))]


@pytest.mark.parametrize("interleave_scoring", [True, False])
def test_group_functions_see_all_rollouts_of_one_example_and_only_those(interleave_scoring):
    groups = []

    def best(states):
        groups.append([(state["example_id"], state["completion"][-1]["content"]) for state in states])
        return ranks([state["completion"] for state in states])

    env = SingleTurnEnv(dataset=rows(2), rubric=rubric_of(best))
    client = ScriptedClient(lambda call: f"{call.text} {call.number % 3}")
    results = asyncio.run(env.evaluate(client, "model", rollouts_per_example=3, use_tqdm=False, interleave_scoring=interleave_scoring))
    assert sorted(groups) == [[(i, f"q{i} {k}") for k in range(3)] for i in range(2)]
    assert results.reward == [0.0, 1.0, 2.0] * 2
    assert [state["advantage"] for state in results.state] == [-1.0, 0.0, 1.0] * 2


def test_a_group_is_scored_as_soon_as_it_is_complete():
    scored_s, ended_s = [], []

    def best(states):
        scored_s.append(time.perf_counter())
        return [0.0] * len(states)

    async def script(call):
        await asyncio.sleep(0.2 if call.text == "q1" else 0.0)
        ended_s.append(time.perf_counter())
        return "a"

    env = SingleTurnEnv(dataset=rows(2), rubric=rubric_of(best))
    asyncio.run(env.evaluate(ScriptedClient(script), "model", rollouts_per_example=2, use_tqdm=False))
    assert min(scored_s) < max(ended_s) < max(scored_s)


def test_rows_of_two_tasks_are_no_group_though_they_share_an_id():
    sizes = []

    def best(states):
        sizes.append(len(states))
        return [1.0] * len(states)

    given = [{"question": "a", "example_id": 0, "task": task} for task in ("one", "one", "other")]
    results = generated(SingleTurnEnv(rubric=rubric_of(best)), given, ScriptedClient(echo))
    assert sorted(sizes) == [1, 2] and results.metadata.num_examples == 2


def test_advantages_are_over_the_examples_mean_also_without_group_functions():
    given = [{"question": "a", "answer": "a", "example_id": 0}, {"question": "b", "answer": "a", "example_id": 0}, {"question": "c", "answer": "c"}]
    results = generated(SingleTurnEnv(rubric=rubric_of(said_the_answer)), given, ScriptedClient(echo))
    assert [state["advantage"] for state in results.state] == [0.5, -0.5, 0.0]
    assert [state["trajectory"][0]["advantage"] for state in results.state] == [0.5, -0.5, 0.0]


def of_one_row(env, script, number, **kwargs):
    """What `number` rollouts of one row come to; the second one's call in its second turn fails."""

    def or_fails(call):
        return status_error(400, "bad") if call.number == number + 1 else script(call)

    return asyncio.run(env.evaluate(ScriptedClient(or_fails), "model", rollouts_per_example=number, use_tqdm=False, **kwargs))


@pytest.mark.parametrize("interleave_scoring", [True, False])
@pytest.mark.parametrize("compares", [True, False])
def test_a_rollout_that_failed_has_reward_0_and_no_advantage_and_is_not_in_its_groups_mean(compares, interleave_scoring):
    def places(states):
        return [float(state["completion"][0]["content"]) for state in states]

    def place(state):
        return float(state["completion"][0]["content"])

    env = Talk(max_turns=2, dataset=rows(1), rubric=rubric_of(places if compares else place))
    results = of_one_row(env, lambda call: str(call.number), 4, sampling_args=RETURNS_TOKENS, interleave_scoring=interleave_scoring)
    assert [state["error"] is None for state in results.state] == [True, False, True, True]
    assert results.reward == [0.0, 0.0, 2.0, 3.0], "the first one's 0 is a judgement, the second one's is none"
    mean = 5.0 / 3.0
    assert [state["advantage"] for state in results.state] == [0.0 - mean, None, 2.0 - mean, 3.0 - mean]
    assert [len(state["trajectory"]) for state in results.state] == [2, 1, 2, 2]
    assert all(step["advantage"] == state["advantage"] for state in results.state for step in state["trajectory"])


@pytest.mark.parametrize("examples_of", [process_trajectories_for_training, lambda states: merge_trajectories_for_training(states).examples])
def test_rollouts_that_failed_do_not_teach(examples_of):
    def place(state):
        return float(state["completion"][0]["content"])

    env = Talk(max_turns=2, dataset=rows(1), rubric=rubric_of(place))
    states = of_one_row(env, lambda call: str(call.number), 3, sampling_args=RETURNS_TOKENS).state
    assert states[1]["trajectory"][0]["tokens"] is not None
    examples = examples_of(states)
    assert {one.rollout for one in examples} == {0, 2}
    assert {one.group_rewards for one in examples} == {(0.0, 2.0)}
    assert {(one.rollout, one.advantage) for one in examples} == {(0, -1.0), (2, 1.0)}


def test_the_only_sound_rollout_of_a_group_has_nothing_to_be_compared_with():
    env = Talk(max_turns=2, dataset=rows(1), rubric=rubric_of(lambda state: 1.0))
    sound, failed = of_one_row(env, lambda call: "a", 2).state
    assert (sound["reward"], sound["advantage"], failed["reward"], failed["advantage"]) == (1.0, 0.0, 0.0, None)


def test_what_a_rubric_gave_before_another_one_failed_is_taken_back():
    def fails(states):
        raise RuntimeError("no idea")

    group = RubricGroup([rubric_of(lambda states: [float(place) for place in range(len(states))]), rubric_of(fails)])
    env = SingleTurnEnv(dataset=rows(1), rubric=group)
    results = asyncio.run(env.evaluate(ScriptedClient(echo), "model", rollouts_per_example=2, use_tqdm=False))
    assert results.reward == [0.0, 0.0] and results.metadata.num_errors == 2
    assert [(state["advantage"], state["trajectory"][0]["advantage"], state["trajectory"][0]["reward"]) for state in results.state] == [(None, None, 0.0)] * 2


# Ids and timing


def test_ids_are_recorded_in_the_state():
    assert [state["id"] for state in generated(SingleTurnEnv(), rows(3), ScriptedClient(echo)).state] == [0, 1, 2]
    given = [{"question": "a", "id": "x"}, {"question": "b", "example_id": "y"}]
    results = generated(SingleTurnEnv(), given, ScriptedClient(echo))
    assert [state["id"] for state in results.state] == [state["example_id"] for state in results.state] == ["x", "y"]


@pytest.mark.parametrize("interleave_scoring", [True, False])
def test_timing_is_recorded_and_the_wait_for_a_turn_is_not_counted(interleave_scoring):
    env = SingleTurnEnv(rubric=rubric_of(Scorer(0.06)))
    began_s = time.time()
    results = generated(env, rows(6), ScriptedClient(echo, delay_s=0.06), max_concurrent=1, interleave_scoring=interleave_scoring)
    for state in results.state:
        timing = state["timing"]
        assert timing["generation_ms"] > 55 and timing["scoring_ms"] > 55
        assert timing["total_ms"] == pytest.approx(timing["generation_ms"] + timing["scoring_ms"])
        assert began_s <= timing["start_time"] <= time.time()
    # With the wait, it would be 60, 120, ... 360 ms. (The process's first answer takes longer: openai's library makes its types.)
    for name in ("generation_ms", "scoring_ms"):
        assert statistics.median(state["timing"][name] for state in results.state) < 150
    starts = [state["timing"]["start_time"] for state in results.state]
    assert starts == sorted(starts) and starts[-1] - starts[0] > 0.25


def test_a_rollout_by_itself_times_its_generation_too():
    state = asyncio.run(SingleTurnEnv().rollout({"prompt": [user("a")], "example_id": 0}, ScriptedClient(echo, delay_s=0.05), "model"))
    assert 45 < state["timing"]["generation_ms"] < 500


# Switches


def test_without_scoring_rewards_are_none_and_no_function_is_called():
    called = []
    env = SingleTurnEnv(rubric=rubric_of(lambda state: called.append(1) or 1.0))
    results = generated(env, rows(2), ScriptedClient(bad_q1), score_rollouts=False)
    assert results.reward == [None, None] and called == [] and results.metrics == {} and math.isnan(results.metadata.avg_reward)
    assert results.metadata.num_errors == 1
    assert [step["reward"] for step in results.state[0]["trajectory"]] == [None]


def test_each_rollout_is_told_when_it_is_done():
    told = []
    env = SingleTurnEnv(rubric=rubric_of(said_the_answer))
    generated(env, rows(4), ScriptedClient(uneven), on_rollout=lambda place, state: told.append((place, state["reward"])))
    assert told == [(3, 1.0), (2, 1.0), (1, 1.0), (0, 1.0)]


def test_without_scoring_each_rollout_is_told_too():
    told = []
    generated(SingleTurnEnv(), rows(3), ScriptedClient(echo), score_rollouts=False, on_rollout=lambda place, state: told.append(place))
    assert sorted(told) == [0, 1, 2]


def test_synchronous_reward_functions_hold_up_neither_generation_nor_each_other():
    generated_all, together = threading.Event(), threading.Barrier(2)

    def script(call):
        if call.text == "q3":
            generated_all.set()
        return call.text

    def waits(completion):
        if completion[-1]["content"] in ("q0", "q1"):
            together.wait(20)
        return float(generated_all.wait(20))

    client = ScriptedClient(script, delay_s=0.01)
    results = generated(SingleTurnEnv(rubric=rubric_of(waits)), rows(4), client, max_concurrent_generation=1)
    assert results.reward == [1.0] * 4 and results.metadata.num_errors == 0


def test_it_works_off_the_main_thread():
    results = []
    env = Talk(max_turns=2, rubric=rubric_of(lambda completion: 1.0))
    thread = threading.Thread(target=lambda: results.append(generated(env, rows(3), ScriptedClient(lambda call: "a"))))
    thread.start()
    thread.join(20)
    assert results[0].reward == [1.0] * 3


def test_a_group_function_that_fails_is_its_groups_failure_and_the_others_go_on():
    def picky(states):
        if states[0]["example_id"] == 0:
            raise RuntimeError("no idea")
        return [1.0, 0.0]

    def right(state):
        return 0.5

    env = SingleTurnEnv(dataset=rows(2), rubric=rubric_of(right, picky))
    results = asyncio.run(env.evaluate(ScriptedClient(echo), "model", rollouts_per_example=2, use_tqdm=False))
    assert results.reward == [0.0, 0.0, 1.5, 0.5] and results.metadata.num_errors == 2
    assert [state["error"] for state in results.state] == ["RuntimeError: no idea"] * 2 + [None] * 2
    assert results.metrics == {"right": [0.0, 0.0, 0.5, 0.5], "picky": [0.0, 0.0, 1.0, 0.0]}
    assert [state["trajectory"][0]["reward"] for state in results.state] == results.reward
    assert [state["advantage"] for state in results.state] == [None, None, 0.5, -0.5]


async def cancelled_task():
    task = asyncio.create_task(asyncio.sleep(60))
    task.cancel()
    await task


def test_a_rollout_that_waits_for_a_cancelled_task_of_its_own_is_data_too():
    class Waits(Talk):
        async def env_response(self, messages, state, **kwargs):
            if state["example_id"] == 1:
                await cancelled_task()
            return await super().env_response(messages, state, **kwargs)

    results = generated(Waits(max_turns=2, rubric=rubric_of(lambda state: 1.0)), rows(3), ScriptedClient(lambda call: "a"))
    assert results.reward == [1.0, 0.0, 1.0] and results.example_id == [0, 1, 2] and "CancelledError" in results.state[1]["error"]


def test_a_reward_function_that_waits_for_a_cancelled_task_of_its_own_is_one_rollouts_failure():
    async def waits(completion):
        if completion[-1]["content"] == "q1":
            await cancelled_task()
        return 1.0

    results = generated(SingleTurnEnv(rubric=rubric_of(waits)), rows(3), ScriptedClient(echo))
    assert results.reward == [1.0, 0.0, 1.0]
