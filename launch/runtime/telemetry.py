"""The run's folder, one progress line per step, and a timeline."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from rich.console import Console
from rich.markup import escape

from launch.checks.host import run_folder_problem
from launch.ledger import Ledger, check_ledger, cut_ledger
from launch.loggers.events import Picture
from launch.loggers.sink import Loggers
from launch.reports.detection import DetectionReport, make_report
from launch.reports.page import story, write_report
from launch.reports.rewards import RewardReport, write_reward_report
from launch.runtime.batch_algebra import BatchAlgebra
from launch.runtime.checkpoints import read_index
from launch.runtime.console import StepBar, keep_lost_console
from launch.runtime.ray_metrics import RayMetrics
from launch.runtime.replacements import Replacement
from launch.runtime.resume import ResumePoint
from rollout_actors.environments.chat.tools import UncalledTools
from shared.chunking import round_parts
from shared.config import RunConfig
from shared.config.derive import resolved_sync_mode, rollout_servers, warmup_steps
from shared.config.pipeline import Channel
from shared.config.secrets import redacted
from shared.errors import ConfigError, StorageError
from shared.grounding.evaluation import Evaluation
from shared.metrics import StepReport, metric_of
from shared.rollouts import SyncReport
from shared.run_files import (
    CONFIG,
    FAILED_CONFIG,
    Patience,
    RunFile,
    Span,
    TraceWriter,
    cannot_write,
    cut_lines,
    cut_timeline,
    damaged_line,
    read_steps,
    read_timeline,
    replace_file,
    write_run_file,
)
from shared.schedule import RunSchedule, StepPlan
from shared.seeds import request_seed
from shared.trajectory import ExampleCounts
from shared.weight_sync.canary import NOISE_FILE

_LOGGER = logging.getLogger(__name__)

TRACK = "driver"
ERROR = "error.txt"


@dataclass(slots=True)
class StepRecord:
    """One step, filled by the driver while it runs."""

    plan: StepPlan
    report: StepReport | None = None
    queue_wait_s: float = 0.0
    """Seconds in which the learner waited for the next round."""
    sync: SyncReport | None = None
    replaced: Sequence[Replacement] = ()
    """Actors that were lost and are back."""


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """A line of evaluations.jsonl, without the report's own metrics.

    Example: `EvaluationRecord(20, 21, 64, "F1@0.5", 0.71, class_f1=0.64)`.
    """

    step: int | None
    """Updates behind the weights."""
    weight_version: int
    num_samples: int
    headline: str
    """Name of the report's main figure."""
    score: float | None
    """Value of the main figure; None: too much of the report failed."""
    class_f1: float | None
    """Of objects: `val/class_f1` of the report's metrics."""
    lenient_f1: float | None = None
    """Of objects: `val/lenient_f1`."""


def read_evaluations(folder: Path) -> list[EvaluationRecord]:
    """Return the reports that a run has made so far; none if there is no such file.

    Raises OSError, and RecordError for a line that is damaged.
    """
    file = folder / "evaluations.jsonl"
    metrics = {"class_f1": "val/class_f1", "lenient_f1": "val/lenient_f1"}
    records = []
    for number, line in enumerate(read_steps(file), 1):
        names = {one.name: metrics.get(one.name, one.name) for one in fields(EvaluationRecord)}
        values: dict[str, Any] = {name: line.get(key) for name, key in names.items()}
        if any(key not in line for key in names.values() if key not in metrics.values()):
            raise damaged_line(file, number, "is no held-out report")
        records.append(EvaluationRecord(**values))
    return records


def require_readable(folder: Path) -> None:
    """Read all that a resumed run reads again, before anything is changed.

    Raises OSError, ConfigError, and RecordError for a line that is damaged.
    """
    for name in ("metrics.jsonl", "plan.jsonl"):
        read_steps(folder / name)
    read_evaluations(folder)
    read_timeline(folder / "timeline.json")
    read_index(folder)


