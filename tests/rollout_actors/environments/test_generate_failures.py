"""Rollouts that fail: they are data, they are counted, they teach nothing, and the others go on
(the issue's orchestration).
"""

import asyncio
import contextlib
import re
import threading
import time

import pytest
from counted_time import counted
from environment_support import (
    Talk,
    assistant,
    generated,
    rows,
    user,
    without_place,
)
from scripted_client import Answer, ScriptedClient, status_error

from rollout_actors.environments import concurrency
from rollout_actors.environments.chat.responses import RETURNS_TOKENS
from rollout_actors.environments.environment import Environment
from rollout_actors.environments.multi_turn import SingleTurnEnv
from rollout_actors.environments.rubric import Rubric
from rollout_actors.environments.tool import ToolEnv
from rollout_actors.threads import Threads

BOTH_WAYS = pytest.mark.parametrize("interleave_scoring", [True, False])


def echo(call):
    return call.text


def says_a(call):
    return "a"


def length(completion):
    return len(completion[-1]["content"])


def one_point(state):
    return 1.0


def is_q1(state):
    return state["prompt"][0]["content"] == "q1"


def bad_q1(call):
    return status_error(400, "bad request") if call.text == "q1" else echo(call)


def errors(results):
    return [without_place(state) for state in results.state]


class HeldTime(asyncio.SelectorEventLoop):
    """A loop whose clock stands still, so that no limit is over before a test says so."""

    now_s = 0.0

    def time(self):
        return self.now_s


def done_after(seconds, is_hanging, work):
    """Do the work. Once `is_hanging` holds, these seconds pass at once."""

    async def pass_seconds():
        task = asyncio.create_task(work)
        end_s = time.monotonic() + 60
        while not is_hanging():
            assert time.monotonic() < end_s, "nothing hangs"
            await asyncio.sleep(0)
            time.sleep(0.001)  # for the threads
        asyncio.get_running_loop().now_s += seconds
        return await task

    with asyncio.Runner(loop_factory=HeldTime) as runner:
        return runner.run(pass_seconds())


@pytest.fixture
def release():
    """An event that those who hang wait for."""
    event = threading.Event()
    yield event
    event.set()


# Limits of time


@pytest.mark.parametrize("swallows", [False, True])
def test_a_rollout_that_hangs_is_cut_off_at_its_limit_though_it_swallows_the_cancellation(swallows):
    class Hangs(Talk):
        async def env_response(self, messages, state, **kwargs):
            if is_q1(state):
                with contextlib.suppress(*[asyncio.CancelledError] * swallows):
                    await asyncio.sleep(3600)
            return await super().env_response(messages, state, **kwargs)

    env = Hangs(max_turns=2)
    work = env.generate(
        rows(3), ScriptedClient(says_a), "model", use_tqdm=False, rollout_timeout_s=1.0
    )
    results, seconds = counted(work)
    assert seconds == pytest.approx(1.0)
    error = (
        "TimeoutError: rollout not done after rollout_timeout_s = 1 s; check what its turns, tools"
        " and cleanups wait for, or raise rollout_timeout_s"
    )
    assert errors(results) == [None, error, None]
    assert len(results.state[1]["trajectory"]) == 1 + swallows


LATE = (
    "TimeoutError: reward function judged is not done after {} = 2 s; check what it waits for, or"
    " raise scoring_timeout_s"
)


def test_rewards_that_hang_in_every_thread_are_bounded_by_the_rollouts_limit_so_that_tools_get_one(
    monkeypatch, release
):
    threads, hung = Threads(2), []
    monkeypatch.setattr(concurrency, "THREADS", threads)

    def look_up(number: int) -> str:
        """Look up a number."""
        return str(number)

    def judged(answer):
        if int(answer) < 2:
            hung.append(answer)
            release.wait(240)
        return 1.0

    async def script(call):
        number = int(call.prompt[0]["content"])
        if number < 2 or call.turn:
            return "done"
        while len(hung) < 2:  # until both threads are taken
            await asyncio.sleep(0)
        return Answer(None, tool_calls=[("look_up", {"number": number})])

    def are_tools_waiting():
        return sum(len(queue.waiting) for queue in threads._queues.values()) == 2

    given = [{"question": str(number), "answer": str(number)} for number in range(4)]
    env = ToolEnv([look_up], rubric=Rubric([judged]))
    work = env.generate(
        given, ScriptedClient(script), "model", use_tqdm=False, rollout_timeout_s=2.0
    )
    results = done_after(2.0, are_tools_waiting, work)
    assert errors(results)[2:] == [None] * 2, "the wait for a thread is within no limit"
    for state in results.state[:2]:
        assert state["reward_errors"] == {"judged": LATE.format("rollout_timeout_s")}


