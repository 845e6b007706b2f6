"""`python -m launch.train +experiment=env_3v1` on real processes: what it leaves behind, and what
it says where one of them ends (issue 5).
"""

import json
import os
import re
import signal
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from command_support import commands
from held_port import held_port
from safetensors.torch import load_file
from serve_process import serve_process
from text_families import make_text_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch.inspect.diff_runs import diff_runs
from launch.inspect.replay import ReplayOptions, replay
from launch.tools.demo.language_model import make_demo_lm

pytestmark = [pytest.mark.engine, pytest.mark.long]

SMALL = [
    "training.max_steps=2",
    "training.eval_steps=1",
    "training.effective_batch_size=32",
    "environment.num_eval_examples=12",
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm") / "model"
    make_demo_lm(folder, seed=17)
    return folder


@pytest.fixture(scope="module")
def by_actors(orphans_are_adopted, tmp_path_factory, checkpoint):
    """A run to its end, with two environment actors, which left no process."""
    with commands() as start:
        run = start(
            tmp_path_factory.mktemp("by_actors"),
            checkpoint,
            None,
            *SMALL,
            "environment.num_actors=2",
            experiment="env_3v1",
        )
        assert run.process.wait(timeout=600) == 0, run.output
        run.assert_nothing_left()
    return run


@pytest.fixture
def command(start_command, tmp_path, checkpoint):
    return partial(start_command, tmp_path, checkpoint, None, experiment="env_3v1")


def test_a_run_of_an_environment_writes_its_folder_saves_a_checkpoint_and_leaves_no_process(
    by_actors,
):
    run = by_actors
    assert [line["rollout/num"] for line in run.lines("metrics.jsonl")] == [32, 32]
    assert all(line["rollout/logprob_max_abs"] < 1e-4 for line in run.lines("metrics.jsonl"))
    assert [(line["step"], line["num_samples"]) for line in run.lines("evaluations.jsonl")] == [
        (0, 12),
        (1, 12),
        (2, 12),
    ]
    dialogues = run.lines("rollouts/step_000002.jsonl")
    assert [line["position"] for line in dialogues] == list(range(32))
    assert {line["actor"] for line in dialogues} == {"environment-0", "environment-1"}
    assert [message["role"] for message in dialogues[0]["completion"]] == [
        "assistant",
        "user",
        "assistant",
    ]
    assert {line["examples"][0]["weight_version"] for line in dialogues} == {2}
    assert (
        len(
            (run.run_dir / "evaluations" / "step_000002" / "rollouts.jsonl")
            .read_text()
            .splitlines()
        )
        == 12
    )
    tracks = {
        event["args"]["name"]
        for event in json.loads((run.run_dir / "timeline.json").read_text())
        if event["name"] == "thread_name"
    }
    assert tracks == {"driver", "learner", "environment-0", "environment-1"}
    assert re.fullmatch(
        r"demo: val mean reward first \d\.\d\d -> final \d\.\d\d \(B steps: 2, wall: \d+ s\)",
        run.output.strip().splitlines()[-1],
    )
    AutoTokenizer.from_pretrained(run.run_dir / "checkpoint")
    AutoModelForCausalLM.from_pretrained(run.run_dir / "checkpoint")


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_moe"])
def test_a_text_model_of_another_family_is_checked_served_synced_and_saved(
    start_command, cluster, tmp_path, kind
):
    model = make_text_model(tmp_path / "model", kind)
    changes = [
        *("rollout_matching.vllm.actors.num_actors=1", "training.max_steps=2"),
        *("training.eval_steps=null", "training.effective_batch_size=32", cluster),
    ]
    run = start_command(tmp_path, model, None, *changes, experiment="env_3v1")
    assert run.process.wait(timeout=600) == 0, run.output
    (within,) = re.findall(r"segments, computed separately, within (\S+)", run.output)
    assert float(within) < 1e-5
    steps = run.lines("metrics.jsonl")
    assert [line["weight_version"] for line in steps] == [1, 2]
    assert all(line["rollout/logprob_max_abs"] < 1e-4 for line in steps)
    (before, after) = (
        load_file(folder / "model.safetensors") for folder in (model, run.run_dir / "checkpoint")
    )
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    AutoModelForCausalLM.from_pretrained(run.run_dir / "checkpoint")


def test_what_engines_and_environments_gave_is_learned_again_from_the_log(by_actors):
    steps = replay(ReplayOptions(run=by_actors.run_dir, step=2), repeats=False)
    assert {step.number: step.differences for step in steps} == {1: [], 2: []}


def test_a_killed_environment_actor_comes_back_and_where_it_may_not_the_run_ends_with_its_name(
    command,
):
    run = command(
        "training.max_steps=500",
        "training.eval_steps=null",
        "training.effective_batch_size=32",
        "environment.num_eval_examples=0",
        "rollout_matching.vllm.actors.max_restarts=1",
    )
    run.wait_for("step    2/500")
    # The only one: its round is asked again.
    os.kill(run.process_called("EnvironmentActor"), signal.SIGKILL)
    run.wait_for("environment-0 is back")
    num_steps = len(run.lines("metrics.jsonl"))
    run.wait_for(f"step {num_steps + 2:>4}/500")
    os.kill(run.process_called("EnvironmentActor"), signal.SIGKILL)
    assert run.process.wait(timeout=240) == 1, run.output
    run.assert_nothing_left()
    last = run.output.rpartition("environment-0 is back")[2]
    assert re.search(r"on environment-0: its process has ended", last), run.output
    assert "max_restarts permits 1 in 3600 s" in last
    assert sum(line.get("rollout/num_replaced", 0) for line in run.lines("metrics.jsonl")) == 1
    assert "Traceback" not in run.output
    assert "checkpoint_interrupted_" in run.output, "the weights of the last update are saved"


def test_rollouts_by_servers_are_those_by_actors_though_one_is_killed_and_started_again(
    by_actors, command, cluster, checkpoint, tmp_path
):
    """One environment actor here, two there. The run waits for the server, and asks it again."""
    settings = [
        f"model={checkpoint}",
        "device=cpu",
        "dtype=float32",
        "max_model_len=512",
        "max_num_seqs=48",
        "kv_cache_memory_bytes=67108864",
        "enforce_eager=true",
    ]
    with ExitStack() as servers:

        def start(name, port=0):
            (tmp_path / name).mkdir()
            arguments = [*settings, f"port={port}"]
            return servers.enter_context(serve_process(arguments, tmp_path / name))

        port = servers.enter_context(held_port())  # for a server and its successor
        first, second = start("first"), start("second", port)
        listed = ",".join(f"{{base_url:'{one.url}',group_port:0}}" for one in (first, second))
        run = command(
            *SMALL, cluster, "backend=server", f"rollout_matching.vllm.server.servers=[{listed}]"
        )
        run.wait_for("sync      v1")
        second.process.kill()
        second.process.wait()
        start("second again", port)
        assert run.process.wait(timeout=600) == 0, run.output
    assert "server-1 is back after" in run.output
    assert sum(line.get("rollout/num_replaced", 0) for line in run.lines("metrics.jsonl")) == 1
    dialogues, of_actors = (one.lines("rollouts/step_000002.jsonl") for one in (run, by_actors))
    assert {example["engine"] for line in dialogues for example in line["examples"]} == {
        "server-0",
        "server-1",
    }
    assert list(map(what_was_said, dialogues)) == list(map(what_was_said, of_actors))
    ledgers = [(one.run_dir / "ledger.jsonl").read_bytes() for one in (run, by_actors)]
    assert ledgers[0] == ledgers[1]


def test_an_engine_beside_the_learner_gives_the_rollouts_and_losses_of_actors_to_the_bit(
    by_actors, command, cluster
):
    """The environment is in the learner's process, and plays while that generates."""
    run = command(*SMALL, cluster, "backend=colocate")
    assert run.process.wait(timeout=600) == 0, run.output
    lines, parts = diff_runs(by_actors.run_dir, run.run_dir)
    assert not parts, lines
    assert lines[-1] == "equal     2 steps, to the bit"
    dialogues, of_actors = (one.lines("rollouts/step_000002.jsonl") for one in (run, by_actors))
    assert list(map(what_was_said, dialogues)) == list(map(what_was_said, of_actors))
    assert {(line["actor"], line["examples"][0]["engine"]) for line in dialogues} == {
        ("learner", "learner")
    }
    held_out, of_actors = (
        [
            (line["position"], line["completion"])
            for line in one.lines("evaluations/step_000002/rollouts.jsonl")
        ]
        for one in (run, by_actors)
    )
    assert held_out == of_actors


def what_was_said(dialogue):
    """Without who said it, and when."""
    examples = [
        {name: value for name, value in example.items() if name != "engine"}
        for example in dialogue["examples"]
    ]
    return [dialogue[name] for name in ("position", "example", "reward", "completion")], examples
