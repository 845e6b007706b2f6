from __future__ import annotations

import signal
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


@pytest.fixture(scope="module")
def orphans_are_adopted() -> Iterator[None]:
    with adopted_orphans():
        yield


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """A running cluster, as an override, for runs that need none of their own."""
    from ray.cluster_utils import Cluster

    with adopted_orphans():
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
    yield f"cluster.address={cluster.address}"
    cluster.shutdown()


@pytest.fixture
def start_command(orphans_are_adopted: None) -> Iterator[Callable[..., Command]]:
    with commands() as start:
        yield start
