"""What Ray's dashboard, Prometheus and Grafana see of a run, at the metrics endpoint itself."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import ray
from ray.util.metrics import Gauge

from launch.loggers import ray_metrics
from launch.loggers.ray_metrics import GAUGES, PHASES, RayMetrics
from launch.processes.ray_connection import GRAFANA
from launch.processes.sweep import TRIALS, trial_of
from shared.metrics import metric_of

METRICS = {
    "loss/total": 2.5,
    "optim/grad_norm": 0.75,
    "optim/learning_rate": 0.125,
    "rollout/num_tokens": 1200.0,
    "rollout/match_rate": 0.375,
    "rollout/length": 40.0,
    "rollout/truncated_rate": 0.0625,
    "sync/canary_max_abs": 0.25,
    "sync/mode": "full",
    "time/bounded_by": "learning",
    "time/generate_tokens_per_s": 800.0,
    "time/learn_tokens_per_s": 2000.0,
    "time/step_s": 3.0,
    "time/generate_s": 1.5,
    "time/learn_s": 1.25,
    "time/sync_s": 0.25,
    "time/queue_wait_s": 0.5,
    "time/idle/learner": 0.625,
}
"""A step of channel B that learns detection."""
OF_AN_ENVIRONMENT = {"loss/total": 1.5, "rollout/reward": 0.875, "rollout/no_signal_share": 0.5}
FIGURES = {"val/f1": 0.7, "val/class_f1": 0.6, "val/coco_ap": 0.4, "val/reward": 0.9}
EXPECTED = {
    "step": 8.0,
    "loss": 1.5,
    "grad_norm": 0.75,
    "learning_rate": 0.125,
    "reward": 0.875,
    "no_signal_share": 0.5,
    "match_rate": 0.375,
    "response_length": 40.0,
    "truncated_rate": 0.0625,
    "tokens_per_s": 800.0,
    "learned_tokens_per_s": 2000.0,
    "canary_difference": 0.25,
    "weight_version": 9.0,
    "response_tokens_total": 1200.0,
    **{("phase_seconds", phase): METRICS[name] for phase, name in PHASES.items()},
    ("idle_share", "learner"): 0.625,
    **{("held_out", name.removeprefix("val/")): value for name, value in FIGURES.items()},
}

Sample = tuple[str, dict[str, str], float]


def exported() -> list[Sample]:
    """Name, labels and value of everything at the metrics endpoint of Ray's first node."""
    node = ray.nodes()[0]
    endpoint = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    try:
        text = urlopen(endpoint, timeout=240).read().decode()
    except URLError:  # it is not open yet
        return []
    lines = [re.fullmatch(r"(\w+)\{(.*)\} (\S+)", line) for line in text.splitlines()]
    return [
        (line[1], dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', line[2])), float(line[3]))
        for line in lines
        if line is not None
    ]


@pytest.fixture(scope="module")
def samples(ray_cluster: None) -> Iterator[list[Sample]]:
    """The endpoint after two steps and a held-out report of the run `observed`, trial 3."""
    with RayMetrics("observed", "3") as metrics:
        metrics.synced(9)
        metrics.step_done(7, METRICS)
        metrics.step_done(8, OF_AN_ENVIRONMENT)
        metrics.held_out(FIGURES)
        # It runs meanwhile, because Ray soon forgets a task that has ended.
        sleep = ray.remote(num_cpus=0)(lambda: time.sleep(600))
        task = sleep.options(name="generate round 3").remote()
        deadline = time.monotonic() + 120
        while len(of_run(samples := exported())) < len(EXPECTED) or not any(
            (labels.get("Name"), labels.get("State")) == ("generate round 3", "RUNNING")
            for _, labels, _ in samples
        ):
            assert time.monotonic() < deadline, (of_run(samples), samples)
            time.sleep(0.5)
        yield samples
        ray.cancel(task, force=True)


def of_run(samples: list[Sample]) -> dict[str | tuple[str, str], float]:
    """The values of the run by their names, or by name and the one label that they have besides."""
    values: dict[str | tuple[str, str], float] = {}
    for name, labels, value in samples:
        if (labels.get("run"), labels.get("trial")) == ("observed", "3"):
            name = name.removeprefix("ray_rollmatch_")
            kind = [labels[key] for key in ("phase", "process", "figure") if key in labels]
            values[(name, *kind) if kind else name] = value
    return values


@pytest.mark.ray
def test_learning_rollouts_times_and_held_out_figures_are_at_the_metrics_endpoint(
    samples: list[Sample],
) -> None:
    """With what a step lacks as the step before it left it."""
    assert of_run(samples) == EXPECTED


@pytest.mark.ray
def test_each_query_of_the_grafana_dashboard_finds_its_metric_with_its_labels(
    samples: list[Sample],
) -> None:
    found: dict[str, dict[str, set[str]]] = {}
    for name, labels, _ in samples:
        for label, value in labels.items():
            found.setdefault(name, {}).setdefault(label, set()).add(value)
    num_queries = 0
    for query, legend in queries():
        num_queries += 1
        for name, selector in re.findall(r"(ray_\w+)(?:\{(.*?)\})?", query):
            assert name in found, query
            for label, pattern in re.findall(r'(\w+)=~?"(.*?)"', selector):
                for value in [] if pattern.startswith("$") else pattern.split("|"):
                    assert value in found[name][label], (query, label, value)
                assert label in found[name], (query, label)
        grouped = re.findall(r"by \((\w+)\)|label_values\(.*, (\w+)\)", query)
        shown = [*re.findall(r"\{\{(\w+)\}\}", legend), *filter(None, sum(grouped, ()))]
        assert set(shown) <= found[name].keys(), (query, legend)
    assert num_queries > len(GAUGES)


def queries() -> Iterator[tuple[str, str]]:
    """Each query of the dashboard, and the legend with the labels that it shows."""
    dashboard = json.loads(GRAFANA.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"], target["legendFormat"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"], ""


def test_the_last_values_are_set_again_until_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray forgets a value that was not set for 20 s, and a step may last for minutes."""
    told: list[tuple[str, float, dict[str, str]]] = []
    monkeypatch.setattr(ray_metrics, "REPEAT_S", 0.01)
    monkeypatch.setattr(
        Gauge, "set", lambda self, value, tags: told.append((self.info["name"], value, tags))
    )
    with RayMetrics("observed", "") as metrics:
        metrics.synced(4)
        metrics.synced(5)
        metrics.held_out({"val/f1": 0.5})
        deadline = time.monotonic() + 120
        while len(told) < 9:
            assert time.monotonic() < deadline, told
            time.sleep(0.01)
    expected = [("rollmatch_weight_version", 5, {}), ("rollmatch_held_out", 0.5, {"figure": "f1"})]
    assert all(one in told[-4:] for one in expected)
    num_told = len(told)
    time.sleep(0.1)
    assert len(told) == num_told


def test_what_is_exported_of_a_step_is_in_the_table_of_metrics() -> None:
    assert [name for name in (*GAUGES.values(), *PHASES.values()) if not metric_of(name)] == []


def test_the_trial_of_a_run_is_known_by_the_folder_of_its_sweep(tmp_path: Path) -> None:
    assert trial_of(tmp_path / "trial_3") == ""
    (tmp_path / TRIALS).touch()
    assert trial_of(tmp_path / "trial_3") == "3"
