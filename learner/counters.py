"""What is counted of a rollout on its way to a target: the `rollout/...` numbers of a step (spec: training-time counters).

Counts and rates only. IoU is no training-time number: it belongs to evaluation reports.
"""

from __future__ import annotations

from learner.targets import Reading
from shared.rollouts import FinishReason, Rollout


def rollout_counters(rollout: Rollout, reading: Reading, num_ground_truth: int) -> dict[str, float]:
    """Of one rollout; to be summed."""
    parsed, num_matched = reading.parsed, len(reading.match.pairs)
    counters: dict[str, float] = {
        "rollout/num": 1,
        "rollout/num_tokens": len(rollout.response_token_ids),
        "rollout/num_length_limited": float(rollout.finish_reason is FinishReason.LENGTH),
        "rollout/num_truncated": float(parsed.truncated),
        "rollout/num_fallback": float(parsed.fallback),
        "rollout/num_valid_objects": len(parsed.objects),
        "rollout/num_dropped_objects": len(parsed.dropped),
        "rollout/num_ground_truth": num_ground_truth,
        "rollout/num_matched": num_matched,
        "rollout/num_excluded": len(reading.excluded),
        "rollout/num_appended": len(reading.appended),
        "rollout/num_gating_rejections": reading.match.gating_rejections,
    }
    for dropped in parsed.dropped:
        name = f"rollout/num_dropped.{dropped.reason}"
        counters[name] = counters.setdefault(name, 0) + 1
    return counters
