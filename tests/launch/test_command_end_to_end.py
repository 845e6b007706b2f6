"""The command itself, on real processes: what it leaves behind when it ends well, is interrupted,
or loses an actor (issue 2).
"""

import json
import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
from command_support import commands
from process_family import descendants_of, is_engine, is_warm_server
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForImageTextToText

from rollout_actors.warm import warm_python

pytestmark = pytest.mark.engine


SHORT = ["training.max_steps=4", "stage2_ab.schedule.warmup_steps=1"]


@pytest.fixture
def command(start_command, tmp_path, warm_checkpoint, demo_data):
    return partial(
        start_command, tmp_path, warm_checkpoint, demo_data, "rollout_matching.decode_batch_size=2"
    )


@pytest.fixture(scope="module")
def undisturbed(orphans_are_adopted, tmp_path_factory, warm_checkpoint, demo_data):
    """A run to its end, which left no process."""
    with commands() as start:
        folder = tmp_path_factory.mktemp("undisturbed")
        changes = (
            "rollout_matching.decode_batch_size=2",
            "telemetry.loggers=[jsonl,tensorboard]",
        )
        run = start(folder, warm_checkpoint, demo_data, *changes, *SHORT)
        assert run.process.wait(timeout=600) == 0, run.output
        run.assert_nothing_left()
    return run


@pytest.mark.long
def test_a_run_writes_its_folder_saves_a_checkpoint_and_leaves_no_process(undisturbed):
    run = undisturbed
    folder = run.run_dir
    steps = run.lines("metrics.jsonl")
    assert [(step["step"], step["channel"]) for step in steps] == [
        (1, "A"),
        (2, "B"),
        (3, "B"),
        (4, "B"),
    ]
    started = re.findall(
        r"^start     (.+): \d+\.\d s, \d+ s in total$", run.output, flags=re.MULTILINE
    )
    assert started == [
        "checks",
        "Ray",
        "room in the cluster",
        "learner",
        "rollout-actor-0, rollout-actor-1, rollout-actor-2",
    ]
    assert all("loss/total" in step and "time/step_s" in step for step in steps)
    plans = [json.loads(line) for line in (folder / "plan.jsonl").read_text().splitlines()]
    assert plans[1]["engines"] == ["rollout-actor-0", "rollout-actor-1", "rollout-actor-2"]
    assert plans[1]["sync_mode"] == "full"
    assert plans[1]["rollout_seed_base"] > 0
    assert plans[1]["rounds"] == [[[0, 6]], [[6, 12]]]
    assert json.loads((folder / "config.json").read_text())["training"]["max_steps"] == 4
    assert len((folder / "evaluations.jsonl").read_text().splitlines()) == 2
    events = json.loads((folder / "timeline.json").read_text())
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert tracks == {"driver", "learner", *plans[1]["engines"]}
    closing = (
        r"demo: val F1@0\.5 warm-up \d\.\d\d -> final \d\.\d\d, with names \d\.\d\d -> \d\.\d\d"
        r" \(B steps: 3, wall: \d+ s\)"
    )
    assert re.fullmatch(closing, run.output.strip().splitlines()[-1])
    logged = EventAccumulator(str(folder / "loggers" / "tensorboard"), {})
    logged.Reload()
    losses = {event.step: event.value for event in logged.Scalars("loss/total")}
    assert losses == {step["step"]: pytest.approx(step["loss/total"]) for step in steps}
    assert len(logged.Scalars("val/f1")) == 2 and logged.Images("held_out/0")
    AutoModelForImageTextToText.from_pretrained(folder / "checkpoint")


