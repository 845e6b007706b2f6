"""The same job on every topology, by its command: the rollouts are the same, and so is what is
learned (backends, ranks, servers, several nodes).
"""

import json
import os
import re
import signal
import subprocess
from contextlib import ExitStack

import pytest
from command_support import ROOT, commands
from serve_process import serve_process

from launch.inspect.diff_runs import diff_runs
from learner.rollout_logs.samples import read_step
from learner.rollout_logs.writer import step_path
from rollout_actors.warm import warm_python

pytestmark = [pytest.mark.engine, pytest.mark.long]

# Two channel-B steps of 12 rollouts from a model that already writes objects, without the queue,
# which not every topology has.
STEPS = (
    "training.max_steps=2",
    "stage2_ab.schedule.warmup_steps=0",
    "data.max_val_samples=4",
    "stage2_ab.channel_b.enable_pipeline=false",
)
# Two requests of a device at a time, and the next round while one is learned.
QUEUED = ("rollout_matching.decode_batch_size=2", "stage2_ab.channel_b.enable_pipeline=true")


@pytest.fixture(scope="module")
def job(cluster, warm_checkpoint, demo_data, tmp_path_factory):
    """Runs an experiment to its end."""

    def run(experiment, *overrides):
        with commands() as start:
            command = start(
                tmp_path_factory.mktemp(experiment),
                warm_checkpoint,
                demo_data,
                *STEPS,
                cluster,
                *overrides,
                experiment=experiment,
            )
            assert command.process.wait(timeout=400) == 0, command.output
        return command

    return run


@pytest.fixture(scope="module")
def actors_job(job):
    two = "rollout_matching.vllm.actors.num_actors=2"
    return job("stage2_3v1", two, "rollout_matching.decode_batch_size=6")


def rollouts(command, step):
    """What became of every sample: response and seed, by position."""
    lines = read_step(step_path(command.run_dir / "rollouts", step + 1))
    names = ("response_token_ids", "seed", "weight_version")
    return [(line["position"], *(line["rollout"][name] for name in names)) for line in lines]


def losses(command):
    return [line["loss/total"] for line in command.lines("metrics.jsonl")]


def test_backend_implementation_swap_preserves_rollout_contract(job, actors_job):
    """An engine beside the learner: the same rollouts, and losses to the bit."""
    colocated = job("stage2_colocate")
    assert [rollouts(colocated, step) for step in range(2)] == [
        rollouts(actors_job, step) for step in range(2)
    ]
    assert losses(colocated) == losses(actors_job)
    assert {line["rollout"]["actor"] for line in colocated.lines("rollouts/step_000001.jsonl")} == {
        "learner"
    }


@pytest.fixture(scope="module")
def hf_job(job):
    return job("stage2_hf")


def test_transformers_gives_the_same_greedy_rollouts_of_the_first_step(hf_job, actors_job):
    assert rollouts(hf_job, 0) == rollouts(actors_job, 0)
    assert losses(hf_job)[0] == pytest.approx(losses(actors_job)[0], rel=1e-5)


def test_a_run_in_one_process_without_ray_is_that_on_ray_to_the_bit(job, hf_job):
    local = job("stage2_hf", "cluster=local", "cluster.address=local")
    lines, parts = diff_runs(hf_job.run_dir, local.run_dir)
    assert not parts, lines
    ledgers = [(run.run_dir / "ledger.jsonl").read_bytes() for run in (hf_job, local)]
    assert ledgers[0] == ledgers[1]
    local.assert_nothing_left()


def test_the_checkpoint_of_a_run_without_actors_is_evaluated_by_actors(hf_job):
    # in the run's cluster
    words = ["-m", "launch.inspect.evaluate", f"run={hf_job.run_dir}", "name=mine"]
    command = [*warm_python.command(), *words]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    mine = json.loads((hf_job.run_dir / "evaluations" / "mine" / "report.json").read_text())
    *_, last = hf_job.lines("evaluations.jsonl")
    assert mine["num_samples"] == last["num_samples"] == 4


