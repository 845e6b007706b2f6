"""Rollouts that fail: they are data, they are counted, they teach nothing, and the others go on
(the issue's orchestration).
"""

import asyncio
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from counted_time import counted
from environment_support import (
    Talk,
    assistant,
    generated,
    rows,
    rubric_of,
    said_the_answer,
    user,
    without_place,
)
from scripted_client import Answer, ScriptedClient, connection_error, overlong_error, status_error

from rollout_actors.environments import concurrency as turns
from rollout_actors.environments.chat.responses import RETURNS_TOKENS
from rollout_actors.environments.concurrency import Threads
from rollout_actors.environments.environment import Environment
from rollout_actors.environments.lifecycle import cleanup
from rollout_actors.environments.multi_turn import SingleTurnEnv
from rollout_actors.environments.rubric import Rubric
from rollout_actors.environments.tool import ToolEnv
from rollout_actors.environments.training.examples import (
    merge_trajectories_for_training,
    process_trajectories_for_training,
)
from rollout_actors.environments.types import State


def echo(call):
    return call.text


def length(completion):
    return len(completion[-1]["content"])


def bad_q1(call):
    return status_error(400, "bad request") if call.text == "q1" else echo(call)


@pytest.mark.parametrize("interleave_scoring", [True, False])
def test_one_failing_rollout_is_data_with_reward_0_and_counted(interleave_scoring):
    env = SingleTurnEnv(rubric=rubric_of(said_the_answer, length))
    results = generated(env, rows(3), ScriptedClient(bad_q1), interleave_scoring=interleave_scoring)
    assert results.reward == [3.0, 0.0, 3.0]
    assert results.metrics == {"said_the_answer": [1.0, None, 1.0], "length": [2.0, None, 2.0]}
    assert [state["error"] for state in results.state] == [
        None,
        "BadRequestError: Error code: 400 - bad request",
        None,
    ]
    # Nobody has measured the 0: averages are over the others.
    assert results.metadata.num_errors == 1 and results.metadata.avg_reward == 3.0
    assert results.metadata.avg_metrics == {"said_the_answer": 1.0, "length": 2.0}
    failed = results.state[1]
    assert (
        failed["is_completed"]
        and failed["stop_condition"] == "error"
        and results.completion[1] == []
    )


def test_a_rollout_that_fails_later_keeps_the_steps_that_it_had():
    def script(call):
        return (
            status_error(400, "bad")
            if call.turn == 1 and call.prompt[0]["content"] == "q1"
            else "a"
        )

    results = generated(
        Talk(max_turns=2), rows(2), ScriptedClient(script), sampling_args=RETURNS_TOKENS
    )
    failed = results.state[1]
    assert (
        len(failed["trajectory"]) == 1
        and failed["trajectory"][0]["tokens"] is not None
        and failed["trajectory"][0]["reward"] == 0.0
    )
    assert failed["completion"] == [assistant("a")] and failed["example_id"] == 1


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
            self._fail(place)

    def _fail(self, place):
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


@pytest.mark.parametrize(
    "place",
    ["init_state", "setup_state", "env_response", "is_completed", "_render_completion", "put_away"],
)
def test_wherever_an_environment_fails_the_other_rollouts_go_on(place):
    results = generated(
        FailsIn(place, rubric=rubric_of(lambda state: 1.0)),
        rows(3),
        ScriptedClient(lambda call: "a"),
    )
    assert results.reward == [1.0, 0.0, 1.0] and results.example_id == [0, 1, 2]
    assert without_place(results.state[1]) == f"RuntimeError: broken {place}"


class Hangs(Talk):
    """In its second turn, for the row `q1`."""

    def __init__(self, **kwargs):
        super().__init__(max_turns=2, **kwargs)
        self.put_away_of = []

    async def env_response(self, messages, state, **kwargs):
        if state["prompt"][0]["content"] == "q1":
            await asyncio.sleep(3600)
        return await super().env_response(messages, state, **kwargs)

    @cleanup
    async def put_away(self, state):
        self.put_away_of.append(state["example_id"])


