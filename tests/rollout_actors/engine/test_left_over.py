"""What is left of a lost engine's processes is ended, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import psutil
import pytest

from rollout_actors.engine import left_over
from rollout_actors.engine.left_over import EngineProcesses, write_process_down

pytestmark = pytest.mark.slow

PROGRAM = """
import time
from rollout_actors.engine.left_over import write_process_down
write_process_down()
print("written", flush=True)
time.sleep(600)
"""


@pytest.fixture
def processes(tmp_path, monkeypatch):
    monkeypatch.setattr(left_over.tempfile, "gettempdir", lambda: str(tmp_path))
    return EngineProcesses("a-run-0")


@pytest.fixture
def start():
    started = []

    def start(environment):
        program = [sys.executable, "-c", PROGRAM]
        environment = os.environ | environment
        started.append(
            subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, text=True)
        )
        assert started[-1].stdout.readline() == "written\n"
        return psutil.Process(started[-1].pid)

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_what_an_engine_left_is_killed_even_where_it_is_stopped_and_nothing_else(
    processes, start, tmp_path
):
    left, other = start(processes.environment), start({})
    left.suspend()
    (file,) = tmp_path.iterdir()
    (line,) = file.read_text().splitlines()
    pid, began = json.loads(line)
    assert pid == left.pid
    # A process that has the number of one that has ended.
    file.write_text(f"{line}\n{json.dumps([other.pid, began - 1])}\n")
    EngineProcesses("a-run-1").end_left()
    assert left.status() != psutil.STATUS_ZOMBIE
    processes.end_left()
    assert left.status() == psutil.STATUS_ZOMBIE, "it is this test's to collect"
    assert other.status() != psutil.STATUS_ZOMBIE
    assert not list(tmp_path.iterdir())
    processes.end_left()


def test_a_process_of_nobodys_place_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.delenv(left_over.FILE, raising=False)
    monkeypatch.chdir(tmp_path)
    write_process_down()
    assert not list(tmp_path.iterdir())
