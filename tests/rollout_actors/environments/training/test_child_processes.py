"""Processes that an environment starts end with it, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rollout_actors.environments.training.child_processes import (
    VARIABLE,
    processes_of,
    variables_of,
)

STARTS = """
import multiprocessing, subprocess, sys, time
from rollout_actors.environments.training.child_processes import EnvironmentProcesses

before = subprocess.Popen(["sleep", "600"])
processes = EnvironmentProcesses()
one = subprocess.Popen(["sleep", "600"], start_new_session=True)
deep = subprocess.run(["sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True)
fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
fork.start()
print(before.pid, one.pid, deep.stdout.strip(), fork.pid, flush=True)
sys.stdin.readline()
processes.end("mine")
sys.stdin.readline()
"""


@pytest.fixture
def started():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", STARTS], **pipes) as process:
        before, *pids = (psutil.Process(int(pid)) for pid in process.stdout.readline().split())
        yield process, before, pids
        process.kill()
        for one in (before, *pids):
            if one.is_running():
                one.kill()


def wait_until_ended(processes):
    deadline = time.monotonic() + 120
    while any(one.is_running() and one.status() != "zombie" for one in processes):
        assert time.monotonic() < deadline, processes
        time.sleep(0.05)


def test_an_environments_processes_end_with_it_and_no_others(started):
    process, before, pids = started
    process.stdin.write("\n")
    process.stdin.flush()
    wait_until_ended(pids)
    assert before.is_running()


def test_those_that_execute_a_program_end_with_a_process_that_is_killed(started):
    process, before, pids = started
    os.kill(process.pid, signal.SIGKILL)
    wait_until_ended(pids[:2])
    assert before.is_running()


def test_a_process_that_only_now_executes_its_program_is_recognised(monkeypatch):
    monkeypatch.setenv(VARIABLE, "a mark")
    for _ in range(50):
        with subprocess.Popen(["sleep", "60"]) as process:
            found = variables_of(Path(f"/proc/{process.pid}"))
            process.kill()
        assert f"{VARIABLE}=a mark".encode() in found


def test_an_environment_that_leaves_processes_is_named(caplog):
    with processes_of("mine"):
        subprocess.Popen(["sleep", "60"])
    assert "mine left 1 processes" in caplog.text
    assert "(sleep)" in caplog.text