def test_a_rollout_that_hangs_is_cut_off_at_its_limit_and_is_data_as_any_that_fails():
    async def right(state):
        return 1.0

    env = Hangs(rubric=rubric_of(right))
    results, seconds = counted(
        env.generate(
            rows(3),
            ScriptedClient(lambda call: "a"),
            "model",
            use_tqdm=False,
            rollout_timeout_s=1.0,
        )
    )
    assert seconds == pytest.approx(1.0)
    assert results.reward == [1.0, 0.0, 1.0] and results.metadata.num_errors == 1
    failed = results.state[1]
    told = (
        "TimeoutError: not done after rollout_timeout_s = 1 s; check what its turns, tools and"
        " cleanups wait for, or allow more"
    )
    assert failed["error"] == told and len(failed["trajectory"]) == 1
    assert sorted(env.put_away_of) == [0, 1, 2]


def test_the_wait_for_a_turn_does_not_count_towards_a_rollouts_limit():
    class Slow(Talk):
        async def setup_state(self, state):
            await asyncio.sleep(0.25)
            return state

    work = Slow(max_turns=1).generate(
        rows(6),
        ScriptedClient(lambda call: "a"),
        "model",
        use_tqdm=False,
        rollout_timeout_s=1.2,
        max_concurrent=1,
    )
    results, seconds = counted(work)
    assert seconds == pytest.approx(1.5)
    assert [state["error"] for state in results.state] == [None] * 6


@pytest.mark.slow
def test_tools_that_hang_cost_their_own_rollouts_alone_though_they_have_every_thread(monkeypatch):
    """Eight of them, of two threads; twenty others call the same tool."""
    monkeypatch.setattr(turns, "THREADS", Threads(2))
    release = threading.Event()

    def look_up(number: int) -> str:
        """Look up a number."""
        if number < 8:
            release.wait(60)
        return str(number)

    def script(call):
        return (
            "done"
            if call.turn
            else Answer(None, tool_calls=[("look_up", {"number": int(call.prompt[0]["content"])})])
        )

    examples = [{"question": str(number)} for number in range(28)]
    try:
        results = generated(
            ToolEnv([look_up]), examples, ScriptedClient(script), rollout_timeout_s=1.0
        )
    finally:
        release.set()
    assert [state["error"] for state in results.state[8:]] == [None] * 20
    assert all(
        state["error"].startswith("TimeoutError: not done after rollout_timeout_s = 1 s")
        for state in results.state[:8]
    )
    assert results.metadata.num_given_up == {"look_up": 8}
    assert results.state[0]["given_up"] == ["look_up"]


@pytest.mark.slow
def test_rewards_that_hang_in_every_thread_are_bounded_by_the_rollouts_limit_so_that_tools_get_one(
    monkeypatch,
):
    monkeypatch.setattr(turns, "THREADS", Threads(2))
    release, hung = threading.Event(), []

    def look_up(number: int) -> str:
        """Look up a number."""
        return str(number)

    def judged(answer):
        if int(answer) < 2:
            hung.append(answer)
            release.wait(60)
        return 1.0

    async def script(call):
        number = int(call.prompt[0]["content"])
        if number >= 2 and not call.turn:
            while len(hung) < 2:  # until both threads are taken
                await asyncio.sleep(0.01)
        return (
            "done"
            if call.turn or number < 2
            else Answer(None, tool_calls=[("look_up", {"number": number})])
        )

    examples = [{"question": str(number), "answer": str(number)} for number in range(4)]
    try:
        results = generated(
            ToolEnv([look_up], rubric=Rubric([judged])),
            examples,
            ScriptedClient(script),
            rollout_timeout_s=2.0,
        )
    finally:
        release.set()
    assert [state["error"] for state in results.state[2:]] == [None] * 2
    error = (
        "TimeoutError: reward function judged is not done after rollout_timeout_s = 2 s; check what"
        " it waits for, or allow more with scoring_timeout_s"
    )
    assert [state["reward_errors"] for state in results.state[:2]] == [{"judged": error}] * 2


