"""Why an engine's process has ended: what vLLM logs in it is told by the process that started
it."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from fake_server import make_settings
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayTaskError

from rollout_actors.engine import failure as engine_failure
from rollout_actors.engine.actor import EngineActor
from rollout_actors.engine.failure import EngineEndedError, EngineFailures
from rollout_actors.engine.ray_calls import RayCall
from shared.errors import LostStartError, RolloutError, WeightSyncError

SMALL_CACHE = (
    "To serve at least one request with the model's max seq len (4096), (0.09 GiB KV cache is"
    " needed. Try increasing `gpu_memory_utilization` or decreasing `max_model_len`."
)
STARTED = "Engine core initialization failed. See root cause above. Failed core proc(s): {}"
WORKERS = (
    "WorkerProc initialization failed due to an exception in a background process. See stack trace"
    " for root cause."
)
ENGINE_CORE = """
import logging, multiprocessing, sys
from rollout_actors.engine.failure import write_failures_down

multiprocessing.current_process().name = "EngineCore"
write_failures_down()
try:
    raise ValueError(sys.argv[1])
except ValueError:
    logging.getLogger("vllm.v1.engine.core").exception("EngineCore failed to start.")
    raise
"""


@pytest.fixture
def failures(monkeypatch, tmp_path):
    """Those of an engine whose processes write their errors down; this process is one of them."""
    monkeypatch.setattr(engine_failure.tempfile, "gettempdir", lambda: str(tmp_path))
    failures = EngineFailures()
    for name, value in failures.environment.items():
        monkeypatch.setenv(name, value)
    logger = logging.getLogger("vllm")
    handlers = list(logger.handlers)
    engine_failure.write_failures_down()
    yield failures
    logger.handlers[:] = handlers


def log(*errors):
    """As a process of vLLM's logs what it ends with."""
    for error in errors:
        try:
            raise error
        except type(error):
            logging.getLogger("vllm.v1.engine.core").exception("EngineCore failed to start.")


def test_what_an_engines_process_logs_before_it_ends_is_told_by_the_one_that_started_it(failures):
    command = [sys.executable, "-c", ENGINE_CORE, SMALL_CACHE]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert done.returncode == 1
    why, story = failures.of_error(RuntimeError(STARTED.format("{'EngineCore': 1}")))
    assert why.startswith(
        f"EngineCore: ValueError: {SMALL_CACHE} (gpu_memory_utilization is"
        " rollout_matching.vllm.gpu_memory_utilization, or "
    )
    keys = r"max_model_len is rollout_matching\.vllm\.max_model_len, .*global_max_length"
    assert re.search(keys, why)
    assert story.startswith("Traceback") and f"ValueError: {SMALL_CACHE}" in story


EARLIER = ValueError("of an earlier call, which the engine has survived")
NO_WEIGHTS = OSError("no such weights")
SILENT = (
    "without an error, probably killed, often for lack of memory; see the output of the process"
)


def test_an_engine_that_was_killed_is_said_to_have_been(failures):
    killed = RuntimeError(STARTED.format("{'EngineCore': -9}"))
    reason = "EngineCore was ended by SIGKILL, which is the system's signal when memory runs out"
    assert failures.of_error(killed) == (reason, "")
    assert failures.of_end({"EngineCore": -signal.SIGSEGV})[0] == "EngineCore was ended by SIGSEGV"


@pytest.mark.parametrize(
    ("logged", "codes", "was_killed"),
    [
        ([], "{'EngineCore': -9}", True),
        ([], "{}", True),
        ([], "{'EngineCore': 1}", False),
        ([], "{'EngineCore': -11}", False),
        ([NO_WEIGHTS], "{'EngineCore': -15}", False),
    ],
)
def test_a_start_may_go_better_again_only_where_the_process_was_killed(
    failures, logged, codes, was_killed
):
    log(*logged)
    assert failures.was_killed(RuntimeError(STARTED.format(codes))) is was_killed
    assert not failures.was_killed(ValueError("bad model"))


@pytest.mark.parametrize(
    ("logged", "error", "told"),
    [
        (
            [EARLIER],
            TimeoutError("Timed out waiting for engine core processes"),
            "TimeoutError: Timed out waiting for engine core processes",
        ),
        ([], RuntimeError("See stack trace"), "RuntimeError: See stack trace"),
        ([], RuntimeError(STARTED.format("{}")), f"EngineCore ended {SILENT}"),
    ],
    ids=["this process's own", "one that nobody says more of", "the end of a silent process"],
)
def test_an_error_is_told_as_it_is_where_no_process_says_more(failures, logged, error, told):
    log(*logged)
    assert failures.of_error(error) == (told, "")


@pytest.mark.parametrize(
    ("logged", "status", "told"),
    [
        ([EARLIER, NO_WEIGHTS, RuntimeError(WORKERS)], 1, "OSError: no such weights"),
        ([RuntimeError("CUDA error")], -signal.SIGTERM, "RuntimeError: CUDA error"),
        ([], 7, f"EngineCore ended with status 7 {SILENT}"),
    ],
    ids=["the process that failed first", "one that is ended because it failed", "silent"],
)
def test_an_end_is_told_by_the_error_that_is_its_cause(failures, logged, status, told):
    log(*logged)
    why, story = failures.of_end({"EngineCore": status})
    assert why.endswith(told)
    assert bool(story) == bool(logged)


def test_half_a_line_of_a_process_that_was_killed_does_not_hide_the_others(failures):
    log(NO_WEIGHTS)
    with Path(failures.environment[engine_failure.FILE]).open("a") as file:
        file.write('{"process": "Eng')
    assert failures.of_end({"EngineCore": 1})[0].endswith("OSError: no such weights")


