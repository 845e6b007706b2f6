"""What a run writes down: its folder, one progress line per step, a timeline."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape

from launch.checks.host import run_folder_problem
from launch.reports.detection import DetectionReport, PrimaryMetric, make_report
from launch.reports.page import write_report
from launch.reports.rewards import RewardReport, write_reward_report
from launch.runtime.batch_algebra import BatchAlgebra
from launch.runtime.ray_metrics import RayMetrics
from rollout_actors.environments.chat.tool_calls import UncalledTools
from shared.chunking import round_parts
from shared.config import RunConfig
from shared.config.derive import resolved_sync_mode, rollout_servers, warmup_steps
from shared.config.pipeline import Channel
from shared.errors import ConfigError, StorageError
from shared.grounding.evaluation import Evaluation
from shared.metrics import StepReport, metric_of
from shared.rollouts import SyncReport
from shared.run_files import RunFile, Span, TraceWriter, cannot_write, write_run_file
from shared.schedule import StepPlan
from shared.seeds import request_seed
from shared.weight_sync.differences import NOISE_FILE

TRACK = "driver"
CONFIG, ERROR = "config.json", "error.txt"
"""In the run's folder: what it was started with, and what ended it. A folder with the first one
holds a run.
"""
FAILED_CONFIG = "config_of_failed_start.json"
"""The first one's name where the run ended before its first sync was done: another start may use
the folder.
"""


@dataclass(slots=True)
class StepRecord:
    """Filled by the driver while the step runs."""

    plan: StepPlan
    report: StepReport | None = None
    queue_wait_s: float = 0.0
    """Seconds in which the learner had nothing to do because the next round was not there."""
    sync: SyncReport | None = None


@dataclass(frozen=True, slots=True)
class HeldOutFigure:
    """What the run's closing line needs of a report."""

    step: int | None
    headline: PrimaryMetric