def test_an_asynchronous_reward_function_that_hangs_has_no_figure_at_its_limit():
    async def judged(completion, answer):
        if answer == "q1":
            await asyncio.sleep(3600)
        return 1.0

    async def length(completion):
        return 1.0

    env = SingleTurnEnv(rubric=Rubric([judged, length], [0.0, 1.0]))
    results, seconds = counted(
        env.generate(rows(3), ScriptedClient(echo), "model", use_tqdm=False, scoring_timeout_s=2.0)
    )
    assert seconds == pytest.approx(2.0)
    assert results.reward == [1.0, 1.0, 1.0]
    error = (
        "TimeoutError: reward function judged is not done after scoring_timeout_s = 2 s; check what"
        " it waits for, or allow more with scoring_timeout_s"
    )
    assert results.state[1]["reward_errors"] == {"judged": error}
    assert results.metadata.num_reward_errors == {"judged": 1}


@pytest.mark.slow
@pytest.mark.parametrize("interleave_scoring", [True, False])
def test_a_plain_reward_function_that_hangs_has_no_figure_at_its_limit_and_its_thread_is_given_up(
    interleave_scoring,
):
    release = threading.Event()

    def hangs(completion):
        release.wait(60)
        return 1.0

    env = SingleTurnEnv(rubric=Rubric([hangs], [0.0]))
    try:
        results = generated(
            env,
            rows(1),
            ScriptedClient(echo),
            scoring_timeout_s=1.0,
            interleave_scoring=interleave_scoring,
        )
    finally:
        release.set()
    assert results.state[0]["reward_errors"]["hangs"].startswith(
        "TimeoutError: reward function hangs is not done after scoring_timeout_s = 1 s"
    )
    assert results.state[0]["timing"]["scoring_ms"] >= 50
    assert results.state[0]["error"] is None
    assert results.metadata.num_given_up == {"hangs": 1}


def test_a_length_mismatch_of_tokens_is_one_rollouts_failure():
    def script(call):
        return Answer("a", completion_ids=[1, 2], logprobs=[-0.1]) if call.text == "q1" else "a"

    results = generated(
        SingleTurnEnv(), rows(2), ScriptedClient(script), sampling_args=RETURNS_TOKENS
    )
    assert (
        results.state[0]["error"] is None
        and "2 token ids with 1 log-probabilities" in results.state[1]["error"]
    )


@pytest.mark.parametrize("interleave_scoring", [True, False])
def test_a_reward_function_that_fails_is_one_rollouts_failure(interleave_scoring):
    def picky(completion):
        if completion[-1]["content"] == "q1":
            raise RuntimeError("no idea")
        return 1.0

    results = generated(
        SingleTurnEnv(rubric=rubric_of(picky)),
        rows(3),
        ScriptedClient(echo),
        interleave_scoring=interleave_scoring,
    )
    assert (
        results.reward == [1.0, 0.0, 1.0]
        and without_place(results.state[1]) == "RuntimeError: no idea"
    )
    assert results.metadata.num_errors == 1 and results.state[1]["trajectory"][0]["reward"] == 0.0


