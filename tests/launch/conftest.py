from __future__ import annotations

import runpy
import signal
import sys
import warnings
from collections.abc import Callable, Iterator

import pytest
from command_support import Command, adopted_orphans, commands


@pytest.fixture(autouse=True)
def _handlers_of_the_tests_own_process() -> Iterator[None]:
    """A command that is called, not started, leaves its signal handlers behind
    (`launch.cli.end_on_signals`).
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def call_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Run `python -m MODULE ARGUMENTS` in this process, which has imported what takes seconds:
    return the exit status and what it printed.
    """

    def call(module: str, *arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        monkeypatch.setenv("COLUMNS", "400")
        status = 0
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # imported already
            try:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else 1
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return call


@pytest.fixture(scope="module")
def orphans_are_adopted() -> Iterator[None]:
    with adopted_orphans():
        yield


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """A running cluster, as an override, for runs that need none of their own."""
    from ray.cluster_utils import Cluster

    from launch.processes.ray_connection import patient_start

    # The dashboard's processes each import Ray, and nobody reads the logs that a monitor would send.
    lean = {"include_dashboard": False, "include_log_monitor": False}
    with adopted_orphans(), patient_start():
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, **lean})
    yield f"cluster.address={cluster.address}"
    cluster.shutdown()


@pytest.fixture
def start_command(orphans_are_adopted: None) -> Iterator[Callable[..., Command]]:
    with commands() as start:
        yield start
