"""Measure how many seconds a run loses to each kind of fault, and to a restart of the whole job.

    python -m benchmarks.recovery [--steps 16] [section.key=value ...]

Runs `experiment=stage2_3v1` once without a fault and once for each kind of fault, which happens
after half of the steps. The lost time is the difference of the wall times. Training losses and
rollouts must be identical to the bit (`rollmatch diff-runs`), else the exit status is 1. The
figures on CPU come from one run each, on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from launch.inspect.diff_runs import diff_runs
from launch.run_folder.ledger import LEDGER

STALL_S = 10.0
LIMIT_S = 900.0
RUN = "ROLLMATCH_BENCHMARK_RUN"
"""Environment variable with the run folder, which marks all processes of a run."""
Strike = Callable[[psutil.Process], None]


def end_one(name: str, number: signal.Signals, *, busy: str | None = None) -> Strike:
    """Return a fault that sends a signal to a process of the run.

    The process has `name` in its command line and, if given, `busy`: the name that Ray shows while
    the process executes a method.
    """
    names = [name] if busy is None else [name, busy]

    def strike(command: psutil.Process) -> None:
        # Not searched by parent: the process that started the actors' warm server may have ended.
        run = command.environ()[RUN]
        deadline = time.monotonic() + LIMIT_S
        found: list[psutil.Process] = []
        while not found:  # it may be restarting
            found = [one for one in psutil.process_iter() if _is_one(one, names, run)]
            if command.status() == psutil.STATUS_ZOMBIE or time.monotonic() > deadline:
                sys.exit(f"no process of the run is called {name}")
        found[-1].send_signal(number)

    return strike


def end_all(command: psutil.Process) -> None:
    """Kill the driver's process. The system then ends all other processes of the run."""
    command.kill()


FAULTS: dict[str, Strike | None] = {
    "none": None,
    "an engine is killed": end_one("EngineCore", signal.SIGKILL),
    "an engine hangs": end_one("EngineCore", signal.SIGSTOP),
    "a rollout actor is killed": end_one("ray::EngineActor", signal.SIGKILL, busy="ray::generate"),
    "a rollout actor is stopped": end_one("ray::EngineActor", signal.SIGSTOP, busy="ray::generate"),
    "the learner is killed": end_one("ray::LearnerActor", signal.SIGKILL),
    "the driver is killed, and the command given again": end_all,
}


def _is_one(process: psutil.Process, names: Sequence[str], run: str) -> bool:
    try:
        line = " ".join(process.cmdline())
        return any(name in line for name in names) and process.environ().get(RUN) == run
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def start(folder: Path, command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a run's command, and mark its processes so that faults can find them."""
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, env=os.environ | {RUN: str(folder.resolve())}
    )


def job(folder: Path, steps: int, *overrides: str) -> list[str]:
    """Return the command of a run, which resumes the run if it is repeated."""
    return [
        *(sys.executable, "-m", "launch.train", "+experiment=stage2_3v1", "resume=auto"),
        f"telemetry.run_dir={folder}",
        f"training.max_steps={steps}",
        "training.eval_steps=null",
        "stage2_ab.schedule.warmup_steps=2",
        *("checkpoint.save_steps=4", "resume.automatic=true"),
        f"timeouts.stall_s={STALL_S:g}",
        *overrides,
    ]


def run(folder: Path, steps: int, overrides: Sequence[str], strike: Strike | None) -> float:
    """Run the experiment to its end, with a fault after half of the steps.

    Return the wall time in seconds.
    """
    command = job(folder, steps, *overrides)
    started_s = time.monotonic()
    process = start(folder, command)
    try:
        if strike is not None:
            wait_for_steps(folder, steps // 2, process)
            strike(psutil.Process(process.pid))
        status = process.wait(timeout=LIMIT_S)
    finally:
        process.terminate()
    if strike is end_all:
        status = subprocess.run(
            command, stdout=subprocess.DEVNULL, timeout=LIMIT_S, check=False
        ).returncode
    if status != 0:
        sys.exit(f"the run in {folder} ended with status {status}; see its error.txt")
    return time.monotonic() - started_s


def compare(run: Path, other: Path) -> tuple[list[str], bool]:
    """Return lines that compare two runs, and whether the runs or their ledger files differ."""
    lines, parts = diff_runs(run, other)
    if (run / LEDGER).read_bytes() != (other / LEDGER).read_bytes():
        return [*lines, f"{LEDGER} differs between the two runs"], True
    return lines, parts


def wait_for_steps(folder: Path, steps: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until the run in the folder has written `steps` steps."""
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + LIMIT_S
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < steps:
        if process.poll() is not None or time.monotonic() > deadline:
            error = folder / "error.txt"
            why = error.read_text() if error.exists() else "and no error.txt"
            sys.exit(
                f"{metrics} has fewer than {steps} lines: exit status {process.returncode}, {why}"
            )
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--out", type=Path, default=None, help="folder of the runs; else temporary")
    options, overrides = parser.parse_known_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    differs = False
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.out or Path(temporary)
        print("| fault | wall, s | lost, s | replaced | ledger |\n|---|---|---|---|---|")
        quiet_s = 0.0
        for index, (fault, strike) in enumerate(FAULTS.items()):
            path = folder / str(index)
            wall_s = run(path, options.steps, overrides, strike)
            quiet_s = wall_s if strike is None else quiet_s
            metrics = [json.loads(line) for line in (path / "metrics.jsonl").open()]
            replaced = sum(line.get("rollout/num_replaced", 0) for line in metrics)
            lines, parts = compare(folder / "0", path)
            differs = differs or parts
            ledger = "differs" if parts else "equal"
            lost_s = wall_s - quiet_s
            print(
                f"| {fault} | {wall_s:.0f} | {lost_s:.0f} | {replaced:.0f} | {ledger} |", flush=True
            )
            if parts:
                print("\n".join(lines), file=sys.stderr)
    sys.exit(int(differs))


if __name__ == "__main__":
    main()
