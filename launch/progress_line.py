"""The line that a run prints after each step."""

from __future__ import annotations

from collections.abc import Mapping

from shared.config.pipeline import Channel
from shared.reports import StepReport


def progress_line(report: StepReport, metrics: Mapping[str, float | str], max_steps: int) -> str:
    parts = [f"step {report.number:>4}/{max_steps} {report.channel}", f"loss {metrics['loss/total']:7.4f}", f"rows {metrics['packing/num_rows']:.0f}"]
    if report.channel is Channel.B:
        parts += [
            *(_of_environments(metrics) if "rollout/num_groups" in metrics else _of_samples(metrics)),
            f"tokens {metrics['rollout/num_tokens']:.0f}",
            f"logp {metrics['rollout/logprob_max_abs']:.0e}" if "rollout/logprob_max_abs" in metrics else "logp not compared",
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
        f"match {metrics['rollout/match_rate']:.2f}" if "rollout/match_rate" in metrics else "match of nothing",
        f"dropped {metrics['rollout/num_dropped_objects']:.0f}",
        *([f"nothing kept of {fallback:.0f}"] if fallback else []),
    ]


def _of_environments(metrics: Mapping[str, float | str]) -> list[str]:
    counts = {"failed": "rollout/num_failed", "truncated": "rollout/num_truncated", "split": "rollout/num_splits"}
    return [
        f"reward {metrics['rollout/reward']:.3f}" if "rollout/reward" in metrics else "no reward",
        f"no signal {metrics['rollout/num_groups_without_signal']:.0f}/{metrics['rollout/num_groups']:.0f}",
        *(f"{word} {metrics[name]:.0f}" for word, name in counts.items() if metrics[name]),
    ]