def test_an_error_of_hours_ago_is_not_told_as_the_end(failures, monkeypatch):
    log(EARLIER)
    now_s = time.time()
    monkeypatch.setattr(engine_failure.time, "time", lambda: now_s + 2 * 3600)
    assert "without an error" in failures.of_end({"EngineCore": 1})[0]
    log(NO_WEIGHTS)
    assert failures.of_end({"EngineCore": 1})[0].endswith(": OSError: no such weights")


def test_what_is_written_down_is_bounded_and_the_last_errors_are_kept(failures, monkeypatch):
    monkeypatch.setattr(engine_failure, "MAX_BYTES", 10_000)
    log(*(ValueError(f"number {number} " + "x" * 1000) for number in range(50)))
    assert "number 49 " in failures.of_end({"EngineCore": 1})[0]
    file = Path(failures.environment[engine_failure.FILE])
    assert file.stat().st_size < 15_000
    failures.remove()
    failures.remove()
    assert not file.exists()


def test_without_somebody_who_asks_nothing_is_written_down(monkeypatch):
    monkeypatch.delenv(engine_failure.FILE, raising=False)
    handlers = list(logging.getLogger("vllm").handlers)
    engine_failure.write_failures_down()
    assert logging.getLogger("vllm").handlers == handlers


@pytest.mark.engine
def test_an_engine_that_has_ended_is_told_of_twice_and_leaves_no_file(failures, tmp_path):
    """Whoever has it ends without closing it (`EngineActor._or_exit`). With the engine tests,
    because it imports vllm.
    """
    from rollout_actors.engine.vllm_engine import VllmEngine

    engine = VllmEngine("rollout-actor-0", make_settings(tmp_path))
    engine._failures = failures
    engine._llm = SimpleNamespace(
        errored=True, engine_core=SimpleNamespace(resources=SimpleNamespace(engine_manager=None))
    )
    log(NO_WEIGHTS)
    assert [engine.why_dead.rpartition(": ")[2] for _ in range(2)] == ["no such weights"] * 2
    assert not list(tmp_path.glob("rollmatch-engine-*"))


class DeadEngine:
    """An engine whose process has ended before it answered."""

    is_dead, process = True, ""

    async def generate(self, requests):
        raise EngineEndedError("EngineCore was ended by SIGKILL")


def test_an_actor_whose_engine_has_died_says_why_before_it_ends():
    """And does not ask Ray to end it, which would tell the callers that it was asked to."""
    later = []

    async def call():
        asyncio.get_running_loop().call_later = lambda seconds, *work: later.append(work)
        await EngineActor(DeadEngine).generate()

    with pytest.raises(EngineEndedError, match="EngineCore was ended by SIGKILL"):
        asyncio.run(call())
    assert later == [(os._exit, 1)]


@pytest.mark.parametrize("kind", [RolloutError, WeightSyncError])
def test_the_run_is_told_why_the_engine_has_ended_and_its_whole_story(kind):
    cause = EngineEndedError("EngineCore: ValueError: no room")
    raised = RayTaskError("generate", "Traceback ...", cause)
    error = RayCall("generate", None, "", kind).translate_error("rollout-actor-1", raised)
    assert isinstance(error, kind)
    assert re.search(r"ended \(EngineCore: ValueError: no room\); .*log .*memory", error.message)


def test_an_actor_that_is_lost_with_its_node_is_reported_with_the_node():
    text = "The actor died because its node has died. Node Id: 5d37"
    gcs = Path(ray.__file__).parent / "core" / "src" / "ray" / "gcs" / "gcs_server"
    assert text.partition(" Node Id")[0].encode() in gcs.read_bytes(), "Ray's own words"
    died = ActorDiedError(ActorDiedErrorContext(actor_id=b"a" * 16, error_message=text))
    error = RayCall("generate", None, "", RolloutError).translate_error("rollout-actor-1", died)
    assert "its node was lost" in error.message and "`ray start`" in error.message
    alone = RayCall("generate", None, "", RolloutError).translate_error("actor", ActorDiedError())
    assert "its node was lost" not in alone.message


def test_an_actor_that_rays_memory_monitor_ended_is_reported_with_the_largest_processes():
    words = " due to the node running low on memory. Memory on the node (IP: "
    raylet = Path(ray.__file__).parent / "core" / "src" / "ray" / "raylet" / "raylet"
    assert all(part.encode() in raylet.read_bytes() for part in words.split(". ")), (
        "Ray's own words"
    )
    text = (
        f"4 worker(s) were killed{words}192.0.2.2, ID: ef5) was 22.46GB used / 23.59GB limit (0.95)"
        "\nOOM kill reason: Memory usage exceeded threshold\n- bytes unsealed: 0\n"
        "Top 10 memory users: PID\tMEM(GB)\tCOMMAND\n2791\t2.84\tray::accumulate\n"
        "2807\t1.43\tVLLM::EngineCore\n2815\t1.37\tpytest -q\n2899\t1.00\tmypy\nRefer to ..."
    )
    died = ActorDiedError(ActorDiedErrorContext(actor_id=b"a" * 16, error_message=text))
    call = RayCall("start", None, "", RolloutError, gone=LostStartError)
    for raised in (died, OutOfMemoryError(text)):  # after the constructor, and in it
        error = call.translate_error("learner", raised)
        assert isinstance(error, LostStartError)
        assert "22.46GB used / 23.59GB limit" in error.message
        assert "2.84 ray::accumulate; 1.43 VLLM::EngineCore; 1.37 pytest -q)" in error.message
        assert "unsealed" not in error.message and "preflight" in error.message
