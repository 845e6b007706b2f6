"""Trains a step of a run again from its recorded rollouts, without engines, environments or Ray.

    rollmatch replay run=RUN step=7

The learner loads the last full checkpoint before the step, or else the run's model. It trains all
steps up to the given one on the rollouts in `rollouts/`. On a CPU of the run's type, the metrics of
each step must equal `metrics.jsonl` bit for bit. The weights after it must have the digest in
`ledger.jsonl`, if the run recorded a digest. The exit status is 1 if metrics or weights differ.

On a GPU the steps are trained twice, because its kernels may add in another order each time. The
difference of the two repetitions is the noise, and a metric may differ from the run by
`NOISE_FACTOR` times the noise. If the repetitions are equal, the run must be too. Not run on a GPU.

The learner runs in this process, so breakpoints in it work. Runs with several learner ranks are
refused, because one process sums gradients in another order.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import statistics
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field, PositiveInt

from launch.cli import explained, read_arguments
from launch.inspect.diff_runs import NOT_LEARNED
from launch.run_folder.console import escaped, make_console
from launch.run_folder.ledger import LEDGER
from launch.run_folder.saved_checkpoints import full_checkpoints
from launch.run_folder.saved_run import changed_config, read_run
from learner.rollout_logs.writer import step_path
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

if TYPE_CHECKING:
    from learner.algorithms.rollout_matching import RolloutMatching
    from learner.learner import Learner
    from learner.rollout_logs.samples import RolloutRecord
    from learner.rollout_logs.trajectories import TrajectoryRecord
    from shared.config import RunConfig

NOISE_FACTOR = 10.0
"""How many times its noise a metric may differ from the run, if two repetitions differ at all.

The noise is the relative difference of two repetitions, at least the median of all metrics that
differ: by chance, two repetitions may agree in a metric.
"""


class ReplayOptions(Section):
    run: Annotated[ConfigPath, Field(examples=["outputs/demo"])]
    """Folder of the run."""
    step: Annotated[PositiveInt, Field(examples=[7])]
    """The step to train again, from 1."""
    checkpoint: ConfigPath | None = None
    """Full checkpoint to begin from; null: the last before the step, or the run's model."""


class ReplayedStep(NamedTuple):
    """A step that was trained again, compared with the run."""

    number: int
    differences: list[str]
    """A line for each difference from the run; empty if the step is as recorded."""
    noise: float | None
    """Median relative difference of the metrics in which two repetitions differ. None: on a CPU, or
    all metrics repeat, so they were compared bit for bit."""


def replay(options: ReplayOptions, *, repeats: bool) -> Iterator[ReplayedStep]:
    """Train again up to the requested step; yield each step's differences from the run.

    `repeats`: train all steps twice, and judge by the noise.

    Raises:
        ConfigError: run, step or checkpoint does not exist; the run lacks rollouts or other
            records; data, weights or packages differ.
        RecordError: a line of a file is damaged or has another version.
    """
    run = options.run.resolve()
    recorded = {line["step"]: line for line in read_lines(run / "metrics.jsonl")}
    ledger = read_lines(run / LEDGER)
    weights = {line["step"]: line["weights"] for line in ledger if "weights" in line}
    config, first = _config(run, options.checkpoint, options.step)
    if options.step not in recorded:
        raise ConfigError(f"step: {run} has the metrics of {len(recorded)} steps; name one of them")
    numbers = range(first + 1, options.step + 1)
    if missing := [number for number in numbers if number not in recorded]:
        raise ConfigError(f"run: its metrics.jsonl lacks steps {missing}; restore the file")
    examples = _examples(run) if config.algorithm.uses_environment else None
    versions = {number: recorded[number]["weight_version"] for number in numbers}
    learn = partial(learn_again, config, run / "rollouts", versions, examples)
    repetition: dict[int, StepReport] = {}
    if repeats:
        repetition = {report.number: report for report in learn()}
        import torch

        gc.collect()  # the GPU has no room for two models
        torch.cuda.empty_cache()
    with closing(learn()) as reports:
        for report in reports:
            number = report.number
            yield _compared(recorded[number], weights.get(number), report, repetition.get(number))


