"""Metrics of the last step, exported by Ray (`telemetry.ray_metrics`).

They appear at the metrics endpoint of the driver's node (`MetricsExportPort` of `ray.nodes()`) as
`ray_rollmatch_...`, with the run's name as a tag.
"""

from __future__ import annotations

from collections.abc import Mapping

from ray.util.metrics import Counter, Gauge

PHASES = {
    "step": "time/step_s",
    "generate": "time/generate_s",
    "learn": "time/learn_s",
    "sync": "time/sync_s",
    "queue_wait": "time/queue_wait_s",
}
"""Values of the tag `phase` of the exported times, with their metrics in metrics.jsonl."""


class RayMetrics:
    """Exports the metrics of the last finished step through Ray. Needs a running Ray."""

    def __init__(self, run: str) -> None:
        tags = {"run": run}

        def gauge(name: str, description: str, *further: str) -> Gauge:
            result = Gauge(f"rollmatch_{name}", description, tag_keys=("run", *further))
            return result.set_default_tags(tags)

        self._step = gauge("step", "Finished updates.")
        self._loss = gauge("loss", "Loss of the step.")
        self._version = gauge("weight_version", "Version of the weights that the engines serve.")
        self._speed = gauge("tokens_per_s", "Response tokens per second of generation.")
        phases = f"Seconds of the step by phase: {', '.join(PHASES)}."
        self._phase = gauge("phase_seconds", phases, "phase")
        self._tokens = Counter(
            "rollmatch_response_tokens", "Response tokens generated so far.", tag_keys=("run",)
        ).set_default_tags(tags)

    def step_done(
        self, num_steps: int, weight_version: int, metrics: Mapping[str, float | str]
    ) -> None:
        """Set every metric after step `num_steps`; `metrics` are the values for metrics.jsonl."""
        self._step.set(num_steps)
        self._version.set(weight_version)
        for phase, name in PHASES.items():
            if name in metrics:
                self._phase.set(float(metrics[name]), tags={"phase": phase})
        self._loss.set(float(metrics["loss/total"]))
        # Ray's counters reject an increase of 0.
        if tokens := float(metrics.get("rollout/num_tokens", 0.0)):
            self._tokens.inc(tokens)
        if (speed := metrics.get("time/generate_tokens_per_s")) is not None:
            self._speed.set(float(speed))