def test_a_plain_reward_function_that_hangs_has_no_figure_at_its_limit_and_its_thread_is_given_up(
    release,
):
    begun_s = []

    def hangs(completion):
        begun_s.append(time.perf_counter())
        release.wait(240)
        return 1.0

    def has_hung():
        return begun_s and time.perf_counter() > begun_s[0] + 0.06

    env = SingleTurnEnv(rubric=Rubric([hangs], [0.0]))
    work = env.generate(
        rows(1), ScriptedClient(echo), "model", use_tqdm=False, scoring_timeout_s=1.0
    )
    results = done_after(1.0, has_hung, work)
    (state,) = results.state
    assert state["reward_errors"]["hangs"].startswith(
        "TimeoutError: reward function hangs is not done after scoring_timeout_s = 1 s"
    )
    assert state["timing"]["scoring_ms"] >= 50
    assert state["error"] is None
    assert results.metadata.num_given_up == {"hangs": 1}


# What the endpoint answers


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (
            Answer("a", completion_ids=[1, 2], logprobs=[-0.1]),
            "2 token ids with 1 log-probabilities",
        ),
        (
            Answer(fields={"choices": None, "error": {"message": "gone", "code": 502}}),
            "the endpoint's response has no choices, and says {'message': 'gone', 'code': 502}",
        ),
    ],
    ids=["a length mismatch of tokens", "no choices"],
)
def test_a_length_mismatch_of_tokens_is_one_rollouts_failure_and_so_is_an_answer_without_choices(
    answer, problem
):
    client = ScriptedClient(lambda call: answer if call.text == "q1" else "a")
    results = generated(SingleTurnEnv(), rows(2), client, sampling_args=RETURNS_TOKENS)
    assert results.state[0]["error"] is None
    assert problem in results.state[1]["error"]


def test_an_answer_that_was_cut_makes_its_rollout_truncated_also_where_an_environment_calls_by_itself():
    class Own(Environment):
        async def rollout(self, input, client, model, sampling_args=None):
            state = await self.init_state(input)
            response = await self.get_model_response(client, model, state["prompt"])
            said = response.choices[0].message.content
            step = {"prompt": state["prompt"], "completion": [assistant(said)], "tokens": None}
            state["trajectory"].append({**step, "response": response})
            await self._complete(state)
            return state

    def script(call):
        return Answer("a", finish_reason="length" if call.text == "q1" else "stop")

    for env in (SingleTurnEnv(), Own()):
        results = generated(env, rows(2), ScriptedClient(script))
        cut = [(state["error"], state["is_truncated"]) for state in results.state]
        assert cut == [(None, False), (None, True)]
        assert results.metadata.num_truncated == 1


# Reward functions and rubrics


def says_q1(completion):
    return completion[-1]["content"] == "q1"


def picky(completion):
    if says_q1(completion):
        raise RuntimeError("no idea")
    return 1.0


@BOTH_WAYS
@pytest.mark.parametrize("compares", [False, True])
def test_averages_are_over_what_there_is_and_a_reward_function_that_fails_is_counted(
    compares, interleave_scoring, caplog
):
    functions = [one_point, picky] + [lambda states: [0.0] * len(states)] * compares
    env = SingleTurnEnv(rubric=Rubric(functions, [1.0, 0.0, 0.0][: len(functions)]))
    results = generated(env, rows(2), ScriptedClient(echo), interleave_scoring=interleave_scoring)
    metadata = results.metadata
    assert (results.reward, metadata.num_errors, metadata.avg_reward) == ([1.0, 1.0], 0, 1.0)
    assert (metadata.avg_metrics["one_point"], metadata.avg_metrics["picky"]) == (1.0, 1.0)
    assert results.metrics["picky"] == [1.0, None]
    assert metadata.num_reward_errors == {"picky": 1}
    assert re.search("picky .* 1 of 2 .*example 1: RuntimeError: no idea", caplog.text)


# What an environment of a user's may get wrong, or do otherwise


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
    assert state["error"] is None
    assert state["completion"] == [assistant("a"), user("yes"), assistant("b")]


def test_a_rollout_that_fails_behind_one_that_it_began_itself_keeps_its_own_state():
    class Asks(Talk):
        """Plays a rollout of another environment in every turn."""

        async def env_response(self, messages, state, **kwargs):
            row = {"prompt": [user("judge")], "example_id": "other", "task": "judge"}
            judge = await SingleTurnEnv().rollout(row, ScriptedClient(["fine"]), "model")
            raise RuntimeError(judge["completion"][-1]["content"])

    row = {"question": "q", "example_id": "mine"}
    (failed,) = generated(Asks(), [row], ScriptedClient(["a"])).state
    assert (failed["example_id"], without_place(failed)) == ("mine", "RuntimeError: fine")
    assert failed["prompt"] == [user("q")]
    assert [step["completion"] for step in failed["trajectory"]] == [[assistant("a")]]


def test_the_error_of_an_environments_own_code_says_in_which_line_and_that_of_a_client_says_none():
    class Own(Talk):
        async def rollout(self, input, client, model, sampling_args=None):
            state = await super().rollout(input, client, model, sampling_args)
            state["answer"] = {}["nope"]

    line = Own.rollout.__wrapped__.__code__.co_firstlineno + 2
    failed, refused = generated(Own(max_turns=1), rows(2), ScriptedClient(bad_q1)).state
    assert failed["error"] == f"KeyError: 'nope' (test_generate_failures.py:{line})"
    assert refused["error"] == "BadRequestError: Error code: 400 - bad request"
