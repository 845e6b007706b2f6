"""Hydra sweeps: a folder for every trial, a failed one does not end the others (`-m`)."""

import io
import json
import os
import re
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from rich.console import Console

from launch.cli import CONF, as_mapping
from launch.processes import sweep
from launch.processes.placement import Resources
from launch.processes.sweep import MARGIN_S, TRIALS, Room, Trial, print_summary
from shared.config import load_config


@pytest.mark.long
def test_a_sweep_goes_on_behind_a_failed_trial_and_after_an_interruption_with_what_is_not_done(
    start_command, demo_checkpoint, demo_data, tmp_path
):
    """Of three trials the first is refused, the second ends, the third is interrupted and saves its
    weights; the same sweep with resume=auto does the rest.
    """
    small = [
        "cluster=local",
        "cluster.trials_at_once=1",
        "stage2_ab.schedule.warmup_steps=500",
        "data.val=null",
    ]

    def start(*options):
        return start_command(
            tmp_path,
            demo_checkpoint,
            demo_data,
            *small,
            "training.max_steps=-1,1,12",
            *options,
            experiment="stage2_hf",
            options=["-m"],
            of_a_user=True,  # a warm server's imports of vLLM would be for nothing
        )

    first = start()
    first.wait_for("step    2/12")
    os.killpg(first.process.pid, signal.SIGINT)  # Ctrl-C: a terminal sends it to all of the group
    assert first.process.wait(timeout=240) == 130, first.output
    first.assert_nothing_left()
    trials = first.lines("trials.jsonl")
    assert [(trial["exit_code"], trial["interrupted"]) for trial in trials] == [
        (2, False),
        (0, False),
        (130, True),
    ]
    folders = [first.run_dir / f"trial_{number}" for number in range(3)]
    assert [trial["folder"] for trial in trials] == [str(folder) for folder in folders]
    assert [(folder / "metrics.jsonl").exists() for folder in folders] == [False, True, True]
    (checkpoint,) = first.run_dir.glob("trial_*/checkpoint_interrupted_*")
    assert f"saved     {checkpoint}" in first.output
    assert re.search(r"training\.max_steps: must be .*got -1", first.output)
    assert "trial     0: failed with exit status 2" in first.output
    assert re.search(r"trial     1: no held-out report, loss \d+\.\d{4}, ", first.output)
    assert "trial     2: interrupted, " in first.output
    assert re.search(r"sweep +1 of 3 trials finished; resume=auto ", first.output)
    assert "Traceback" not in first.output

    again = start()
    assert again.process.wait(timeout=240) == 2
    assert re.search(rf"{first.run_dir} .*already; .*resume=auto", again.output)

    written = (folders[1] / "metrics.jsonl").read_bytes()
    rest = start("resume=auto")
    assert rest.process.wait(timeout=240) == 1, rest.output  # that of the trial that is refused
    rest.assert_nothing_left()
    assert f"trial     1: complete, {folders[1]}" in rest.output
    ends = [(one["trial"], one["exit_code"]) for one in rest.lines("trials.jsonl")[3:]]
    assert ends == [(0, 2), (2, 0)]
    assert (folders[1] / "metrics.jsonl").read_bytes() == written
    lines = (folders[2] / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 13))
    assert re.search(r"resume    \S+trial_2 after \d+ of 12 steps", rest.output)
    assert re.search(r"^trial  training\.max_steps  steps  loss$", rest.output, flags=re.MULTILINE)
    assert "sweep     2 of 3 trials finished; " in rest.output


TRIAL = """#!/bin/sh
# In place of Python: `-m launch.train seed=SEED telemetry.run_dir=FOLDER`.
seed=${3#seed=} folder=$(echo "${4#telemetry.run_dir=}" | tr -d "'")
wait_for() { for _ in $(seq 1200); do "$@" && return; sleep 0.05; done; exit 9; }
mkdir -p "$folder"
echo "step    1/1"
echo "{\\"step\\": 1, \\"loss/total\\": $seed.5}" > "$folder/metrics.jsonl"
"""
"""A program that stands in for a training."""


