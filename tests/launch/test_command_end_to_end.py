"""The command itself, on real processes: what it leaves behind when it ends well, is interrupted, or loses an actor (issue 2)."""

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
SET_CHILD_SUBREAPER = 36


@pytest.fixture(scope="module", autouse=True)
def orphans_come_to_this_process():
    """What a run leaves behind becomes a child of this process, instead of disappearing among everybody's."""
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1)
    yield
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 0)


class Command:
    """`python -m launch.train`, and every process that came of it."""

    def __init__(self, folder, checkpoint, data, *overrides):
        self.before = {child.pid for child in psutil.Process().children(recursive=True)}
        self.run_dir = folder / "run"
        command = [sys.executable, "-m", "launch.train", "+experiment=stage2_3v1", f"telemetry.run_dir={self.run_dir}", f"model.path={checkpoint}"]
        command += [f"data.train={data / 'train.jsonl'}", f"data.val={data / 'val.jsonl'}", "training.effective_batch_size=8", *overrides]
        command += [
            "stage2_ab.channel_b.rollouts_per_step=12",
            "stage2_ab.schedule.b_ratio=1.0",
            "rollout_matching.decode_batch_size=2",
            "training.packing_window=4",
            "cluster.dashboard=false",
            "telemetry.name=demo",
        ]
        self.log = folder / "log"
        environment = os.environ | {"COLUMNS": "400"}
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
        """The run's living processes: id -> command line. Those that descend from older children of this process are somebody else's."""
        found = {}
        for child in psutil.Process().children(recursive=True):
            try:
                older = {child.pid, *(parent.pid for parent in child.parents())} & self.before
                if not older and child.status() != psutil.STATUS_ZOMBIE:
                    found[child.pid] = " ".join(child.cmdline())
            except psutil.NoSuchProcess:
                continue  # it ended while we looked
        return found

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
    assert plans[1]["rounds"] == [[0, 6], [6, 12]]
    assert json.loads((folder / "config.json").read_text())["training"]["max_steps"] == 3
    assert len((folder / "evaluations.jsonl").read_text().splitlines()) == 2
    events = json.loads((folder / "timeline.json").read_text())
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert tracks == {"driver", "learner", *plans[1]["actors"]}
    closing = r"demo: val F1@0\.5 warm-up \d\.\d\d -> final \d\.\d\d \(B steps: 2, wall: \d+ s\)"
    assert re.fullmatch(closing, run.output.strip().splitlines()[-1])
    assert_loads_elsewhere(folder / "checkpoint")


def assert_loads_elsewhere(checkpoint):
    """In transformers and in vLLM, in a process that neither sees this project nor loads its plugin."""
    code = f"""
import sys
from transformers import AutoModelForImageTextToText, AutoProcessor
AutoProcessor.from_pretrained({str(checkpoint)!r})
AutoModelForImageTextToText.from_pretrained({str(checkpoint)!r})
from vllm import LLM, SamplingParams
llm = LLM({str(checkpoint)!r}, enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=2**26, dtype="float32")
output = llm.generate([{{"prompt_token_ids": [1, 2, 3]}}], SamplingParams(max_tokens=4, temperature=0))
assert len(output[0].outputs[0].token_ids) == 4
assert not {{"shared", "learner", "rollout_actors"}} & {{name.split(".")[0] for name in sys.modules}}
print("loaded elsewhere")
"""
    environment = os.environ | {"VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", env=environment, timeout=240, check=False)
    assert "loaded elsewhere" in done.stdout, done.stderr[-3000:]


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
    assert sum("VLLM::EngineCore" in line for line in run.processes().values()) == 3
    os.kill(next(pid for pid, line in run.processes().items() if line.startswith("ray::") and "VllmActor" in line), signal.SIGKILL)
    assert run.process.wait(timeout=120) == 1, run.output
    run.assert_nothing_left()
    assert re.search(r"on rollout-actor-\d: its process has ended", run.output)
    assert "Traceback" not in run.output
    assert "Traceback" in (run.run_dir / "error.txt").read_text()
