"""Hydra sweeps: `python -m launch.train -m +experiment=stage2_3v1 training.seed=1,2
training.learning_rate=1e-3,2e-3`.

Hydra composes the trials. Each runs as a separate command, so that a failed trial does not end the
others. By default as many trials run at a time as this machine's GPUs and CPUs permit. The trials'
folders are `trial_N` in `telemetry.run_dir`. After each trial a line is added to `trials.jsonl` in
`telemetry.run_dir`.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent import futures
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from launch.cli import as_mapping, quoted
from launch.processes.placement import Resources, plan_placement
from launch.reports.trials import Line, settings_of, tables
from launch.run_folder.console import make_console
from launch.tools.demo.once import make_missing_demo_files
from shared.config import RunConfig, load_config
from shared.config.secrets import hide, redacted
from shared.errors import ConfigError, RecordError
from shared.protocols import PR_SET_PDEATHSIG
from shared.run_files import read_lines, read_steps

TRIALS = "trials.jsonl"
MARGIN_S = 60.0
"""Seconds for an interrupted trial's processes to end, beyond its `timeouts.interrupt_s`."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One training run of a Hydra sweep, with its own configuration."""

    number: int
    overrides: tuple[str, ...]
    shown: tuple[str, ...]
    """The trial's overrides of the configuration, without secrets."""
    folder: Path
    config: RunConfig | None
    """The trial's configuration; None if it is invalid. The trial itself then reports why."""

    @property
    def end_s(self) -> float:
        """Seconds in which the trial must end after the sweep was interrupted."""
        return MARGIN_S + (self.config.timeouts.interrupt_s if self.config else 0.0)


@dataclass(frozen=True, slots=True)
class Share:
    """The part of this machine that a trial has. Example: `Share(4.0, ("0", "1"))`."""

    cpus: float
    """Number of CPU cores."""
    gpus: tuple[str, ...]
    """GPU names, as in `CUDA_VISIBLE_DEVICES`."""


@dataclass(frozen=True, slots=True)
class Running:
    """A trial of a sweep that is running, with its process and its share of the machine."""

    trial: Trial
    share: Share
    process: subprocess.Popen[bytes]
    started_s: float


_trials: list[Trial] = []
"""The trials that Hydra has composed so far."""


def is_sweep() -> bool:
    """Return whether this command is to run several configurations (`--multirun`)."""
    return bool(HydraConfig.get().mode == RunMode.MULTIRUN)


def add_trial(composed: DictConfig, console: Console) -> None:
    """Add the configuration that Hydra has just composed to the sweep as a trial.

    Raises:
        ConfigError: the folder already has a sweep, and this sweep does not continue it.
    """
    job = HydraConfig.get()
    folder = Path(job.runtime.output_dir)
    continues = OmegaConf.select(composed, "resume.run") == "auto"
    if continues and "${now" in OmegaConf.to_yaml(composed.telemetry):
        raise ConfigError(
            "resume.run: auto looks for the sweep in telemetry.run_dir, which has a new name at"
            " every start; set telemetry.run_dir=FOLDER"
        )
    if not continues and (folder.parent / TRIALS).exists():
        raise ConfigError(
            f"telemetry.run_dir: {folder.parent} holds a sweep already; continue it with"
            " resume=auto, choose another folder, or move that sweep away"
        )
    config = None
    with suppress(ConfigError):  # which the trial itself reports
        mapping = as_mapping(composed)
        hide(mapping)
        config = load_config(mapping)
    hydras = folder.parent / "multirun.yaml"
    if hydras.exists():
        hydras.write_text(redacted(hydras.read_text()))
    if config is not None:
        # Made here, because two trials would make them at the same time.
        make_missing_demo_files(config, lambda line: _print(console, line))
    overrides = tuple(job.overrides.task)
    shown = tuple(redacted(override) for override in overrides)
    _trials.append(Trial(job.job.num, overrides, shown, folder, config))


def run_trials(console: Console) -> None:
    """Run the sweep's trials, if any, and print their results; exit with 1 if some failed.

    Raises:
        KeyboardInterrupt: the sweep was interrupted; its running trials have been ended and
            recorded.
    """
    if not _trials:
        return
    folder = _trials[0].folder.parent
    ended = last_lines(folder)
    waiting = deque(trial for trial in _trials if not _is_complete(trial, ended))
    for trial in _trials:
        if trial not in waiting:
            _print(console, f"trial     {trial.number}: complete, {trial.folder}")
    if waiting:
        (folder / TRIALS).touch()
        try:
            _run(waiting, Room.of_machine(waiting), console)
        except KeyboardInterrupt:
            print_summary(folder, len(_trials))
            raise
    if print_summary(folder, len(_trials)):
        sys.exit(1)