@pytest.mark.parametrize("interleave_scoring", [True, False])
@pytest.mark.parametrize("compares", [False, True])
def test_averages_are_over_what_there_is_and_a_reward_function_that_fails_is_counted(
    compares, interleave_scoring, caplog
):
    def constant(completion):
        return 1.0

    def picky(completion):
        if completion[-1]["content"] == "q1":
            raise RuntimeError("no idea")
        return 3.0

    functions = [constant, picky] + ([lambda states: [0.0] * len(states)] if compares else [])
    env = SingleTurnEnv(rubric=Rubric(functions, [1.0, 0.0, 0.0][: len(functions)]))
    results = generated(env, rows(2), ScriptedClient(echo), interleave_scoring=interleave_scoring)
    assert results.reward == [1.0, 1.0] and results.metadata.num_errors == 0
    metadata = results.metadata
    assert (
        metadata.avg_reward,
        metadata.avg_metrics["constant"],
        metadata.avg_metrics["picky"],
    ) == (1.0, 1.0, 3.0)
    assert results.metrics["picky"] == [3.0, None]
    assert metadata.num_reward_errors == {"picky": 1}
    assert (
        "reward function picky failed for 1 of 2 rollouts, the first of example 1: RuntimeError: no"
        " idea" in caplog.text
    )


@pytest.mark.slow
def test_retries_are_for_infrastructure_errors_only():
    seen = {}

    def script(call):
        seen[call.text] = seen.get(call.text, 0) + 1
        failures = {
            "q0": connection_error(),
            "q1": status_error(400, "bad"),
            "q2": ValueError("mine"),
        }
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
    assert results.reward == [3.0, 1.0] and [state["is_truncated"] for state in results.state] == [
        False,
        True,
    ]


def test_a_failing_batch_is_told_with_its_first_error(caplog):
    generated(SingleTurnEnv(), rows(3), ScriptedClient(bad_q1))
    assert "1 of 3 rollouts failed, the first of example 1: BadRequestError" in caplog.text


def test_cancelling_the_batch_cancels_its_calls():
    client = ScriptedClient(echo, delay_s=30)

    async def cancelled():
        task = asyncio.create_task(
            SingleTurnEnv().generate(rows(4), client, "model", use_tqdm=False)
        )
        while client.num_under_way < 4:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert (client.num_cancelled, client.num_under_way) == (4, 0)


def test_a_group_function_that_fails_is_its_groups_failure_and_the_others_go_on():
    def picky(states):
        if states[0]["example_id"] == 0:
            raise RuntimeError("no idea")
        return [1.0, 0.0]

    def right(state):
        return 0.5

    env = SingleTurnEnv(dataset=rows(2), rubric=rubric_of(right, picky))
    results = asyncio.run(
        env.evaluate(ScriptedClient(echo), "model", rollouts_per_example=2, use_tqdm=False)
    )
    assert results.reward == [0.0, 0.0, 1.5, 0.5] and results.metadata.num_errors == 2
    assert [without_place(state) for state in results.state] == ["RuntimeError: no idea"] * 2 + [
        None
    ] * 2
    assert results.metrics == {"right": [0.5, 0.5, 0.5, 0.5], "picky": [None, None, 1.0, 0.0]}
    assert results.metadata.avg_metrics == {"right": 0.5, "picky": 0.5}
    assert results.metadata.num_reward_errors == {"picky": 2}
    assert [state["trajectory"][0]["reward"] for state in results.state] == results.reward
    assert [state["advantage"] for state in results.state] == [None, None, 0.5, -0.5]


def test_of_a_rubric_that_fails_itself_nothing_stays_not_even_what_its_functions_failed_of():
    def picky(state):
        raise RuntimeError("no idea")

    class Own(Rubric):
        async def score_rollout(self, state):
            await super().score_rollout(state)
            raise ValueError("mine")

    results = generated(
        SingleTurnEnv(rubric=Own([length, picky], [1.0, 0.0])), rows(1), ScriptedClient(echo)
    )
    (failed,) = results.state
    assert without_place(failed) == "ValueError: mine"
    assert (failed["metrics"], "reward_errors" in failed, results.metadata.num_reward_errors) == (
        {},
        False,
        {},
    )


