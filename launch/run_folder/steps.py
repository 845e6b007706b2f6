"""The record of a step: first the plan; in the end metrics, time spans, a console line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from launch.doctor.timing import StepTimes
from launch.processes.batch_algebra import BatchAlgebra
from launch.processes.replacements import Replacement
from shared.chunking import round_parts
from shared.config import RunConfig
from shared.config.pipeline import Channel
from shared.metrics import REWARD_FAMILY, StepReport, metric_of
from shared.rollouts import SyncReport
from shared.run_files import Span
from shared.schedule import StepPlan
from shared.seeds import request_seed

TRACK = "driver"
MAX_PARTS = 4
"""Maximum number of reward functions in the console's line of a step."""


@dataclass(slots=True)
class StepRecord:
    """The driver's record of one step while the step runs."""

    plan: StepPlan
    report: StepReport | None = None
    queue_wait_s: float = 0.0
    """Seconds that the learner waited for rounds of rollouts."""
    sync: SyncReport | None = None
    replaced: Sequence[Replacement] = ()
    """Replacements of lost actors that became ready in the step."""


class StepPlans:
    """Makes the lines of plan.jsonl: what each engine generates, and how weights are sent."""

    def __init__(self, config: RunConfig, sync_fallback: str | None) -> None:
        """`sync_fallback`: why a resumed run no longer sends an adapter; None otherwise."""
        section = config.rollout_matching.servers
        self._seed = config.training.seed
        # Environments make one call after the other, so their calls are not known in advance.
        self._plans_calls = section is not None and not config.algorithm.uses_environment
        self.servers = [] if section is None else [one.model_dump() for one in section.servers]
        self.sync_fallback = sync_fallback
        """Why full weights are sent instead of an adapter; None if no adapter sync has failed."""
        self._sync_mode = "full" if sync_fallback else config.sync_mode
        self._algebra: BatchAlgebra | None = None
        self._engines: tuple[str, ...] = ()

    def placed(self, algebra: BatchAlgebra, engines: tuple[str, ...]) -> None:
        """Set the engines' names and shares of requests, after the engines have started."""
        self._algebra = algebra
        self._engines = engines

    def synced(self, sync: SyncReport) -> None:
        """Record the mode and the ports of a weight sync, for the plans of later steps."""
        self._sync_mode = sync.mode
        self.sync_fallback = sync.fell_back or self.sync_fallback
        # Port 0 in the configuration means any free port; the plan names the port that was used.
        for server, port in zip(self.servers, sync.ports, strict=False):
            server["group_port"] = port

    def line(self, plan: StepPlan) -> dict[str, object]:
        assert self._algebra is not None, "`placed` is called before the first step"
        rounds = self._algebra.rounds if plan.channel is Channel.B else ()
        calls: list[list[dict[str, object]]] = []
        if self._plans_calls:
            devices = self._algebra.engine_devices
            calls = server_calls(
                rounds, devices, self._engines, run_seed=self._seed, step=plan.step
            )
        return {
            **asdict(plan),
            "step": plan.number,
            "rounds": [[[part.start, part.stop] for part in ranks] for ranks in rounds],
            "calls": calls,
            "engines": self._engines,
            "servers": self.servers,
            "sync_mode": self._sync_mode,
            "sync_fallback": self.sync_fallback,
        }


def server_calls(
    rounds: Sequence[Sequence[range]],
    devices: Sequence[int],
    names: Sequence[str],
    *,
    run_seed: int,
    step: int,
) -> list[list[dict[str, object]]]:
    """Return, for each round of a step, the calls to servers as they are if no server fails.

    A call has the name of a server, the number of requests (`count`), and the position and the seed
    of the first request.

    Args:
        rounds: `[round][rank]`, the positions of a step that each learner rank learns.
        devices: the number of devices of each server.
        names: the name of each server.
    """
    calls: list[list[dict[str, object]]] = []
    for ranks in rounds:
        calls.append([])
        for part in round_parts([len(positions) for positions in ranks], devices):
            first = ranks[part.rank].start + part.requests.start
            call = {"server": names[part.engine], "first_position": first}
            seed = request_seed(run_seed, step, first)
            calls[-1].append({**call, "count": len(part.requests), "seed": seed})
    return calls


def step_metrics(
    record: StepRecord, report: StepReport, step_s: float, save_s: float, decode_mode: str
) -> dict[str, float | str]:
    """Return the metrics of a step that has ended.

    Args:
        step_s: duration of the step in seconds.
        save_s: seconds that the run waited for checkpoints since the previous step.
        decode_mode: the decoding mode of the step's rollouts.
    """
    metrics: dict[str, float | str] = {**report.metrics, "time/step_s": step_s}
    if report.channel is Channel.B:
        metrics["time/queue_wait_s"] = record.queue_wait_s
        metrics["rollout/decode_mode"] = decode_mode
    if record.sync is not None:
        metrics |= record.sync.metrics()
    if record.replaced:
        metrics["rollout/num_replaced"] = len(record.replaced)
        metrics["time/replace_s"] = max(one.started_s - one.lost_s for one in record.replaced)
    if save_s:
        metrics["time/save_s"] = save_s
    metrics |= StepTimes.of(report.spans, metrics).metrics()
    unknown = [name for name in metrics if not metric_of(name)]
    assert not unknown, f"not in shared/metrics.py: {unknown}"
    return metrics