def cut_run_files(folder: Path, step: int, *, reports_again: bool) -> int:
    """Leave what a run had written when `step` updates were done and nothing further was begun.

    Args:
        reports_again: the report of the weights after these updates is going to be made again.

    Returns:
        The last step whose metrics are there; 0 where there is none.

    Raises as `require_readable` does.
    """
    require_readable(folder)
    metrics = cut_lines(folder / "metrics.jsonl", lambda line: line["step"] <= step)
    last = int(metrics[-1]["step"]) if metrics else 0
    cut_lines(folder / "plan.jsonl", lambda line: line["step"] <= step)
    cut_ledger(folder, last)
    last_report = step - int(reports_again)
    cut_lines(folder / "evaluations.jsonl", lambda line: line["step"] <= last_report)
    for report in (folder / "evaluations").glob("step_*"):
        # Not those of `launch.evaluate`, such as step_000020_val.
        name = re.fullmatch(r"step_(\d{6,})(\.partial)?", report.name)
        if name is not None and int(name[1]) > last_report:
            shutil.rmtree(report)
    for log in (folder / "rollouts").glob("step_*.jsonl"):
        name = re.fullmatch(r"step_(\d{6,})(\.rank\d+)?\.jsonl", log.name)
        if name is not None and int(name[1]) > step:
            log.unlink()
    cut_timeline(folder / "timeline.json", f"step {last} (")
    return last


def only_writer(folder: Path) -> IO[bytes]:
    """Lock the run's folder until the file that is returned is closed, or this process ends.

    Raises:
        ConfigError: another process has it.
        OSError: no file can be made there.
    """
    file = (folder / ".lock").open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ConfigError(
            f"telemetry.run_dir: another process writes to {folder}; wait until that run has ended,"
            " or end it"
        ) from error
    except OSError as error:
        # A network disk without locks: two runs in a folder are then not told.
        _LOGGER.warning("%s cannot be locked (%s)", folder, error)
    return file


