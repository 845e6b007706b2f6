"""`rollmatch diff-runs` names the first step, stage and sample at which two runs part."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from config_support import configuration
from edited_lines import edit_line
from resumable_run import Interruption, start

from launch.inspect.diff_runs import diff_runs, main
from shared.errors import ConfigError

SETTINGS = {
    "global_max_length": 512,
    "training__max_steps": 3,
    "training__effective_batch_size": 4,
    "training__packing_window": 4,
    "stage2_ab__channel_b__rollouts_per_step": 4,
    "stage2_ab__schedule__warmup_steps": 1,
    "learner__cpu_threads": 1,
    "telemetry__ray_metrics": False,
    "data__val": None,
    "checkpoint__save_steps": 1,
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(demo_checkpoint, demo_data, tmp_path_factory):
    """Makes a run in a folder."""
    folder = tmp_path_factory.mktemp("runs")

    def make(name: str, *, at: int | None = None, **changes) -> Path:
        settings = {**SETTINGS, "resume": {"run": "auto"}, **changes}
        start(
            configuration(demo_checkpoint, demo_data, folder / name, **settings), Interruption(at)
        )
        return folder / name

    return make


@pytest.fixture(scope="module")
def whole(run):
    return run("whole")


@pytest.fixture
def copy(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "copy")
    return tmp_path / "copy"


def test_a_resumed_run_is_equal_to_one_that_was_not_interrupted_and_a_longer_one_says_so(
    run, whole
):
    with pytest.raises(KeyboardInterrupt):
        run("resumed", at=6)
    resumed = run("resumed", training__max_steps=4)
    lines, parts = diff_runs(whole, resumed)
    assert not parts
    assert re.search(r"^equal +3 steps, .* B .* 4\b", lines[-1])
    assert "changed   training.max_steps: A 3, B 4" in lines


def test_another_seed_is_seen_in_the_draw_of_the_first_step(run, whole):
    lines, parts = diff_runs(whole, run("another seed", training__seed=18))
    assert parts
    assert "changed   training.seed: A 17, B 18" in lines
    assert any(line.startswith("part      at step 1, stage draw, position 0 (") for line in lines)
    assert lines[-1] == "equal     0 steps before, to the bit"


def test_the_first_stage_that_differs_is_named_with_its_sample(whole, copy):
    log = copy / "rollouts" / "step_000002.jsonl"
    edit_line(log, 1, lambda line: line["target"]["coord_targets"].append(7.0))
    edit_line(log, 3, lambda line: line["rollout"]["response_token_ids"].__setitem__(2, 5))
    lines, _ = diff_runs(whole, copy)
    (parting,) = [line for line in lines if line.startswith("part ")]
    assert parting.startswith("part      at step 2, stage rollout, position 3 (")
    assert parting.endswith("): response_token_ids[2]")
    assert lines[-2:] == ["          B 5", "equal     1 steps before, to the bit"]


@pytest.mark.parametrize(
    ("metric", "stage"),
    [
        ("packing/num_rows", "row"),
        ("loss/total", "loss"),
        ("optim/grad_norm", "gradient"),
        ("optim/learning_rate", "update"),
        ("weight_version", "sync"),
        ("rollout/num", "other"),
    ],
)
def test_what_no_sample_shows_is_named_by_its_metric(whole, copy, metric, stage):
    edit_line(copy / "metrics.jsonl", 2, lambda line: line.update({metric: 0.125}))
    lines, parts = diff_runs(whole, copy)
    assert parts
    assert f"part      at step 3, stage {stage}: {metric}" in lines


def test_a_ledger_that_was_edited_is_told(whole, copy):
    edit_line(copy / "ledger.jsonl", 2, lambda line: line.update(loss=0.5))
    lines, parts = diff_runs(whole, copy)
    assert not parts
    (told,) = [line for line in lines if line.startswith("ledger ")]
    assert told.startswith(
        f"ledger    B has a damaged ledger: {copy / 'ledger.jsonl'} line 3: its hash"
    )


def test_times_and_engines_do_not_count(whole, copy):
    edit_line(copy / "metrics.jsonl", 2, lambda line: line.update({"time/step_s": 99.0}))
    log = copy / "rollouts" / "step_000003.jsonl"
    edit_line(log, 0, lambda line: line["rollout"].update(actor="actor-7", attempt=2))
    assert diff_runs(whole, copy)[1] is False


def test_the_command_ends_as_diff_does(whole, copy, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main([str(whole), str(copy)])
    assert ended.value.code == 0
    assert "equal     3 steps, to the bit" in capsys.readouterr().out
    edit_line(copy / "metrics.jsonl", 0, lambda line: line.update({"loss/total": 0.0}))
    with pytest.raises(SystemExit) as ended:
        main([str(whole), str(copy)])
    assert ended.value.code == 1
    with pytest.raises(ConfigError, match="holds no run"):
        diff_runs(whole, tmp_path)