class Telemetry:
    """Owns the run's folder. Every line is flushed when it is written, so a run that dies keeps
    what it had.
    """

    def __init__(self, config: RunConfig, console: Console) -> None:
        """Creates the folder and saves the configuration. Removes what a start that failed has left
        there.

        Raises:
            ConfigError: the folder holds a run, which would be overwritten.
            StorageError: it cannot be written.
        """
        if (problem := run_folder_problem(config)) is not None:
            raise ConfigError(problem)
        folder = config.telemetry.run_dir
        self._config = config
        self._algebra: BatchAlgebra | None = None
        self._console = console
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / FAILED_CONFIG).exists():
                for name in (ERROR, FAILED_CONFIG):
                    (folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise cannot_write(folder, error) from error
        self._metrics, self._plans, self._evaluations = (
            RunFile(folder / f"{name}.jsonl") for name in ("metrics", "plan", "evaluations")
        )
        self._trace = TraceWriter(folder / "timeline.json") if config.telemetry.timeline else None
        # Last: a folder with this file holds a run, and the next start is refused it.
        write_run_file(folder / CONFIG, config.model_dump_json(indent=2) + "\n")
        self._engines: tuple[str, ...] = ()
        self._has_begun = False
        """Whether there is anything of this run that another one must not overwrite."""
        self._ray_metrics: RayMetrics | None = None
        self._sync_mode: str = resolved_sync_mode(config)
        self._sync_fallback: str | None = None
        section = rollout_servers(config)
        self._servers = [] if section is None else [entry.model_dump() for entry in section.servers]
        self.evaluations: list[HeldOutFigure] = []
        self._uncalled_tools = UncalledTools()

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if isinstance(error, Exception):
                self._keep(error)
            if error is not None and not self._has_begun:
                self._leave_folder()
            if self._trace is not None:
                self._trace.complete()
        except StorageError as unwritten:
            if error is None:
                raise
            # Not raised: what ended the run is what its user has to know.
            self._warn(str(unwritten))
        finally:
            for file in (self._metrics, self._plans, self._evaluations):
                file.close()
            if self._trace is not None:
                self._trace.close()

    def _leave_folder(self) -> None:
        """Let another start use the folder, because nothing came of this one. Raises
        StorageError."""
        folder = self._config.telemetry.run_dir
        try:
            (folder / CONFIG).replace(folder / FAILED_CONFIG)
        except OSError as error:
            raise cannot_write(folder / FAILED_CONFIG, error) from error

    def _keep(self, error: Exception) -> None:
        """The console shows the message; the whole story, with what other processes raised, is kept
        in a file, or else shown too.
        """
        details, story = (
            self._config.telemetry.run_dir / ERROR,
            "".join(traceback.format_exception(error)),
        )
        others = (
            "what the other processes said in Ray's session folder (/tmp/ray/session_latest/logs)"
        )
        try:
            write_run_file(details, story)
            where = f"in {details}"
        except StorageError as unwritten:
            where = "above"
            self._console.print(
                story.encode(errors="backslashreplace").decode(), markup=False, highlight=False
            )
            self._warn(str(unwritten))
        self._console.print(f"the run ended; details {where}, {others}", highlight=False)

    def placed(
        self, algebra: BatchAlgebra, engines: tuple[str, ...], *, learner_threads: int
    ) -> None:
        """The rollout engines are up, under these names, and every learner rank computes with so
        many threads, which its results depend on.
        """
        self._algebra, self._engines = algebra, engines
        if self._config.telemetry.ray_metrics:
            self._ray_metrics = RayMetrics(self._config.telemetry.name)
        folder = self._config.telemetry.run_dir
        write_run_file(folder / "batch_algebra.txt", "\n".join(algebra.describe()) + "\n")
        placement = {
            "backend": self._config.rollout_matching.rollout_backend,
            "vllm_mode": self._config.rollout_matching.vllm.mode,
            "engines": engines,
            "devices": algebra.engine_devices,
            "servers": self._servers,
            "learner_ranks": algebra.learner_world_size,
            "learner_threads": learner_threads,
        }
        write_run_file(folder / "placement.json", json.dumps(placement) + "\n")

    @contextmanager
    def step(self, plan: StepPlan) -> Iterator[StepRecord]:
        """Write the plan before the step and its metrics after it; nothing of a step that failed
        but its plan.
        """
        assert self._algebra is not None, "placed comes before the first step"
        self._has_begun = True
        rounds = self._algebra.rounds if plan.channel is Channel.B else ()
        _write(
            self._plans,
            {
                **asdict(plan),
                "step": plan.number,
                "rounds": [
                    [[positions.start, positions.stop] for positions in ranks] for ranks in rounds
                ],
                "calls": self._calls(rounds, plan.step),
                "engines": self._engines,
                "servers": self._servers,
                "sync_mode": self._sync_mode,
                "sync_fallback": self._sync_fallback,
            },
        )
        started_s = time.time()
        record = StepRecord(plan)
        yield record
        assert record.report is not None
        self._step_done(
            record.report,
            record.sync,
            record.queue_wait_s,
            Span(TRACK, f"step {plan.number} ({plan.channel})", started_s, time.time()),
        )

    def sync(self, report: SyncReport) -> None:
        """DetectionReport a sync outside any step, that ended now, and record the noise that it
        measured.

        Raises StorageError.
        """
        self._has_begun = True
        if report.canary_noise is not None:
            write_run_file(
                self._config.telemetry.run_dir / NOISE_FILE, report.canary_noise.as_json()
            )
        self._note_mode(report)
        self._trace_spans([_span_until_now(f"sync v{report.version}", report.total_s)])
        self._console.print(
            f"sync      v{report.version}  {report.bytes / 1e6:.1f} MB in {report.total_s:.2f} s,"
            f" canary within {report.canary_max_abs:.1e}",
            highlight=False,
        )

    def evaluation(self, evaluation: Evaluation[Any]) -> float:
        """DetectionReport on it, in a folder and in a line. Returns the headline's value."""
        self._trace_spans([_span_until_now("held-out report", evaluation.wall_s)])
        report = self._report(evaluation)
        self.evaluations.append(HeldOutFigure(evaluation.step, report.headline))
        place = {
            "step": evaluation.step,
            "weight_version": evaluation.weight_version,
            "num_samples": len(evaluation.outcomes),
        }
        # By its name, so that who compares runs of any kind need not know what theirs are about.
        headline = {"headline": report.headline.name, "score": report.headline.value}
        _write(self._evaluations, {**place, **headline, **report.metrics()})
        self._console.print(
            f"held out  after {evaluation.step} steps, {len(evaluation.outcomes)} samples:"
            f" {report.describe()}",
            markup=False,
            highlight=False,
        )
        return report.headline.value

    def _report(self, evaluation: Evaluation[Any]) -> DetectionReport | RewardReport:
        """Written into a folder of its own."""
        folder = self._config.telemetry.run_dir / "evaluations" / f"step_{evaluation.step:06d}"
        if self._config.environment is not None:
            rewards = RewardReport(evaluation)
            write_reward_report(folder, rewards)
            return rewards
        report = make_report(
            evaluation,
            self._config,
            subject=f"{self._config.telemetry.name} after {evaluation.step} steps",
        )
        write_report(folder, report)
        return report

    def saved(self, checkpoint: Path) -> None:
        self._console.print(f"saved     {checkpoint}", highlight=False)

    def not_saved(self, error: Exception) -> None:
        self._warn(f"the weights of this run could not be saved: {error}")

    def improvement(self) -> str | None:
        """The headline of the last report beside that of the warm-up's end, or of the first where
        there is none; None with fewer than two reports.
        """
        if len(self.evaluations) < 2:
            return None
        warm = warmup_steps(self._config)
        at_warmups_end = [report for report in self.evaluations if report.step == warm > 0]
        (name, before), after = (
            (("warm-up", at_warmups_end[0]) if at_warmups_end else ("first", self.evaluations[0])),
            self.evaluations[-1],
        )
        return (
            f"val {after.headline.name} {name} {before.headline.value:.2f} -> final"
            f" {after.headline.value:.2f}"
        )

    def _step_done(
        self, report: StepReport, sync: SyncReport | None, queue_wait_s: float, span: Span
    ) -> None:
        metrics: dict[str, float | str] = {**report.metrics, "time/step_s": span.duration_s}
        if report.channel is Channel.B:
            metrics["time/queue_wait_s"] = queue_wait_s
            metrics["rollout/decode_mode"] = self._config.rollout_matching.resolved_decode_mode
        if sync is not None:
            self._note_mode(sync)
            metrics |= sync.metrics()
        assert all(map(metric_of, metrics)), (
            f"not in shared/metrics.py: {[name for name in metrics if metric_of(name) is None]}"
        )
        _write(
            self._metrics,
            {
                "step": report.number,
                "channel": report.channel,
                "weight_version": report.weight_version,
                **metrics,
            },
        )
        if self._ray_metrics is not None:
            self._ray_metrics.step_done(
                report.number, report.weight_version if sync is None else sync.version, metrics
            )
        # What is left of the step when the learner is done is the sync.
        sync_span = (
            []
            if sync is None
            else [
                Span(
                    TRACK,
                    f"sync v{sync.version}",
                    max(done.end_s for done in report.spans),
                    span.end_s,
                )
            ]
        )
        self._trace_spans([span, *report.spans, *sync_span])
        self._console.print(
            progress_line(report, metrics, self._config.training.max_steps), highlight=False
        )
        if (calls := report.metrics.get("rollout/num_tool_calls")) is not None:
            problem = self._uncalled_tools.problem(int(report.metrics["rollout/num"]), calls)
            if problem is not None:
                self._warn(problem)

    def _calls(self, rounds: Sequence[Sequence[range]], step: int) -> list[list[dict[str, Any]]]:
        """Of the servers, by round. Environments ask them call by call: those are not known
        before."""
        if not self._servers or self._config.environment is not None:
            return []
        assert self._algebra is not None
        return server_calls(
            rounds,
            self._algebra.engine_devices,
            self._engines,
            run_seed=self._config.training.seed,
            step=step,
        )

    def _note_mode(self, sync: SyncReport) -> None:
        """Every later plan says what is sent, and why it is not the adapter any more."""
        self._sync_mode = sync.mode
        if sync.fell_back is not None:
            self._sync_fallback = sync.fell_back
            self._warn(
                f"the adapter sync failed, full weights are sent from now on: {sync.fell_back}"
            )

    def _warn(self, text: str) -> None:
        self._console.print(f"[bold yellow]warning[/]   {escape(text)}", highlight=False)

    def _trace_spans(self, spans: Sequence[Span]) -> None:
        if self._trace is not None:
            self._trace.write(spans)


def _span_until_now(name: str, seconds: float) -> Span:
    now_s = time.time()
    return Span(TRACK, name, now_s - seconds, now_s)


def _write(file: RunFile, values: Mapping[str, Any]) -> None:
    file.write(json.dumps(values) + "\n")


# The line that a run prints after each step.


def progress_line(report: StepReport, metrics: Mapping[str, float | str], max_steps: int) -> str:
    parts = [
        f"step {report.number:>4}/{max_steps} {report.channel}",
        f"loss {metrics['loss/total']:7.4f}",
        f"rows {metrics['packing/num_rows']:.0f}",
    ]
    if report.channel is Channel.B:
        parts += [
            *(
                _of_environments(metrics)
                if "rollout/num_groups" in metrics
                else _of_samples(metrics)
            ),
            f"tokens {metrics['rollout/num_tokens']:.0f}",
            (
                f"logp {metrics['rollout/logprob_max_abs']:.0e}"
                if "rollout/logprob_max_abs" in metrics
                else "logp not compared"
            ),
            f"generate {metrics['time/generate_s']:.2f} s",
        ]
    if metrics["packing/num_carried"]:
        parts.append(f"carried {metrics['packing/num_carried']:.0f}")
    parts.append(f"learn {metrics['time/learn_s']:.2f} s")
    if "time/sync_s" in metrics:
        parts.append(f"sync {metrics['time/sync_s']:.2f} s")
    return "  ".join([*parts, f"step {metrics['time/step_s']:.2f} s", f"v{report.weight_version}"])


def _of_samples(metrics: Mapping[str, float | str]) -> list[str]:
    fallback = metrics["rollout/num_fallback"]
    return [
        (
            f"match {metrics['rollout/match_rate']:.2f}"
            if "rollout/match_rate" in metrics
            else "match of nothing"
        ),
        f"dropped {metrics['rollout/num_dropped_objects']:.0f}",
        *([f"nothing kept of {fallback:.0f}"] if fallback else []),
    ]


def _of_environments(metrics: Mapping[str, float | str]) -> list[str]:
    counts = {
        "failed": "rollout/num_failed",
        "truncated": "rollout/num_truncated",
        "split": "rollout/num_splits",
    }
    without = metrics["rollout/num_groups_without_signal"]
    return [
        f"reward {metrics['rollout/reward']:.3f}" if "rollout/reward" in metrics else "no reward",
        f"no signal {without:.0f}/{metrics['rollout/num_groups']:.0f}",
        *(f"{word} {metrics[name]:.0f}" for word, name in counts.items() if metrics[name]),
    ]


# Which server will be asked for what in a step, and under which seed: known before the step, so
# that it is in its plan (spec: server-mode metadata).


def server_calls(
    rounds: Sequence[Sequence[range]],
    devices: Sequence[int],
    names: Sequence[str],
    *,
    run_seed: int,
    step: int,
) -> list[list[dict[str, Any]]]:
    """The calls of each round, as long as no server fails: what one takes over keeps the seeds of
    its requests, and its rollouts say who answered.

    Args:
        rounds: `[round][rank]`, the positions of a step that each learner rank learns.
        devices: of each server.
    """
    calls: list[list[dict[str, Any]]] = []
    for ranks in rounds:
        calls.append([])
        for part in round_parts(list(map(len, ranks)), devices):
            first = ranks[part.rank].start + part.requests.start
            seed = request_seed(run_seed, step, first)
            calls[-1].append(
                {
                    "server": names[part.engine],
                    "first_position": first,
                    "count": len(part.requests),
                    "seed": seed,
                }
            )
    return calls
