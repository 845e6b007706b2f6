"""The command itself, on real processes: what it leaves behind when it ends well, is interrupted, or loses an actor (issue 2)."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
MARK = "ROLLMATCH_TEST_RUN"


class Command:
    """`python -m launch.train`, all of whose processes carry a mark in their environment."""

    def __init__(self, folder, checkpoint, data, *overrides):
        self.mark = f"{os.getpid()}-{time.time_ns()}"
        self.run_dir = folder / "run"
        command = [sys.executable, "-m", "launch.train", "+experiment=stage2_3v1", f"telemetry.run_dir={self.run_dir}", f"model.path={checkpoint}"]
        command += [f"data.train={data / 'train.jsonl'}", f"data.val={data / 'val.jsonl'}", "training.effective_batch_size=8", *overrides]
        command += ["stage2_ab.channel_b.rollouts_per_step=8", "rollout_matching.decode_batch_size=2", "training.packing_window=4", "cluster.dashboard=false"]
        self.log = folder / "log"
        environment = os.environ | {MARK: self.mark, "COLUMNS": "400"}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=self.log.open("w"), stderr=subprocess.STDOUT, start_new_session=True)

    @property
    def output(self):
        return self.log.read_text()

    def wait_for(self, text, timeout_s=240):
        deadline = time.monotonic() + timeout_s
        while text not in self.output:
            assert time.monotonic() < deadline, f"no {text!r} in {timeout_s} s:\n{self.output}"
            assert self.process.poll() is None, f"ended before {text!r}:\n{self.output}"
            time.sleep(0.2)

    def processes(self):
        """The run's living processes: id -> command line. Zombies have no command line and are not counted."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # it ended while we looked
        return {pid: line for pid, line in found.items() if line}

    def assert_nothing_left(self, timeout_s=20):
        deadline = time.monotonic() + timeout_s
        while left := self.processes():
            assert time.monotonic() < deadline, left
            time.sleep(0.2)


@pytest.fixture
def command(tmp_path, warm_checkpoint, demo_data):
    started = []

    def start(*overrides):
        started.append(Command(tmp_path, warm_checkpoint, demo_data, *overrides))
        return started[-1]

    yield start
    for run in started:
        for pid in run.processes():
            os.kill(pid, signal.SIGKILL)


def test_a_run_writes_its_folder_saves_a_checkpoint_and_leaves_no_process(command):
    run = command("training.max_steps=3", "stage2_ab.schedule.warmup_steps=1")
    assert run.process.wait(timeout=300) == 0, run.output
    run.assert_nothing_left()
    folder = run.run_dir
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(step["step"], step["channel"]) for step in steps] == [(0, "A"), (1, "B"), (2, "B")]
    assert all("loss/total" in step and "time/step_s" in step for step in steps)
    plans = [json.loads(line) for line in (folder / "plan.jsonl").read_text().splitlines()]
    assert plans[1]["actors"] == ["rollout-actor-0", "rollout-actor-1", "rollout-actor-2"]
    assert plans[1]["sync_mode"] == "full"
    assert plans[1]["rollout_seed_base"] > 0
    assert plans[1]["rounds"] == [[0, 4], [4, 8]]
    assert json.loads((folder / "config.json").read_text())["training"]["max_steps"] == 3
    assert len((folder / "evaluations.jsonl").read_text().splitlines()) == 2
    events = json.loads((folder / "timeline.json").read_text())
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert tracks == {"driver", "learner", *plans[1]["actors"]}
    assert run.output.strip().splitlines()[-1].startswith("demo: val F1@0.5 warm-up ")
    assert "(B steps: 2, wall: " in run.output

    from transformers import AutoModelForImageTextToText, AutoProcessor

    AutoProcessor.from_pretrained(folder / "checkpoint")
    AutoModelForImageTextToText.from_pretrained(folder / "checkpoint")


def test_an_interrupted_run_leaves_no_process(command):
    run = command("training.max_steps=500", "stage2_ab.schedule.warmup_steps=0", "data.val=null")
    run.wait_for("step    2/500")
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(timeout=60) == 130, run.output
    run.assert_nothing_left()
    assert "interrupted" in run.output


def test_a_killed_actor_ends_the_run_with_its_name_and_leaves_no_process(command):
    run = command("training.max_steps=500", "stage2_ab.schedule.warmup_steps=0", "data.val=null")
    run.wait_for("step    2/500")
    victim = next(pid for pid, line in run.processes().items() if "rollout-actor-1" in line)
    os.kill(victim, signal.SIGKILL)
    assert run.process.wait(timeout=120) == 1, run.output
    run.assert_nothing_left()
    assert "on rollout-actor-1: its process has ended" in run.output
    assert "Traceback" not in run.output.split("RolloutError")[-1]
