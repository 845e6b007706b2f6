"""Environments through `openai.AsyncOpenAI`, and `vf-eval`, against real endpoints: `rollmatch
serve`, and a stock `vllm serve`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import httpx
import openai
import pytest
import torch
from endpoint_support import (
    GREEDY,
    QUESTION,
    SAMPLED,
    TEMPERATURE,
    WITH_TOKENS,
    Endpoint,
    asked_throughout,
    greedy,
)
from engine_support import SmallLearner, small_settings
from fake_server import HERE, eventually
from serve_process import OneServer, ServeProcess, serve_process
from stock_process import TOKEN, stock_process

from learner.algorithms.advantages import teacher_log_ratios
from rollout_actors.backends.http import ServerAddress
from rollout_actors.backends.rollmatch_server import ServerClient, serve_arguments
from rollout_actors.environments.chat.responses import parse_response_tokens
from rollout_actors.environments.clients.openai import is_overlong, merged
from rollout_actors.environments.loading import load_environment
from rollout_actors.environments.multi_turn import MultiTurnEnv
from rollout_actors.environments.rubric import Rubric
from rollout_actors.environments.training.teacher import Teacher, TeacherSettings
from rollout_actors.environments.types import Messages, State, TrajectoryStepTokens
from rollout_actors.server.token_file import find_token
from shared.errors import WeightSyncError
from shared.rollouts import DecodeMode, DecodeSettings, Rollout, RolloutRequest
from shared.trajectory import TrainingExample
from shared.weight_sync.phases import sync_weights

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
def server(
    demo_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServeProcess]:
    arguments = [
        *serve_arguments(small_settings(demo_checkpoint), port=0),
        "served_model_name=demo,policy",
        "tool_call_parser=hermes",
    ]
    with serve_process(arguments, tmp_path_factory.mktemp("serve")) as one:
        yield one


@pytest.fixture(scope="module")
def pool(server: ServeProcess, demo_checkpoint: Path) -> Iterator[OneServer]:
    pool = OneServer(
        ServerClient(
            "server-0", server.address(), index=0, expected=small_settings(demo_checkpoint)
        )
    )
    assert pool.start() == 1
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def ours(server: ServeProcess, pool: OneServer) -> Endpoint:
    return Endpoint(server.url, "demo", find_token(server.url) or "")


@pytest.fixture(scope="module")
def stock(demo_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    tools = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    with stock_process(
        small_settings(demo_checkpoint), tmp_path_factory.mktemp("stock"), more=tools
    ) as one:
        assert eventually(lambda: answers(one.url), within_s=120), one.output.read_text()
        yield Endpoint(one.url, str(demo_checkpoint), TOKEN)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", **HERE).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(params=["ours", "stock"])
def endpoint(request: pytest.FixtureRequest) -> Endpoint:
    """Either kind, which serves the checkpoint or what a test before has sent."""
    one: Endpoint = request.getfixturevalue(request.param)
    return one


def as_a_run_asks(
    learner: SmallLearner, tokens: TrajectoryStepTokens, **changes: Any
) -> RolloutRequest:
    decode = DecodeSettings(
        mode=DecodeMode.SAMPLE,
        temperature=TEMPERATURE,
        top_p=1.0,
        top_k=-1,
        repetition_penalty=1.0,
        max_new_tokens=SAMPLED["max_tokens"],
        num_beams=1,
        stop_token_ids=(learner.stop,),
        banned_token_ids=(),
        return_logprobs=True,
    )
    return RolloutRequest(
        1,
        0,
        "sample-0",
        tuple(tokens["prompt_ids"]),
        (),
        replace(decode, **changes),
        SAMPLED["seed"],
    )


def all_tokens(rollout: Rollout) -> tuple[list[int], list[float]]:
    """With the stop token, where one was sampled."""
    assert rollout.logprobs is not None
    if rollout.stop_token_id is None:
        return list(rollout.response_token_ids), list(rollout.logprobs)
    assert rollout.stop_token_logprob is not None
    return [*rollout.response_token_ids, rollout.stop_token_id], [
        *rollout.logprobs,
        rollout.stop_token_logprob,
    ]


def is_what_the_engine_sampled(
    tokens: TrajectoryStepTokens, pool: OneServer, learner: SmallLearner
) -> bool:
    (rollout,) = pool.generate([as_a_run_asks(learner, tokens)])
    ids, logprobs = all_tokens(rollout)
    assert tokens["completion_logprobs"] == pytest.approx(logprobs, abs=1e-6)
    return tokens["completion_ids"] == ids


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


def test_a_field_that_nobody_knows_is_refused_and_not_left_out_of_account(ours: Endpoint) -> None:
    with pytest.raises(
        openai.BadRequestError, match=r"no such field: top_kk \(did you mean top_k\?\)"
    ):
        ours.chat(extra_body={"top_kk": 3})


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
    stock: Endpoint, learner: SmallLearner
) -> None:
    text = '<tool_call>\n{"name": "put", "arguments": {"name": "figs", "number": 7}}\n</tool_call>'
    environment = load_environment("key_value_store", max_turns=2)
    results = stock.ask(
        lambda client: environment.evaluate(
            client, stock.model, written(text), num_examples=2, use_tqdm=False
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


# What is launch.tools.serve's own


def test_the_model_goes_by_every_name_that_it_was_given(ours: Endpoint) -> None:
    async def names(client: openai.AsyncOpenAI) -> list[str]:
        return [model.id async for model in client.models.list()]

    assert ours.ask(names) == ["demo", "policy"]
    assert [replace(ours, model=name).chat(max_tokens=1).model for name in ("demo", "policy")] == [
        "demo",
        "demo",
    ]


def test_the_tokens_are_those_of_the_other_routes(
    ours: Endpoint, pool: OneServer, learner: SmallLearner
) -> None:
    assert is_what_the_engine_sampled(ours.tokens(ours.chat(**WITH_TOKENS)), pool, learner)


@pytest.mark.parametrize(
    "wanted",
    [
        {"stream": True},
        {"response_format": {"type": "json_object"}},
        {"tools": [TOOL]},  # it is strict
        {"tools": [TOOL], "tool_choice": "required"},
    ],
)
def test_what_a_stock_server_takes_is_refused_with_its_command(
    ours: Endpoint, wanted: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError, match=r"not served here; .* vllm serve /.* hermes"):
        ours.chat(**wanted)


def test_health_counts_what_the_openai_routes_sample(server: ServeProcess, ours: Endpoint) -> None:
    def num_tokens() -> int:
        return int(httpx.get(f"{server.url}/health/", **HERE).json()["num_tokens"])

    before = num_tokens()
    one = ours.chat(n=2, **SAMPLED).usage.completion_tokens
    assert num_tokens() == before + one


def test_no_answer_is_of_two_versions_however_often_weights_arrive(
    ours: Endpoint, pool: OneServer, learner: SmallLearner
) -> None:
    sync_weights(learner, pool)
    prompt_ids = ours.tokens(ours.chat(**GREEDY))["prompt_ids"]
    expected = {learner.version: greedy(learner, prompt_ids, GREEDY["max_tokens"])}

    def syncs() -> None:
        for seed in (51, 52, 53):
            learner.learn(seed)
            sync_weights(learner, pool)
            expected[learner.version] = greedy(learner, prompt_ids, GREEDY["max_tokens"])

    said = asked_throughout(ours, syncs)
    answered = [one for one in said if not isinstance(one, str)]
    for one in answered:
        assert ours.tokens(one)["completion_ids"] == expected[one.weight_version]
    # Which versions are asked between two syncs is for the machine's speed to say.
    versions = {one.weight_version for one in answered}
    assert learner.version in versions and len(versions) > 1
    assert len({tuple(tokens) for tokens in expected.values()}) == 4
    assert all(
        "other weights" in one or "serves no rollouts" in one
        for one in said
        if isinstance(one, str)
    )


def test_what_a_sync_finds_queued_is_never_answered_under_weights_that_are_not_verified(
    ours: Endpoint, pool: OneServer, learner: SmallLearner
) -> None:
    """More calls than the engine decodes at a time (8): what it has begun with ends under the old
    weights, the others are sent away.
    """
    version, long = learner.version, {"max_tokens": 400, "ignore_eos": True}
    bodies = {key: value for key, value in long.items() if key != "max_tokens"}

    def asked(seed: int) -> Any:
        try:
            return ours.chat(
                max_tokens=400, temperature=1.0, seed=seed, extra_body=bodies
            ).weight_version
        except openai.ConflictError as error:
            return str(error)

    with ThreadPoolExecutor(14) as threads:
        asking = [threads.submit(asked, seed) for seed in range(14)]
        assert eventually(
            lambda: httpx.get(f"{ours.url}/health/", **HERE).json()["num_running"] == 14
        )
        time.sleep(0.1)
        learner.learn(41)
        sync_weights(learner, pool)
        said = [one.result() for one in asking]
    answered, refused = (
        [one for one in said if isinstance(one, int)],
        [one for one in said if isinstance(one, str)],
    )
    assert set(answered) == {version}
    assert (len(answered), len(refused)) == (8, 6)
    assert all("other weights" in one or "serves no rollouts" in one for one in refused)
    assert ours.chat(max_tokens=1).weight_version == version + 1


def test_nothing_is_answered_after_a_sync_that_was_not_completed(
    ours: Endpoint, pool: OneServer, learner: SmallLearner
) -> None:
    learner.sender.close()
    offer = learner.offer_weights()
    with pytest.raises(WeightSyncError):
        pool.receive_weights(replace(offer, terms=replace(offer.terms, timeout_s=2.0))).result(
            timeout=30
        )
    with pytest.raises(
        openai.ConflictError,
        match=r"its sync to version \d+ is under way, or was not completed; complete a sync",
    ):
        ours.chat()
    learner.sender.close()
    sync_weights(learner, pool)
    assert ours.chat(max_tokens=1).weight_version == learner.version


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
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        return out, err

    def lines(self, name: str = "rollouts.jsonl") -> list[dict[str, Any]]:
        """Of the only evaluation."""
        (path,) = self.folder.glob(f"outputs/evals/*/*/{name}")
        return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("endpoint", "name", "arguments", "turns"),
    [("ours", "guess_number", {"max_turns": 2}, 2), ("stock", "key_value_store", {}, 1)],
    indirect=["endpoint"],
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


def test_vf_eval_that_is_interrupted_aborts_its_requests_and_goes_on_later(
    ours: Endpoint, tmp_path: Path
) -> None:
    evaluations = Evaluations(tmp_path, ours)
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
    running = f"{ours.url}/health/"
    assert eventually(lambda: httpx.get(running, **HERE).json()["num_running"] > 0, within_s=60)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert eventually(lambda: httpx.get(running, **HERE).json()["num_running"] == 0)
    (folder,) = tmp_path.glob("outputs/evals/*/*")
    evaluations.run("--resume", str(folder))
    assert sorted((line["example"], line["rollout"]) for line in evaluations.lines()) == [
        (e, r) for e in range(6) for r in range(2)
    ]
    assert {line["state"]["error"] for line in evaluations.lines()} == {None}
