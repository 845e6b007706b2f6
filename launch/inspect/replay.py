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

import itertools
import json
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveInt

from launch.cli import explained, read_arguments
from launch.inspect.diff_runs import NOT_LEARNED
from launch.run_folder.console import escaped, make_console
from launch.run_folder.ledger import LEDGER
from launch.run_folder.saved_checkpoints import full_checkpoints
from launch.run_folder.saved_run import changed_config, read_run
from learner.algorithms.rollout_matching import RolloutMatching, RolloutMatchingStep
from learner.learner import Learner
from learner.model.ranks import RankTopology
from learner.rollout_logs import samples, trajectories
from learner.rollout_logs.samples import RolloutRecord
from learner.rollout_logs.trajectories import TrajectoryRecord, logged_rollout
from learner.rollout_logs.writer import step_path
from shared.config import RunConfig
from shared.config.base import ConfigPath, Section
from shared.errors import ConfigError
from shared.metrics import StepReport, merge_reports
from shared.records import Sample
from shared.rollouts import FinishReason, Rollout, RolloutRequest
from shared.run_files import read_lines
from shared.schedule import RunSchedule, StepPlan
from shared.seeds import request_seed
from shared.trajectory import EnvironmentRequest, EnvironmentRollout, ExampleCounts
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
        ConfigError: no such run, step or checkpoint; a run without rollouts, or of a version that
            recorded less; other data, weights or packages.
        RecordError: a line of a file is damaged or of another version.
    """
    run = options.run.resolve()
    recorded = {line["step"]: line for line in read_lines(run / "metrics.jsonl")}
    ledger = read_lines(run / LEDGER)
    weights = {line["step"]: line["weights"] for line in ledger if "weights" in line}
    config, first = _config(run, options.checkpoint, options.step)
    if options.step not in recorded:
        raise ConfigError(f"step: {run} has the metrics of {len(recorded)} steps; choose one")
    numbers = range(first + 1, options.step + 1)
    if missing := [number for number in numbers if number not in recorded]:
        raise ConfigError(f"run: its metrics.jsonl lacks steps {missing}; restore it")
    examples = _examples(run) if config.algorithm.uses_environment else None
    versions = {number: recorded[number]["weight_version"] for number in numbers}
    with closing(learn_again(config, run / "rollouts", versions, examples)) as reports:
        for report in reports:
            differences = _differences(recorded[report.number], report.metrics)
            # The metrics may not show a gradient's last bits, and the weights do.
            was, now = weights.get(report.number), report.digests.get("weights")
            if None not in (was, now) and was != now:
                differences.append(f"weights after the update: {was} recorded, {now} now")
            yield report.number, differences


def _examples(run: Path) -> ExampleCounts:
    counts = _placement(run).get("examples")
    if counts is None:
        raise ConfigError(
            f"run: {run / 'placement.json'} does not say how many examples the environment has:"
            " a version that did not record it wrote the run; check that version out, or run again"
        )
    return ExampleCounts(**counts)


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


def _differences(recorded: Mapping[str, object], learned: Mapping[str, float]) -> list[str]:
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


def learn_again(
    config: RunConfig, logs: Path, versions: Mapping[int, int], examples: ExampleCounts | None
) -> Generator[StepReport, None, None]:
    """Yield the report of each step.

    Args:
        config: the run's, resumed before the first of the steps, without any files to write.
        logs: the folder of the run's rollouts.
        versions: the version of the learner's weights in each step, by its number.
        examples: those of the run's environment; None for a run without one.

    Raises:
        ConfigError, RecordError: the log lacks a rollout, or has another one than the run asked
            for; what `Learner` raises.
    """
    device = Device.CUDA if torch.cuda.is_available() else Device.CPU
    schedule = RunSchedule(config)
    place = RankTopology(TransportKind.GLOO, (), device=device)
    learner = Learner(config, place, None, examples)
    try:
        for number, version in versions.items():
            plan = schedule.plan(number - 1)
            # A sync would set it: the version that the rollouts were sampled with.
            learner.publisher.version = version
            # A checkpoint has those that the run had generated ahead.
            answers = list(learner.answers_ahead)
            requests = learner.next_requests(plan)
            if requests:
                answers += _recorded(learner, requests, logs, plan)
            # Rows do not depend on the rounds, but a round has one version of the weights.
            for _, part in itertools.groupby(answers, _version):
                learner.accumulate(list(part))
            for _ in range(schedule.refill_rounds):
                again = learner.refill_requests(plan)
                learner.accumulate(_recorded(learner, again, logs, plan))
            yield merge_reports([learner.finish_step()])
    finally:
        learner.close()


def _recorded(
    learner: Learner, requests: Sequence[Any], logs: Path, plan: StepPlan
) -> list[Rollout | tuple[EnvironmentRollout, ...]]:
    """Make the answers that the run had to these requests of a step."""
    path = step_path(logs, plan.number)
    algorithm = learner.algorithm
    step = learner.steps[-1]
    try:
        if isinstance(algorithm, RolloutMatching):
            assert isinstance(step, RolloutMatchingStep)
            lines = {line["position"]: line for line in samples.read_step(path)}
            drawn = dict(zip(step.share, step.samples, strict=True))
            return [
                _rollout(algorithm, request, drawn[request.position], lines) for request in requests
            ]
        played = {line["position"]: line for line in trajectories.read_step(path)}
        return [_group(request, played, logs) for request in requests]
    except FileNotFoundError as error:
        raise ConfigError(
            f"run: {path} is not there; a run is replayed from its rollouts"
            " (telemetry.rollouts=true)"
        ) from error


def _rollout(
    algorithm: RolloutMatching,
    request: RolloutRequest,
    sample: Sample,
    lines: Mapping[int, RolloutRecord],
) -> Rollout:
    line = lines.get(request.position)
    entry = None if line is None else line["rollout"]
    asked = (request.sample_id, request.seed)
    if line is None or entry is None or (line["sample_id"], entry["seed"]) != asked:
        what = f"rollout of sample {request.sample_id} with seed {request.seed}"
        raise _not_logged(what, request.step, request.position)
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


def _group(
    request: EnvironmentRequest, lines: Mapping[int, TrajectoryRecord], logs: Path
) -> tuple[EnvironmentRollout, ...]:
    (group,) = request.groups
    rollouts = []
    for position in group.positions:
        line = lines.get(position)
        what = f"rollout of example {group.example} under the run's seed"
        if line is None or line["example"] != group.example:
            raise _not_logged(what, request.step, position)
        rollout = logged_rollout(line, logs)
        for call in rollout.calls:
            asked = request_seed(request.run_seed, request.step, position, call.turn, call.path)
            if call.seed != asked:
                raise _not_logged(what, request.step, position)
        rollouts.append(rollout)
    return tuple(rollouts)


def _not_logged(what: str, step: int, position: int) -> ConfigError:
    return ConfigError(
        f"run: the log of step {step + 1} has no {what} at position {position}; the run's data,"
        " configuration or code were others"
    )


def _version(answer: Rollout | tuple[EnvironmentRollout, ...]) -> int | None:
    """Return the version of the weights that sampled this answer; None: it has no tokens."""
    if isinstance(answer, Rollout):
        return answer.weight_version
    versions = (example.weight_version for one in answer for example in one.examples)
    return next((version for version in versions if version is not None), None)


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
