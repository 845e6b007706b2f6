"""Environments of the package `verifiers`, in a process of their own (issue 21, point 12).

What is about the process is tried with a stand-in of the package; the package itself plays where
`make foreign` has installed it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from environment_support import assistant, cancelled_when, generated, user
from foreign_interpreters import interpreter_of
from scripted_client import Answer, ScriptedClient

from rollout_actors.environments.clients.openai import overlong_answer
from rollout_actors.environments.loading import load_environment

pytestmark = pytest.mark.slow
FIXTURES = Path(__file__).parents[3] / "fixtures"
TOKENS = Answer("ab", prompt_ids=[1, 2], completion_ids=[7, 8], logprobs=[-0.5, -0.25])


def closed(environment):
    asyncio.run(environment.aclose())


# The package


@pytest.fixture(scope="module")
def environment():
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(FIXTURES)
        environment = load_environment(
            "verifiers:vf_lengths", interpreter=str(interpreter_of("verifiers"))
        )
    yield environment
    closed(environment)


@pytest.mark.long
def test_an_environment_is_played_unchanged_with_the_tokens_of_the_calls(environment):
    rows = environment.get_dataset()
    assert (len(rows), len(environment.get_eval_dataset())) == (6, 3)
    client = ScriptedClient([TOKENS, TOKENS], returns_tokens=True)
    (state,) = generated(environment, [rows[1]], client).state
    assert client.calls[0].prompt == [{"role": "system", "content": "Talk."}, user("Say 1.")]
    assert client.calls[1].prompt[2:] == [assistant("ab"), user("And again.")]
    assert [step["tokens"]["completion_ids"] for step in state["trajectory"]] == [[7, 8], [7, 8]]
    assert state["trajectory"][0]["tokens"]["completion_logprobs"] == [-0.5, -0.25]
    assert (state["error"], state["stop_condition"]) == (None, "max_turns_reached")
    assert state["completion"] == [assistant("ab"), user("And again."), assistant("ab")]


@pytest.mark.long
def test_its_rubric_scores_and_compares_the_rollouts_of_a_row(environment):
    row = environment.get_dataset()[0]
    # Calls of the two rollouts come in any order, and each is longer than the one before.
    client = ScriptedClient(lambda call: "a" * 10**call.number)
    results = generated(environment, [row, row], client)
    assert results.metrics.keys() >= {"length", "longest"}
    assert sorted(results.metrics["longest"]) == [0.0, 1.0]
    for length, longest, reward in zip(
        results.metrics["length"], results.metrics["longest"], results.reward, strict=True
    ):
        assert reward == pytest.approx(length + 0.5 * longest)


# The process

STAND_IN = """
import asyncio, os, time

__version__ = "0.0"


class Rubric:
    async def score_group(self, states):
        for state in states:
            state.update(reward=float(len(state["said"])), metrics={"length": len(state["said"])})


class Environment:
    sampling_args = {"n": 1, "temperature": 0.5, "extra_body": {}}
    message_type = "chat"
    oai_tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    dataset, eval_dataset = (), None
    rubric = Rubric()

    def get_dataset(self):
        prompt = [{"role": "user", "content": "Speak."}]
        return [{"prompt": prompt, "task": "t", "example_id": 0, "info": {"secret": object()}}]

    async def rollout(self, row, client, model, sampling_args):
        if model == "die":
            os._exit(3)
        if model == "wait":
            try:
                open("waits", "w").close()
                await asyncio.sleep(600)
            finally:
                open("cancelled", "w").close()
        assert row["info"]["secret"], "it is the row as it was made"
        answer = await client.chat.completions.create(
            model=model,
            messages=[*row["prompt"], {"role": "assistant", "content": "", "tool_calls": None}],
            tools=self.oai_tools,
            extra_body={"top_k": 5},
            **{key: value for key, value in sampling_args.items() if value is not None},
        )
        return {"said": answer.choices[0].message.content, "error": None}

    async def _teardown(self):
        open("torn_down", "w").close()


def load_environment(name, does="speak"):
    if does == "fail":
        raise KeyError("no such data")
    if does == "hang":
        time.sleep(600)
    print("what is printed is no answer", os.getpid())
    return Environment()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with the stand-in."""
    (tmp_path / "verifiers.py").write_text(STAND_IN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def stand_in(**arguments):
    return load_environment("verifiers:any", interpreter=sys.executable, **arguments)


def test_a_rollouts_calls_go_to_its_client_and_its_end_is_the_process_end_too(folder):
    environment = stand_in()
    (row,) = environment.get_dataset()
    assert environment.eval_dataset is None
    client = ScriptedClient([TOKENS, overlong_answer("model")])
    (state,) = generated(environment, [row], client).state
    (call,) = client.calls
    assert call.arguments["tools"] == environment.oai_tools
    assert (call.arguments["temperature"], call.arguments["extra_body"]) == (0.5, {"top_k": 5})
    assert call.prompt[-1] == assistant(""), "without the nulls of another library"
    assert (state["reward"], state["metrics"]) == (2.0, {"length": 2.0})
    # A prompt that is too long.
    (state,) = generated(environment, [row], client).state
    assert state["is_truncated"]
    assert "maximum context length" in state["error"], "the stand-in does not look for it"
    # A rollout that is cancelled.
    cancelled_when((folder / "waits").exists, lambda: environment.rollout(row, client, "wait"))
    closed(environment)
    assert (folder / "cancelled").exists()
    assert (folder / "torn_down").exists()


def test_a_process_that_ends_fails_its_rollouts_with_its_status(folder):
    environment = stand_in()
    (row,) = environment.get_dataset()
    for _ in range(2):
        problem = "verifiers:any: its process has ended with status 3"
        with pytest.raises(ConnectionError, match=problem):
            asyncio.run(environment.rollout(row, ScriptedClient([]), "die"))
    closed(environment)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"does": "fail"}, "verifiers:any: KeyError: 'no such data'"),
        (
            {"does": "hang", "start_timeout_s": 0.1},
            r"is not loaded after environment.args.start_timeout_s = 0.1 s",
        ),
        ({"dose": "x"}, "unexpected keyword argument 'dose'"),
    ],
)
def test_an_environment_that_is_not_loaded_says_why(folder, arguments, problem):
    with pytest.raises(ValueError, match=problem):
        stand_in(**arguments)


def test_a_release_without_the_interface_is_named_with_one_that_has_it(folder):
    (folder / "verifiers.py").write_text('__version__ = "0.4.0"')
    problem = r"verifiers 0.4.0 has no load_environment.*install verifiers==0\.3\.1"
    with pytest.raises(ValueError, match=problem):
        stand_in()


def test_an_interpreter_that_is_not_there_is_named_with_how_to_make_one():
    problem = r"environment.args.interpreter: /no/python was not started .*uv pip install"
    with pytest.raises(ValueError, match=problem):
        load_environment("verifiers:any", interpreter="/no/python")


def test_the_process_ends_with_its_parent(folder):
    program = (
        "import sys, time\n"
        "from rollout_actors.environments.loading import load_environment\n"
        "environment = load_environment('verifiers:any', interpreter=sys.executable)\n"
        "print(environment._process._process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=folder
    )
    assert parent.stdout is not None
    process = psutil.Process(int(parent.stdout.readline()))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    process.wait(240)
