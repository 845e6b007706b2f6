"""`launch.replay` of a run of several learner ranks: a process for each, without Ray."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest
import rank_jobs
from config_support import configuration
from rank_support import RankProcesses
from rich.console import Console

from launch.replay.__main__ import ReplayOptions, replay
from launch.replay.learning import RecordedStep, Recording
from launch.replay.ranks import learned_steps
from launch.run_folder.telemetry import Telemetry
from launch.runtime.batch_algebra import batch_algebra
from shared.errors import ConfigError, LearnerError
from shared.metrics import merge_reports
from shared.schedule import RunSchedule

pytestmark = pytest.mark.processes

TWO_RANKS = {
    "global_max_length": 400,
    "training__max_steps": 2,
    "training__effective_batch_size": 4,
    "training__packing": False,
    "stage2_ab__schedule__warmup_steps": 1,
    "stage2_ab__channel_b__rollouts_per_step": 9,
    "rollout_matching__decode_batch_size": 6,
    "rollout_matching__vllm": {"mode": "actors", "actors": {"num_actors": 1}},
    "learner__world_size": 2,
    "learner__cpu_threads": 1,
    "telemetry__ray_metrics": False,
    "data__val": None,
    "checkpoint__save_minutes": None,
}


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankProcesses]:
    processes = RankProcesses(2)
    yield processes
    processes.close()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_step_of_several_ranks_is_learned_again_by_as_many_processes(
    parallel, two_ranks, demo_checkpoint, demo_data, tmp_path
):
    config = configuration(
        demo_checkpoint, demo_data, tmp_path / "run", learner__parallel=parallel, **TWO_RANKS
    )
    before = set(multiprocessing.active_children())
    algebra = batch_algebra(config)
    assert len(algebra.rounds) > 1
    with Telemetry(config, Console(quiet=True)) as telemetry:
        telemetry.placed(algebra, ("half right",), learner_threads=1)
        learned = two_ranks.run(rank_jobs.learn, config, 2, algebra.chunk)
        reports = zip(*(rank.reports for rank in learned), strict=True)
        for plan, of_ranks in zip(RunSchedule(config).plans(), reports, strict=True):
            with telemetry.step(plan) as record:
                record.report = merge_reports(of_ranks)
    assert (tmp_path / "run" / "rollouts" / "step_000002.rank1.jsonl").exists()
    assert dict(replay(ReplayOptions(run=tmp_path / "run", step=2))) == {1: [], 2: []}
    assert set(multiprocessing.active_children()) == before


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    """Two steps of two ranks, without anything to learn."""
    timeouts = {"start_s": 120.0, "learn_s": 0.5}
    config = configuration(tmp_path, tmp_path, tmp_path, timeouts=timeouts, **TWO_RANKS)
    steps = [RecordedStep(plan, 0, ()) for plan in RunSchedule(config).plans()]
    return Recording(config, tmp_path / "rollouts", tuple(steps), None)


@pytest.mark.parametrize(
    ("work", "error", "message"),
    [
        (
            rank_jobs.replay_that_loses_rank_1,
            LearnerError,
            r"rank 1's process has ended \(exit code 1",
        ),
        (rank_jobs.replay_that_fails_on_rank_1, ConfigError, "data.train: is not what it was"),
        (
            rank_jobs.replay_that_hangs_on_rank_1,
            LearnerError,
            r"no answer from (rank 0, )?rank 1 after timeouts.learn_s for each round and the update = 0.5 s",
        ),
    ],
)
def test_a_rank_that_ends_fails_or_hangs_is_named_and_no_process_stays(
    recording, work, error, message
):
    before = set(multiprocessing.active_children())
    with pytest.raises(error, match=message):
        list(learned_steps(recording, work))
    assert set(multiprocessing.active_children()) == before