class Telemetry:
    """Owns the run's folder. Every line is flushed when it is written."""

    def __init__(
        self, config: RunConfig, console: Console, point: ResumePoint | None = None
    ) -> None:
        """Create the folder and save the configuration. Removes what a failed start has left there.

        The files of a run that is resumed at `point` go on behind its step.

        Raises:
            ConfigError: the folder holds a run.
            StorageError: it cannot be written.
        """
        if point is None and (problem := run_folder_problem(config)) is not None:
            raise ConfigError(problem)
        folder = config.telemetry.run_dir
        self._config = config
        self._folder = folder
        self._console = console
        self._bar = StepBar(console, config.training.max_steps)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = only_writer(folder)
            keep_lost_console(folder)
            # Under `resume=auto` a run that ended before its first checkpoint is begun anew.
            begun = (FAILED_CONFIG, CONFIG) if config.resume.is_auto else (FAILED_CONFIG,)
            if point is None and any((folder / name).exists() for name in begun):
                self._cut(0, reports_again=True)
        except OSError as error:
            raise cannot_write(folder, error) from error
        self.patience = Patience(tell=self._warn)
        """Tries again what the disk refuses, from the first sync on: a start is to fail at once."""
        self._open("wb" if point is None else "ab")
        self._ledger: Ledger | None = None
        if point is None:
            if config.telemetry.ledger:
                self._ledger = Ledger(config, patience=self.patience)
            # Last: a folder with this file holds a run, and the next start is refused it.
            write_run_file(folder / CONFIG, config.model_dump_json(indent=2) + "\n")
        self._num_written = 0
        """The last step whose metrics a resumed run has found."""
        self._algebra: BatchAlgebra | None = None
        self._engines: tuple[str, ...] = ()
        self._has_begun = point is not None
        """Whether there is anything of this run that another one must not overwrite."""
        self._ray_metrics: RayMetrics | None = None
        self._loggers: Loggers | None = None
        """Not before the run has begun: a start that fails is no run in them."""
        self.sync_fallback = None if point is None else point.state.sync_fallback
        """Why full weights are sent instead of an adapter."""
        self._sync_mode = "full" if self.sync_fallback else resolved_sync_mode(config)
        self.ray_logs: Path | None = None
        """The folder of the Ray session's logs; None: there is no session."""
        section = rollout_servers(config)
        self._servers = [] if section is None else [entry.model_dump() for entry in section.servers]
        self.evaluations: list[EvaluationRecord] = []
        self._save_s = 0.0
        """Seconds of waiting for checkpoints since the last step's line."""
        self._uncalled_tools = UncalledTools()

    def go_on(self, point: ResumePoint) -> None:
        """Cut the files of a run to what had happened at the point, and go on behind it.

        Not before the learner has taken the checkpoint: a start that fails changes nothing. Raises
        StorageError.
        """
        self._close()
        self._bar.go_on(point.step)
        reports_again = RunSchedule(self._config).evaluates_before(point.step)
        try:
            if (problem := check_ledger(self._folder)) is not None:
                self._warn(problem)
            self._num_written = self._cut(point.step, reports_again=reports_again)
            replace_file(self._folder / CONFIG, self._config.model_dump_json(indent=2) + "\n")
            self.evaluations = read_evaluations(self._folder)
            if self._config.telemetry.ledger:
                last = self._num_written
                self._ledger = Ledger(self._config, last, mode="ab", patience=self.patience)
        except OSError as error:
            raise cannot_write(self._folder, error) from error
        self._open("ab")

    def _cut(self, step: int, *, reports_again: bool) -> int:
        last = cut_run_files(self._folder, step, reports_again=reports_again)
        for name in (ERROR, FAILED_CONFIG):
            (self._folder / name).unlink(missing_ok=True)
        return last

    def _open(self, mode: str) -> None:
        folder = self._folder
        again = self.patience
        self._metrics = RunFile(folder / "metrics.jsonl", mode=mode, patience=again)
        self._plans = RunFile(folder / "plan.jsonl", mode=mode, patience=again)
        self._evaluations = RunFile(folder / "evaluations.jsonl", mode=mode, patience=again)
        self._trace: TraceWriter | None = None
        if self._config.telemetry.timeline:
            self._trace = TraceWriter(folder / "timeline.json", mode=mode, patience=again)

    def _close(self) -> None:
        for file in (self._metrics, self._plans, self._evaluations, self._trace):
            if file is not None:
                file.close()

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        if error is not None:
            self.patience.limit_s = 0.0  # whoever waits for the end has been told why it comes
        try:
            if isinstance(error, Exception):
                self._keep(error)
            if error is not None and not self._has_begun:
                # Nothing came of this start, so another one may use the folder.
                failed = self._folder / FAILED_CONFIG
                try:
                    (self._folder / CONFIG).replace(failed)
                except OSError as refused:
                    raise cannot_write(failed, refused) from refused
            if self._trace is not None:
                self._trace.complete()
        except StorageError as unwritten:
            if error is None:
                raise
            # Not raised: what ended the run is what its user has to know.
            self._warn(str(unwritten))
        finally:
            try:
                # Ctrl-C may end this wait.
                if self._loggers is not None:
                    self._loggers.close(failed=error is not None)
            finally:
                self._close()
                if self._ledger is not None:
                    self._ledger.close()
                self._lock.close()

    def _keep(self, error: Exception) -> None:
        """Keep the error's whole story in a file, or else show it."""
        story = redacted("".join(traceback.format_exception(error)))
        try:
            write_run_file(self._folder / ERROR, story)
            where = f"in {self._folder / ERROR}"
        except StorageError as unwritten:
            self._warn(str(unwritten))
            try:
                # Only a new name is safe in a folder where everybody may write.
                number, path = tempfile.mkstemp(".txt", f"rollmatch_{self._folder.name}_error_")
                os.close(number)
                try:
                    write_run_file(Path(path), story)
                except StorageError:
                    Path(path).unlink()
                    raise
                where = f"in {path}"
            except (OSError, StorageError):
                where = "above"
                self._print(story.encode(errors="backslashreplace").decode())
        others = ""
        if self.ray_logs is not None:
            others = f", what the other processes printed is in {self.ray_logs}"
        self._print(f"the run ended; details {where}{others}")

    def placed(
        self,
        algebra: BatchAlgebra,
        engines: tuple[str, ...],
        *,
        learner_threads: int,
        examples: ExampleCounts | None = None,
    ) -> None:
        """Record the engines, and what the results of a learner rank depend on: its threads and,
        where there is an environment, the number of its examples.
        """
        self._algebra = algebra
        self._engines = engines
        if self._config.telemetry.ray_metrics and self._config.cluster.kind == "ray":
            self._ray_metrics = RayMetrics(self._config.telemetry.name)
        write_run_file(self._folder / "batch_algebra.txt", "\n".join(algebra.describe()) + "\n")
        placement = {
            "backend": self._config.rollout_matching.rollout_backend,
            "vllm_mode": self._config.rollout_matching.vllm.mode,
            "engines": engines,
            "devices": algebra.engine_devices,
            "servers": self._servers,
            "learner_ranks": algebra.learner_world_size,
            "learner_threads": learner_threads,
            "examples": None if examples is None else asdict(examples),
        }
        write_run_file(self._folder / "placement.json", json.dumps(placement) + "\n")

    @contextmanager
    def step(self, plan: StepPlan) -> Iterator[StepRecord]:
        """Write the plan before the step and its metrics after it."""
        assert self._algebra is not None, "placed comes before the first step"
        self._begin()
        rounds = self._algebra.rounds if plan.channel is Channel.B else ()
        line = {
            **asdict(plan),
            "step": plan.number,
            "rounds": [[[part.start, part.stop] for part in ranks] for ranks in rounds],
            "calls": self._calls(rounds, plan.step),
            "engines": self._engines,
            "servers": self._servers,
            "sync_mode": self._sync_mode,
            "sync_fallback": self.sync_fallback,
        }
        self._plans.write(json.dumps(line) + "\n")
        started_s = time.time()
        record = StepRecord(plan)
        yield record
        span = Span(TRACK, f"step {plan.number} ({plan.channel})", started_s, time.time())
        self._step_done(record, span)

    def waits_for(self, what: str) -> AbstractContextManager[None]:
        """Show on a terminal what the run waits for in the body."""
        return self._bar.waits_for(what)

    def _begin(self) -> None:
        self._has_begun = True
        self.patience.limit_s = self._config.timeouts.storage_s
        if self._loggers is None:
            first_step = self._num_written + 1
            self._loggers = Loggers(self._config, first_step=first_step, warn=self._warn)

    def has_written(self, number: int) -> bool:
        """Tell whether this step's metrics are in the run's folder."""
        return self._num_written >= number

    def write_step(self, plan: StepPlan, report: StepReport, sync: SyncReport | None) -> None:
        """Write the metrics of a step that ended before the run was resumed."""
        start_s = min(span.start_s for span in report.spans)
        end_s = max(span.end_s for span in report.spans)
        span = Span(TRACK, f"step {plan.number} ({plan.channel})", start_s, end_s)
        self._step_done(StepRecord(plan, report, sync=sync), span)

    def sync(self, report: SyncReport) -> None:
        """Record a sync outside any step, that ended now, and the noise that it measured."""
        self._begin()
        if report.canary_noise is not None:
            noise = report.canary_noise.as_json()
            self.patience(lambda: write_run_file(self._folder / NOISE_FILE, noise))
        self._note_mode(report)
        self._trace_until_now(f"sync v{report.version}", report.total_s)
        self._print(
            f"sync      v{report.version}  {report.bytes / 1e6:.1f} MB in {report.total_s:.2f} s,"
            f" canary within {report.canary_max_abs:.1e}"
        )

    def evaluation(self, evaluation: Evaluation[Any]) -> float | None:
        """Write the held-out report as a folder and two lines, and return its headline's value."""
        self._trace_until_now("held-out report", evaluation.wall_s)
        folder = self._folder / "evaluations" / f"step_{evaluation.step:06d}"
        report: DetectionReport | RewardReport
        pictures: list[Picture] = []
        if self._config.environment is not None:
            rewards = report = RewardReport(evaluation)
            self.patience(lambda: write_reward_report(folder, rewards))
        else:
            subject = f"{self._config.telemetry.name} after {evaluation.step} steps"
            detection = report = make_report(evaluation, self._config, subject=subject)
            self.patience(lambda: write_report(folder, detection))
            pictures = [
                Picture(
                    folder / worst.picture,
                    f"{worst.scene.sample.sample_id}, F1 {worst.f1:.2f}. {story(worst)}",
                )
                for worst in detection.worst
            ]
        figures = report.metrics()
        record = EvaluationRecord(
            evaluation.step,
            evaluation.weight_version,
            len(evaluation.outcomes),
            report.headline.name,
            report.headline.value,
            class_f1=figures.get("val/class_f1"),
            lenient_f1=figures.get("val/lenient_f1"),
        )
        self.evaluations.append(record)
        line = {**asdict(record), **figures}
        del line["class_f1"], line["lenient_f1"]  # they are among the metrics
        self._evaluations.write(json.dumps(line) + "\n")
        if self._loggers is not None:
            assert evaluation.step is not None, "a run knows its steps"
            self._loggers.report(evaluation.step, folder, figures, pictures)
        size = f"{record.step} steps, {record.num_samples} samples"
        self._print(f"held out  after {size}: {report.describe()}")
        return record.score

    def waited_for_save(self, checkpoint: Path, seconds: float) -> None:
        """Record that the run waited until now for this checkpoint, or for its copy."""
        self._save_s += seconds
        self._trace_until_now(f"save {checkpoint.name}", seconds)

    def saves_in_foreground(self, reason: str) -> None:
        """Tell why the run waits for its checkpoints although `checkpoint.background` is set."""
        self._warn(f"the run waits while a checkpoint is written (checkpoint.background): {reason}")

    def saved(self, checkpoint: Path, written: Sequence[Span] = ()) -> None:
        """Tell that a checkpoint is whole; `written`: when the ranks wrote it beside the run."""
        if self._trace is not None:
            self._trace.write(written)
        self._print(f"saved     {checkpoint}")

    def put_aside(self, checkpoint: Path, aside: Path, why: str) -> None:
        self._print(f"resumed   {checkpoint} {why}, and is {aside.name} now")

    def gives_up_save(self, error: StorageError) -> None:
        """Tell why a checkpoint under way is given up for the last update's own."""
        self._warn(f"{error}; it is given up, and the last update is saved without it")

    def goes_on_saving(self, error: StorageError) -> None:
        """Tell what the disk refused behind a checkpoint that is whole."""
        self._warn(f"{error}; the last update is saved all the same")

    def not_saved(self, error: Exception) -> None:
        self._warn(f"the weights of this run could not be saved: {error}")

    def improvement(self) -> str | None:
        """Compare the last of several reports with that of the warm-up's end, or else the first."""
        if len(self.evaluations) < 2:
            return None
        warm = warmup_steps(self._config)
        name = "warm-up"
        before = next((record for record in self.evaluations if record.step == warm > 0), None)
        if before is None:
            name = "first"
            before = self.evaluations[0]
        after = self.evaluations[-1]
        if before.score is None or after.score is None:
            lacking = "the last report" if after.score is None else f"that of the {name}"
            return f"val {after.headline}: {lacking} has no score, too many of its rollouts failed"
        line = f"val {after.headline} {name} {before.score:.2f} -> final {after.score:.2f}"
        if before.class_f1 is not None and after.class_f1 is not None:
            line += f", with names {before.class_f1:.2f} -> {after.class_f1:.2f}"
        if before.lenient_f1 is not None and after.lenient_f1 is not None:
            lenient = f"{before.lenient_f1:.2f} -> {after.lenient_f1:.2f}"
            if lenient != f"{before.score:.2f} -> {after.score:.2f}":
                line += f", read leniently {lenient}"
        return line

    def _step_done(self, record: StepRecord, span: Span) -> None:
        report = record.report
        assert report is not None, "the driver fills it"
        metrics: dict[str, float | str] = {**report.metrics, "time/step_s": span.duration_s}
        if report.channel is Channel.B:
            metrics["time/queue_wait_s"] = record.queue_wait_s
            metrics["rollout/decode_mode"] = self._config.rollout_matching.resolved_decode_mode
        version = report.weight_version
        spans = [span, *report.spans]
        if record.sync is not None:
            self._note_mode(record.sync)
            metrics |= record.sync.metrics()
            version = record.sync.version
            # What is left of the step when the learner is done is the sync.
            learned_s = max(done.end_s for done in report.spans)
            spans.append(Span(TRACK, f"sync v{version}", learned_s, span.end_s))
        if record.replaced:
            metrics["rollout/num_replaced"] = len(record.replaced)
            metrics["time/replace_s"] = max(one.started_s - one.lost_s for one in record.replaced)
            spans += [
                Span(one.actor, "replace", one.lost_s, one.started_s, {"reason": one.reason})
                for one in record.replaced
            ]
        if self._save_s:
            metrics["time/save_s"] = self._save_s
            self._save_s = 0.0
        unknown = [name for name in metrics if not metric_of(name)]
        assert not unknown, f"not in shared/metrics.py: {unknown}"
        line: dict[str, Any] = {"step": report.number, "channel": report.channel}
        line |= {"weight_version": report.weight_version, **metrics}
        if self._ledger is not None:
            self._ledger.write(record.plan, report)
        self._metrics.write(json.dumps(line) + "\n")
        if self._loggers is not None:
            self._loggers.step(report.number, metrics)
        if self._ray_metrics is not None:
            self._ray_metrics.step_done(report.number, version, metrics)
        if self._trace is not None:
            self._trace.write(spans)
        self._print(progress_line(report, metrics, self._config.training.max_steps))
        self._bar.done(report.number)
        calls = report.metrics.get("rollout/num_tool_calls")
        if calls is not None:
            num_rollouts = int(report.metrics["rollout/num"])
            if problem := self._uncalled_tools.problem(num_rollouts, calls):
                self._warn(problem)

    def _calls(self, rounds: Sequence[Sequence[range]], step: int) -> list[list[dict[str, Any]]]:
        # Those of environments, which ask call by call, are not known before.
        if not self._servers or self._config.environment is not None:
            return []
        assert self._algebra is not None
        devices = self._algebra.engine_devices
        seed = self._config.training.seed
        return server_calls(rounds, devices, self._engines, run_seed=seed, step=step)

    def _note_mode(self, sync: SyncReport) -> None:
        self._sync_mode = sync.mode
        # Port 0 of the configuration is any free one: the plan names the port that was used.
        for server, port in zip(self._servers, sync.ports, strict=False):
            server["group_port"] = port
        if sync.fell_back is not None:
            self.sync_fallback = sync.fell_back
            now = "full weights are sent from now on"
            self._warn(f"the adapter sync failed, {now}: {sync.fell_back}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def _warn(self, text: str) -> None:
        self._console.print(f"[bold yellow]warning[/]   {escape(text)}", highlight=False)

    def _trace_until_now(self, name: str, seconds: float) -> None:
        if self._trace is not None:
            now_s = time.time()
            self._trace.write([Span(TRACK, name, now_s - seconds, now_s)])


def progress_line(report: StepReport, metrics: Mapping[str, float | str], max_steps: int) -> str:
    """Return the console's line of a finished step.

    Example: `step   26/160 B  loss  1.2500  rows 3  match 0.25  dropped 2  tokens 90  logp 3e-06
    generate 0.40 s  learn 0.50 s  step 1.00 s  v7`.
    """
    parts = [
        f"step {report.number:>4}/{max_steps} {report.channel}",
        f"loss {metrics['loss/total']:7.4f}",
        f"rows {metrics['packing/num_rows']:.0f}",
    ]
    if report.channel is Channel.B:
        # Samples are matched, and may be rewarded too.
        if "rollout/num_dropped_objects" in metrics:
            parts += _sample_figures(metrics)
        if "rollout/num_groups" in metrics:
            parts += _reward_figures(metrics)
        if "rollout/num_failed" in metrics:
            parts += _trajectory_figures(metrics)
        parts.append(f"tokens {metrics['rollout/num_tokens']:.0f}")
        if "rollout/logprob_max_abs" in metrics:
            parts.append(f"logp {metrics['rollout/logprob_max_abs']:.0e}")
        else:
            parts.append("logp not compared")
        parts.append(f"generate {metrics['time/generate_s']:.2f} s")
    if metrics["packing/num_carried"]:
        parts.append(f"carried {metrics['packing/num_carried']:.0f}")
    parts.append(f"learn {metrics['time/learn_s']:.2f} s")
    if "time/sync_s" in metrics:
        parts.append(f"sync {metrics['time/sync_s']:.2f} s")
    return "  ".join([*parts, f"step {metrics['time/step_s']:.2f} s", f"v{report.weight_version}"])


def _sample_figures(metrics: Mapping[str, float | str]) -> list[str]:
    figures = ["match of nothing"]
    if "rollout/match_rate" in metrics:
        figures = [f"match {metrics['rollout/match_rate']:.2f}"]
    figures.append(f"dropped {metrics['rollout/num_dropped_objects']:.0f}")
    if fallback := metrics["rollout/num_fallback"]:
        figures.append(f"nothing kept of {fallback:.0f}")
    return figures


def _reward_figures(metrics: Mapping[str, float | str]) -> list[str]:
    figures = ["no reward"]
    if "rollout/reward" in metrics:
        figures = [f"reward {metrics['rollout/reward']:.3f}"]
    without = metrics["rollout/num_groups_without_signal"]
    figures.append(f"no signal {without:.0f}/{metrics['rollout/num_groups']:.0f}")
    return figures


def _trajectory_figures(metrics: Mapping[str, float | str]) -> list[str]:
    figures = []
    for word, name in (("failed", "failed"), ("truncated", "truncated"), ("split", "splits")):
        if count := metrics[f"rollout/num_{name}"]:
            figures.append(f"{word} {count:.0f}")
    return figures


def server_calls(
    rounds: Sequence[Sequence[range]],
    devices: Sequence[int],
    names: Sequence[str],
    *,
    run_seed: int,
    step: int,
) -> list[list[dict[str, Any]]]:
    """Return the calls of each round where no server fails, with the seed of the first request.

    Args:
        rounds: `[round][rank]`, the positions of a step that each learner rank learns.
        devices: those of each server.
    """
    calls: list[list[dict[str, Any]]] = []
    for ranks in rounds:
        calls.append([])
        for part in round_parts([len(positions) for positions in ranks], devices):
            first = ranks[part.rank].start + part.requests.start
            call = {"server": names[part.engine], "first_position": first}
            seed = request_seed(run_seed, step, first)
            calls[-1].append({**call, "count": len(part.requests), "seed": seed})
    return calls