def step_spans(record: StepRecord, report: StepReport, start_s: float, end_s: float) -> list[Span]:
    """Return the time spans (Unix times) of a step that has ended, for the run's timeline."""
    plan = record.plan
    spans = [Span(TRACK, f"step {plan.number} ({plan.channel})", start_s, end_s), *report.spans]
    if record.sync is not None:
        # The sync takes the rest of the step after the learner is done.
        learned_s = max(done.end_s for done in report.spans)
        spans.append(Span(TRACK, f"sync v{record.sync.version}", learned_s, end_s))
    spans += [
        Span(one.actor, "replace", one.lost_s, one.started_s, {"reason": one.reason})
        for one in record.replaced
    ]
    return spans


def progress_line(report: StepReport, metrics: Mapping[str, float | str], max_steps: int) -> str:
    """Return the console's line of a finished step.

    Example: `step   26/160 B  loss  1.2500  rows 3  match 0.25  dropped 2  len 34/57  cut 0.02
    logp 3e-06  generate 0.40 s 225 tok/s  learn 0.50 s 900 tok/s  step 1.00 s  v7`. `len` is the
    mean and the largest number of tokens of a rollout, `cut` the share cut at the length limit.
    """
    parts = [
        f"step {report.number:>4}/{max_steps} {report.channel}",
        f"loss {metrics['loss/total']:7.4f}",
        f"rows {metrics['packing/num_rows']:.0f}",
    ]
    if report.channel is Channel.B:
        # Samples are matched, and may have rewards too.
        if "rollout/num_dropped_objects" in metrics:
            parts += _sample_figures(metrics)
        if "rollout/num_groups" in metrics:
            parts += _reward_figures(metrics)
        if "rollout/num_failed" in metrics:
            parts += _trajectory_figures(metrics)
        parts += _length_figures(metrics)
        if "rollout/logprob_max_abs" in metrics:
            parts.append(f"logp {metrics['rollout/logprob_max_abs']:.0e}")
        else:
            parts.append("logp not compared")
        parts.append(f"generate {_timed('generate', metrics)}")
    if metrics["packing/num_carried"]:
        parts.append(f"carried {metrics['packing/num_carried']:.0f}")
    parts.append(f"learn {_timed('learn', metrics)}")
    if "time/sync_s" in metrics:
        parts.append(f"sync {metrics['time/sync_s']:.2f} s")
    return "  ".join([*parts, f"step {metrics['time/step_s']:.2f} s", f"v{report.weight_version}"])


def _timed(part: str, metrics: Mapping[str, float | str]) -> str:
    """Return the seconds of a part of the step, and its tokens per second if there were any."""
    speed = metrics.get(f"time/{part}_tokens_per_s")
    return f"{metrics[f'time/{part}_s']:.2f} s" + (f" {speed:.0f} tok/s" if speed else "")


def _length_figures(metrics: Mapping[str, float | str]) -> list[str]:
    figures = [f"len {metrics['rollout/length']:.0f}/{metrics['rollout/length_max']:.0f}"]
    # A conversation can be cut between answers too.
    is_environment = "rollout/num_failed" in metrics
    rate = "truncated_rate" if is_environment else "length_limited_rate"
    if share := metrics[f"rollout/{rate}"]:
        figures.append(f"cut {share:.2f}")
    return figures


def _sample_figures(metrics: Mapping[str, float | str]) -> list[str]:
    figures = ["match undefined"]
    if "rollout/match_rate" in metrics:
        figures = [f"match {metrics['rollout/match_rate']:.2f}"]
    figures.append(f"dropped {metrics['rollout/num_dropped_objects']:.0f}")
    if fallback := metrics["rollout/num_fallback"]:
        figures.append(f"fallback {fallback:.0f}")
    return figures


def _reward_figures(metrics: Mapping[str, float | str]) -> list[str]:
    figures = ["no reward"]
    if "rollout/reward" in metrics:
        reward = f"reward {metrics['rollout/reward']:.3f} ±{metrics['rollout/reward_std']:.2f}"
        names = [name for name in metrics if name.startswith(REWARD_FAMILY)]
        # A single function is the reward itself.
        parts = [f"{name.removeprefix(REWARD_FAMILY)} {metrics[name]:.2f}" for name in names]
        hidden = [f"+{len(parts) - MAX_PARTS}"] if len(parts) > MAX_PARTS else []
        shown = ", ".join([*parts[:MAX_PARTS], *hidden]) if len(parts) > 1 else ""
        figures = [f"{reward} ({shown})" if shown else reward]
    without = metrics["rollout/num_groups_without_signal"]
    figures.append(f"no signal {without:.0f}/{metrics['rollout/num_groups']:.0f}")
    return figures


def _trajectory_figures(metrics: Mapping[str, float | str]) -> list[str]:
    figures = []
    for word, name in (("failed", "failed"), ("split", "splits")):
        if count := metrics[f"rollout/num_{name}"]:
            figures.append(f"{word} {count:.0f}")
    return figures
