"""Environments through `openai.AsyncOpenAI`, and `vf-eval`, against a real endpoint, a stock `vllm
serve`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import httpx
import openai
import pytest
import torch
from endpoint_support import (
    QUESTION,
    TEMPERATURE,
    WITH_TOKENS,
    Endpoint,
)
from engine_support import SmallLearner, small_settings
from fake_server import HERE, eventually
from stock_process import TOKEN, stock_process

from learner.algorithms.advantages import teacher_log_ratios
from rollout_actors.backends.http import ServerAddress
from rollout_actors.environments.chat.responses import parse_response_tokens
from rollout_actors.environments.clients.openai import is_overlong, merged
from rollout_actors.environments.loading import load_environment
from rollout_actors.environments.multi_turn import MultiTurnEnv
from rollout_actors.environments.rubric import Rubric
from rollout_actors.environments.training.teacher import Teacher, TeacherSettings
from rollout_actors.environments.types import Messages, State
from shared.trajectory import TrainingExample

pytestmark = [pytest.mark.engine, pytest.mark.long]

ROOT = Path(__file__).parents[3]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "turn",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"way": {"type": "string", "enum": ["left", "right"]}},
            "required": ["way"],
        },
    },
}


@pytest.fixture(scope="module")
def endpoint(demo_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    tools = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    with stock_process(
        small_settings(demo_checkpoint), tmp_path_factory.mktemp("stock"), more=tools
    ) as one:
        assert eventually(lambda: answers(one.url), within_s=240), one.output.read_text()
        yield Endpoint(one.url, str(demo_checkpoint), TOKEN)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", **HERE).status_code == 200
    except httpx.TransportError:
        return False


# What an endpoint says


def test_tokens_and_log_probabilities_are_extracted_from_a_chat(
    endpoint: Endpoint, learner: SmallLearner
) -> None:
    response = endpoint.chat(**WITH_TOKENS)
    tokens = endpoint.tokens(response)
    text = learner.tokenizer.apply_chat_template(
        QUESTION, tokenize=False, add_generation_prompt=True
    )
    assert tokens["prompt_ids"] == learner.tokenizer(text, add_special_tokens=False).input_ids
    assert len(tokens["completion_ids"]) == response.usage.completion_tokens
    assert (
        learner.tokenizer.decode(tokens["completion_ids"], skip_special_tokens=True)
        == response.choices[0].message.content
    )
    assert (set(tokens["prompt_mask"]), set(tokens["completion_mask"])) == ({0}, {1})


def test_tokens_and_log_probabilities_are_extracted_from_a_completion(
    endpoint: Endpoint, learner: SmallLearner
) -> None:
    prompt = "Detect every object"
    response = endpoint.ask(
        lambda client: client.completions.create(model=endpoint.model, prompt=prompt, **WITH_TOKENS)
    )
    tokens = endpoint.tokens(response, "completion")
    assert tokens["prompt_ids"] == learner.tokenizer(prompt).input_ids
    assert (
        learner.tokenizer.decode(tokens["completion_ids"], skip_special_tokens=True)
        == response.choices[0].text
    )
    assert max(tokens["completion_logprobs"]) < 0.0


def test_log_probabilities_are_of_the_temperature_that_was_sampled_under(
    endpoint: Endpoint, learner: SmallLearner
) -> None:
    tokens = endpoint.tokens(endpoint.chat(**WITH_TOKENS))
    ids_1T = torch.tensor([tokens["prompt_ids"] + tokens["completion_ids"]])
    with torch.no_grad():
        logits_TV = learner.model(input_ids=ids_1T, use_cache=False).logits[
            0, len(tokens["prompt_ids"]) - 1 : -1
        ]
    chosen_T1 = torch.tensor(tokens["completion_ids"])[:, None]
    for temperature, is_it in ((TEMPERATURE, True), (1.0, False)):
        expected = (logits_TV / temperature).log_softmax(-1).gather(1, chosen_T1)[:, 0].tolist()
        assert (tokens["completion_logprobs"] == pytest.approx(expected, abs=1e-4)) is is_it


def test_a_missing_piece_gives_no_tokens(endpoint: Endpoint) -> None:
    for left_out in (
        {"logprobs": None},
        {"extra_body": None},
        {"extra_body": {"return_token_ids": False, "return_tokens_as_token_ids": True}},
    ):
        arguments = {
            key: value for key, value in (WITH_TOKENS | left_out).items() if value is not None
        }
        assert asyncio.run(parse_response_tokens(endpoint.chat(**arguments), "chat")) is None


def test_a_prompt_that_is_too_long_is_known_as_such(endpoint: Endpoint) -> None:
    long = [{"role": "user", "content": "Detect every object in the image. " * 200}]
    barely = [{"role": "user", "content": "a " * 500}]
    for messages in (long, barely):
        with pytest.raises(openai.BadRequestError) as caught:
            endpoint.chat(messages, max_tokens=4)
        assert is_overlong(caught.value, {"max_tokens": 4}), caught.value
    for prompt in ("Detect every object in the image. " * 200, [5] * 512, [5] * 600):
        with pytest.raises(openai.BadRequestError) as caught:
            endpoint.ask(
                lambda client, prompt=prompt: client.completions.create(
                    model=endpoint.model, prompt=prompt, max_tokens=4
                )
            )
        assert is_overlong(caught.value, {"max_tokens": 4}), caught.value


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 9999},
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"logprobs": True, "top_logprobs": 999},
        {"tools": [TOOL], "tool_choice": "some"},
    ],
)
def test_a_call_that_is_wrong_is_refused_and_is_no_prompt_that_is_too_long(
    endpoint: Endpoint, wrong: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        endpoint.chat(**wrong)
    assert not is_overlong(caught.value, wrong), caught.value


def test_a_teacher_that_has_the_students_weights_teaches_nothing(
    endpoint: Endpoint, learner: SmallLearner
) -> None:
    """What was sampled at temperature 1 is as probable to it: the advantages are 0."""
    tokens = endpoint.tokens(endpoint.chat(**WITH_TOKENS | {"temperature": 1.0}))
    before = [0] * len(tokens["prompt_ids"])
    example = TrainingExample(
        [*tokens["prompt_ids"], *tokens["completion_ids"]],
        logprobs=[*map(float, before), *tokens["completion_logprobs"]],
        mask=[*before, *tokens["completion_mask"]],
        reward=0.0,
        advantage=0.0,
    )
    address = ServerAddress("a teacher", endpoint.url, 120.0, 120.0, "vllm", endpoint.token)
    teacher = Teacher(TeacherSettings(endpoint.model, address), max_under_way=2)

    async def scored() -> TrainingExample:
        await teacher.require_suitable(learner.tokenizer, 256)
        (one,) = await teacher.score([example])
        return one

    log_ratios = teacher_log_ratios(asyncio.run(scored()))
    assert min(example.logprobs) < -1.0, "the student is not sure of what it sampled"
    assert log_ratios == pytest.approx([0.0] * len(example.mask), abs=1e-5)


# Environments


def exclaims(completion: Messages) -> float:
    return float(len(completion[-1]["content"]))


class AskTwice(MultiTurnEnv):
    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Messages:
        return [{"role": "user", "content": "And what else?"}]


def generated(environment: MultiTurnEnv, endpoint: Endpoint, **kwargs: Any) -> Any:
    rows = [
        {"prompt": QUESTION, "answer": ""},
        {"prompt": [{"role": "user", "content": "every object"}], "answer": ""},
    ]
    return endpoint.ask(
        lambda client: environment.generate(rows, client, endpoint.model, use_tqdm=False, **kwargs)
    )


def test_every_turn_of_a_rollout_has_the_tokens_of_its_own_call(
    endpoint: Endpoint, learner: SmallLearner
) -> None:
    results = generated(
        AskTwice(max_turns=2, rubric=Rubric([exclaims]), sampling_args=WITH_TOKENS), endpoint
    )
    for state in results.state:
        first, second = (step["tokens"] for step in state["trajectory"])
        text = learner.tokenizer.apply_chat_template(
            state["trajectory"][1]["prompt"], tokenize=False, add_generation_prompt=True
        )
        assert second["prompt_ids"] == learner.tokenizer(text, add_special_tokens=False).input_ids
        assert second["prompt_ids"][: len(first["prompt_ids"])] == first["prompt_ids"]
        # A chat goes over text: what the model sampled is tokenised again, here into other tokens.
        sampled = first["prompt_ids"] + first["completion_ids"]
        assert second["prompt_ids"][: len(sampled)] != sampled
        assert (state["error"], state["reward"] > 0.0) == (None, True)


# Tools


def written(call: str) -> dict[str, Any]:
    """Sampling arguments with which the model, which knows no tools, writes this as text; that it
    is a call is for the parser to find.
    """
    return merged(
        WITH_TOKENS,
        {"max_tokens": 120, "extra_body": {"structured_outputs": {"regex": re.escape(call)}}},
    )


def test_a_tool_call_in_free_text_is_read_and_the_environment_answers_it(
    endpoint: Endpoint, learner: SmallLearner
) -> None:
    text = '<tool_call>\n{"name": "put", "arguments": {"name": "figs", "number": 7}}\n</tool_call>'
    environment = load_environment("key_value_store", max_turns=2)
    results = endpoint.ask(
        lambda client: environment.evaluate(
            client, endpoint.model, written(text), num_examples=2, use_tqdm=False
        )
    )
    for state in results.state:
        assert (state["error"], state["stop_condition"], state["store"]["figs"]) == (
            None,
            "max_turns_reached",
            7,
        )
        assert state["metrics"]["num_calls_of_put"] == 2.0
        for step in state["trajectory"]:
            (message,) = step["completion"]
            (call,) = message["tool_calls"]
            assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
                "put",
                {"name": "figs", "number": 7},
            )
            assert step["response"].choices[0].finish_reason == "tool_calls"
            assert (
                learner.tokenizer.decode(step["tokens"]["completion_ids"], skip_special_tokens=True)
                == text
            )
        assert state["trajectory"][1]["prompt"][-1] == {
            "role": "tool",
            "tool_call_id": call_id(state["trajectory"][0]),
            "content": "figs is 7",
        }


def call_id(step: Any) -> str:
    return str(step["completion"][0]["tool_calls"][0]["id"])


# `vf-eval`


@dataclass
class Evaluations:
    """The command in a folder of its own."""

    folder: Path
    endpoint: Endpoint

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        environ = os.environ | {
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "200",
            "OPENAI_API_KEY": "another",
            "THE_KEY": self.endpoint.token,
        }
        where = (
            []
            if "--resume" in arguments
            else ["-m", self.endpoint.model, "-b", f"{self.endpoint.url}/v1", "-k", "THE_KEY"]
        )
        command = [sys.executable, "-m", "launch.tools.vf_eval", *arguments, *where]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, *arguments: str) -> tuple[str, str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        return out, err

    def lines(self, name: str = "rollouts.jsonl") -> list[dict[str, Any]]:
        """Of the only evaluation."""
        (path,) = self.folder.glob(f"outputs/evals/*/*/{name}")
        return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("name", "arguments", "turns"),
    [("guess_number", {"max_turns": 2}, 2), ("key_value_store", {}, 1)],
)
def test_vf_eval_of_an_example(
    endpoint: Endpoint,
    learner: SmallLearner,
    tmp_path: Path,
    name: str,
    arguments: dict[str, Any],
    turns: int,
) -> None:
    evaluations = Evaluations(tmp_path, endpoint)
    asked = [
        "-n",
        "2",
        "-r",
        "2",
        "-t",
        "16",
        "-T",
        "0.7",
        "--tokens",
        "-C",
        "trajectory,timing.total_ms",
        "-s",
        "-v",
        "-a",
    ]
    asked.append(json.dumps(arguments))
    out, err = evaluations.run(name, *asked)
    assert "4/4" in err
    assert "rollouts    4, of 2 examples" in out
    assert "[assistant]" in out
    for line in evaluations.lines():
        steps = line["state"]["trajectory"]
        assert (line["state"]["error"], len(steps), line["completion_tokens"]) == (
            None,
            turns,
            sum(len(step["tokens"]["completion_ids"]) for step in steps),
        )
        for step in steps:
            # Where there are tools, vLLM leaves special tokens in the text, for its parsers.
            has_tools = name == "key_value_store"
            said = learner.tokenizer.decode(
                step["tokens"]["completion_ids"], skip_special_tokens=not has_tools
            )
            # A character that has only begun is not said.
            assert step["completion"][0]["content"].rstrip("\ufffd") == said.rstrip("\ufffd")
            assert len(step["tokens"]["completion_logprobs"]) == len(
                step["tokens"]["completion_ids"]
            )
    saved = datasets.Dataset.from_json(str(next(tmp_path.rglob("results.jsonl"))))
    assert saved["example_id"] == [0, 0, 1, 1]
    assert {"trajectory", "timing.total_ms", "reward"} <= set(saved.column_names)


def num_running(endpoint: Endpoint) -> float:
    """Return the requests that the engine has, by vLLM's own count."""
    lines = httpx.get(f"{endpoint.url}/metrics", **HERE).text.splitlines()
    counts = [line for line in lines if line.startswith("vllm:num_requests_running{")]
    return sum(float(line.rpartition(" ")[2]) for line in counts)


def test_vf_eval_that_is_interrupted_aborts_its_requests_and_goes_on_later(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    evaluations = Evaluations(tmp_path, endpoint)
    arguments = [
        "guess_number",
        "-n",
        "6",
        "-r",
        "2",
        "-c",
        "2",
        "-t",
        "24",
        "--no-interleave-scoring",
        "-a",
    ]
    process = evaluations.start(*arguments, '{"max_turns": 4}')
    assert eventually(lambda: num_running(endpoint) > 0, within_s=240)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert eventually(lambda: num_running(endpoint) == 0)
    (folder,) = tmp_path.glob("outputs/evals/*/*")
    evaluations.run("--resume", str(folder))
    assert sorted((line["example"], line["rollout"]) for line in evaluations.lines()) == [
        (e, r) for e in range(6) for r in range(2)
    ]
    assert {line["state"]["error"] for line in evaluations.lines()} == {None}
