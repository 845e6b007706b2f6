"""`telemetry`: what a run writes down, and where."""

from __future__ import annotations

from pathlib import Path

from shared.config.base import ConfigPath, Section


class TelemetrySection(Section):
    name: str = "run"
    """What the run's closing line calls it."""

    run_dir: ConfigPath = Path("outputs/run")
    """The run's folder: resolved configuration, metrics, plans, timeline, checkpoints."""

    ray_metrics: bool = True
    """Publish tokens/s, phase times, loss, weight version and queue wait through `ray.util.metrics`, for Ray's dashboard and Prometheus."""

    timeline: bool = True
    """Record spans of every process, as a file that Perfetto opens."""

    rollouts: bool = True
    """Write what became of every rollout into `rollouts/step_xxxxxx.jsonl`, the first step's into `step_000001.jsonl`; `launch.show_sample` reads it."""