@pytest.mark.parametrize(("given", "told"), [(None, "None"), (float("nan"), "nan")])
@pytest.mark.parametrize("interleave_scoring", [True, False])
def test_a_rubric_of_the_users_own_that_gives_no_reward_fails_its_rollout_and_not_the_batch(
    given, told, interleave_scoring
):
    class Own(Rubric):
        async def score_rollout(self, state):
            state["reward"] = given if state["completion"][-1]["content"] == "q1" else 0.5

    env = SingleTurnEnv(dataset=rows(3), rubric=Own())
    results = asyncio.run(
        env.evaluate(
            ScriptedClient(echo),
            "model",
            rollouts_per_example=2,
            use_tqdm=False,
            interleave_scoring=interleave_scoring,
        )
    )
    assert results.reward == [0.5, 0.5, 0.0, 0.0, 0.5, 0.5]
    assert (
        results.state[2]["error"] == f"ValueError: Own gave the reward {told}; give a finite number"
    )


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

    results = generated(
        Waits(max_turns=2, rubric=rubric_of(lambda state: 1.0)),
        rows(3),
        ScriptedClient(lambda call: "a"),
    )
    assert (
        results.reward == [1.0, 0.0, 1.0]
        and results.example_id == [0, 1, 2]
        and "CancelledError" in results.state[1]["error"]
    )


def test_a_reward_function_that_waits_for_a_cancelled_task_of_its_own_is_one_rollouts_failure():
    async def waits(completion):
        if completion[-1]["content"] == "q1":
            await cancelled_task()
        return 1.0

    results = generated(SingleTurnEnv(rubric=rubric_of(waits)), rows(3), ScriptedClient(echo))
    assert results.reward == [1.0, 0.0, 1.0]


# They do not teach


def of_one_row(env, script, number, **kwargs):
    """What `number` rollouts of one row come to; the second one's call in its second turn fails."""

    def or_fails(call):
        return status_error(400, "bad") if call.number == number + 1 else script(call)

    return asyncio.run(
        env.evaluate(
            ScriptedClient(or_fails), "model", rollouts_per_example=number, use_tqdm=False, **kwargs
        )
    )


@pytest.mark.parametrize("interleave_scoring", [True, False])
@pytest.mark.parametrize("compares", [True, False])
def test_a_rollout_that_failed_has_reward_0_and_no_advantage_and_is_not_in_its_groups_mean(
    compares, interleave_scoring
):
    def places(states):
        return [float(state["completion"][0]["content"]) for state in states]

    def place(state):
        return float(state["completion"][0]["content"])

    env = Talk(max_turns=2, dataset=rows(1), rubric=rubric_of(places if compares else place))
    results = of_one_row(
        env,
        lambda call: str(call.number),
        4,
        sampling_args=RETURNS_TOKENS,
        interleave_scoring=interleave_scoring,
    )
    assert [state["error"] is None for state in results.state] == [True, False, True, True]
    assert results.reward == [0.0, 0.0, 2.0, 3.0], (
        "the first one's 0 is a judgement, the second one's is none"
    )
    mean = 5.0 / 3.0
    assert [state["advantage"] for state in results.state] == [
        0.0 - mean,
        None,
        2.0 - mean,
        3.0 - mean,
    ]
    assert [len(state["trajectory"]) for state in results.state] == [2, 1, 2, 2]
    assert all(
        step["advantage"] == state["advantage"]
        for state in results.state
        for step in state["trajectory"]
    )


@pytest.mark.parametrize(
    "examples_of",
    [
        process_trajectories_for_training,
        lambda states: merge_trajectories_for_training(states).examples,
    ],
)
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


# What an environment of a user's may get wrong


@pytest.mark.parametrize("method", ["init_state", "setup_state", "rollout"])
def test_an_environment_that_forgets_to_return_the_state_is_told_so_and_the_other_rollouts_go_on(
    method,
):
    class Forgets(Talk):
        pass

    async def forgetful(self, given, *args, **kwargs):
        made = await getattr(Talk, method)(self, given, *args, **kwargs)
        return None if given["prompt"][0]["content"] == "q1" else made

    setattr(Forgets, method, forgetful)
    results = generated(
        Forgets(max_turns=1, env_id="mine", rubric=rubric_of(lambda state: 1.0)),
        rows(3),
        ScriptedClient(lambda call: "a"),
    )
    assert results.reward == [1.0, 0.0, 1.0] and results.example_id == [0, 1, 2]
    assert (
        results.state[1]["error"]
        == f"TypeError: {method} of mine returned nothing; return the state"
    )