@pytest.fixture
def trials_of(tmp_path, monkeypatch):
    """Make trials of these seeds, which run `TRIAL` and this shell code; print to a file."""

    def make(*seeds, code, limit=2):
        program = tmp_path / "python"
        program.write_text(TRIAL + code)
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        local = ("cluster.kind=local", f"cluster.trials_at_once={limit}")
        config = load_config(as_mapping(composed_of("stage2_hf", *local)))
        folders = [tmp_path / f"trial_{number}" for number in range(len(seeds))]
        trials = [
            Trial(number, (f"seed={seed}",), (f"++training.seed={seed}",), folder, config)
            for number, (seed, folder) in enumerate(zip(seeds, folders, strict=True))
        ]
        monkeypatch.setattr(sweep, "_trials", trials)
        return Console(file=io.StringIO(), width=400)

    return make


@pytest.mark.slow
def test_trials_that_leave_room_run_side_by_side_and_their_loss_is_summed_up_over_seeds(
    trials_of, tmp_path, capsys
):
    """Each of the first two waits for the other. The last one ends when both have ended."""
    meets = """
    case "$seed" in
        1) wait_for [ -e "$folder/../trial_1" ] ;;
        2) wait_for [ -e "$folder/../trial_2" ] ;;
        3) wait_for grep -q '"trial": 1' "$folder/../trials.jsonl" ;;
    esac
    """
    console = trials_of(1, 2, 3, code=meets)
    sweep.run_trials(console)
    told = ["ended" in line for line in console.file.getvalue().splitlines() if "trial " in line]
    assert told == [False, False, True, False, True, True]
    lines = [json.loads(line) for line in (tmp_path / TRIALS).read_text().splitlines()]
    losses = [line["loss"] for line in lines]
    assert sorted(losses) == [1.5, 2.5, 3.5]
    row = f"3      {statistics.mean(losses):.4f} ± {statistics.stdev(losses):.4f}"
    assert ["seeds  loss", row] == capsys.readouterr().out.splitlines()[-3:-1]
    for number in range(3):
        assert "step    1/1" in (tmp_path / f"trial_{number}.log").read_text()


@pytest.mark.slow
def test_an_interrupted_sweep_begins_no_further_trial(trials_of, tmp_path, capsys, monkeypatch):
    """A trial that is told to end may still save its weights."""
    wait = sweep.futures.wait

    def waits(*arguments, **options):
        (tmp_path / "waits").touch()
        return wait(*arguments, **options)

    monkeypatch.setattr(sweep.futures, "wait", waits)
    begun = 'wait_for [ -e "$folder/../waits" ]'
    saves = f"trap 'exit 130' TERM; {begun}; kill -INT $PPID; wait_for false\n"
    console = trials_of(1, 2, code=saves, limit=1)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            sweep.run_trials(console)
    finally:
        signal.signal(signal.SIGINT, previous)
    (line,) = (tmp_path / TRIALS).read_text().splitlines()
    assert (json.loads(line)["exit_code"], json.loads(line)["interrupted"]) == (130, True)
    assert not (tmp_path / "trial_1").exists()
    assert "sweep     0 of 2 trials finished; resume=auto" in capsys.readouterr().out


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


def summary(tmp_path, capsys, trials):
    """Return the lines that are printed of these trials, and the number that failed."""
    (tmp_path / TRIALS).write_text("".join(json.dumps(line) + "\n" for line in trials))
    failed = print_summary(tmp_path, len(trials))
    return capsys.readouterr().out.splitlines(), failed