def _examples(run: Path) -> ExampleCounts:
    counts = _placement(run).get("examples")
    if counts is None:
        raise ConfigError(
            f"run: {run / 'placement.json'} does not say how many examples the environment has;"
            " an older version wrote the run: check out that version, or run again"
        )
    return ExampleCounts(**counts)


def _config(run: Path, checkpoint: Path | None, step: int) -> tuple[RunConfig, int]:
    """Return the configuration of a replay, and the number of steps before its checkpoint.

    It resumes from a checkpoint before `step`, or starts with the run's model (0 steps before). It
    writes no files.
    """
    states = {folder: state for folder, state in full_checkpoints(run) if state.step < step}
    if checkpoint is not None:
        checkpoint = checkpoint.resolve()
        if checkpoint not in states:
            names = ", ".join(str(folder) for folder in states)
            remedy = f"choose one of: {names}" if names else "this run has none"
            raise ConfigError(
                f"checkpoint: {checkpoint} is not a full checkpoint (checkpoint.full) before step"
                f" {step}; {remedy}"
            )
    elif states:
        checkpoint = max(states, key=lambda folder: states[folder].step)
    changes = {
        "resume.run": None if checkpoint is None else str(checkpoint),
        "telemetry.run_dir": str(run),
        "telemetry.rollouts": False,
        "checkpoint.full": False,
    }
    if placement := _placement(run):
        # The number of threads decides the order of sums.
        changes["learner.cpu_threads"] = placement["learner_threads"]
    # The run's config.json is from its last start, which may have changed keys.
    saved = read_run(run) if checkpoint is None else states[checkpoint].config
    config = changed_config(saved, changes)
    pipeline = config.rollout_matching.pipeline
    if config.algorithm.learns_rewards and pipeline.policy_gradient is not None:
        raise ConfigError(
            "run: it trains on rewards of samples (policy_gradient), which needs log-probabilities"
            " that the files in rollouts/ do not have; runs of this kind cannot be replayed yet"
        )
    if config.learner.world_size > 1:
        raise ConfigError(
            f"run: it has {config.learner.world_size} learner ranks, and a replay has one, which"
            " sums gradients in another order; resume a copy of the run from its checkpoint, and"
            " compare the two with `rollmatch diff-runs`"
        )
    return config, 0 if checkpoint is None else states[checkpoint].step


def _placement(run: Path) -> dict[str, Any]:
    """Return the recorded placement of a run, or an empty mapping."""
    file = run / "placement.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


class _Noise:
    """The relative differences between a step and its repetition, in the metrics that differ."""

    def __init__(self, report: StepReport, repetition: StepReport) -> None:
        one, other = report.metrics, repetition.metrics
        every = {
            name: _relative(one.get(name), other.get(name)) for name in _learned_names(one, other)
        }
        self._of = {name: noise for name, noise in every.items() if noise}
        self.typical = statistics.median(self._of.values()) if self._of else 0.0
        self.weights_repeat = report.digests.get("weights") == repetition.digests.get("weights")

    def of(self, name: str) -> float:
        return max(self._of.get(name, 0.0), self.typical)


def _compared(
    recorded: Mapping[str, object],
    recorded_weights: str | None,
    report: StepReport,
    repetition: StepReport | None,
) -> ReplayedStep:
    """Compare a step with the run.

    Args:
        recorded: the run's line of metrics.
        recorded_weights: the digest of the weights after the step; None if it was not recorded.
        repetition: the same step, trained another time; None on a CPU.
    """
    noise = _Noise(report, report if repetition is None else repetition)
    lines = []
    for name in _learned_names(recorded, report.metrics):
        was, now = recorded.get(name), report.metrics.get(name)
        relative = _relative(was, now)
        if relative > NOISE_FACTOR * noise.of(name):
            line = f"{name}: {was} recorded, {now} now"
            if math.isfinite(relative):
                line += f", relative difference {relative:.1e}"
            if noise.typical:
                line += f", noise {noise.of(name):.1e}"
            lines.append(line)
    # The weights show differences in the last bits that metrics may hide.
    weights = report.digests.get("weights")
    if noise.weights_repeat and recorded_weights not in (None, weights) and weights is not None:
        lines.append(f"weights after the update: {recorded_weights} recorded, {weights} now")
    return ReplayedStep(report.number, lines, noise.typical or None)


