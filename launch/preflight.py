"""Checks what a run would do, and whether it can do it, without starting an engine.

    rollmatch preflight +experiment=stage2_3v1 [section.key=value ...]

Prints the placement and the memory that processes need, then every problem with its remedy.
Exit status 1 if there is a problem.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial

import hydra
from omegaconf import DictConfig

from launch.cli import (
    CONF,
    as_schema_overrides,
    config_of_command,
    explained,
    with_absolute_paths,
)
from launch.run_folder.console import StartUp, make_console


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def main(composed: DictConfig) -> None:
    console = make_console()
    with explained(console):
        # After `--help`, which Hydra handles.
        from launch.checks.contents import PreflightReport
        from launch.checks.data import of_length, with_num_steps
        from launch.checks.host import vllm_import
        from launch.checks.hub import fetched_model
        from launch.checks.preflight import preflight
        from launch.run_folder.resume import resumed
        from launch.tools.demo.once import make_missing_demo_files, untrained_model

        show = partial(console.print, markup=False, highlight=False)
        config = config_of_command(composed)
        config = config.model_copy(update={"model": untrained_model(config.model, show)})
        make_missing_demo_files(config, show)
        config = config.model_copy(update={"model": fetched_model(config.model, show)})
        length = PreflightReport()
        start_up = StartUp(console)
        with start_up.stage("number of steps") if config.training.num_epochs else nullcontext():
            counted = length.attempt(lambda: with_num_steps(config, show))
        config = with_absolute_paths(counted or of_length(config, 1))
        if counted is not None:
            config, point = resumed(config)
            if point is not None:
                for line in point.describe(config):
                    console.print(line, markup=False, highlight=False)
                from launch.run_folder.folder import require_readable

                require_readable(config.telemetry.run_dir)
        with vllm_import(config.rollout_matching, config.timeouts.start_s) as import_problems:
            with start_up.stage("checks"):
                findings = preflight(config)
            findings.collect(import_problems())
        # The checks of the data find most of these again.
        findings.problems = list(dict.fromkeys([*length.problems, *findings.problems]))
    for line in findings.lines:
        console.print(line, markup=False, highlight=False)
    if not findings.problems:
        console.print("ready     no problem was found", highlight=False)
        return
    plural = "s" if len(findings.problems) > 1 else ""
    console.print(f"[bold red]{len(findings.problems)} problem{plural}[/]", highlight=False)
    for problem in findings.problems:
        console.print(problem, markup=False, highlight=False)
    sys.exit(1)


if __name__ == "__main__":
    with explained(make_console()):
        sys.argv[1:] = as_schema_overrides(sys.argv[1:])
    main()
