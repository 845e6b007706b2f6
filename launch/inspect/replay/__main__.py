"""Learns a step of a run again, from what the run has recorded: no engine, no environment, no Ray.

    rollmatch replay run=RUN step=7

The learner loads the nearest full checkpoint before the step, or the run's model where there is
none, and learns every step up to this one from the rollouts in `rollouts/`. Its metrics have to be
those of `metrics.jsonl`, to the bit, and its weights have to have the digest of `ledger.jsonl`, if
there is one. Exit status 1 where they differ.

A breakpoint anywhere in the learner works: all of it runs in this process. A run of several learner
ranks is refused: one process sums its gradients in another order.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveInt

from launch.cli import explained, read_arguments
from launch.inspect.diff_runs import NOT_LEARNED
from launch.inspect.replay.learning import RecordedStep, Recording, learn_again
from launch.run_folder.console import escaped, make_console
from launch.run_folder.ledger import LEDGER
from launch.run_folder.saved_checkpoints import full_checkpoints
from launch.run_folder.saved_run import changed_config, read_run
from shared.config import RunConfig
from shared.config.base import ConfigPath, Section
from shared.errors import ConfigError
from shared.run_files import read_lines
from shared.schedule import RunSchedule
from shared.trajectory import ExampleCounts


class ReplayOptions(Section):
    run: Annotated[ConfigPath, Field(examples=["outputs/demo"])]
    """Folder of the run."""
    step: Annotated[PositiveInt, Field(examples=[7])]
    """The step to learn again, from 1."""
    checkpoint: ConfigPath | None = None
    """The full checkpoint to begin from; null: the nearest one before the step, or none."""


def replay(options: ReplayOptions) -> Iterator[tuple[int, list[str]]]:
    """Yield, for each step up to the one that is asked for, its number and what differs.

    Raises:
        ConfigError: no such run, step or checkpoint; a run without rollouts, or of a version that
            recorded less; other data, weights or packages.
        RecordError: a line of a file is damaged or of another version.
    """
    run = options.run.resolve()
    recorded = {line["step"]: line for line in read_lines(run / "metrics.jsonl")}
    ledger = read_lines(run / LEDGER)
    weights = {line["step"]: line["weights"] for line in ledger if "weights" in line}
    recording = _recording(run, options, recorded)
    with closing(learn_again(recording)) as reports:
        for report in reports:
            differences = _differences(recorded[report.number], report.metrics)
            # Of a gradient's last bits the metrics may tell nothing, and the weights do.
            was, now = weights.get(report.number), report.digests.get("weights")
            if None not in (was, now) and was != now:
                differences.append(f"weights after the update: {was} recorded, {now} now")
            yield report.number, differences


def _recording(
    run: Path, options: ReplayOptions, recorded: Mapping[int, Mapping[str, Any]]
) -> Recording:
    """Gather what the run has recorded of the steps."""
    config, first = _config(run, options.checkpoint, options.step)
    if options.step not in recorded:
        raise ConfigError(f"step: {run} has the metrics of {len(recorded)} steps; choose one")
    numbers = range(first + 1, options.step + 1)
    if missing := [number for number in numbers if number not in recorded]:
        raise ConfigError(f"run: its metrics.jsonl lacks steps {missing}; restore it")
    schedule = RunSchedule(config)
    steps = [
        RecordedStep(schedule.plan(number - 1), recorded[number]["weight_version"])
        for number in numbers
    ]
    examples = None
    if config.algorithm.uses_environment:
        counts = _placement(run).get("examples")
        if counts is None:
            raise ConfigError(
                f"run: {run / 'placement.json'} does not say how many examples the environment has:"
                " a version that did not record it wrote the run; check that version out, or run"
                " again"
            )
        examples = ExampleCounts(**counts)
    return Recording(config, run / "rollouts", tuple(steps), examples)


def _config(run: Path, checkpoint: Path | None, step: int) -> tuple[RunConfig, int]:
    """Return the run's configuration, to be resumed before the step without writing anything, and
    the updates behind the checkpoint.
    """
    states = {folder: state for folder, state in full_checkpoints(run) if state.step < step}
    if checkpoint is not None:
        checkpoint = checkpoint.resolve()
        if checkpoint not in states:
            names = ", ".join(str(folder) for folder in states) or "none"
            raise ConfigError(f"checkpoint: give a full one before step {step}: {names}")
    elif states:
        checkpoint = max(states, key=lambda folder: states[folder].step)
    changes = {
        "resume.run": None if checkpoint is None else str(checkpoint),
        "telemetry.run_dir": str(run),
        "telemetry.rollouts": False,
        "checkpoint.full": False,
    }
    if placement := _placement(run):
        # In the same number of threads, which decides the order of sums.
        changes["learner.cpu_threads"] = placement["learner_threads"]
    # Of the checkpoint: the run's own is of its last start, which may have changed it.
    saved = read_run(run) if checkpoint is None else states[checkpoint].config
    config = changed_config(saved, changes)
    pipeline = config.rollout_matching.pipeline
    if config.algorithm.learns_rewards and pipeline.policy_gradient is not None:
        raise ConfigError(
            "run: its rollouts of samples are learned by their rewards too (policy_gradient), and"
            " their log does not keep the log-probabilities that this needs: not replayed yet"
        )
    if config.learner.world_size > 1:
        raise ConfigError(
            f"run: it has {config.learner.world_size} learner ranks, and a replay learns in one"
            " process, which sums gradients in another order; resume a copy of the run from its"
            " checkpoint, and compare the two with `rollmatch diff-runs`"
        )
    return config, 0 if checkpoint is None else states[checkpoint].step


def _placement(run: Path) -> dict[str, Any]:
    """Read what a run has recorded of its placement; empty where it has not."""
    file = run / "placement.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


def _differences(recorded: Mapping[str, Any], learned: Mapping[str, float]) -> list[str]:
    """Say which metrics are not what the run has recorded."""
    names = [
        name
        for name in dict.fromkeys((*recorded, *learned))
        if "/" in name and not name.startswith(NOT_LEARNED) and not name.endswith("_s")
    ]
    return [
        f"{name}: {recorded.get(name)} recorded, {learned.get(name)} now"
        for name in names
        if recorded.get(name) != learned.get(name)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    differs = False
    with explained(make_console(stderr=True)):
        options = read_arguments(ReplayOptions, sys.argv[1:] if arguments is None else arguments)
        for step, differences in replay(options):
            print(f"step {step:6d}  {'differs' if differences else 'equal, to the bit'}")
            for line in differences:
                print(escaped(f"             {line}"))
            differs = differs or bool(differences)
    sys.exit(int(differs))


if __name__ == "__main__":
    main()