def _is_complete(trial: Trial, ended: dict[int, Line]) -> bool:
    line = ended.get(trial.number)
    if line is None or line["exit_code"] != 0:
        return False
    return settings_of(line["overrides"]) == settings_of(trial.shown)


def _run(waiting: deque[Trial], room: Room, console: Console) -> None:
    running: dict[futures.Future[int], Running] = {}
    has_logs = room.holds_several(waiting)
    with futures.ThreadPoolExecutor(len(waiting)) as threads:
        try:
            while waiting or running:
                while waiting and (share := room.take(waiting[0])) is not None:
                    started = _start(waiting.popleft(), share, console, has_log=has_logs)
                    running[threads.submit(started.process.wait)] = started
                done, _ = futures.wait(running, return_when=futures.FIRST_COMPLETED)
                for future in done:
                    one = running.pop(future)
                    room.give_back(one.share)
                    _record(one, interrupted=False)
                    status = one.process.returncode
                    line = f"trial     {one.trial.number}: ended with exit status {status}"
                    _print(console, line)
        finally:  # some are running if the sweep is interrupted
            for one in running.values():
                one.process.send_signal(signal.SIGTERM)
            end_s = time.monotonic() + max((one.trial.end_s for one in running.values()), default=0)
            for future, one in running.items():
                try:
                    future.result(timeout=end_s - time.monotonic())
                except futures.TimeoutError:
                    one.process.kill()
                    future.result()
                _record(one, interrupted=one.process.returncode != 0)


def _start(trial: Trial, share: Share, console: Console, *, has_log: bool) -> Running:
    log = trial.folder.with_suffix(".log")
    where = f", on GPU {', '.join(share.gpus)}" if share.gpus else ""
    where += f", output in {log}" if has_log else ""
    _print(console, f"trial     {trial.number}: {' '.join(trial.shown)}{where}")
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(share.gpus)} if share.gpus else {}
    libc = ctypes.CDLL(None)
    with log.open("ab") if has_log else nullcontext() as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "launch.train", *trial.overrides),
                f"telemetry.run_dir={quoted(str(trial.folder))}",
            ],
            env=os.environ | environment,
            stdout=output,
            stderr=output and subprocess.STDOUT,
            # If the sweep is killed, the trial saves its weights and ends.
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
        )
    return Running(trial, share, process, time.monotonic())


def _record(one: Running, *, interrupted: bool) -> None:
    """Append the line of a trial that has ended to `trials.jsonl`.

    The line has the trial's last loss and its last held-out report.
    """
    trial = one.trial
    line = {
        "trial": trial.number,
        "overrides": trial.shown,
        "folder": str(trial.folder),
        "exit_code": one.process.returncode,
        "interrupted": interrupted,
        "wall_s": time.monotonic() - one.started_s,
    }
    try:
        steps = read_steps(trial.folder / "metrics.jsonl")
        reports = read_steps(trial.folder / "evaluations.jsonl")
    except (OSError, RecordError) as error:
        # Damaged files of one trial must not end the others.
        line["error"] = str(error)
    else:
        if steps:
            line["step"] = steps[-1]["step"]
            if "loss/total" in steps[-1]:
                line["loss"] = steps[-1]["loss/total"]
        if reports:
            line |= reports[-1]
    with (trial.folder.parent / TRIALS).open("a") as file:
        file.write(json.dumps(line) + "\n")


