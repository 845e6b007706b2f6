"""What Ray's dashboard and Prometheus see of a run, at the metrics endpoint itself."""

from __future__ import annotations

import re
import time
from urllib.request import urlopen

import pytest
import ray

from launch.loggers.ray_metrics import RayMetrics

pytestmark = pytest.mark.ray

METRICS = {
    "loss/total": 2.5,
    "rollout/num_tokens": 1200.0,
    "time/generate_tokens_per_s": 800.0,
    "time/step_s": 3.0,
    "time/generate_s": 1.5,
    "time/learn_s": 1.25,
    "time/sync_s": 0.25,
    "time/queue_wait_s": 0.5,
}
EXPECTED = {
    "ray_rollmatch_step": 7.0,
    "ray_rollmatch_loss": 2.5,
    "ray_rollmatch_weight_version": 9.0,
    "ray_rollmatch_tokens_per_s": 800.0,
    "ray_rollmatch_response_tokens_total": 1200.0,
}


def exported(endpoint: str) -> dict[tuple[str, str], float]:
    """Name, phase (or nothing) and value of what the run called `observed` has published."""
    text = urlopen(endpoint, timeout=10).read().decode()
    lines = [
        re.fullmatch(r'(ray_rollmatch_\w+)\{(.*run="observed".*)\} (\S+)', line)
        for line in text.splitlines()
    ]
    found = [line.groups() for line in lines if line is not None]
    return {
        (name, "".join(re.findall(r'phase="(\w+)"', tags))): float(value)
        for name, tags, value in found
    }


def test_tokens_per_second_phases_loss_version_and_queue_wait_are_at_the_metrics_endpoint(
    ray_cluster,
):
    RayMetrics("observed").step_done(7, 9, METRICS)
    node = ray.nodes()[0]
    endpoint = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    deadline = time.monotonic() + 60
    while len(values := exported(endpoint)) < len(EXPECTED) + 5:
        assert time.monotonic() < deadline, values
        time.sleep(0.5)
    assert {name: values[name, ""] for name in EXPECTED} == EXPECTED
    phases = {
        phase: value
        for (name, phase), value in values.items()
        if name == "ray_rollmatch_phase_seconds"
    }
    assert phases == {"step": 3.0, "generate": 1.5, "learn": 1.25, "sync": 0.25, "queue_wait": 0.5}
