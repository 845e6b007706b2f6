"""The training job as one command: `python -m launch.train +experiment=stage2_3v1`.

::

    compose (Hydra) -> load_config -> preflight -> Cluster.start -> driver.train -> reports
                       all errors     all errors   Ray, engines,    every step
                       of the keys    of the host  learner ranks

Modules are imported when they are needed: after Hydra has handled `--help`, heavy ones after the
configuration is valid. Processes start after preflight.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from omegaconf import DictConfig
from rich.console import Console

from launch.cli import (
    CONF,
    as_schema_overrides,
    config_of_command,
    end_on_signals,
    explained,
    with_absolute_paths,
)
from launch.run_folder.console import StartUp, make_console
from shared.errors import CollectiveError, ConfigError, LostLearnerError, LostStartError

if TYPE_CHECKING:
    from launch.processes.replacements import RestartBudget
    from shared.config import RunConfig


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def main(composed: DictConfig) -> None:
    console = make_console()
    with explained(console):
        from launch.processes.sweep import add_trial, is_sweep

        if is_sweep():
            add_trial(composed, console)
            return
        run_job(config_of_command(composed), console)


def run_job(config: RunConfig, console: Console) -> None:
    """Run a training job. With `resume.automatic`, restart it after errors that may pass.

    Such errors are: the learner's process ends or does not answer, a learner rank waits in vain for
    other ranks, or a starting actor is killed or too slow. `rollout_matching.vllm.actors` limits
    the number of restarts. Before each restart `error.txt` is renamed to `error_1.txt` and so on.
    Raises the error that ends the run for good.
    """
    budget: RestartBudget | None = None
    if config.cluster.kind == "local":
        # As in Ray's processes. OpenMP reads it when torch is imported. Without it, the threads of
        # two runs on one machine spin while they wait, and take each other's cores.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from launch.checks.hub import fetched_model
    from launch.processes.engine_settings import engines_imported_early
    from launch.tools.demo.once import make_missing_demo_files

    make_missing_demo_files(config, lambda line: _print(console, [line]))
    model = fetched_model(config.model, lambda line: _print(console, [line]))
    config = config.model_copy(update={"model": model})
    while True:
        try:
            with engines_imported_early(config):
                run(config, console)
        # Other errors of the run, such as a loss that is not finite, would repeat exactly.
        except (LostLearnerError, CollectiveError, LostStartError) as error:
            if not config.resume.automatic:
                raise
            from launch.processes.replacements import RestartBudget

            budget = budget or RestartBudget(config.rollout_matching.vllm.actors)
            if not budget.take():
                message = f"{error.message}; {budget.refusal('the job is not started again')}"
                if isinstance(error, LostStartError):
                    raise LostStartError(message, actor=error.actor, phase="start") from error
                raise LostLearnerError(message, phase=error.phase) from error
            why = " ".join(str(error).split())
            details = _keep_story(config.telemetry.run_dir)
            _print(console, [f"restart   {why}; the job is started again{details}"])
            # A start that failed has not yet moved away the steps after its checkpoint.
            if error.phase != "start":
                again = config.resume.model_copy(update={"run": Path("auto")})
                config = config.model_copy(update={"resume": again})
        else:
            return


def _keep_story(folder: Path) -> str:
    """Rename `error.txt`, if it exists, so that the next start does not remove it.

    Returns the end of a console line that names the new file; an empty text without the file.
    """
    if not (folder / "error.txt").exists():
        return ""
    story = folder / f"error_{1 + len(list(folder.glob('error_*.txt')))}.txt"
    (folder / "error.txt").replace(story)
    return f"; details in {story}"


def run(config: RunConfig, console: Console) -> None:
    """Check the configuration, start all processes, train and report, and end the processes."""
    from launch.checks.host import require_vllm
    from launch.checks.preflight import preflight
    from launch.processes.batch_algebra import batch_algebra
    from launch.run_folder.folder import require_readable
    from launch.run_folder.resume import resumed
    from launch.run_folder.telemetry import Telemetry
    from shared.config.derive import remarks

    started_s = time.monotonic()
    start_up = StartUp(console)
    require_vllm(config.rollout_matching)
    if config.training.num_epochs is not None:
        from launch.checks.data import with_num_steps

        with start_up.stage("number of steps"):
            config = with_num_steps(config, lambda line: _print(console, [line]))
    if config.engine_devices is not None:  # else printed after the servers or cluster are asked
        _print(console, batch_algebra(config).describe())
    _print(console, (f"note      {remark}" for remark in remarks(config)))
    config = with_absolute_paths(config)
    config, point = resumed(config)
    if point is not None:
        _print(console, point.describe(config))
        if point.is_complete(config):
            return
        require_readable(config.telemetry.run_dir)
    with start_up.stage("checks"):
        findings = preflight(config, waits_for_servers=True)
    if findings.problems:
        raise ConfigError(findings.problems)
    facts = findings.facts
    assert facts is not None, "invalid data are reported as a problem"
    about_data = facts.describe()
    _print(console, about_data)
    warnings = (line for line in findings.lines if line.startswith("warning"))
    _print(console, (line for line in warnings if line not in about_data))

    from launch.driver import train
    from launch.pipeline import one_ahead, one_at_a_time
    from launch.processes.cluster import Cluster
    from launch.processes.local import LocalRun
    from launch.run_folder.checkpoints import Checkpoints
    from launch.run_folder.ledger import require_same_step
    from shared.schedule import RunSchedule

    queue = one_ahead if config.stage2_ab.channel_b.enable_pipeline else one_at_a_time
    schedule = RunSchedule(config)
    kind = LocalRun if config.cluster.kind == "local" else Cluster
    with (
        Telemetry(config, console, point) as telemetry,
        kind(config, facts.images, start_up, facts.examples, telemetry) as cluster,
    ):
        if isinstance(cluster, Cluster):
            telemetry.ray_logs = cluster.ray_logs
        end_on_signals()  # ray.init has replaced our handler
        learner, rollouts = cluster.start()
        algebra = batch_algebra(config, rollouts.devices)
        if config.engine_devices is None:
            _print(console, algebra.describe())
        telemetry.placed(
            algebra,
            rollouts.names,
            learner_threads=learner.num_threads,
            examples=facts.examples,
        )
        names = ", ".join(rollouts.names)
        who = f"{names} and the learner"
        if config.rollout_matching.in_learner:
            verb = "generates" if len(rollouts.names) == 1 else "generate"
            who = f"{names}, which {verb} too,"
        _print(console, [f"model     {finding}" for finding in learner.findings])
        wall_s = time.monotonic() - started_s
        folder = config.telemetry.run_dir
        _print(console, [f"ready     {who} after {wall_s:.0f} s; run folder {folder}"])
        if point is not None and point.step:
            require_same_step(folder, point, learner.last_report())
        checkpoints = Checkpoints(config, learner, telemetry, point)
        if point is not None:
            telemetry.go_on(point)
        with telemetry.exported(), checkpoints.saved_at_an_early_end():
            train(learner, rollouts, schedule, queue, telemetry, checkpoints, point)
    if (improvement := telemetry.improvement()) is not None:
        effort = f"B steps: {schedule.num_b_steps}, wall: {time.monotonic() - started_s:.0f} s"
        _print(console, [f"{config.telemetry.name}: {improvement} ({effort})"])


def _print(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False)


if __name__ == "__main__":
    console = make_console()
    with explained(console):
        sys.argv[1:] = as_schema_overrides(sys.argv[1:])
    main()
    from launch.processes.sweep import run_trials  # after `--help`

    with explained(console):
        run_trials(console)
