"""A cluster that is not there, does not answer or asks for a token is told in time, before anything
is started.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from config_support import configuration

from launch.runtime import ray_connection
from launch.runtime.placement import Resources
from launch.runtime.ray_connection import cluster_nodes, connect
from shared.config import RunConfig
from shared.errors import ConfigError

CHECK = (
    "check `ray status` there, cluster.temp_dir and, where the cluster asks for a token,"
    " RAY_AUTH_MODE=token, or use local"
)
TOKEN = "set RAY_AUTH_MODE=token here and give this machine the cluster's token (~/.ray/auth_token)"


@pytest.fixture
def at(tmp_path: Path) -> Callable[[str], RunConfig]:
    return lambda address: configuration(tmp_path, tmp_path, tmp_path, cluster__address=address)


@pytest.mark.parametrize("ask", [cluster_nodes, connect])
def test_an_address_where_nothing_listens_is_refused_before_ray_is_asked(
    ask: Callable[[RunConfig], object], at: Callable[[str], RunConfig]
) -> None:
    """`ray.init` would wait there for many minutes, without a word."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
        with pytest.raises(ConfigError) as caught:
            ask(at(address))
        assert (
            str(caught.value)
            == f"cluster.address: {address} gives no Ray cluster ([Errno 111] Connection refused);"
            f" {CHECK}"
        )


@pytest.mark.slow
def test_what_listens_and_is_no_ray_cluster_is_given_up(
    at: Callable[[str], RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A port of another service's, such as the dashboard's: the connection is there, and nothing
    that Ray understands comes over it.
    """
    monkeypatch.setattr(ray_connection, "ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConfigError) as caught:
            cluster_nodes(at(address))
    told = (
        f"cluster.address: {address} did not answer as a Ray cluster within 0.5 s; give the port of"
        " `ray start --head` (6379), "
    )
    assert str(caught.value) == told + CHECK


def test_nodes_are_asked_for_in_a_process_of_its_own(
    at: Callable[[str], RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ray_connection,
        "_ASK",
        """print('words of Ray\\n[{"CPU": 4.0, "memory": 1.0}, {"CPU": 8.0, "GPU": 2.0}]')""",
    )
    assert cluster_nodes(at("auto")) == [Resources(cpus=4, gpus=0), Resources(cpus=8, gpus=2)]


@pytest.mark.parametrize(
    ("said", "remedy"),
    [("ConnectionError: no head node", CHECK), ("AuthenticationError: Missing token", TOKEN)],
)
def test_why_ray_gives_no_cluster_is_told(
    said: str, remedy: str, at: Callable[[str], RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_connection, "_ASK", f"import sys; sys.exit('lines before it\\n{said}')")
    with pytest.raises(ConfigError) as caught:
        cluster_nodes(at("auto"))
    assert str(caught.value) == f"cluster.address: auto gives no Ray cluster ({said}); {remedy}"


@pytest.mark.slow
def test_the_run_s_own_connection_says_the_same(
    at: Callable[[str], RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.exceptions import AuthenticationError

    for error, remedy in (
        (ConnectionError("no head node"), CHECK),
        (RuntimeError("Missing authentication token"), TOKEN),
        (AuthenticationError("token"), TOKEN),
    ):

        def refuse(error: Exception = error, **arguments: object) -> None:
            raise error

        monkeypatch.setattr("ray.init", refuse)
        with pytest.raises(ConfigError) as caught:
            connect(at("auto"))
        assert str(caught.value).startswith("cluster.address: auto gives no Ray cluster (") and str(
            caught.value
        ).endswith(f"; {remedy}")
