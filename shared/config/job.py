"""`cluster`, `timeouts`, `resume`, `telemetry` and `evaluation`: the job around the training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from shared.config.base import ConfigPath, Section, refusal
from shared.errors import Timeout


class ClusterSection(Section):
    """The Ray cluster that the run lives in."""

    kind: Literal["ray", "local"] = "ray"
    """`local`: no Ray; driver, learner and engine are one process (rollout_backend hf, or vllm.mode
    colocate), in which a breakpoint works anywhere. `cluster=local` is short for it."""
    address: Annotated[str, Field(min_length=1)] = "local"
    """Address of a running cluster, or `local`: the run starts one of its own and ends it."""
    temp_dir: ConfigPath | None = None
    """The folder for Ray's sockets and logs, in `rollmatch-UID/ray` of it, which other users cannot
    enter; short, because a socket's path has at most 107 bytes. null: that of RAY_TMPDIR or TMPDIR,
    or /tmp."""
    dashboard: bool = True
    """Start Ray's dashboard with a cluster of the run's own."""
    trials_at_once: PositiveInt | None = None
    """Most trials of a sweep that run side by side; null: as many as this machine has GPUs and
    cores for, one after the other on servers or on a cluster at an address. On CPU a trial takes
    all cores, or `learner.cpu_threads`; a number here counts no cores."""


class TimeoutsSection(Section):
    """The longest each kind of wait may take; a longer one ends the run with what to check."""

    start_s: PositiveFloat = 300.0
    """Until the learner and every engine are ready."""
    generate_s: PositiveFloat = 1800.0
    """One round of rollouts; with an environment one call of the model. An environment actor's
    whole part of a round may take twice as long."""
    stall_s: PositiveFloat = 120.0
    """A rollout or environment actor that does not answer for so long, or samples no token for an
    answer that it owes, is given up."""
    learn_s: PositiveFloat = 600.0
    """Learning one round, or finishing a step: as long again for each round that
    `training.updates_per_batch` learns again. Also scoring, saving, and waits of ranks for each
    other."""
    sync_phase_s: PositiveFloat = 60.0
    """Each phase of a weight sync; the joining of servers has
    `rollout_matching.vllm.server.timeout_s`."""
    interrupt_s: PositiveFloat = 60.0
    """From a signal (Ctrl-C, SIGTERM, SIGHUP) or a failure until the last finished update is saved,
    with what is running then: a row, a token, a sync."""
    storage_s: NonNegativeFloat = 300.0
    """A run that has begun tries again for so long to write what a full disk, a read-only folder or
    a lost network share refuses, and waits meanwhile; 0: it ends at once."""
    logger_s: PositiveFloat = 120.0
    """A logger of `telemetry.loggers` that needs longer for one thing is given up; the run never
    waits for it, but at its end, for as long, until all that it has is logged."""

    def limit(
        self,
        key: Literal["start_s", "generate_s", "stall_s", "learn_s", "sync_phase_s", "interrupt_s"],
    ) -> Timeout:
        """Return a key's limit with the key's name."""
        return Timeout(self.model_dump()[key], f"timeouts.{key}")


class ResumeSection(Section):
    """The run that this one goes on with; `resume=RUN` on the command line is `resume.run=RUN`."""

    run: ConfigPath | None = None
    """A run's folder, which goes on from its newest full checkpoint, or one of its checkpoints;
    `auto`: the run in `telemetry.run_dir`, or a new one where there is none; null: a new one."""
    allow: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Keys that may differ from the run's, though they change what is computed."""
    automatic: bool = False
    """Start the job again by itself where the learner or a start is lost: all of it, from the last
    full checkpoint, as often as `rollout_matching.vllm.actors.max_restarts` permits."""

    @property
    def is_auto(self) -> bool:
        return str(self.run) == "auto"

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint that the learner loads, once the start has found it; None: a new run."""
        return None if self.is_auto else self.run


class TelemetrySection(Section):
    """The files that a run writes, and where."""

    name: str = "run"
    """What the run's closing line calls it."""
    run_dir: ConfigPath = Path("outputs/run")
    """The run's folder: resolved configuration, metrics, plans, timeline, checkpoints."""
    ray_metrics: bool = True
    """Publish speed, times, loss and weight version through `ray.util.metrics`, for Prometheus."""
    timeline: bool = True
    """Record spans of every process, as a file that Perfetto opens."""
    rollouts: bool = True
    """Write every rollout's outcome into `rollouts/step_xxxxxx.jsonl`, for `rollmatch show-sample`
    and `rollmatch replay`."""
    rollout_images: bool = True
    """Keep the pictures of an environment's rollouts, each once, in `rollouts/images/`, without
    which `rollmatch replay` learns no step that has some."""
    ledger: bool = True
    """Write digests of what decided every step, and of its weights, as a chain (`ledger.jsonl`)."""
    loggers: Annotated[
        tuple[Literal["jsonl", "tensorboard", "trackio", "wandb", "mlflow"], ...],
        Field(strict=False),
    ] = ("jsonl",)
    """Packages that metrics, held-out pictures and tables of rollouts go to as well
    (docs/loggers.md). `jsonl` stands for the run's own files, which are always written."""
    project: Annotated[str, Field(min_length=1)] = "rollmatch"
    """The project, or experiment in MLflow's terms, that the loggers file the run under."""


def _rising(thresholds: tuple[float, ...]) -> tuple[float, ...]:
    if not thresholds or list(thresholds) != sorted(set(thresholds)):
        raise refusal(
            f"must name at least one threshold, in rising order, got {list(thresholds)}",
            "write [0.5, 0.75]",
        )
    return thresholds


class EvaluationSection(Section):
    """The held-out report; no effect under `trajectory_pg`, whose reports are of rewards."""

    iou_thresholds: Annotated[
        tuple[Annotated[float, Field(gt=0.0, le=1.0)], ...],
        Field(strict=False),
        AfterValidator(_rising),
    ] = (0.5, 0.75)
    """Least IoU of a detection, one set of figures for each; the first is on the progress line."""
    score: Literal["constant", "coord_probability"] = "coord_probability"
    """Confidence of a prediction for COCO AP: 1, or the mean probability of the tokens of its
    coordinates."""
    worst_scenes: NonNegativeInt = 8
    """Pictures of the scenes with the lowest F1 in a report."""