def assert_loads_elsewhere(checkpoint):
    """In transformers and in vLLM, in a process that neither sees this project nor loads its
    plugin.
    """
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
    environment = os.environ | {
        "VLLM_PLUGINS": "",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    done = subprocess.run(
        [*warm_python.command(), "-c", code],
        capture_output=True,
        text=True,
        cwd="/",
        env=environment,
        timeout=240,
        check=False,
    )
    assert "loaded elsewhere" in done.stdout, done.stderr[-3000:]


@pytest.mark.long
def test_a_run_that_is_interrupted_while_its_learner_generates_leaves_the_round_and_saves_its_weights(
    command, demo_checkpoint
):
    """The weights would come behind the round, and `timeouts.interrupt_s` would be over."""
    # From random weights no rollout ends by itself: the round takes minutes.
    large = [
        "global_max_length=3500",
        "rollout_matching.max_new_tokens=3000",
        f"model.path={demo_checkpoint}",
    ]
    steps = [
        "training.max_steps=500",
        "stage2_ab.schedule.warmup_steps=1",
        "data.val=null",
        "timeouts.interrupt_s=40.0",
    ]
    run = command(*steps, *large, experiment="stage2_hf")
    run.wait_for("step    1/500")
    time.sleep(2.0)  # into the first round
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(timeout=240) == 130, run.output
    run.assert_nothing_left()
    assert f"saved     {run.run_dir / 'checkpoint_interrupted_000001'}" in run.output, run.output
    assert f"resume={run.run_dir}`" in run.output


@pytest.mark.long
def test_a_run_that_is_struck_by_four_faults_has_the_ledger_of_the_undisturbed_one(
    command, undisturbed
):
    faults = ["timeouts.stall_s=10.0", "timeouts.sync_phase_s=40.0", "resume.automatic=true"]
    # On a busy machine sound actors may be given up too.
    faults += ["rollout_matching.vllm.actors.max_restarts=100", "checkpoint.save_steps=1"]
    run = command(*SHORT, *faults, "resume=auto")
    run.wait_for("held out  after 1 steps")
    engines = [pid for pid, line in run.processes().items() if is_engine(line)]
    os.kill(engines[0], signal.SIGKILL)
    run.wait_for("step    2/4")
    actor = psutil.Process(run.process_called("EngineActor"))
    # Stopped, its engine does not see that the actor has been killed.
    (engine,) = [one for one in descendants_of(actor) if is_engine(" ".join(one.cmdline()))]
    for process in (engine, actor):
        process.suspend()
    run.wait_for("step    3/4")
    assert len([line for line in run.processes().values() if is_engine(line)]) <= 3, (
        "the one that takes its place has ended the stopped engine"
    )
    told = re.findall(r"(rollout-actor-\d) is back after \d+ s", run.output)
    assert len(told) >= 2
    run.wait_until(lambda: (run.run_dir / "checkpoints/step_000002").exists())
    os.kill(run.process_called("LearnerActor"), signal.SIGKILL)
    run.wait_for("restart   ")
    run.wait_for("resume    ")
    run.wait_for("ready     ", times=2)
    for pid in run.processes():
        with suppress(ProcessLookupError):  # Ray ends the others of a killed one
            os.kill(pid, signal.SIGKILL)
    run.process.wait(timeout=240)
    run.assert_nothing_left()

    again = command(*SHORT, *faults, "resume=auto")
    assert again.process.wait(timeout=400) == 0, again.output
    again.assert_nothing_left()
    ledgers = [(one.run_dir / "ledger.jsonl").read_bytes() for one in (again, undisturbed)]
    assert ledgers[0] == ledgers[1]
    steps = again.lines("metrics.jsonl")
    assert [step["loss/total"] for step in steps] == [
        step["loss/total"] for step in undisturbed.lines("metrics.jsonl")
    ]
    # The second loss is told with the step after that checkpoint, which may be done again.
    assert sum(step.get("rollout/num_replaced", 0) for step in steps) >= 1, steps
    events = json.loads((again.run_dir / "timeline.json").read_text())
    assert [event for event in events if event["name"] == "replace"]


@pytest.mark.long
def test_where_nobody_is_replaced_a_killed_actor_ends_the_run_and_a_signal_its_resumption(command):
    """Each with a checkpoint and without a process left; the signal within a minute."""
    steps = ["training.max_steps=500", "stage2_ab.schedule.warmup_steps=0", "data.val=null"]
    actors = "rollout_matching.vllm.actors"
    run = command(*steps, f"{actors}.num_actors=2", f"{actors}.max_restarts=0")
    run.wait_for("step    2/500")
    processes = run.processes()
    assert len([pid for pid, line in processes.items() if is_engine(line)]) == 2, (
        f"{processes}\n{run.output}"
    )
    os.kill(run.process_called("EngineActor"), signal.SIGKILL)
    assert run.process.wait(timeout=240) == 1, run.output
    run.assert_nothing_left()
    assert re.search(r"on rollout-actor-\d: its process has ended", run.output)
    assert "Traceback" not in run.output
    assert "Traceback" in (run.run_dir / "error.txt").read_text()
    (of_failure,) = run.run_dir.glob("checkpoint_interrupted_*")
    num_steps = int(of_failure.name.rpartition("_")[2])

    again = command(*steps, f"{actors}.num_actors=1", "resume=auto", of_a_user=True)
    again.wait_for(f"step {num_steps + 2:>4}/500")
    (server,) = filter(is_warm_server, psutil.Process(again.process.pid).children())
    (of_server,) = [Path(word) for word in server.cmdline() if word.startswith("/tmp/rollmatch-")]
    os.killpg(again.process.pid, signal.SIGHUP)  # as a closed terminal: Ray must not hear it
    assert again.process.wait(timeout=240) == 130, again.output
    again.assert_nothing_left()
    assert "interrupted" in again.output
    deadline = time.monotonic() + 240
    # the run's own server stays for some seconds
    while of_server.exists():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    (checkpoint,) = again.run_dir.glob("checkpoint_interrupted_*")
    assert checkpoint != of_failure, "a newer one takes its place"
    num_steps = int(checkpoint.name.rpartition("_")[2])
    numbers = [line["step"] for line in again.lines("metrics.jsonl")]
    assert numbers == list(range(1, len(numbers) + 1))
    # A step's line is written behind its sync: an update that was interrupted there has none.
    assert len(numbers) in (num_steps - 1, num_steps), "the weights of the last finished update"
    assert_loads_elsewhere(checkpoint)
    assert f"saved     {checkpoint}" in again.output
    assert not (again.run_dir / "error.txt").exists()
