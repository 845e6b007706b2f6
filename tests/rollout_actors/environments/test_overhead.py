"""What orchestration costs (the issue's bound), measured as `benchmarks.environments` does."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

MOST_MS = 0.3
"""Per turn. docs/explanation/performance.md promises 0.15 on a quiet machine; a slower one had 0.14
to 0.27."""


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`benchmarks` is no installed package."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3])
    return importlib.import_module("benchmarks.environments")


def test_a_thousand_concurrent_rollouts_of_three_turns_against_an_instant_client_cost_at_most_0_3_ms_a_turn(
    benchmark: Any,
) -> None:
    """Token extraction included. (What threads cost beside it, where a reward function is a plain
    one, is the machine's: docs/explanation/performance.md.)
    """
    spent_ms: list[float] = []
    # Processor time, and the best of several: the machine may be busy with something else.
    while len(spent_ms) < 8 and min(spent_ms, default=1.0) > MOST_MS:
        _, cpu_ms = benchmark.overhead(1000, 3, benchmark.ends_well)
        spent_ms.append(cpu_ms)
    assert min(spent_ms) <= MOST_MS, spent_ms


def test_an_environment_actors_collector_is_set_as_it_is_measured() -> None:
    code = (
        "import gc; from rollout_actors.environments.training.actor import collect_rarely;"
        " collect_rarely(); print(gc.get_threshold(), gc.get_freeze_count() > 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.strip() == "(50000, 20, 100) True"


def test_settings_of_the_collector_change_no_result_and_are_taken_back(benchmark: Any) -> None:
    before = gc.isenabled(), gc.get_threshold()
    spent = benchmark.collectors(5, 2, 1)  # which checks the results
    assert list(spent) == list(benchmark.COLLECTORS)
    assert (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()) == (*before, 0)
