"""Hydra sweeps: `python -m launch.train -m +experiment=stage2_3v1 training.seed=1,2
training.learning_rate=1e-3,2e-3`.

Trials are commands, one after the other, so that one that fails does not end the others. Their
folders are `trial_N` in `telemetry.run_dir`; `trials.jsonl` there holds a line for each.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig
from rich.console import Console

from launch.cli import as_mapping
from launch.runtime.console import make_console
from shared.config import load_config
from shared.config.secrets import hide, redacted
from shared.errors import ConfigError

TRIALS = "trials.jsonl"
MARGIN_S = 60.0
"""Seconds for an interrupted trial's processes to end, beyond its `timeouts.interrupt_s`."""


def is_sweep() -> bool:
    """Return whether this command is to run several configurations (`--multirun`)."""
    return bool(HydraConfig.get().mode == RunMode.MULTIRUN)


def run_trial(composed: DictConfig, console: Console) -> None:
    """Run the trial that Hydra is at, and record how it ended.

    Raises:
        KeyboardInterrupt: the trial has been ended and recorded.
    """
    trial = HydraConfig.get()
    overrides = list(trial.overrides.task)
    folder = Path(trial.runtime.output_dir)
    shown = _without_secrets(composed, overrides, folder.parent / "multirun.yaml")
    _print(console, f"trial     {trial.job.num}: {' '.join(shown)}")
    started_s = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "launch.train", *overrides, f"++telemetry.run_dir={folder}"]
    )
    interrupted = False
    try:
        process.wait()
    except KeyboardInterrupt:
        interrupted = True
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=end_s(composed))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    line = {
        "trial": trial.job.num,
        "overrides": shown,
        "folder": str(folder),
        "exit_code": process.returncode,
        "interrupted": interrupted,
        "wall_s": time.monotonic() - started_s,
    }
    with suppress(FileNotFoundError):
        reports = (folder / "evaluations.jsonl").read_text().splitlines()
        if reports:
            line |= json.loads(reports[-1])
    with (folder.parent / TRIALS).open("a") as file:
        file.write(json.dumps(line) + "\n")
    if interrupted:
        # Hydra calls no callback then.
        print_summary(folder.parent)
        raise KeyboardInterrupt


def _without_secrets(composed: DictConfig, overrides: Sequence[str], saved: Path) -> list[str]:
    """Mask the configuration's secrets in the overrides, and in the file that Hydra has saved."""
    with suppress(ConfigError):  # the trial reports it
        hide(as_mapping(composed))
    if saved.exists():
        saved.write_text(redacted(saved.read_text()))
    return [redacted(override) for override in overrides]


def end_s(composed: DictConfig) -> float:
    """Return the seconds that the trial has to end after the sweep was interrupted."""
    try:
        config = load_config(as_mapping(composed))
    except ConfigError:
        return MARGIN_S  # the trial reports it, and has nothing to save
    return config.timeouts.interrupt_s + MARGIN_S


def print_summary(folder: Path) -> int:
    """Print a line for every trial that has begun, and a table of settings and results.

    Returns the number of trials that failed.
    """
    trials = [json.loads(line) for line in (folder / TRIALS).read_text().splitlines()]
    console = make_console()
    for trial in trials:
        if trial["interrupted"]:
            end = "interrupted"
        elif trial["exit_code"]:
            end = f"failed with exit status {trial['exit_code']}"
        elif "headline" in trial and trial["score"] is None:
            end = f"no {trial['headline']}: too much of the last report failed"
        elif "headline" in trial:
            end = f"{trial['headline']} {trial['score']:.3f}"
        else:
            end = "no held-out report"
        line = f"trial     {trial['trial']}: {end}, {trial['wall_s']:.0f} s, {trial['folder']}"
        _print(console, line)
    for row in _trial_table(trials):
        _print(console, row)
    failed = sum(trial["exit_code"] != 0 for trial in trials)
    finished = f"{len(trials) - failed} of {len(trials)} trials finished"
    _print(console, f"sweep     {finished}; {folder / TRIALS}")
    return failed


def _has_score(trial: Mapping[str, Any], name: str) -> bool:
    """Tell whether the trial's last report has this headline, and a score of it."""
    return trial.get("headline") == name and trial["score"] is not None


def _trial_table(trials: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tabulate the keys in which trials differ, their last reports' updates and headlines."""
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
        if len({setting.get(key) for setting in settings}) > 1
    ]
    best = {
        name: max(
            (trial["score"] for trial in trials if _has_score(trial, name)),
            default=None,
        )
        for name in names
    }
    rows = [["trial", *keys, "steps", *names]]
    for trial, setting in zip(trials, settings, strict=True):
        row = [str(trial["trial"]), *(setting.get(key, "-") for key in keys)]
        row.append(str(trial.get("step", "-")))
        for name in names:
            if not _has_score(trial, name):
                row.append("-")
                continue
            is_best = len(trials) > 1 and trial["score"] == best[name]
            row.append(f"{trial['score']:.3f}" + (" (best)" if is_best else ""))
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _print(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False)


class SweepSummary(Callback):
    """Refuses a folder that holds a sweep, and prints the results; exit status 1 if some failed."""

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
