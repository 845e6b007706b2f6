"""`python -m launch.train` as a process, and every process that came of it."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from process_family import ancestors_of, fork_of, is_warm_server

from rollout_actors.engine import warm_python

ROOT = Path(__file__).parents[2]
SET_CHILD_SUBREAPER = 36


@contextmanager
def adopted_orphans():
    """What a run leaves behind becomes a child of this process, instead of disappearing among everybody's."""
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 0)


@contextmanager
def commands():
    """Yield a function that starts a `Command`. At the end the processes that are left of them are killed."""
    started = []

    def start(*arguments, **options):
        started.append(Command(*arguments, **options))
        return started[-1]

    try:
        yield start
    finally:
        for pid in [pid for run in started for pid in run.processes()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Command:
    def __init__(self, folder, checkpoint, data, *overrides, experiment="stage2_3v1", options=(), of_a_user=False):
        """`data`: a folder of samples; None: the experiment is of an environment. `of_a_user`: the driver is not forked, and the run makes a warm server of
        its own."""
        self.before = {child.pid for child in psutil.Process().children(recursive=True)}
        self.run_dir = folder / "run"
        python = [sys.executable] if of_a_user else warm_python.command()
        command = [*python, "-m", "launch.train", *options, f"+experiment={experiment}"]
        command += [f"telemetry.run_dir={self.run_dir}", f"model.path={checkpoint}"]
        if data is not None:
            command += [f"data.train={data / 'train.jsonl'}", f"data.val={data / 'val.jsonl'}", "training.effective_batch_size=8"]
            command += ["stage2_ab.channel_b.rollouts_per_step=12", "stage2_ab.schedule.b_ratio=1.0", "training.packing_window=4"]
        command += ["cluster.dashboard=false", "telemetry.name=demo", *overrides]
        self.log = folder / "log"
        unset = ["OMP_NUM_THREADS", "OMP_WAIT_POLICY", *([warm_python.FOLDER] if of_a_user else [])]
        environment = {name: value for name, value in os.environ.items() if name not in unset} | {"COLUMNS": "400"}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=self.log.open("w"), stderr=subprocess.STDOUT, start_new_session=True)

    def lines(self, name):
        """A file of the run's folder, a line of JSON each."""
        return [json.loads(line) for line in (self.run_dir / name).read_text().splitlines()]

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
        found, children = {}, psutil.Process().children(recursive=True)
        shims = {fork.pid: child for child in children if (fork := fork_of(child)) is not None}
        for child in children:
            try:
                older = {child.pid, *(ancestor.pid for ancestor in ancestors_of(child, shims) if not is_warm_server(ancestor))} & self.before
                if not older and not is_warm_server(child) and child.status() != psutil.STATUS_ZOMBIE:
                    found[child.pid] = " ".join(child.cmdline())
            except psutil.NoSuchProcess:
                continue  # it ended while we looked
        return found

    def process_called(self, text, timeout_s=60):
        """A process with this in its command line, which Ray changes with every task."""
        deadline = time.monotonic() + timeout_s
        while not (found := [pid for pid, line in self.processes().items() if line.startswith("ray::") and text in line]):
            assert time.monotonic() < deadline, self.processes()
        return found[-1]

    def assert_nothing_left(self, timeout_s=20):
        deadline = time.monotonic() + timeout_s
        while left := self.processes():
            assert time.monotonic() < deadline, left
            time.sleep(0.2)
