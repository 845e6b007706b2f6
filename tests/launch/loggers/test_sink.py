"""A logger that hangs, fails or dies neither stops nor delays a step, and is told by name.

The package is a stand-in for wandb, whose own test is in test_packages.py.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
from config_support import configuration
from rich.console import Console

from launch.loggers import sink
from launch.loggers.events import MetricsEvent, RunEvent
from launch.loggers.sink import PACKAGES, missing_packages
from launch.processes.batch_algebra import batch_algebra
from launch.run_folder.telemetry import Telemetry
from shared.config import RunConfig
from shared.metrics import StepReport
from shared.run_files import Span
from shared.schedule import RunSchedule

pytestmark = pytest.mark.slow

STAND_IN = """
import json, os, pathlib, time

FOLDER = pathlib.Path(__file__).parent

def note(name, value):
    with (FOLDER / name).open("a") as file:
        file.write(json.dumps(value, default=str) + "\\n")

class Settings:
    def __init__(self, **settings):
        pass

class Run:
    id = "run-1"

    def log(self, values, step):
        if (FOLDER / "fails").exists():
            raise RuntimeError("quota exceeded\\nask somebody")
        if (FOLDER / "dies").exists():
            os._exit(3)
        note("logged", step)

    def finish(self, exit_code):
        note("finished", exit_code)

def init(**options):
    note("begun", options)
    while not (FOLDER / "answers").exists():
        time.sleep(0.02)
    return Run()

def teardown():
    pass
"""
METRICS = {
    "loss/total": 1.5,
    "packing/num_rows": 3.0,
    "packing/num_carried": 0.0,
    "time/learn_s": 0.5,
}


class Package:
    """The stand-in's folder: what it has noted, and how it behaves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "wandb.py").write_text(STAND_IN)

    def will(self, do: str) -> None:
        """`answers`, `fails` or `dies`, from now on."""
        (self.folder / do).touch()

    def noted(self, name: str) -> list[Any]:
        file = self.folder / name
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    folder = tmp_path / "stand_in"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")
    return Package(folder)


@pytest.fixture
def output() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def begin(tmp_path: Path, output: io.StringIO):
    """Begin a run, a trial of a sweep, whose logger is the stand-in."""

    def make(limit_s: float = 120.0) -> tuple[RunConfig, Telemetry]:
        config = configuration(
            tmp_path / "model",
            tmp_path / "data",
            tmp_path / "sweep" / "trial_3",
            telemetry__ray_metrics=False,
            telemetry__loggers=["wandb"],
            timeouts__logger_s=limit_s,
        )
        telemetry = Telemetry(config, Console(file=output, width=1000))
        telemetry.placed(batch_algebra(config, (1, 1)), ("a", "b"), learner_threads=2)
        return config, telemetry

    return make


def take_steps(config: RunConfig, telemetry: Telemetry, *numbers: int) -> None:
    """Take steps of channel A, after each of which its line is in metrics.jsonl."""
    for number in numbers:
        plan = RunSchedule(config).plan(number - 1)
        with telemetry.step(plan) as record:
            spans = (Span("learner", "learn", 1.0, 2.0),)
            record.report = StepReport(plan.step, plan.channel, 1, METRICS, spans)
    text = (config.telemetry.run_dir / "metrics.jsonl").read_text()
    assert json.loads(text.splitlines()[-1])["step"] == numbers[-1]


def wait_until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 240
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def warnings(output: io.StringIO) -> list[str]:
    lines = output.getvalue().splitlines()
    return [line.removeprefix("warning   ") for line in lines if line.startswith("warning")]


def assert_nothing_runs() -> None:
    children = psutil.Process().children(recursive=True)
    assert [one for one in children if "launch.loggers.process" in one.cmdline()] == []


def test_steps_go_on_while_a_logger_hangs_and_all_of_them_are_logged_when_it_answers(
    package, begin, output
):
    config, telemetry = begin()
    with telemetry:
        take_steps(config, telemetry, 1, 2, 3)
        assert package.noted("logged") == []
        package.will("answers")
    assert package.noted("logged") == [1, 2, 3]
    assert package.noted("finished") == [0]
    assert warnings(output) == []
    assert_nothing_runs()
    (begun,) = package.noted("begun")
    # A trial has a run of its own.
    assert (begun["name"], begun["project"], begun["id"]) == (
        "run-sweep-trial_3",
        "rollmatch",
        None,
    )
    assert begun["config"]["training"]["seed"] == 17
    assert (config.telemetry.run_dir / "loggers" / "wandb.id").read_text() == "run-1\n"


def test_a_logger_that_is_late_is_given_up_and_what_it_missed_is_counted(package, begin, output):
    config, telemetry = begin(limit_s=0.5)
    with telemetry:
        take_steps(config, telemetry, 1, 2)
        wait_until(lambda: bool(warnings(output)))
        assert_nothing_runs()
        take_steps(config, telemetry, 3)
    late, missed = warnings(output)
    assert late.startswith(
        "telemetry.loggers: wandb failed (no answer after timeouts.logger_s = 0.5 s), and the run"
        " continues without it; run `wandb login`"
    )
    assert re.search(r"^telemetry\.loggers: 3 of 3 events .* wandb; metrics\.jsonl ", missed)


