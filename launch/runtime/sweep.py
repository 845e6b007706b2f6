"""Hydra sweeps: `python -m launch.train -m +experiment=stage2_3v1 training.seed=1,2
training.learning_rate=1e-3,2e-3`.

Every trial is a command of its own, one after the other, so that one that fails or runs out of
memory does not end the others and leaves nothing behind. Its folder is `trial_N` in the sweep's,
which is `telemetry.run_dir`; `trials.jsonl` there holds a line for each.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig
from rich.console import Console

from launch.cli import as_mapping
from shared.config import load_config
from shared.errors import ConfigError

TRIALS = "trials.jsonl"
MARGIN_S = 60.0
"""Given to an interrupted trial beyond its `timeouts.interrupt_s`, in which it saves its weights:
its processes end, one after the other.
"""


def is_sweep() -> bool:
    """Whether Hydra runs this process's command once for each of several configurations
    (`--multirun`).
    """
    return bool(HydraConfig.get().mode == RunMode.MULTIRUN)


def run_trial(composed: DictConfig, console: Console) -> None:
    """The trial that Hydra is at, as a process; `composed` is its configuration. Its failure is
    written down, and that is all it does to the sweep.

    KeyboardInterrupt ends the trial and, when that is written down too, the sweep.
    """
    trial = HydraConfig.get()
    overrides, folder = list(trial.overrides.task), Path(trial.runtime.output_dir)
    console.print(
        f"trial     {trial.job.num}: {' '.join(overrides)}", markup=False, highlight=False
    )
    started_s = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "launch.train", *overrides, f"++telemetry.run_dir={folder}"]
    )
    interrupted = False
    try:
        process.wait()
    except KeyboardInterrupt:
        interrupted = True
        _end(process, end_s(composed))
    line = {
        "trial": trial.job.num,
        "overrides": overrides,
        "folder": str(folder),
        "exit_code": process.returncode,
        "interrupted": interrupted,
        "wall_s": time.monotonic() - started_s,
        **_last_report(folder),
    }
    with (folder.parent / TRIALS).open("a") as file:
        file.write(json.dumps(line) + "\n")
    if interrupted:
        # Hydra calls no callback then.
        print_summary(folder.parent)
        raise KeyboardInterrupt


def end_s(composed: DictConfig) -> float:
    """Longest time in seconds that the trial has to end after the sweep was interrupted."""
    try:
        config = load_config(as_mapping(composed))
    except ConfigError:
        return MARGIN_S  # the trial says so itself, and has nothing to save
    return config.timeouts.interrupt_s + MARGIN_S


def _end(process: subprocess.Popen[bytes], end_s: float) -> None:
    """Tell it to, and kill it where it has not after `end_s` seconds."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=end_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_report(folder: Path) -> dict[str, Any]:
    """The figures of the trial's last held-out report; nothing where there is none."""
    try:
        lines = (folder / "evaluations.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return {}
    return json.loads(lines[-1]) if lines else {}


def print_summary(folder: Path) -> int:
    """A line for every trial that has begun, with the headline of its last held-out report or how
    it failed, and a table of what was tried and what came of it; the number of those that failed.
    """
    trials = [json.loads(line) for line in (folder / TRIALS).read_text().splitlines()]
    console = Console(soft_wrap=True)
    for trial in trials:
        headline = (
            f"{trial['headline']} {trial['score']:.3f}"
            if "headline" in trial
            else "no held-out report"
        )
        end = (
            "interrupted"
            if trial["interrupted"]
            else (
                headline
                if trial["exit_code"] == 0
                else f"failed with exit status {trial['exit_code']}"
            )
        )
        console.print(
            f"trial     {trial['trial']}: {end}, {trial['wall_s']:.0f} s, {trial['folder']}",
            markup=False,
            highlight=False,
        )
    for row in trial_table(trials):
        console.print(row, markup=False, highlight=False)
    failed = sum(trial["exit_code"] != 0 for trial in trials)
    console.print(
        f"sweep     {len(trials) - failed} of {len(trials)} trials finished; {folder / TRIALS}",
        highlight=False,
    )
    return failed


def trial_table(trials: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of a table over trials: the keys in which they differ, the updates before the last
    report, and its headline.

    The best figure of each headline is marked; a trial of another kind has its own. There is no
    table where no trial has a report.
    """
    names = list(dict.fromkeys(trial["headline"] for trial in trials if "headline" in trial))
    if not names:
        return []
    settings = [
        dict(override.lstrip("+").partition("=")[::2] for override in trial["overrides"])
        for trial in trials
    ]
    keys = [
        key
        for key in dict.fromkeys(chain(*settings))
        if len({one.get(key) for one in settings}) > 1
    ]
    best = {
        name: max(trial["score"] for trial in trials if trial.get("headline") == name)
        for name in names
    }
    rows = [("trial", *keys, "steps", *names)]
    for trial, own in zip(trials, settings, strict=True):
        figures = []
        for name in names:
            has_it = trial.get("headline") == name
            mark = " (best)" if has_it and len(trials) > 1 and trial["score"] == best[name] else ""
            figures.append(f"{trial['score']:.3f}{mark}" if has_it else "-")
        rows.append(
            (
                str(trial["trial"]),
                *(own.get(key, "-") for key in keys),
                str(trial.get("step", "-")),
                *figures,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


class SweepSummary(Callback):
    """Before a sweep its folder is looked at, and what came of it is printed after it. Exit status
    1 where a trial failed.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        if (Path(config.hydra.sweep.dir) / TRIALS).exists():
            print(
                f"telemetry.run_dir: {config.hydra.sweep.dir} holds a sweep already; choose another"
                " folder, or move that sweep away"
            )
            sys.exit(2)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        if print_summary(Path(config.hydra.sweep.dir)):
            sys.exit(1)