class Room:
    """The resources of this machine that running trials leave free.

    Example: on 8 GPUs, two trials of 3 actors and a learner use 4 GPUs each, and a third waits.
    """

    def __init__(self, here: Resources, gpus: Sequence[str], limit: int | None) -> None:
        self._here = here
        self._limit = limit
        self._cpus = here.cpus
        self._gpus = tuple(gpus)
        self._num_running = 0
        self._is_shared = True

    @classmethod
    def of_machine(cls, trials: Sequence[Trial]) -> Room:
        """Return the room of the CPU cores and GPUs that this process may use."""
        import torch

        count = torch.cuda.device_count()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        here = Resources(float(len(os.sched_getaffinity(0))), float(count))
        limits = [one.config.cluster.trials_at_once for one in trials if one.config]
        return cls(here, visible.split(",")[:count], limits[0] if limits else None)

    def take(self, trial: Trial) -> Share | None:
        """Reserve a share of the machine for the trial, and return it; None: the trial has to wait.

        A trial never waits if no other trial is running.
        """
        needs = self._needs(trial)
        if self._num_running:
            if needs is None or not self._is_shared or self._num_running == self._limit:
                return None
            if needs.gpus > len(self._gpus) or (self._limit is None and needs.cpus > self._cpus):
                return None
        self._num_running += 1
        self._is_shared = needs is not None
        needs = needs or Resources(0.0, 0.0)
        share = Share(needs.cpus, self._gpus[: int(needs.gpus)])
        self._cpus -= share.cpus
        self._gpus = self._gpus[len(share.gpus) :]
        return share

    def give_back(self, share: Share) -> None:
        """Take back the share of a trial that has ended."""
        self._num_running -= 1
        self._is_shared = True
        self._cpus += share.cpus
        self._gpus = share.gpus + self._gpus

    def holds_several(self, trials: Sequence[Trial]) -> bool:
        """Return whether two consecutive trials can run at the same time."""
        for pair in zip(trials, list(trials)[1:], strict=False):
            room = Room(self._here, self._gpus, self._limit)
            if all(room.take(trial) is not None for trial in pair):
                return True
        return False

    def _needs(self, trial: Trial) -> Resources | None:
        """Return the resources that the trial needs; None: no other trial may run with it."""
        config = trial.config
        if config is None or config.rollout_matching.servers is not None:
            return None
        if config.cluster.kind == "ray" and config.cluster.address != "local":
            return None if self._limit is None else Resources(0.0, 0.0)
        try:
            placement = plan_placement(config, [self._here])
        except ConfigError:  # which the trial itself reports
            return None
        reserved = Resources.sum(placement.bundles)
        cpus = reserved.cpus
        if config.environment is not None:
            cpus += config.environment.num_actors * config.environment.cpus_per_actor
        if not reserved.gpus:
            # Otherwise torch computes with all cores.
            cpus = max(cpus, config.learner.cpu_threads or self._here.cpus)
        return Resources(cpus, float(math.ceil(reserved.gpus)))


def trial_of(run_dir: Path) -> str:
    """Return the number of the sweep's trial in this run folder; an empty text without a sweep."""
    return run_dir.name.removeprefix("trial_") if (run_dir.parent / TRIALS).exists() else ""


def last_lines(folder: Path) -> dict[int, Line]:
    """Return the last line in `trials.jsonl` of each trial that has ended, by trial number."""
    lines = {line["trial"]: line for line in read_lines(folder / TRIALS)}
    return dict(sorted(lines.items()))


def print_summary(folder: Path, num_trials: int) -> int:
    """Print a line for every trial that has ended, and tables of settings and results.

    Returns the number of trials that failed.
    """
    # A continued sweep may have fewer trials than before.
    trials = [line for line in last_lines(folder).values() if line["trial"] < num_trials]
    console = make_console()
    for trial in trials:
        if trial["interrupted"]:
            end = "interrupted"
        elif trial["exit_code"]:
            end = f"failed with exit status {trial['exit_code']}"
        elif "headline" in trial and trial["score"] is None:
            end = f"no {trial['headline']}: too many rollouts of the last report failed"
        elif "headline" in trial:
            end = f"{trial['headline']} {trial['score']:.3f}"
        elif "loss" in trial:
            end = f"no held-out report, loss {trial['loss']:.4f}"
        else:
            end = "no held-out report"
        line = f"trial     {trial['trial']}: {end}, {trial['wall_s']:.0f} s, {trial['folder']}"
        _print(console, line)
    for row in tables(trials):
        _print(console, row)
    failed = sum(trial["exit_code"] != 0 for trial in trials)
    finished = len(trials) - failed
    remedy = "" if finished >= num_trials else "; resume=auto continues the others"
    line = f"{finished} of {num_trials} trials finished{remedy}; {folder / TRIALS}"
    _print(console, f"sweep     {line}")
    return failed


def _print(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False)
