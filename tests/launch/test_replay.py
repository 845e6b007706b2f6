"""`launch.replay` learns a recorded step again, without engines, and gets the same numbers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from config_support import configuration, trajectory_config
from edited_lines import edit_line
from resumable_run import start

from launch.replay import ReplayOptions, main, replay
from shared.errors import ConfigError
from shared.run_files import read_lines

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(demo_checkpoint, demo_data, tmp_path_factory):
    """A run of channels A, B, B, B with segments that are carried and rollouts that are stale; it
    has kept the checkpoints after its second and fourth step.
    """
    folder = tmp_path_factory.mktemp("replay") / "run"
    settings = {
        "global_max_length": 400,
        "training__max_steps": 4,
        "training__effective_batch_size": 4,
        "training__packing_window": 4,
        "stage2_ab__channel_b__rollouts_per_step": 4,
        "stage2_ab__schedule__warmup_steps": 1,
        "rollout_matching__max_staleness": 1,
        "learner__cpu_threads": 1,
        "rollout_matching__maskiou_gate_schedule": {"start": 0.1, "steps": 2},
        "telemetry__ray_metrics": False,
        "data__val": None,
        "checkpoint__save_steps": 2,
        "checkpoint__save_minutes": None,
    }
    start(configuration(demo_checkpoint, demo_data, folder, **settings))
    return folder


@pytest.fixture
def copy(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "copy")
    return tmp_path / "copy"


def replayed(run: Path, step: int, **options) -> dict[int, list[str]]:
    return dict(replay(ReplayOptions(run=run, step=step, **options)))


def test_a_step_is_learned_again_to_the_bit_from_the_checkpoint_before_it(whole):
    assert replayed(whole, 4) == {3: [], 4: []}
    gates = [line.get("rollout/match_gate") for line in read_lines(whole / "metrics.jsonl")]
    assert gates == [None, 0.1, 0.2, 0.3], "a gate with a schedule is of the step alone"


def test_without_a_checkpoint_before_the_step_it_is_learned_from_the_runs_model(whole):
    assert replayed(whole, 2) == {1: [], 2: []}


def test_nothing_of_the_run_changes(whole):
    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}

    before = files()
    replayed(whole, 2)
    assert files() == before


def test_what_is_not_as_recorded_is_named_and_the_command_fails(copy, capsys):
    edit_line(copy / "metrics.jsonl", 1, lambda line: line.update({"loss/total": 0.5}))
    with pytest.raises(SystemExit) as ended:
        main([f"run={copy}", "step=2"])
    assert ended.value.code == 1
    output = capsys.readouterr().out
    assert "step      1  equal, to the bit\nstep      2  differs\n" in output
    assert "loss/total: 0.5 recorded, " in output


def test_an_edited_rollout_is_another_loss(copy):
    log = copy / "rollouts" / "step_000002.jsonl"
    edit_line(log, 0, lambda line: line["rollout"].update(response_token_ids=[]))
    (differences,) = [found for found in replayed(copy, 2).values() if found]
    assert any(one.startswith("loss/total: ") for one in differences)


def test_what_cannot_be_replayed_is_told(copy, demo_lm, tmp_path):
    log = copy / "rollouts" / "step_000002.jsonl"
    edit_line(log, 1, lambda line: line["rollout"].update(seed=5))
    with pytest.raises(
        ConfigError, match=r"the log of step 2 has no rollout of sample .* with seed"
    ):
        replayed(copy, 2)
    log.unlink()
    with pytest.raises(ConfigError, match=r"step_000002.jsonl is not there; .*rollouts=true"):
        replayed(copy, 2)
    with pytest.raises(ConfigError, match="has the metrics of 4 steps"):
        replayed(copy, 7)
    with pytest.raises(ConfigError, match=r"checkpoint: .* before step 2: none"):
        replayed(copy, 2, checkpoint=copy / "checkpoint")
    environment = tmp_path / "environment"
    environment.mkdir()
    config = trajectory_config(demo_lm, environment)
    (environment / "config.json").write_text(config.model_dump_json())
    with pytest.raises(ConfigError, match="of an environment, whose steps are not replayed yet"):
        replayed(environment, 1)