def test_two_learner_ranks_that_generate_learn_what_one_does_and_end_with_a_killed_one(
    hf_job, start_command, warm_checkpoint, demo_data, tmp_path
):
    """The run names the rank that was killed, and leaves no process."""
    overrides = [*STEPS, "training.max_steps=500", "learner.world_size=2"]
    two = start_command(tmp_path, warm_checkpoint, demo_data, *overrides, experiment="stage2_hf")
    two.wait_for("step    2/500")
    os.kill(two.process_called("LearnerActor"), signal.SIGKILL)
    assert two.process.wait(timeout=240) == 1, two.output
    two.assert_nothing_left()
    assert re.search(r"on the learner: rank \d's process has ended \(", two.output)
    assert rollouts(two, 0) == rollouts(hf_job, 0)
    assert losses(two)[:2] == pytest.approx(losses(hf_job), rel=1e-4)
    assert {
        line["rollout"]["actor"]
        for rank in ("", ".rank1")
        for line in two.lines(f"rollouts/step_000001{rank}.jsonl")
    } == {"learner-0", "learner-1"}


def test_two_learner_ranks_learn_what_one_does_with_the_in_step_queue_on(job, actors_job):
    two = job("stage2_2learners", *QUEUED)
    plan, *_ = two.lines("plan.jsonl")
    assert plan["rounds"] == [[[0, 2], [6, 8]], [[2, 4], [8, 10]], [[4, 6], [10, 12]]]
    # Rows differ, since each rank packs its own, and with them the order of float sums.
    assert losses(two) == pytest.approx(losses(actors_job), rel=1e-4)
    assert [line["rollout/num"] for line in two.lines("metrics.jsonl")] == [12.0] * 2
    tracks = {
        event["args"]["name"]
        for event in json.loads((two.run_dir / "timeline.json").read_text())
        if event["name"] == "thread_name"
    }
    assert {"learner-0", "learner-1", "driver"} <= tracks


SERVER = (
    "port=0",
    "dtype=float32",
    "max_model_len=1024",
    "max_num_seqs=6",
    "kv_cache_memory_bytes=67108864",
    "enforce_eager=true",
)


@pytest.fixture(scope="module")
def servers(warm_checkpoint, tmp_path_factory):
    """Three that load at the same time: the run waits for them."""
    arguments = [f"model={warm_checkpoint}", *SERVER]
    with ExitStack() as started:
        folders = [tmp_path_factory.mktemp("server") for _ in range(3)]
        yield [started.enter_context(serve_process(arguments, folder)).url for folder in folders]


def in_server_mode(servers):
    entries = ",".join(f"{{base_url:'{url}',group_port:0}}" for url in servers)
    return f"rollout_matching.vllm.server.servers=[{entries}]"


def test_multi_process_learner_does_not_deadlock_in_server_mode(job, actors_job, servers):
    """Scenario, on CPU: rank 0 sends the weights to three servers, every rank's requests go out. The
    ranks hold a part of the model each, and the next round is generated while one is learned.
    """
    served = job(
        "stage2_server",
        in_server_mode(servers),
        "learner.world_size=2",
        "learner.parallel=fsdp",
        "learner.shard_size=2",
        *QUEUED,
    )
    plan, *_ = served.lines("plan.jsonl")
    assert len(plan["rounds"]) == 2
    assert [entry["base_url"] for entry in plan["servers"]] == servers
    assert losses(served) == pytest.approx(losses(actors_job), rel=1e-4)
    assert rollouts(served, 0) == rollouts(actors_job, 0)


def test_an_adapter_is_trained_and_sent_by_itself_to_a_server(
    job, actors_job, warm_checkpoint, tmp_path
):
    adapter = (
        "model.adapter.kind=lora",
        "rollout_matching.vllm.enable_lora=true",
        "rollout_matching.vllm.sync.mode=adapter",
        "training.learning_rate=1e-2",
        "rollout_matching.decode_batch_size=6",
    )
    arguments = [f"model={warm_checkpoint}", *SERVER, "enable_lora=true", "max_lora_rank=16"]
    with serve_process(arguments, tmp_path) as server:
        served = job("stage2_server", in_server_mode([server.url]), *adapter)
    # A new adapter changes nothing yet.
    assert rollouts(served, 0) == rollouts(actors_job, 0)
    assert losses(served)[0] == pytest.approx(losses(actors_job)[0], rel=1e-6)
    metrics = served.lines("metrics.jsonl")
    assert [line["sync/mode"] for line in metrics] == ["adapter"] * 2
    assert metrics[-1]["sync/adapter_effect"] == pytest.approx(1.0, abs=0.1)
    assert [{version for *_, version in rollouts(served, step)} for step in range(2)] == [{1}, {2}]
