"""The outputs of a run: the files of its folder, the console, loggers and Ray's metrics."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.markup import escape

from launch.doctor.learning import FINDINGS, VERDICT, Doctor, Finding, lines_of, read_findings
from launch.doctor.timing import VERDICT_STEPS, StepTimes, verdict
from launch.loggers.events import AlertEvent
from launch.loggers.ray_metrics import RayMetrics
from launch.loggers.sink import Loggers
from launch.processes.batch_algebra import BatchAlgebra
from launch.processes.sweep import trial_of
from launch.reports.run_page import PAGE, write_page
from launch.run_folder.console import StepBar
from launch.run_folder.folder import RunFolder
from launch.run_folder.held_out import (
    EvaluationRecord,
    improvement,
    line_of,
    read_evaluations,
    write_held_out,
)
from launch.run_folder.ledger import Ledger, check_ledger
from launch.run_folder.resume import ResumePoint
from launch.run_folder.steps import (
    TRACK,
    StepPlans,
    StepRecord,
    progress_line,
    step_metrics,
    step_spans,
)
from launch.run_folder.timeline import TraceWriter
from shared.config import RunConfig
from shared.errors import ConfigError, RecordError, StorageError
from shared.grounding.evaluation import Evaluation, Outcome
from shared.metrics import StepReport
from shared.rollouts import SyncReport
from shared.run_files import (
    CONFIG,
    Patience,
    RunFile,
    Span,
    cannot_write,
    replace_file,
    write_run_file,
)
from shared.schedule import RunSchedule, StepPlan
from shared.trajectory import ExampleCounts
from shared.weight_sync.canary import NOISE_FILE


class Telemetry:
    """The recorder of a run's steps, weight syncs, held-out reports and checkpoints.

    Every line is flushed when it is written.
    """

    def __init__(
        self, config: RunConfig, console: Console, point: ResumePoint | None = None
    ) -> None:
        """Create the run folder, remove files of a failed start, and save the configuration.

        If a run is resumed at `point`, nothing is removed or saved before `go_on` is called.

        Raises:
            ConfigError: the folder holds a run.
            StorageError: the folder cannot be written.
        """
        self._config = config
        self._console = console
        run_dir = config.telemetry.run_dir
        self._folder = RunFolder(run_dir, config.resume, resumes=point is not None)
        self._bar = StepBar(console, config.training.num_steps)
        self.patience = Patience(tell=self.warn)
        """Calls functions that write files. Failed writes are retried only after the first weight
        sync; before that, they end the start at once."""
        self._plans = StepPlans(config, None if point is None else point.state.sync_fallback)
        self._ends = ExitStack()
        """Closes the open files when the run ends."""
        self._ends.callback(self._folder.close)
        self._timeline: TraceWriter | None = None
        self._ledger: Ledger | None = None
        if point is None:
            self._open(None)
            # Written last: a folder with this file holds a run, which the next start refuses.
            write_run_file(self._folder.path / CONFIG, _as_text(config))
        self._num_written = 0
        """For a resumed run, the last step whose metrics are in the folder; else 0."""
        self._has_begun = point is not None
        """Whether the run has results that another run must not overwrite."""
        self._ray_metrics: RayMetrics | None = None
        self._loggers: Loggers | None = None
        """None until the run has begun, so that the loggers do not log a failed start as a run."""
        self.ray_logs: Path | None = None
        """The folder of the Ray session's logs; None without a session."""
        self._evaluations: list[EvaluationRecord] = []
        self._save_s = 0.0
        """Seconds that the run waited for checkpoints since the line of the last step."""
        self._doctor = Doctor(config)
        self._times: dict[int, StepTimes] = {}
        """Times of the steps since the last verdict, by number."""
        self._devices: tuple[int, ...] = ()

    @property
    def sync_fallback(self) -> str | None:
        """Why full weights are sent instead of an adapter; None if no adapter sync has failed."""
        return self._plans.sync_fallback

    def go_on(self, point: ResumePoint) -> None:
        """Cut a resumed run's files back to its checkpoint, and continue them.

        Called after the learner has loaded the checkpoint, so a failed start changes nothing.
        Raises StorageError.
        """
        folder = self._folder.path
        self._bar.go_on(point.step)
        reports_again = RunSchedule(self._config).evaluates_before(point.step)
        try:
            if (problem := check_ledger(folder)) is not None:
                self.warn(problem)
            self._num_written = self._folder.cut(point.step, reports_again=reports_again)
            replace_file(folder / CONFIG, _as_text(self._config))
            self._evaluations = read_evaluations(folder)
            self._doctor = Doctor.of_run(self._config, folder)
            verdicts = [
                one
                for one in read_findings(folder)
                if one.rule == VERDICT and one.step <= self._num_written
            ]
            replace_file(folder / FINDINGS, lines_of([*self._doctor.findings, *verdicts]))
            self._open(self._num_written)
        except OSError as error:
            raise cannot_write(folder, error) from error

    def _open(self, last: int | None) -> None:
        """Create the files that grow with the run, or continue them after the step `last`."""
        section = self._config.telemetry
        mode = "wb" if last is None else "ab"
        again = self.patience

        def lines(name: str) -> RunFile:
            file = RunFile(section.run_dir / name, mode=mode, patience=again)
            self._ends.callback(file.close)
            return file

        self._metric_lines = lines("metrics.jsonl")
        self._plan_lines = lines("plan.jsonl")
        self._report_lines = lines("evaluations.jsonl")
        self._finding_lines = lines(FINDINGS)
        if section.timeline:
            path = section.run_dir / "timeline.json"
            self._timeline = TraceWriter(path, mode=mode, patience=again)
            self._ends.callback(self._timeline.close)
        if section.ledger:
            self._ledger = Ledger(self._config, last or 0, mode=mode, patience=again)
            self._ends.callback(self._ledger.close)

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._ends:
            if self._loggers is not None:
                # Runs before the other callbacks; Ctrl-C may interrupt it.
                self._ends.callback(self._loggers.close, failed=error is not None)
            self._bar.close()
            if error is None:
                self._verdict()
            else:
                # The run is ending, so failed writes are not tried again.
                self.patience.limit_s = 0.0
            try:
                if isinstance(error, Exception):
                    self._keep(error)
                if error is not None and not self._has_begun:
                    self._folder.leave_to_another_start()
                if self._timeline is not None:
                    self._timeline.complete()
            except StorageError as unwritten:
                if error is None:
                    raise
                # Not raised, because the user has to see the error that ended the run.
                self.warn(str(unwritten))
            if self._loggers is not None:  # a start that failed changes nothing
                self._write_page()

    def _write_page(self) -> None:
        """Write the page of the run. If that fails, warn only: the run itself is complete."""
        folder = self._folder.path
        try:
            write_page({folder: self._config}, folder / PAGE)
        except (ConfigError, OSError, RecordError, StorageError) as error:
            self.warn(f"{error}; then write the page with `rollmatch view {folder}`")
        else:
            self.note(f"report    {folder / PAGE}")

    def _keep(self, error: Exception) -> None:
        """Save the error with its traceback in a file, or else print it."""
        kept = self._folder.keep_error(error, self.warn)
        where = f"in {kept}"
        if isinstance(kept, str):
            self.note(kept.encode(errors="backslashreplace").decode())
            where = "above"
        others = ""
        if self.ray_logs is not None:
            others = f", the output of the other processes is in {self.ray_logs}"
        self.note(f"the run ended; details {where}{others}")

    def placed(
        self,
        algebra: BatchAlgebra,
        engines: tuple[str, ...],
        *,
        learner_threads: int,
        examples: ExampleCounts | None = None,
    ) -> None:
        """Record the engines, the threads of a learner rank, and the number of examples.

        Threads and examples influence results. Only an environment has examples.
        """
        self._plans.placed(algebra, engines)
        self._devices = algebra.engine_devices
        folder = self._folder.path
        write_run_file(folder / "batch_algebra.txt", "\n".join(algebra.describe()) + "\n")
        placement = {
            "backend": self._config.rollout_matching.rollout_backend,
            "vllm_mode": self._config.rollout_matching.vllm.mode,
            "engines": engines,
            "devices": algebra.engine_devices,
            "servers": self._plans.servers,
            "learner_ranks": algebra.learner_world_size,
            "learner_threads": learner_threads,
            "examples": None if examples is None else asdict(examples),
        }
        write_run_file(folder / "placement.json", json.dumps(placement) + "\n")

    @contextmanager
    def exported(self) -> Iterator[None]:
        """Export metrics through Ray in the `with` block, in which Ray must be connected."""
        section = self._config.telemetry
        if not (section.ray_metrics and self._config.cluster.kind == "ray"):
            yield
            return
        with RayMetrics(section.name, trial_of(section.run_dir)) as self._ray_metrics:
            yield

    @contextmanager
    def step(self, plan: StepPlan) -> Iterator[StepRecord]:
        """Write a step's plan before the `with` block, and its metrics after it."""
        self._begin()
        self._plan_lines.write(json.dumps(self._plans.line(plan)) + "\n")
        started_s = time.time()
        record = StepRecord(plan)
        yield record
        self._step_done(record, started_s, time.time())

    def waits_for(self, what: str) -> AbstractContextManager[None]:
        """Show on a terminal that the run waits for `what` during the `with` block."""
        return self._bar.waits_for(what)

    def _begin(self) -> None:
        self._has_begun = True
        self.patience.limit_s = self._config.timeouts.storage_s
        if self._loggers is None:
            first_step = self._num_written + 1
            self._loggers = Loggers(self._config, first_step=first_step, warn=self.warn)

    def has_written(self, number: int) -> bool:
        """Return whether the metrics of step `number` are in the run's folder."""
        return self._num_written >= number

    def write_step(self, plan: StepPlan, report: StepReport, sync: SyncReport | None) -> None:
        """Write the metrics of a step that ended before the run was resumed."""
        start_s = min(span.start_s for span in report.spans)
        end_s = max(span.end_s for span in report.spans)
        self._step_done(StepRecord(plan, report, sync=sync), start_s, end_s)

    def sync(self, report: SyncReport) -> None:
        """Record a weight sync that has just ended outside of a step.

        If the sync has measured the canary's rounding noise, it is saved in a file (`NOISE_FILE`).
        """
        self._begin()
        if report.canary_noise is not None:
            noise = report.canary_noise.as_json()
            self.patience(lambda: write_run_file(self._folder.path / NOISE_FILE, noise))
        self._note_mode(report)
        if self._ray_metrics is not None:
            self._ray_metrics.synced(report.version)
        self._trace_until_now(f"sync v{report.version}", report.total_s)
        self.note(
            f"sync      v{report.version}  {report.bytes / 1e6:.1f} MB in {report.total_s:.2f} s,"
            f" canary within {report.canary_max_abs:.1e}"
        )

    def evaluation(self, evaluation: Evaluation[Outcome]) -> float | None:
        """Write and log the held-out report; return its score, None if too many rollouts failed."""
        self._trace_until_now("held-out report", evaluation.wall_s)
        folder = self._folder.path / "evaluations" / f"step_{evaluation.step:06d}"
        findings = [finding.describe() for finding in self._doctor.findings]
        report, pictures = write_held_out(evaluation, folder, self._config, self.patience, findings)
        line = line_of(evaluation, report)
        record = EvaluationRecord.of_line(line)
        self._evaluations.append(record)
        self._report_lines.write(json.dumps(line) + "\n")
        if self._loggers is not None:
            assert evaluation.step is not None, "reports of a run have a step"
            self._loggers.report(evaluation.step, folder, report.metrics(), pictures)
        if self._ray_metrics is not None:
            self._ray_metrics.held_out(report.metrics())
        size = f"{record.step} steps, {record.num_samples} samples"
        self.note(f"held out  after {size}: {report.describe()}")
        self._tell(self._doctor.report(line, self._folder.path))
        return record.score

    def waited_for_save(self, checkpoint: Path, seconds: float) -> None:
        """Record that the run has just waited `seconds` for this checkpoint.

        It waited until the weights were written or, for a write in the background, copied.
        """
        self._save_s += seconds
        self._trace_until_now(f"save {checkpoint.name}", seconds)

    def saved(self, checkpoint: Path, written: Sequence[Span] = ()) -> None:
        """Report a complete checkpoint.

        `written`: time spans in which learner ranks wrote it in the background.
        """
        self._trace(written)
        self.note(f"saved     {checkpoint}")

    def improvement(self) -> str | None:
        """Return a line that compares the last held-out report with an earlier one.

        Returns None if there are fewer than two reports.
        """
        return improvement(self._evaluations, self._config.warmup_steps)

    def _step_done(self, record: StepRecord, start_s: float, end_s: float) -> None:
        report = record.report
        assert report is not None, "the driver sets the report"
        decode_mode = self._config.rollout_matching.resolved_decode_mode
        metrics = step_metrics(record, report, end_s - start_s, self._save_s, decode_mode)
        self._save_s = 0.0
        version = report.weight_version
        if record.sync is not None:
            self._note_mode(record.sync)
            version = record.sync.version
        line = {"step": report.number, "channel": report.channel}
        line |= {"weight_version": report.weight_version, **metrics}
        # The ledger's line is written before the metrics, because a resumed run cuts the ledger to
        # the last step of the metrics.
        if self._ledger is not None:
            self._ledger.write(record.plan, report)
        self._metric_lines.write(json.dumps(line) + "\n")
        if self._loggers is not None:
            self._loggers.step(report.number, metrics)
        if self._ray_metrics is not None:
            self._ray_metrics.step_done(report.number, metrics)
            self._ray_metrics.synced(version)
        self._trace(step_spans(record, report, start_s, end_s))
        self.note(progress_line(report, metrics, self._config.training.num_steps))
        self._bar.done(report.number)
        self._tell(self._doctor.step(line))
        self._times[report.number] = StepTimes.of(report.spans, metrics)
        if report.number % VERDICT_STEPS == 0:
            self._verdict()

    def _verdict(self) -> None:
        """Report what bounded the steps since the last verdict, and what would help."""
        if self._times:
            text = verdict(self._config, self._devices, list(self._times.values()))
            self.note(f"time      {text}")
            line = Finding(VERDICT, max(self._times), len(self._times), text)
            self._finding_lines.write(lines_of([line]))
            self._times.clear()

    def _tell(self, findings: Iterable[Finding]) -> None:
        """Report new findings of the doctor on the console, in a file and in the loggers."""
        for finding in findings:
            self.warn(f"{finding.rule}: {finding.text}")
            self._finding_lines.write(lines_of([finding]))
            if self._loggers is not None:
                self._loggers.alert(AlertEvent(finding.step, finding.rule, finding.text))

    def _note_mode(self, sync: SyncReport) -> None:
        self._plans.synced(sync)
        if sync.fell_back is not None:
            now = "full weights are sent from now on"
            self.warn(f"the adapter sync failed, {now}: {sync.fell_back}")

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def warn(self, text: str) -> None:
        self._console.print(f"[bold yellow]warning[/]   {escape(text)}", highlight=False)

    def _trace(self, spans: Iterable[Span]) -> None:
        if self._timeline is not None:
            self._timeline.write(spans)

    def _trace_until_now(self, name: str, seconds: float) -> None:
        now_s = time.time()
        self._trace([Span(TRACK, name, now_s - seconds, now_s)])


def _as_text(config: RunConfig) -> str:
    return config.model_dump_json(indent=2) + "\n"