def test_an_environment_with_a_rollout_of_its_own_may_leave_out_fields_of_the_state():
    class Own(Environment):
        async def rollout(self, input, client, model, sampling_args=None):
            if input["example_id"] == 1:
                raise RuntimeError("mine")
            return State(input=input, completion=[assistant("q0")])

    results = generated(Own(rubric=rubric_of(said_the_answer)), rows(2), None)
    assert results.reward == [1.0, 0.0] and [state["trajectory"] for state in results.state] == [
        [],
        [],
    ]
    assert [without_place(state) for state in results.state] == [None, "RuntimeError: mine"]


def test_a_rollout_that_fails_behind_one_that_it_began_itself_keeps_its_own_state():
    class Asks(Talk):
        """Plays a rollout of another environment in every turn."""

        async def env_response(self, messages, state, **kwargs):
            judge = await SingleTurnEnv().rollout(
                {"prompt": [user("judge")], "example_id": "other", "task": "judge"},
                ScriptedClient(["fine"]),
                "model",
            )
            raise RuntimeError(judge["completion"][-1]["content"])

    (failed,) = generated(
        Asks(), [{"question": "q", "example_id": "mine"}], ScriptedClient(["a"])
    ).state
    assert (failed["example_id"], without_place(failed)) == ("mine", "RuntimeError: fine")
    assert failed["prompt"] == [user("q")] and [
        step["completion"] for step in failed["trajectory"]
    ] == [[assistant("a")]]


def test_an_answer_without_choices_is_one_rollouts_failure_with_what_the_endpoint_says():
    def script(call):
        return (
            Answer(fields={"choices": None, "error": {"message": "upstream is gone", "code": 502}})
            if call.text == "q1"
            else "a"
        )

    results = generated(
        SingleTurnEnv(), rows(2), ScriptedClient(script), sampling_args=RETURNS_TOKENS
    )
    assert results.state[0]["error"] is None
    assert (
        "the endpoint's answer has no choices, and says {'message': 'upstream is gone', 'code':"
        " 502}" in results.state[1]["error"]
    )


def test_the_error_of_an_environments_own_code_says_in_which_line_and_that_of_a_client_says_none():
    class Own(Talk):
        async def rollout(self, input, client, model, sampling_args=None):
            state = await super().rollout(input, client, model, sampling_args)
            state["answer"] = {}["nope"]

    line = Own.rollout.__wrapped__.__code__.co_firstlineno + 2
    failed, refused = generated(Own(max_turns=1), rows(2), ScriptedClient(bad_q1)).state
    assert failed["error"] == f"KeyError: 'nope' (test_generate_failures.py:{line})"
    assert refused["error"] == "BadRequestError: Error code: 400 - bad request"


# exit()


# Rollouts that an environment's own asks of others, or makes itself


def cancels_its_own_task():
    asyncio.get_running_loop().call_later(0.01, asyncio.current_task().cancel)


class LimitsItself(Talk):
    """A limit of time as one writes it without `asyncio.timeout`: nobody takes the cancellation
    back.
    """

    async def env_response(self, messages, state, **kwargs):
        if state["prompt"][0]["content"] == "q1":
            cancels_its_own_task()
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                raise RuntimeError("sandbox too slow") from None
        return await super().env_response(messages, state, **kwargs)