@pytest.mark.parametrize(
    ("fault", "told"),
    [("fails", "(RuntimeError: quota exceeded)"), ("dies", "(its process has ended)")],
)
def test_a_logger_that_fails_or_dies_is_told_once_with_the_first_cause_and_where_to_look(
    package, begin, output, fault, told
):
    config, telemetry = begin()
    package.will("answers")
    with telemetry:
        take_steps(config, telemetry, 1)
        wait_until(lambda: package.noted("logged") == [1])
        package.will(fault)
        take_steps(config, telemetry, 2)
        wait_until(lambda: bool(warnings(output)))
        take_steps(config, telemetry, 3)
    failed, missed = warnings(output)
    assert told in failed
    log = config.telemetry.run_dir / "loggers" / "wandb.log"
    assert f"metrics.jsonl has all metrics, {log} has the output of wandb" in failed
    assert "2 of 3 events" in missed
    assert ("quota exceeded\nask somebody" in log.read_text()) == (fault == "fails")
    assert_nothing_runs()


def test_a_logger_that_is_slower_than_the_run_loses_events_and_not_the_run_its_memory(
    package, begin, output, monkeypatch
):
    monkeypatch.setattr(sink, "QUEUE_SIZE", 2)
    config, telemetry = begin()
    with telemetry:
        take_steps(config, telemetry, 1, 2, 3, 4, 5)
        package.will("answers")
    logged = package.noted("logged")
    assert logged == sorted(logged) and 1 <= len(logged) <= 3
    slow, missed = warnings(output)
    assert slow.startswith("telemetry.loggers: wandb is slower than the run, 2 events wait for it")
    assert f"{5 - len(logged)} of 5 events" in missed


def test_a_run_that_fails_waits_for_a_hanging_logger_a_short_time(
    package, begin, output, monkeypatch
):
    monkeypatch.setattr(sink, "EARLY_END_S", 0.2)
    config, telemetry = begin()
    take_steps(config, telemetry, 1)
    with pytest.raises(ZeroDivisionError), telemetry:
        raise ZeroDivisionError
    unfinished, missed = warnings(output)
    assert re.search(r"wandb failed \(.*timeouts\.logger_s = .* at most 0\.2 s", unfinished)
    assert "1 of 1 events" in missed
    assert_nothing_runs()


def test_a_logger_that_cannot_be_started_costs_the_run_nothing(begin, output):
    config, telemetry = begin()
    with telemetry:
        (config.telemetry.run_dir / "loggers").write_text("in the way")
        take_steps(config, telemetry, 1)
    failed, missed = warnings(output)
    assert re.search(r"wandb failed \(.*started \(\[Errno 17\]", failed)
    assert "1 of 1 events" in missed


def process_of_a_logger(limit_s: float) -> tuple[Connection, subprocess.Popen]:
    pipe, far_end = Pipe()
    with far_end:
        number = far_end.fileno()
        command = [sys.executable, "-m", "launch.loggers.process", str(number), str(limit_s)]
        return pipe, subprocess.Popen(command, pass_fds=[number])


def test_the_process_of_a_driver_that_was_killed_ends_its_run_as_failed(package, tmp_path):
    package.will("answers")
    pipe, process = process_of_a_logger(240.0)
    for event in (
        RunEvent("wandb", tmp_path, "demo", "run", 1, {}, {}),
        MetricsEvent(1, {"loss/total": 1.0}),
    ):
        pipe.send(event)
        assert pipe.poll(240) and pipe.recv() is None
    pipe.close()
    assert process.wait(240) == 0
    assert package.noted("finished") == [1]


def test_the_process_of_a_driver_that_was_killed_ends_though_its_package_hangs(package, tmp_path):
    pipe, process = process_of_a_logger(0.1)
    pipe.send(RunEvent("wandb", tmp_path, "demo", "run", 1, {}, {}))
    pipe.close()
    assert process.wait(240) == -signal.SIGALRM


def test_a_package_that_is_not_installed_is_named_with_the_command_that_installs_it(
    monkeypatch,
):
    def nothing_is(name: str) -> str:
        raise sink.PackageNotFoundError(name)

    monkeypatch.setattr(sink, "version", nothing_is)
    problems = list(missing_packages(("jsonl", *PACKAGES)))
    assert problems[0].startswith("telemetry.loggers: tensorboard ")
    assert "`pip install 'rollmatch[tensorboard]'`" in problems[0]
    assert len(problems) == 4

    def only_skinny_is(name: str) -> str:
        return "3.17.2" if name == "mlflow-skinny" else nothing_is(name)

    monkeypatch.setattr(sink, "version", only_skinny_is)
    assert list(missing_packages(("jsonl", "mlflow"))) == []
