"""Why an engine's process has ended: what vLLM logs in it is told by the process that started
it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_server import make_settings
from ray.exceptions import RayTaskError

from rollout_actors.engine import failure as engine_failure
from rollout_actors.engine.actor import EngineActor
from rollout_actors.engine.failure import EngineEndedError, EngineFailures
from rollout_actors.engine.ray_calls import RayCall
from shared.errors import RolloutError, WeightSyncError

SMALL_CACHE = (
    "To serve at least one request with the model's max seq len (4096), (0.09 GiB KV cache is"
    " needed, which is larger than the available KV cache memory (0.0 GiB). Based on the available"
    " memory, the estimated maximum model length is 16. Try increasing `gpu_memory_utilization` or"
    " decreasing `max_model_len` when initializing the engine."
)
STARTED = RuntimeError(
    "Engine core initialization failed. See root cause above. Failed core proc(s):"
    " {'EngineCore': 1}"
)
KILLED = RuntimeError(
    "Engine core initialization failed. See root cause above. Failed core proc(s):"
    " {'EngineCore': -9}"
)
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
    monkeypatch.setattr(engine_failure.tempfile, "gettempdir", lambda: str(tmp_path))
    failures = EngineFailures()
    for name, value in failures.environment.items():
        monkeypatch.setenv(name, value)
    yield failures
    logger = logging.getLogger("vllm")
    for handler in [one for one in logger.handlers if isinstance(one, engine_failure.FailureLog)]:
        logger.removeHandler(handler)


def log(error):
    """As a process of vLLM's logs what it ends with."""
    try:
        raise error
    except type(error):
        logging.getLogger("vllm.v1.engine.core").exception("EngineCore failed to start.")


def test_what_an_engines_process_logs_before_it_ends_is_told_by_the_one_that_started_it(failures):
    done = subprocess.run(
        [sys.executable, "-c", ENGINE_CORE, SMALL_CACHE],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    why, story = failures.of_error(STARTED)
    assert why.startswith(
        f"EngineCore: ValueError: {SMALL_CACHE} (gpu_memory_utilization is"
        " rollout_matching.vllm.gpu_memory_utilization, or "
    )
    assert "max_model_len is rollout_matching.vllm.max_model_len, or global_max_length" in why
    assert story.startswith("Traceback") and f"ValueError: {SMALL_CACHE}" in story


def test_an_engine_that_was_killed_is_said_to_have_been(failures):
    assert failures.of_error(KILLED) == (
        "EngineCore was ended by SIGKILL, as the system does where memory runs out",
        "",
    )
    assert failures.of_end({"EngineCore": -signal.SIGSEGV})[0] == "EngineCore was ended by SIGSEGV"


def test_an_error_of_this_process_is_told_as_it_is(failures):
    engine_failure.write_failures_down()
    log(ValueError("of an earlier call, which the engine has survived"))
    assert failures.of_error(TimeoutError("Timed out waiting for engine core processes")) == (
        "TimeoutError: Timed out waiting for engine core processes",
        "",
    )


def test_an_error_that_nobody_says_more_of_is_told_as_it_is(failures):
    assert failures.of_error(RuntimeError("See stack trace")) == (
        "RuntimeError: See stack trace",
        "",
    )


def test_half_a_line_of_a_process_that_was_killed_does_not_hide_the_others(failures):
    engine_failure.write_failures_down()
    log(OSError("no such weights"))
    with Path(failures.environment[engine_failure.FILE]).open("a") as file:
        file.write('{"process": "Eng')
    assert failures.of_end({"EngineCore": 1})[0].endswith("OSError: no such weights")


def test_of_several_processes_the_one_that_failed_first_is_told(failures):
    engine_failure.write_failures_down()
    log(ValueError("of an earlier call, which the engine has survived"))
    log(OSError("no such weights"))
    log(RuntimeError(WORKERS))
    assert failures.of_end({"EngineCore": 1})[0].endswith(": OSError: no such weights")


def test_a_process_that_is_being_ended_because_it_failed_has_failed_and_was_not_killed(failures):
    engine_failure.write_failures_down()
    log(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert "RuntimeError: CUDA error" in failures.of_end({"EngineCore": -signal.SIGTERM})[0]


def test_a_process_that_wrote_nothing_is_said_to_have_ended_with_its_status(failures):
    assert failures.of_end({"EngineCore": 7}) == (
        (
            "EngineCore ended with status 7 and wrote no error, as where it is killed; see what it"
            " printed"
        ),
        "",
    )
    unknown = RuntimeError(
        "Engine core initialization failed. See root cause above. Failed core proc(s): {}"
    )
    assert (
        failures.of_error(unknown)[0]
        == "EngineCore ended and wrote no error, as where it is killed; see what it printed"
    )


def test_an_error_of_hours_ago_is_not_told_as_the_end(failures, monkeypatch):
    engine_failure.write_failures_down()
    log(ValueError("of an earlier call, which the engine has survived"))
    now_s = time.time()
    monkeypatch.setattr(engine_failure.time, "time", lambda: now_s + 2 * 3600)
    assert "wrote no error" in failures.of_end({"EngineCore": 1})[0]
    log(OSError("no such weights"))
    assert failures.of_end({"EngineCore": 1})[0].endswith(": OSError: no such weights")


def test_what_is_written_down_is_bounded_and_the_last_errors_are_kept(failures, monkeypatch):
    monkeypatch.setattr(engine_failure, "MAX_BYTES", 10_000)
    engine_failure.write_failures_down()
    for number in range(50):
        log(ValueError(f"number {number} " + "x" * 1000))
    assert "number 49 " in failures.of_end({"EngineCore": 1})[0]
    file = Path(failures.environment[engine_failure.FILE])
    assert file.stat().st_size < 15_000
    failures.remove()
    failures.remove()
    assert not file.exists()


def test_without_somebody_who_asks_nothing_is_written_down(failures, monkeypatch):
    monkeypatch.delenv(engine_failure.FILE)
    engine_failure.write_failures_down()
    log(ValueError("x"))
    assert failures.first_cause() is None


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
    engine_failure.write_failures_down()
    log(OSError("no such weights"))
    assert [engine.why_dead.rpartition(": ")[2] for _ in range(2)] == ["no such weights"] * 2
    assert not list(tmp_path.glob("rollmatch-engine-*"))


class DeadEngine:
    """An engine whose process has ended before it answered."""

    is_dead, process = True, ""

    async def generate(self, requests):
        raise EngineEndedError("EngineCore was ended by SIGKILL")


def test_an_actor_whose_engine_has_died_says_why_before_it_ends(monkeypatch):
    """And does not ask Ray to end it, which would tell the callers that it was asked to."""
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)

    async def call():
        asyncio.get_running_loop().call_later = lambda seconds, *work: later.append(
            (seconds, *work)
        )
        await EngineActor(DeadEngine).generate()

    later = []
    with pytest.raises(EngineEndedError, match="EngineCore was ended by SIGKILL"):
        asyncio.run(call())
    assert ended == [] and [work[1:] for work in later] == [(os._exit, 1)]


@pytest.mark.parametrize("kind", [RolloutError, WeightSyncError])
def test_the_run_is_told_why_the_engine_has_ended_and_its_whole_story(kind):
    cause = EngineEndedError("EngineCore: ValueError: no room")
    error = RayCall("generate", None, "", kind).translate_error(
        "rollout-actor-1", RayTaskError("generate", "Traceback ...", cause)
    )
    assert isinstance(error, kind)
    assert (
        error.message
        == "its process has ended (EngineCore: ValueError: no room); check its log and the"
        " machine's memory"
    )