def test_the_summary_of_a_sweep_has_the_headline_of_its_runs_and_a_table_over_them(
    tmp_path, capsys
):
    """Of an environment it is the mean reward."""
    trials = [
        trial(0, "seed=1", "learning_rate=1e-3", reward=0.25),
        trial(1, "seed=1", "learning_rate=2e-3", reward=0.75),
        trial(2, "seed=1", "learning_rate=-1", exit_code=2),
        # A report of which too much failed has no score.
        trial(3, "seed=1", "learning_rate=3e-3", reward=0.5) | {"score": None},
    ]
    lines, failed = summary(tmp_path, capsys, trials)
    assert failed == 1
    shown = [
        "mean reward 0.250",
        "mean reward 0.750",
        ".*exit status 2",
        "no mean reward.* failed",
    ]
    for number, (line, end) in enumerate(zip(lines[:4], shown, strict=True)):
        assert re.fullmatch(f"trial +{number}: {end}, 61 s, out/trial_{number}", line)
    assert lines[4:-1] == [
        "trial  training.learning_rate  steps  mean reward",
        "0      1e-3                    80     0.250",
        "1      2e-3                    80     0.750 (best)",
        "2      -1                      -      -",
        "3      3e-3                    80     -",
    ]


def test_trials_that_differ_in_their_seed_alone_have_a_mean_and_a_deviation(tmp_path, capsys):
    """Of those that finished; the best is the best mean."""
    trials = [
        trial(0, "seed=1", "learning_rate=1e-3", reward=0.25),
        trial(1, "seed=1", "learning_rate=2e-3", reward=0.75),
        trial(2, "seed=2", "learning_rate=1e-3", reward=0.75),
        trial(3, "seed=2", "learning_rate=2e-3", reward=0.5),
        trial(4, "seed=3", "learning_rate=1e-3", reward=0.0, exit_code=1),
    ]
    lines, _ = summary(tmp_path, capsys, trials)
    assert not any("best" in line for line in lines[:-4])
    assert lines[-4:-1] == [
        "training.learning_rate  seeds  mean reward",
        "1e-3                    2      0.500 ± 0.354",
        "2e-3                    2      0.625 ± 0.177 (best)",
    ]


@pytest.mark.parametrize("rewards", [(0.5, 0.5), (0.5001, 0.5002), (0.5,)])
def test_neither_of_two_equal_results_nor_the_only_one_is_the_best(tmp_path, capsys, rewards):
    trials = [trial(i, f"rate={i}", reward=reward) for i, reward in enumerate(rewards)]
    lines, _ = summary(tmp_path, capsys, [*trials, trial(9, "rate=9", exit_code=2)])
    assert not any("best" in line for line in lines)


def test_a_sweep_without_held_out_reports_compares_the_last_losses(tmp_path, capsys):
    trials = [trial(i, f"rate={i}") | {"step": 8, "loss": 1.5 - i} for i in range(2)]
    lines, _ = summary(tmp_path, capsys, trials)
    for number, (line, loss) in enumerate(zip(lines[:2], ("1.5000", "0.5000"), strict=True)):
        assert re.fullmatch(f"trial +{number}: .*loss {loss}, 61 s, out/trial_{number}", line)
    assert lines[2:-1] == [
        "trial  training.rate  steps  loss",
        "0      0              8      1.5000",
        "1      1              8      0.5000 (best)",
    ]


def test_a_trial_that_was_continued_counts_once_and_its_start_s_own_keys_do_not_matter(
    tmp_path, capsys
):
    first = trial(0, "seed=1", exit_code=130) | {"interrupted": True}
    again = trial(0, "seed=1", reward=0.5)
    again["overrides"] = [*again["overrides"], "++resume.run=auto"]
    lines, failed = summary(tmp_path, capsys, [first, trial(1, "seed=2", reward=0.25), again])
    assert failed == 0
    assert lines[2:5] == [
        "trial  training.seed  steps  mean reward",
        "0      1              80     0.500",
        "1      2              80     0.250",
    ]