@pytest.mark.parametrize("score_rollouts", [True, False])
def test_a_rollout_that_cancels_its_own_task_is_one_rollouts_failure(score_rollouts):
    results = generated(
        LimitsItself(max_turns=2),
        rows(3),
        ScriptedClient(lambda call: "a"),
        score_rollouts=score_rollouts,
    )
    assert [without_place(state) for state in results.state] == [
        None,
        "RuntimeError: sandbox too slow",
        None,
    ]


def test_a_rollout_that_keeps_the_cancellation_at_its_limit_to_itself_has_failed_all_the_same():
    class Stubborn(Talk):
        async def env_response(self, messages, state, **kwargs):
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                return [user("anyway")]

    (state,) = generated(
        Stubborn(max_turns=2), rows(1), ScriptedClient(["a", "b"]), rollout_timeout_s=0.05
    ).state
    assert state["error"].startswith("TimeoutError: not done after rollout_timeout_s = 0.05 s")


def test_a_cleanup_that_fails_because_the_rollout_did_leaves_the_first_error_told():
    class Sandbox(Talk):
        async def setup_state(self, state):
            raise ConnectionError("the host answered 503")

        @cleanup
        def put_away(self, state):
            del state["sandbox_id"]

    (state,) = generated(Sandbox(), rows(1), ScriptedClient([])).state
    assert re.fullmatch(
        r"KeyError: 'sandbox_id' \(.*\), after ConnectionError: the host answered 503"
        r" \(test_generate_failures.py:\d+\)",
        state["error"],
    )


@pytest.mark.parametrize("missing", ["input", "timing", "trajectory"])
def test_an_environment_with_a_rollout_of_its_own_may_leave_out_what_the_row_has_and_what_is_measured(
    missing,
):
    class Own(SingleTurnEnv):
        async def rollout(self, input, client, model, sampling_args=None):
            state = State(
                input=dict(input), timing=None, trajectory=None, completion=[assistant("a")]
            )
            if missing == "input":
                del state["input"]
            return state

    results = generated(
        Own(rubric=rubric_of(said_the_answer)),
        [{"question": "q", "answer": "a"}],
        ScriptedClient([]),
    )
    assert (
        results.reward,
        results.metadata.num_errors,
        results.state[0]["task"],
        results.prompt,
    ) == ([1.0], 0, "default", [[user("q")]])


@pytest.mark.parametrize(
    "method",
    ["init_state", "setup_state", "get_prompt_messages", "env_response", "is_completed", "rollout"],
)
def test_an_environments_methods_may_be_plain_functions(method):
    class Plain(Talk):
        pass

    whole = getattr(Talk, method)
    setattr(Plain, method, lambda self, *args, **kwargs: whole(self, *args, **kwargs))
    if method == "env_response":
        Plain.env_response = lambda self, messages, state: [user("yes")]
    if method == "setup_state":
        Plain.setup_state = lambda self, state: state
    (state,) = generated(Plain(max_turns=2), rows(1), ScriptedClient(["a", "b"])).state
    assert state["error"] is None and state["completion"] == [
        assistant("a"),
        user("yes"),
        assistant("b"),
    ]


def exits(completion):
    if completion[-1]["content"] == "q1":
        exec("exit()")
    return 1.0


async def exits_later(completion):
    await asyncio.sleep(0)
    return exits(completion)


def exits_for_all(states):
    return [exits(state["completion"]) for state in states]


@pytest.mark.parametrize("function", [exits, exits_later, exits_for_all])
def test_a_reward_function_that_runs_code_which_calls_exit_is_one_rollouts_failure(function):
    """Off the main thread, where an exit is never that of a signal's handler."""
    # With another one that compares rollouts, asynchronous functions run in tasks of their own.
    environment = SingleTurnEnv(rubric=rubric_of(function, lambda states: [0.0] * len(states)))
    with ThreadPoolExecutor(1) as pool:
        results = pool.submit(generated, environment, rows(3), ScriptedClient(echo)).result()
    assert results.reward == [1.0, 0.0, 1.0]
    assert without_place(results.state[1]).endswith("called exit()")
