"""Answers judged by another model, and by mathematics."""

import asyncio
import sys
from types import SimpleNamespace

import openai
import pytest
from environment_support import assistant, generated, without_place
from scripted_client import ScriptedClient

from rollout_actors.environments.answers.parsers import XMLParser
from rollout_actors.environments.answers.rubrics import JudgeRubric, MathRubric
from rollout_actors.environments.clients.openai import overlong_answer
from rollout_actors.environments.multi_turn import SingleTurnEnv

ROWS = [{"question": "2 + 2?", "answer": "4"}]


async def right(judge, prompt, completion, answer, state):
    return float("yes" in await judge(prompt, completion, answer, state))


async def wrong(judge, prompt, completion, answer, state, **kwargs):
    """As environments of `verifiers` write it."""
    return 1.0 - float("yes" in await judge(prompt, completion, answer, state, **kwargs))


def test_a_judge_is_asked_about_question_answer_and_response_and_once_for_all_its_functions():
    judge = ScriptedClient(["yes"])
    rubric = JudgeRubric(
        judge_client=judge,
        judge_model="wise",
        judge_sampling_args={"temperature": 0.0},
        judge_prompt="{question} {answer} {response}",
    )
    rubric.add_reward_func(right, 2.0)
    rubric.add_reward_func(wrong, 0.0)
    environment = SingleTurnEnv(dataset=ROWS, rubric=rubric, parser=XMLParser())
    (state,) = generated(environment, ROWS, ScriptedClient(["<answer>5</answer>"])).state
    assert (state["reward"], state["metrics"]) == (2.0, {"right": 1.0, "wrong": 0.0})
    (call,) = judge.calls
    assert (call.model, call.text, call.arguments) == ("wise", "2 + 2? 4 5", {"temperature": 0.0})


def test_without_a_state_a_judge_is_asked_each_time():
    judge = ScriptedClient(["yes", "no"])
    rubric = JudgeRubric(judge_client=judge)
    asked = [asyncio.run(rubric.judge("2 + 2?", "4", "4")) for _ in range(2)]
    assert asked == ["yes", "no"]


def test_a_judge_that_cannot_answer_costs_the_reward_alone():
    rubric = JudgeRubric([right], judge_client=ScriptedClient([overlong_answer("wise")]))
    environment = SingleTurnEnv(dataset=ROWS, rubric=rubric)
    (state,) = generated(environment, ROWS, ScriptedClient(["4"])).state
    told = "ValueError: judge: the prompt is too long; shorten judge_prompt"
    assert without_place(state) == told
    assert state["completion"] == [assistant("4")]


def test_without_a_client_the_judge_is_openais_and_needs_its_key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    assert isinstance(JudgeRubric([right]).judge_client, openai.AsyncOpenAI)
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(openai.OpenAIError):
        JudgeRubric([right])


def numbers_as_mathematics(monkeypatch):
    """Stand in for the package where it is not installed."""
    parse = lambda text, parsing_timeout: text.removeprefix(r"\boxed{").removesuffix("}")  # noqa: E731
    verify = lambda one, other, timeout_seconds: float(one) == float(other)  # noqa: E731
    monkeypatch.setitem(sys.modules, "math_verify", SimpleNamespace(parse=parse, verify=verify))


def test_a_mathematical_answer_is_the_boxed_one_behind_the_thought(monkeypatch):
    numbers_as_mathematics(monkeypatch)
    said = [r"<think>\boxed{4}</think> so \boxed{4.0}", "4.0", r"\boxed{5}", r"\boxed{}"]
    environment = SingleTurnEnv(dataset=ROWS, rubric=MathRubric())
    results = generated(environment, ROWS * 4, ScriptedClient(said))
    assert results.metrics == {"correct_answer": [1.0, 1.0, 0.0, 0.0]}
    assert results.reward == [1.0, 1.0, 0.0, 0.0]


def test_the_function_stands_behind_others_and_the_parser_may_be_another(monkeypatch):
    numbers_as_mathematics(monkeypatch)
    rubric = MathRubric([right], [0.5], XMLParser())
    assert (rubric.reward_names, rubric.weights) == (["right", "correct_answer"], (0.5, 1.0))
    assert rubric.funcs == (right, rubric.correct_answer)
    assert rubric.correct_answer(rubric.parser, [assistant("<answer>4</answer>")], 4) == 1.0


def test_without_the_package_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match=r"pip install 'rollmatch\[math\]'"):
        MathRubric()


@pytest.mark.parametrize(
    ("answer", "said", "reward"),
    [
        ("1/2", "0.5", 1.0),
        (r"\frac{1}{2}", r"so \boxed{1/2}", 1.0),
        ("1,000", "1000", 1.0),
        ("x+1", "1+x", 1.0),
        ("42", "forty", 0.0),
        ("42", r"}{\frac", 0.0),
        ("42", "", 0.0),
    ],
)
def test_the_package_compares_in_the_threads_of_reward_functions(answer, said, reward):
    pytest.importorskip("math_verify")
    environment = SingleTurnEnv(dataset=ROWS, rubric=MathRubric())
    results = generated(environment, [ROWS[0] | {"answer": answer}], ScriptedClient([said]))
    assert (results.reward, results.state[0]["error"]) == ([reward], None)