def composed_of(experiment, *overrides):
    arguments = [f"+experiment={experiment}", *(f"++{one}" for one in overrides)]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", overrides=arguments)


EIGHT = tuple("01234567")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpus", "overrides", "shares"),
    [
        # Three actors and a learner are four GPUs.
        (EIGHT, (), [("0", "1", "2", "3"), ("4", "5", "6", "7"), None]),
        (EIGHT[:6], (), [("0", "1", "2", "3"), None]),
        (EIGHT, ("cluster.trials_at_once=1",), [("0", "1", "2", "3"), None]),
        # Each has four CPUs of sixteen.
        (EIGHT, ("learner.cpus=9",), [("0", "1", "2", "3"), None]),
        # On CPU torch uses all cores.
        ((), ("learner.cpu_threads=null",), [(), None]),
        ((), ("learner.cpu_threads=8",), [(), (), None]),
        ((), ("cluster.trials_at_once=3",), [(), (), (), None]),
        (EIGHT, ("cluster.address=10.0.0.1:6379",), [(), None]),
        (EIGHT, ("cluster.address=10.0.0.1:6379", "cluster.trials_at_once=2"), [(), (), None]),
    ],
)
def test_trials_have_gpus_of_their_own_and_run_side_by_side_while_there_is_room(
    gpus, overrides, shares
):
    config = load_config(as_mapping(composed_of("stage2_3v1", *overrides)))
    trial = Trial(0, (), (), Path("trial_0"), config)
    room = Room(Resources(16.0, float(len(gpus))), gpus, config.cluster.trials_at_once)
    assert room.holds_several([trial, trial]) == (shares[1] is not None)
    taken = [room.take(trial) for _ in shares]
    assert [share and share.gpus for share in taken] == shares
    room.give_back(taken[0])
    assert room.take(trial).gpus == shares[0], "what an ended trial had"


@pytest.mark.slow
def test_a_trial_on_servers_runs_alone(tmp_path):
    """Two runs cannot load their weights into one server."""
    servers = ["rollout_matching.vllm.mode=server"]
    servers += [
        "rollout_matching.vllm.server.servers=[{base_url: 'http://127.0.0.1:8000', group_port: 0}]"
    ]
    on_servers = load_config(as_mapping(composed_of("stage2_3v1", *servers)))
    elsewhere = load_config(as_mapping(composed_of("stage2_3v1")))
    for first, second in ((on_servers, elsewhere), (elsewhere, on_servers)):
        room = Room(Resources(16.0, 0.0), (), 4)
        assert room.take(Trial(0, (), (), tmp_path, first)) is not None
        assert room.take(Trial(1, (), (), tmp_path, second)) is None


def test_an_interrupted_trial_has_the_time_of_its_own_configuration_to_save_its_weights():
    """A trial whose configuration is refused has nothing to save."""
    config = load_config(as_mapping(composed_of("stage2_3v1", "timeouts.interrupt_s=600.0")))
    assert Trial(0, (), (), Path("trial_0"), config).end_s == 600 + MARGIN_S
    assert Trial(0, (), (), Path("trial_0"), None).end_s == MARGIN_S


@pytest.mark.long
def test_the_files_of_a_sweep_have_no_secret_of_its_configuration(tmp_path):
    """Hydra writes the composed configuration itself, before the first trial."""
    words = [
        *("-m", "+experiment=env_3v1", "environment.args={api_key: sk-LEAK5}"),
        *("training.max_steps=-1", f"telemetry.run_dir={tmp_path / 'sweep'}"),
    ]
    command = [sys.executable, "-m", "launch.train", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert "0 of 1 trials finished" in done.stdout
    files = {path.name: path.read_text() for path in (tmp_path / "sweep").glob("*.*")}
    assert files.keys() == {"multirun.yaml", TRIALS}
    for text in (*files.values(), done.stdout, done.stderr):
        assert "LEAK" not in text
    assert all("<secret>" in text for text in (*files.values(), done.stdout))
