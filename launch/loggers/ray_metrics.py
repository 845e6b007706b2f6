"""Metrics of the last step, exported by Ray (`telemetry.ray_metrics`).

They appear at the metrics endpoint of the driver's node (`MetricsExportPort` of `ray.nodes()`) as
`ray_rollmatch_...`, with the run's name and, in a sweep, the trial's number as tags.
`launch/templates/grafana.json` is a Grafana dashboard of them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from ray.util.metrics import Counter, Gauge

from shared.metrics import IDLE_FAMILY

GAUGES = {
    "loss": "loss/total",
    "grad_norm": "optim/grad_norm",
    "learning_rate": "optim/learning_rate",
    "reward": "rollout/reward",
    "no_signal_share": "rollout/no_signal_share",
    "match_rate": "rollout/match_rate",
    "response_length": "rollout/length",
    "truncated_rate": "rollout/truncated_rate",
    "tokens_per_s": "time/generate_tokens_per_s",
    "learned_tokens_per_s": "time/learn_tokens_per_s",
    "canary_difference": "sync/canary_max_abs",
}
"""By name of an exported metric, its name in metrics.jsonl."""
PHASES = {
    "step": "time/step_s",
    "generate": "time/generate_s",
    "learn": "time/learn_s",
    "sync": "time/sync_s",
    "queue_wait": "time/queue_wait_s",
}
"""Values of the tag `phase` of the exported times, with their metrics in metrics.jsonl."""
REPEAT_S = 1.0
"""Seconds until every value is set again. Ray forgets a value that is not set for two export
intervals (by default 20 s), and steps and held-out reports may be longer apart."""
END_S = 10.0
"""Limit in seconds for the last repetition, which takes milliseconds, to end."""
HELD_OUT = "val/"
"""Prefix of the figures of a held-out report; the tag `figure` has the rest of the name."""


class RayMetrics:
    """Exports the metrics of the last finished step through Ray, until its `with` block ends.

    A metric keeps its value in steps that do not have it, such as the match rate on channel A.
    """

    def __init__(self, run: str, trial: str) -> None:
        """Needs a connection to Ray. `trial`: number of a sweep's trial; empty without a sweep."""
        tags = {"run": run, "trial": trial}

        def gauge(name: str, description: str, *further: str) -> Gauge:
            result = Gauge(f"rollmatch_{name}", description, tag_keys=(*tags, *further))
            return result.set_default_tags(tags)

        self._gauges = {metric: gauge(name, metric) for name, metric in GAUGES.items()}
        self._step = gauge("step", "Finished updates.")
        self._version = gauge("weight_version", "Version of the weights that the engines serve.")
        phases = f"Seconds of the step by phase: {', '.join(PHASES)}."
        self._phase = gauge("phase_seconds", phases, "phase")
        self._idle = gauge("idle_share", "Share of the step without work.", "process")
        self._held_out = gauge("held_out", "Figures of the last held-out report.", "figure")
        self._tokens = Counter(
            "rollmatch_response_tokens", "Response tokens generated so far.", tag_keys=tuple(tags)
        ).set_default_tags(tags)
        self._values: dict[tuple[Gauge, str, str], float] = {}
        """By gauge, name and value of its further tag (empty without one), the last value."""
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="ray-metrics", daemon=True)

    def __enter__(self) -> RayMetrics:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Let Ray forget the values. No value is set after this returns, because Ray may end."""
        self._is_closed.set()
        self._thread.join(END_S)

    def synced(self, weight_version: int) -> None:
        self._set(self._version, weight_version)

    def step_done(self, num_steps: int, metrics: Mapping[str, float | str]) -> None:
        """Set every metric after step `num_steps`; `metrics` are the values for metrics.jsonl."""
        self._set(self._step, num_steps)
        for metric, gauge in self._gauges.items():
            if metric in metrics:
                self._set(gauge, metrics[metric])
        for phase, name in PHASES.items():
            if name in metrics:
                self._set(self._phase, metrics[name], "phase", phase)
        for name, value in metrics.items():
            if name.startswith(IDLE_FAMILY):
                self._set(self._idle, value, "process", name.removeprefix(IDLE_FAMILY))
        # Ray's counters reject an increase of 0.
        if tokens := float(metrics.get("rollout/num_tokens", 0.0)):
            self._tokens.inc(tokens)

    def held_out(self, figures: Mapping[str, float]) -> None:
        """Set the figures of a held-out report, such as `val/f1` or `val/reward`."""
        for name, value in figures.items():
            self._set(self._held_out, value, "figure", name.removeprefix(HELD_OUT))

    def _set(self, gauge: Gauge, value: float | str, tag: str = "", kind: str = "") -> None:
        self._values[gauge, tag, kind] = float(value)
        gauge.set(float(value), tags={tag: kind} if tag else {})

    def _repeat(self) -> None:
        while not self._is_closed.wait(REPEAT_S):
            for (gauge, tag, kind), value in self._values.copy().items():
                gauge.set(value, tags={tag: kind} if tag else {})