def _learned_names(*metrics: Mapping[str, object]) -> list[str]:
    """Return the names of the metrics that a replay computes again."""
    return [
        name
        for name in dict.fromkeys(itertools.chain(*metrics))
        if "/" in name and not name.startswith(NOT_LEARNED) and not name.endswith("_s")
    ]


def _relative(one: object, other: object) -> float:
    """Return the difference, relative to the larger value: 0 if equal, infinite if not numbers."""
    if one == other:
        return 0.0
    if not (isinstance(one, int | float) and isinstance(other, int | float)):
        return math.inf
    relative = abs(one - other) / max(abs(one), abs(other))
    return math.inf if math.isnan(relative) else relative


def learn_again(
    config: RunConfig, logs: Path, versions: Mapping[int, int], examples: ExampleCounts | None
) -> Generator[StepReport, None, None]:
    """Train the steps in `versions` again from recorded rollouts; yield the report of each.

    Args:
        config: continues the run just before the first of these steps, and writes no files.
        logs: folder of the run's rollouts.
        versions: weight version of the learner in each step, by step number.
        examples: numbers of dataset rows of the run's environment; None without an environment.

    Raises ConfigError or RecordError if the log lacks a requested rollout, or has another rollout
    in its place; also errors of `Learner`.
    """
    import torch

    from learner.learner import Learner
    from learner.model.ranks import RankTopology

    device = Device.CUDA if torch.cuda.is_available() else Device.CPU
    schedule = RunSchedule(config)
    place = RankTopology(TransportKind.GLOO, (), device=device)
    learner = Learner(config, place, None, examples)
    try:
        for number, version in versions.items():
            plan = schedule.plan(number - 1)
            # Usually set by a weight sync: the version that sampled the rollouts.
            learner.publisher.version = version
            # The checkpoint holds rollouts that the run generated ahead.
            answers = list(learner.answers_ahead)
            requests = learner.next_requests(plan)
            if requests:
                answers += _recorded(learner, requests, logs, plan)
            # Packed rows do not depend on rounds, but each round has one weight version.
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
    from learner.algorithms.rollout_matching import RolloutMatching, RolloutMatchingStep
    from learner.rollout_logs import samples, trajectories

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
            f"run: {path} does not exist, and a replay needs the rollouts of the run; run again"
            " with telemetry.rollouts=true"
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
    from learner.rollout_logs.trajectories import logged_rollout

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
        f"run: the log of step {step + 1} has no {what} at position {position}; the run had"
        " other data, configuration or code: restore them"
    )


def _version(answer: Rollout | tuple[EnvironmentRollout, ...]) -> int | None:
    """Return the version of the weights that generated an answer; None if it has no tokens."""
    if isinstance(answer, Rollout):
        return answer.weight_version
    versions = (example.weight_version for one in answer for example in one.examples)
    return next((version for version in versions if version is not None), None)


def main(arguments: Sequence[str] | None = None) -> None:
    differs = False
    with explained(make_console(stderr=True)):
        options = read_arguments(ReplayOptions, arguments)
        import torch  # after `--help`: torch and the learner take seconds

        for step in replay(options, repeats=torch.cuda.is_available()):
            equal = "equal, to the bit"
            if step.noise is not None:
                equal = f"equal within {NOISE_FACTOR:g} times the noise ({step.noise:.1e})"
            print(f"step {step.number:6d}  {'differs' if step.differences else equal}")
            for line in step.differences:
                print(escaped(f"             {line}"))
            differs = differs or bool(step.differences)
    sys.exit(int(differs))


if __name__ == "__main__":
    main()
