"""Learns a step of a run again, from what the run has recorded: no engine, no Ray.

    python -m launch.replay run=RUN step=7

The learner loads the nearest full checkpoint before the step, or the run's model where there is
none, and learns every step up to this one from the rollouts in `rollouts/`. Its metrics have to be
those of `metrics.jsonl`, to the bit. Exit status 1 where they are not. A breakpoint anywhere in the
learner works: all of it runs in this process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveInt
from rich.console import Console

from launch.cli import explained, read_arguments
from launch.diff_runs import NOT_LEARNED
from launch.runtime.resume import full_checkpoints
from launch.runtime.saved_run import changed_config, read_run
from learner.algorithms.rollout_matching import RolloutMatching
from learner.learner import Learner
from learner.model.ranks import RankTopology
from learner.rollout_logs.samples import RolloutRecord, read_step
from learner.rollout_logs.writer import step_path
from shared.config import RunConfig
from shared.config.base import ConfigPath, Section
from shared.errors import ConfigError
from shared.metrics import merge_reports
from shared.rollouts import FinishReason, Rollout, RolloutRequest
from shared.run_files import read_lines
from shared.schedule import RunSchedule, StepPlan
from shared.weight_sync.transports import Device, TransportKind


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
        ConfigError: no such run, step or checkpoint; a run that is not replayed: of an environment,
            of several learner ranks, without rollouts; other data, weights or packages.
        RecordError: a line of the log is damaged or of another version.
    """
    run = options.run.resolve()
    recorded = {line["step"]: line for line in read_lines(run / "metrics.jsonl")}
    config = _config(run, options.checkpoint, options.step)
    if options.step not in recorded:
        raise ConfigError(f"step: {run} has the metrics of {len(recorded)} steps; choose one")
    device = Device.CUDA if torch.cuda.is_available() else Device.CPU
    learner = Learner(config, RankTopology(TransportKind.GLOO, (), device=device))
    try:
        steps = range(learner.num_updates, options.step)
        if missing := [step + 1 for step in steps if step + 1 not in recorded]:
            raise ConfigError(f"run: its metrics.jsonl lacks steps {missing}; restore it")
        for step in steps:
            plan = RunSchedule(config).plan(step)
            # What a sync would make of it: the version that the rollouts were sampled with.
            learner.publisher.version = recorded[plan.number]["weight_version"]
            metrics = _learn(learner, plan, run / "rollouts")
            yield plan.number, _differences(recorded[plan.number], metrics)
    finally:
        learner.close()


def _config(run: Path, checkpoint: Path | None, step: int) -> RunConfig:
    """Return the run's configuration, to be resumed before the step without writing anything."""
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
    placement = run / "placement.json"
    if placement.exists():
        # In the same number of threads, which decides the order of sums.
        changes["learner.cpu_threads"] = json.loads(placement.read_text())["learner_threads"]
    # Of the checkpoint: the run's own is of its last start, which may have changed it.
    saved = read_run(run) if checkpoint is None else states[checkpoint].config
    config = changed_config(saved, changes)
    if config.environment is not None:
        raise ConfigError("run: it is of an environment, whose steps are not replayed yet")
    if config.learner.world_size > 1:
        raise ConfigError("run: it has several learner ranks, and a replay has one")
    return config


def _learn(learner: Learner, plan: StepPlan, logs: Path) -> Mapping[str, float]:
    """Take one step with the recorded rollouts; return its metrics."""
    # A checkpoint has those that the run had generated ahead.
    answers = learner.answers_ahead()
    requests = learner.next_requests(plan)
    if requests:
        path = step_path(logs, plan.number)
        try:
            lines = {line["position"]: line for line in read_step(path)}
        except FileNotFoundError as error:
            raise ConfigError(
                f"run: {path} is not there; a run is replayed from its rollouts"
                " (telemetry.rollouts=true)"
            ) from error
        answers += [_recorded(learner, request, lines) for request in requests]
    if answers:
        learner.accumulate(answers)
    return merge_reports([learner.finish_step()]).metrics


def _recorded(
    learner: Learner, request: RolloutRequest, lines: dict[int, RolloutRecord]
) -> Rollout:
    """Make the rollout that the run had for this request."""
    line = lines.get(request.position)
    entry = None if line is None else line["rollout"]
    if (
        line is None
        or entry is None
        or (line["sample_id"], entry["seed"])
        != (
            request.sample_id,
            request.seed,
        )
    ):
        raise ConfigError(
            f"run: the log of step {request.step + 1} has no rollout of sample"
            f" {request.sample_id} with seed {request.seed} at position {request.position}; the"
            " run's data, configuration or code were others"
        )
    algorithm = learner.algorithm
    assert isinstance(algorithm, RolloutMatching)
    sample = next(one for one in algorithm.train if one.sample_id == request.sample_id)
    reason = FinishReason(entry["finish_reason"])
    stopped = reason in (FinishReason.STOP, FinishReason.REPETITION)
    return Rollout(
        step=request.step,
        position=request.position,
        sample_id=request.sample_id,
        prompt_token_ids=algorithm.encoder.encode(sample).token_ids,
        response_token_ids=tuple(entry["response_token_ids"]),
        stop_token_id=request.decode.stop_token_ids[0] if stopped else None,
        logprobs=None,
        stop_token_logprob=None,
        finish_reason=reason,
        forced_positions=tuple(entry["forced_positions"]),
        weight_version=entry["weight_version"],
        actor=entry["actor"],
        attempt=entry["attempt"],
        seed=entry["seed"],
        generate_s=0.0,
    )


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
    with explained(Console(stderr=True, soft_wrap=True)):
        options = read_arguments(ReplayOptions, sys.argv[1:] if arguments is None else arguments)
        for step, differences in replay(options):
            print(f"step {step:6d}  {'differs' if differences else 'equal, to the bit'}")
            for line in differences:
                print(f"             {line}")
            differs = differs or bool(differences)
    sys.exit(int(differs))


if __name__ == "__main__":
    main()
