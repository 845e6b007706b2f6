"""`cluster`, `timeouts`, `resume`, `telemetry` and `evaluation`: everything around the training."""

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
    """The Ray cluster of the run."""

    kind: Literal["ray", "local"] = "ray"
    """ray: processes in a Ray cluster; local: driver, learner and engine in one process, in which
    breakpoints work (rollout_backend hf, or vllm.mode colocate). `cluster=local` is short for it.
    """
    address: Annotated[str, Field(min_length=1)] = "local"
    """Address of a running Ray cluster; `local`: the run starts its own cluster, and stops it."""
    temp_dir: ConfigPath | None = None
    """Parent folder of Ray's sockets and logs, which are in its private subfolder
    `rollmatch-UID/ray`. Keep the path short: a socket's path has at most 107 bytes. null:
    RAY_TMPDIR, TMPDIR or /tmp."""
    dashboard: bool = True
    """Start Ray's dashboard if the run starts its own cluster."""
    trials_at_once: PositiveInt | None = None
    """Maximum number of trials of a sweep that run at the same time. null: as many as this
    machine's GPUs and cores allow (on CPU a trial uses `learner.cpu_threads` cores, by default
    all); 1 with servers or a cluster at an address. A number is used as it is, without counting
    cores."""


class TimeoutsSection(Section):
    """Limits of waits, in seconds. A wait beyond its limit ends the run with advice."""

    start_s: PositiveFloat = 300.0
    """Seconds until the learner and all engines are ready. Raise it for large models."""
    generate_s: PositiveFloat = 1800.0
    """Seconds for one round of rollouts; with an environment, for one model call. An environment
    actor may take twice as long for its share of a round."""
    stall_s: PositiveFloat = 120.0
    """Seconds after which a rollout actor or environment actor that makes no progress is given up.
    No progress means: the actor does not answer, or samples no token while it owes an answer."""
    learn_s: PositiveFloat = 600.0
    """Seconds for learning one round of rollouts, or for finishing a step with its optimizer
    update. With `training.updates_per_batch` above 1, finishing has this time once more for each
    round of each further update. Also the limit for scoring held-out answers, for saving, and for
    waits of learner ranks for each other."""
    sync_phase_s: PositiveFloat = 60.0
    """Seconds for each phase of a weight sync. Servers join the weight transfer within
    `rollout_matching.vllm.server.timeout_s` instead."""
    interrupt_s: PositiveFloat = 60.0
    """Seconds from a signal (Ctrl-C, SIGTERM, SIGHUP) or a failure until the last finished update
    is saved. This includes the work in progress: a row, a token or a sync."""
    storage_s: NonNegativeFloat = 300.0
    """Seconds for which a run that has begun retries a failed write (full disk, read-only folder,
    lost network share). The run waits meanwhile. 0: it ends at once."""
    logger_s: PositiveFloat = 120.0
    """Seconds after which a logger (`telemetry.loggers`) is given up if a call to it does not
    return. Training does not wait for loggers. When training is over, the run waits at most this
    long until everything is logged."""

    def limit(
        self,
        key: Literal["start_s", "generate_s", "stall_s", "learn_s", "sync_phase_s", "interrupt_s"],
    ) -> Timeout:
        """Return the time limit of a key of this section, with the key's name for messages."""
        return Timeout(self.model_dump()[key], f"timeouts.{key}")


class ResumeSection(Section):
    """Which earlier run this run continues. `resume=RUN` on the command line sets `resume.run`."""

    run: ConfigPath | None = None
    """The run to continue: a run folder (from its newest full checkpoint), or one of its
    checkpoints. auto: the run in `telemetry.run_dir` if there is one, else a new run. null: a new
    run."""
    allow: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Keys that may differ from the continued run's, although they change what is computed."""
    automatic: bool = False
    """Restart the whole job from its last full checkpoint if the learner, or a starting process, is
    lost. At most `rollout_matching.vllm.actors.max_restarts` times. Use it for unattended runs."""

    @property
    def is_auto(self) -> bool:
        return str(self.run) == "auto"

    @property
    def checkpoint(self) -> Path | None:
        """The checkpoint that the learner loads to continue a run; None: a new run.

        Valid after the start of the program, which replaces `run` by the checkpoint that it found.
        """
        return None if self.is_auto else self.run


class TelemetrySection(Section):
    """The run folder, the files in it, and the loggers."""

    name: str = "run"
    """The name of the run in its last line on the console."""
    run_dir: ConfigPath = Path("outputs/run")
    """The run folder: resolved configuration, metrics, plans, timeline, checkpoints."""
    ray_metrics: bool = True
    """Publish loss, reward, match rate, held-out figures, times, idle shares, speed and weight
    version with `ray.util.metrics`, for Prometheus."""
    timeline: bool = True
    """Record what every process does and when, in `timeline.json` of the run folder. Open the file
    in Perfetto, a viewer at https://ui.perfetto.dev."""
    rollouts: bool = True
    """Write all rollouts to `rollouts/step_xxxxxx.jsonl`. `rollmatch show-sample` and `rollmatch
    replay` need them."""
    rollout_images: bool = True
    """Save each image of an environment's rollouts once, in `rollouts/images/`. `rollmatch replay`
    needs them for steps with images."""
    ledger: bool = True
    """Write hashes of each step's inputs, rollouts, targets and weights to `ledger.jsonl`. Each
    line has the hash of the line before. Runs that computed the same have equal files."""
    loggers: Annotated[
        tuple[Literal["jsonl", "tensorboard", "trackio", "wandb", "mlflow"], ...],
        Field(strict=False),
    ] = ("jsonl",)
    """Packages that also receive metrics, held-out images and tables of rollouts
    (docs/how_to/loggers.md). `jsonl` stands for the run's own files, which are always written."""
    project: Annotated[str, Field(min_length=1)] = "rollmatch"
    """The project (MLflow: experiment) of the run in the loggers."""


def _rising(thresholds: tuple[float, ...]) -> tuple[float, ...]:
    if not thresholds or list(thresholds) != sorted(set(thresholds)):
        raise refusal(
            f"must list at least one threshold, in ascending order, got {list(thresholds)}",
            "write [0.5, 0.75]",
        )
    return thresholds


class EvaluationSection(Section):
    """Reports on the held-out set. No effect under `trajectory_pg`, which reports rewards."""

    iou_thresholds: Annotated[
        tuple[Annotated[float, Field(gt=0.0, le=1.0)], ...],
        Field(strict=False),
        AfterValidator(_rising),
    ] = (0.5, 0.75)
    """Least IoU with a ground-truth object at which a prediction counts as correct. Each threshold
    has its own metrics; the progress line shows those of the first."""
    score: Literal["constant", "coord_probability"] = "coord_probability"
    """Confidence of a prediction for COCO AP. constant: 1; coord_probability: the mean probability
    of the prediction's coordinate tokens."""
    worst_scenes: NonNegativeInt = 8
    """Number of held-out samples with the lowest F1 whose images a report shows. Samples with an F1
    of 1 are left out."""
