"""How many torch threads the learner has beside engines, and in a resumed run."""

import json

import pytest

from launch.processes.placement import Resources, plan_placement
from launch.processes.threads import describe_threads, num_threads, with_threads
from tests.fixtures.config_changes import load

CPUS = [Resources(cpus=16, gpus=0)]
GPUS = [Resources(cpus=16, gpus=8)]
THREADS = "learner.cpu_threads"
# 3 actors decode at most 18 sequences at a time.
ACTORS = {
    THREADS: None,
    "rollout_matching.decode_batch_size": 6,
    "stage2_ab.channel_b.rollouts_per_step": 32,
    "training.effective_batch_size": 32,
}
ONE_ROUND = {"rollout_matching.decode_batch_size": 11}
NO_QUEUE = {"stage2_ab.channel_b.enable_pipeline": False}


@pytest.fixture(autouse=True)
def _sixteen_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(16))


def chosen(changes, nodes=CPUS):
    config = load(ACTORS | changes)
    placement = plan_placement(config, nodes)
    return with_threads(config, placement).learner.cpu_threads, describe_threads(config, placement)


@pytest.mark.parametrize(
    ("cores", "ranks", "busy", "expected"),
    [(2, 1, 0, 2), (2, 1, 3, 1), (16, 1, 3, 13), (16, 2, 3, 6), (2, 4, 0, 1)],
)
def test_ranks_share_the_cores_that_engines_leave(cores, ranks, busy, expected):
    assert num_threads(cores, ranks, busy) == expected


@pytest.mark.parametrize(
    ("changes", "expected", "why"),
    [
        ({}, 13, "3 engines generate meanwhile"),
        (ONE_ROUND, 16, "no engine generates meanwhile"),
        (ONE_ROUND | {"rollout_matching.max_staleness": 1}, 13, "3 engines generate meanwhile"),
        (NO_QUEUE, 16, "no engine generates meanwhile"),
        (
            NO_QUEUE | {"rollout_matching.rollout_backend": "hf"},
            16,
            "no engine generates meanwhile",
        ),
        ({THREADS: 4}, 4, "set by learner.cpu_threads"),
    ],
)
def test_engines_take_cores_only_if_they_generate_while_the_learner_learns(changes, expected, why):
    threads, line = chosen(changes)
    assert threads == expected
    assert line == f"threads   each learner rank: {expected} ({why})"


def test_on_gpus_and_on_a_cluster_at_an_address_a_rank_has_a_thread_for_each_core_of_its_node():
    assert chosen({}, GPUS)[0] is None
    threads, line = chosen({"cluster.address": "10.0.0.1:6379"})
    assert threads is None
    assert line.endswith("one for each core of its node")


def test_a_resumed_run_keeps_its_number_whatever_its_rounds_and_cores_are(tmp_path):
    (tmp_path / "placement.json").write_text(json.dumps({"learner_threads": 5}))
    run = {"telemetry.run_dir": str(tmp_path)}
    resumed = {"resume.run": str(tmp_path / "checkpoints" / "step_000003")}
    assert chosen(run)[0] == 13
    assert chosen(run | {"resume.run": "auto"})[0] == 13, "no checkpoint was found"
    threads, line = chosen(run | resumed | ONE_ROUND)
    assert threads == 5
    assert line == "threads   each learner rank: 5 (as before in this run)"
