"""Learns the steps of a run again, with the answers of the run's log."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from learner.algorithms.rollout_matching import RolloutMatching, RolloutMatchingStep
from learner.learner import Learner
from learner.model.ranks import RankTopology
from learner.rollout_logs import samples, trajectories
from learner.rollout_logs.samples import RolloutRecord
from learner.rollout_logs.trajectories import TrajectoryRecord, logged_rollout
from learner.rollout_logs.writer import step_path
from shared.config import RunConfig
from shared.errors import ConfigError
from shared.metrics import StepReport, merge_reports
from shared.records import Sample
from shared.rollouts import FinishReason, Rollout, RolloutRequest
from shared.schedule import RunSchedule, StepPlan
from shared.seeds import request_seed
from shared.trajectory import EnvironmentRequest, EnvironmentRollout, ExampleCounts
from shared.weight_sync.transports import Device, TransportKind


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step of the run, without its answers."""

    plan: StepPlan
    weight_version: int
    """Version of the learner's weights."""


@dataclass(frozen=True, slots=True)
class Recording:
    """All that the learner needs of a run to learn some steps again."""

    config: RunConfig
    """The run's, resumed before the first of the steps, without any files to write."""
    logs: Path
    steps: tuple[RecordedStep, ...]
    examples: ExampleCounts | None
    """Those of the run's environment; None for a run without one."""


def learn_again(recording: Recording) -> Generator[StepReport, None, None]:
    """Yield the report of each step.

    Raises:
        ConfigError, RecordError: the log lacks a rollout, or has another one than the run asked
            for; what `Learner` raises.
    """
    device = Device.CUDA if torch.cuda.is_available() else Device.CPU
    place = RankTopology(TransportKind.GLOO, (), device=device)
    learner = Learner(recording.config, place, None, recording.examples)
    try:
        for step in recording.steps:
            # What a sync would make of it: the version that the rollouts were sampled with.
            learner.publisher.version = step.weight_version
            # A checkpoint has those that the run had generated ahead.
            answers = list(learner.answers_ahead)
            requests = learner.next_requests(step.plan)
            if requests:
                answers += _recorded(learner, requests, recording.logs, step.plan)
            # Rows do not depend on the rounds, but a round has one version of the weights.
            for _, part in itertools.groupby(answers, _version):
                learner.accumulate(list(part))
            for _ in range(RunSchedule(recording.config).refill_rounds):
                again = learner.refill_requests(step.plan)
                learner.accumulate(_recorded(learner, again, recording.logs, step.plan))
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
