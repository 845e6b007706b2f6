"""Hydra sweeps: a folder for every trial, a failed one does not end the others (`-m`)."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from hydra import compose, initialize_config_dir

from launch.cli import CONF
from launch.runtime.sweep import MARGIN_S, TRIALS, end_s, print_summary


@pytest.mark.engine
@pytest.mark.long
def test_a_sweep_goes_on_behind_a_failed_trial_and_an_interruption_ends_it(
    start_command, warm_checkpoint, demo_data, tmp_path
):
    """Of four trials the first is refused, the second ends, the third is interrupted and saves its
    weights, and the fourth never begins.
    """
    small = ["stage2_ab.schedule.warmup_steps=500", "data.max_val_samples=4", "training.seed=2"]
    sweep = start_command(
        tmp_path,
        warm_checkpoint,
        demo_data,
        *small,
        "training.max_steps=-1,1,500,501",
        experiment="stage2_hf",
        options=["-m"],
    )
    sweep.wait_for("step    1/500")
    os.killpg(sweep.process.pid, signal.SIGINT)  # Ctrl-C: a terminal sends it to all of the group
    assert sweep.process.wait(timeout=90) == 130, sweep.output
    sweep.assert_nothing_left()
    trials = sweep.lines("trials.jsonl")
    assert [(trial["exit_code"], trial["interrupted"]) for trial in trials] == [
        (2, False),
        (0, False),
        (130, True),
    ]
    assert [trial["folder"] for trial in trials] == [
        str(sweep.run_dir / f"trial_{number}") for number in range(3)
    ]
    assert (
        sorted(path.name for path in sweep.run_dir.glob("trial_*/metrics.jsonl"))
        == ["metrics.jsonl"] * 2
    )
    second = json.loads((sweep.run_dir / "trial_1" / "config.json").read_text())
    assert (second["training"]["seed"], second["training"]["max_steps"]) == (2, 1)
    (checkpoint,) = sweep.run_dir.glob("trial_*/checkpoint_interrupted_*")
    assert f"saved     {checkpoint}" in sweep.output
    assert re.search(r"training\.max_steps: must be .*got -1", sweep.output)
    assert "trial     0: failed with exit status 2" in sweep.output
    assert re.search(r"trial     1: F1@0\.5 \d\.\d{3}, ", sweep.output)
    assert "trial     2: interrupted, " in sweep.output
    assert "sweep     1 of 3 trials finished" in sweep.output
    assert re.search(
        r"^trial  training\.max_steps  steps  F1@0\.5$", sweep.output, flags=re.MULTILINE
    )
    assert "Traceback" not in sweep.output


def trial(number, *overrides, exit_code=0, reward=None):
    """A line of the sweep's file."""
    line = {
        "trial": number,
        "overrides": ["+experiment=env_3v1", *(f"++training.{key}" for key in overrides)],
        "folder": f"out/trial_{number}",
        "exit_code": exit_code,
        "interrupted": False,
        "wall_s": 61.0,
    }
    if reward is None:
        return line
    return line | {"step": 80, "headline": "mean reward", "score": reward, "val/reward": reward}


def test_the_summary_of_a_sweep_has_the_headline_of_its_runs_and_a_table_over_them(
    tmp_path, capsys
):
    """Of an environment it is the mean reward."""
    trials = [
        trial(0, "seed=1", "learning_rate=1e-3", reward=0.25),
        trial(1, "seed=2", "learning_rate=1e-3", reward=0.75),
        trial(2, "seed=2", "learning_rate=-1", exit_code=2),
        # A report of which too much failed has no score.
        trial(3, "seed=3", "learning_rate=1e-3", reward=0.5) | {"score": None},
    ]
    (tmp_path / TRIALS).write_text("".join(json.dumps(line) + "\n" for line in trials))
    assert print_summary(tmp_path) == 1
    assert capsys.readouterr().out.splitlines()[:-1] == [
        "trial     0: mean reward 0.250, 61 s, out/trial_0",
        "trial     1: mean reward 0.750, 61 s, out/trial_1",
        "trial     2: failed with exit status 2, 61 s, out/trial_2",
        "trial     3: no mean reward: too much of the last report failed, 61 s, out/trial_3",
        "trial  training.seed  training.learning_rate  steps  mean reward",
        "0      1              1e-3                    80     0.250",
        "1      2              1e-3                    80     0.750 (best)",
        "2      2              -1                      -      -",
        "3      3              1e-3                    80     -",
    ]


def test_a_sweep_without_held_out_reports_has_no_table(tmp_path, capsys):
    (tmp_path / TRIALS).write_text(json.dumps(trial(0, "seed=1")) + "\n")
    assert print_summary(tmp_path) == 0
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "trial     0",
        "sweep     1 of 1 trials finished; " + str(tmp_path / TRIALS),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "expected"),
    [("timeouts.interrupt_s=600.0", 600 + MARGIN_S), ("training.learning_rate=-1.0", MARGIN_S)],
)
def test_an_interrupted_trial_has_the_time_of_its_own_configuration_to_save_its_weights(
    override, expected
):
    """A trial whose configuration is refused has nothing to save."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose("train", overrides=["+experiment=stage2_3v1", f"++{override}"])
    assert end_s(composed) == expected


@pytest.mark.long
def test_the_files_of_a_sweep_have_no_secret_of_its_configuration(tmp_path):
    """Hydra writes the composed configuration itself, before the first trial."""
    sweep = [
        *("-m", "+experiment=env_3v1", "environment.args={api_key: sk-LEAK5}"),
        *("training.max_steps=-1,-2", f"telemetry.run_dir={tmp_path / 'sweep'}"),
    ]
    command = [sys.executable, "-m", "launch.train", *sweep]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert "0 of 2 trials finished" in done.stdout
    files = {path.name: path.read_text() for path in (tmp_path / "sweep").glob("*.*")}
    assert files.keys() == {"multirun.yaml", TRIALS}
    for text in (*files.values(), done.stdout, done.stderr):
        assert "LEAK" not in text
    assert all("<secret>" in text for text in (*files.values(), done.stdout))
