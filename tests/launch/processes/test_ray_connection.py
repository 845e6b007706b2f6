"""A cluster that is not there, does not answer or asks for a token is told in time, before anything
is started.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
from held_port import held_port
from ray._private import services
from ray._private.node import Node
from ray.exceptions import AuthenticationError

from launch.processes import ray_connection
from launch.processes.placement import Resources
from launch.processes.ray_connection import (
    AGENT_PORTS,
    GRAFANA,
    GRAFANA_FOLDER,
    cluster_nodes,
    connect,
    patient_start,
)
from shared.config.job import ClusterSection
from shared.errors import ConfigError

CHECK = (
    "check `ray status` there, cluster.temp_dir and, if the cluster asks for a token,"
    " RAY_AUTH_MODE=token, or set cluster.address=local"
)
TOKEN = "set RAY_AUTH_MODE=token here and give this machine the cluster's token (~/.ray/auth_token)"


def nodes_at(address: str) -> list[Resources]:
    return cluster_nodes(ClusterSection(address=address), 240.0)


def connect_to(address: str) -> object:
    return connect(ClusterSection(address=address))


def refusal(ask: Callable[[str], object], address: str) -> str:
    with pytest.raises(ConfigError) as caught:
        ask(address)
    return str(caught.value)


@pytest.mark.parametrize("ask", [nodes_at, connect_to])
@pytest.mark.parametrize("prefix", ["", "ray://"])
def test_an_address_where_nothing_listens_is_refused_before_ray_is_asked(
    ask: Callable[[str], object], prefix: str
) -> None:
    """`ray.init` would wait there for many minutes, without a word."""
    refused = "gives no Ray cluster ([Errno 111] Connection refused)"
    with held_port() as port:
        address = f"{prefix}127.0.0.1:{port}"
        assert refusal(ask, address) == f"cluster.address: {address} {refused}; {CHECK}"


@pytest.mark.slow
def test_what_listens_and_is_no_ray_cluster_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A port of another service's, such as the dashboard's: the connection is there, and nothing
    that Ray understands comes over it.
    """
    monkeypatch.setattr(ray_connection, "ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        problem = refusal(nodes_at, address)
    assert re.search(
        rf"^cluster\.address: {address} .* 0\.5 s; .*`ray start --head` \(6379\), ", problem
    )
    assert problem.endswith(CHECK)


def test_nodes_are_asked_for_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = '[{"CPU": 4.0, "memory": 1.0}, {"CPU": 8.0, "GPU": 2.0}]'
    monkeypatch.setattr(ray_connection, "_ASK", f"print('words of Ray\\n{nodes}')")
    assert nodes_at("auto") == [Resources(cpus=4, gpus=0), Resources(cpus=8, gpus=2)]


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [("ConnectionError: no head node", CHECK), ("AuthenticationError: Missing token", TOKEN)],
)
def test_why_ray_gives_no_cluster_is_told(
    reason: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = f"import sys; sys.exit('lines before it\\n{reason}')"
    monkeypatch.setattr(ray_connection, "_ASK", fails)
    expected = f"cluster.address: auto gives no Ray cluster ({reason}); {remedy}"
    assert refusal(nodes_at, "auto") == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (ConnectionError("no head node"), CHECK),
        (RuntimeError("Missing authentication token"), TOKEN),
        (AuthenticationError("token"), TOKEN),
    ],
)
def test_the_run_s_own_connection_says_the_same(
    error: Exception, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.init", Mock(side_effect=error))
    problem = refusal(connect_to, "auto")
    assert problem.startswith("cluster.address: auto gives no Ray cluster (")
    assert problem.endswith(f"; {remedy}")


def test_ray_s_sockets_and_token_are_for_this_user_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray lets everybody write to its folder, and makes its token as the umask says."""
    for name in ("RAY_TMPDIR", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv(GRAFANA_FOLDER, "set, so that it is taken back after the test")
    monkeypatch.delenv(GRAFANA_FOLDER)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    init = Mock(side_effect=RuntimeError("not started"))
    monkeypatch.setattr("ray.init", init)
    tokens = []
    for mode in (0o600, 0o644):  # the second time there is one already
        assert "not started" in refusal(connect_to, "local")
        private = tmp_path / f"rollmatch-{os.getuid()}"
        assert init.call_args.kwargs["_temp_dir"] == str(private / "ray")
        token = tmp_path / "home" / ".ray" / "auth_token"
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (private, token.parent, token)]
        assert modes == [0o700, 0o700, 0o600], mode
        tokens.append(token.read_text())
        token.chmod(0o644)
    assert len(tokens[0]) == 64 and tokens[0] == tokens[1]
    assert Path(os.environ[GRAFANA_FOLDER]) == private / "grafana", "here Ray writes its dashboards"
    assert (private / "grafana" / "rollmatch.json").read_text() == GRAFANA.read_text()
    shutil.rmtree(private)
    private.symlink_to(tmp_path / "home")
    assert "is not a folder of this user" in refusal(connect_to, "local")


def test_a_node_that_has_not_registered_yet_is_waited_for_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "ray._private.services.get_node(" in inspect.getsource(Node.__init__), "Ray's own wait"
    missing = RuntimeError("no such node")
    get_node = Mock(side_effect=[missing, missing, {"node_id": "a"}, missing, missing])
    monkeypatch.setattr(services, "get_node", get_node)
    with patient_start():
        assert services.get_node("gcs", "a") == {"node_id": "a"}
    assert get_node.call_args_list == [call("gcs", "a")] * 3
    monkeypatch.setattr(ray_connection, "REGISTER_S", 0.05)
    with patient_start(), pytest.raises(RuntimeError, match="no such node"):
        services.get_node("gcs", "b")
    assert services.get_node is get_node


def test_a_raylet_does_not_wait_for_the_ports_of_its_agents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert {*AGENT_PORTS} < inspect.signature(services.start_raylet).parameters.keys()
    monkeypatch.setattr(ray_connection, "_HELD", [])
    started: dict[str, int] = {}
    asked = dict.fromkeys(AGENT_PORTS, 0)

    def start_raylet(session: str, **ports: int) -> None:
        started.update(ports)
        services.start_ray_process(["raylet", f"--session={session}"], "raylet", fate_share=None)

    start_process = Mock()
    monkeypatch.setattr(services, "start_raylet", start_raylet)
    monkeypatch.setattr(services, "start_ray_process", start_process)
    node = {"node_id": "a"}
    monkeypatch.setattr(services, "get_node", Mock(return_value=node))
    monkeypatch.setattr(ray_connection, "REGISTER_S", 0.5)
    with patient_start():
        services.start_raylet("a", **asked)
        assert services.get_node("127.0.0.1:1", "a") is node, "a silent agent stops nobody"
    monkeypatch.setattr(ray_connection, "REGISTER_S", 120.0)
    with patient_start():
        services.start_raylet("a", **asked)
        with socket.create_server(("", started["metrics_agent_port"])) as agent:
            assert services.get_node("127.0.0.1:1", "a") is node
            agent.settimeout(120)
            agent.accept()[0].close()
    assert (services.start_raylet, services.start_ray_process) == (start_raylet, start_process)
    assert len({*started.values()}) == 4 and started.keys() == {*AGENT_PORTS}
    flag = f"--dashboard_agent_listen_port={started['dashboard_agent_listen_port']}"
    command = ["raylet", "--session=a", flag]
    assert start_process.call_args == call(command, "raylet", fate_share=None)
    for port in started.values():
        socket.create_server(("", port)).close()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))


def test_ray_waits_for_its_processes_as_long_as_the_user_says_or_as_a_run_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = "RAY_gcs_server_port_wait_time_s", "RAY_agent_register_timeout_ms"
    for given, expected in ((None, "120"), ("7", "7")):
        for name in limits:
            monkeypatch.delenv(name, raising=False)
        if given is not None:
            monkeypatch.setenv(limits[0], given)
        with patient_start():
            assert [os.environ[name] for name in limits] == [expected, "120000"]
        assert [os.environ.get(name) for name in limits] == [given, None]


def test_who_gets_in_is_told_with_the_way_to_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    (line,) = ray_connection.who_gets_in("127.0.0.1:8265")
    assert line.startswith("dashboard http://127.0.0.1:8265") and "get-auth-token" in line
    assert ray_connection.who_gets_in("") == []
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert "can run code as this user" in ray_connection.who_gets_in("")[0]


def test_what_ray_starts_does_not_hear_that_the_terminal_is_closed() -> None:
    """Where the command leads the session, as under `ssh -t`, they share a group."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with ray_connection.deaf_to_hangup():
        child = subprocess.Popen(["sleep", "60"])
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    child.send_signal(signal.SIGHUP)
    child.terminate()
    assert child.wait(timeout=120) == -signal.SIGTERM


IN_ANOTHER_GROUP = """\
import json, os, signal, subprocess, sys
from launch.processes.ray_connection import starting_in_another_group
signals = []
signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
before = os.getpgrp()
with starting_in_another_group():
    child = subprocess.Popen(["sleep", "60"])
    if sys.argv[1:] == ["signalled"]:
        os.killpg(before, signal.SIGTERM)
groups = [before, os.getpgrp(), os.getpgid(child.pid)]
os.killpg(os.getpgrp(), signal.SIGTERM)
print(json.dumps({"groups": groups, "signals": len(signals), "lives": child.poll() is None}))
child.kill()
child.wait()
"""


@pytest.mark.parametrize("meanwhile", [[], ["signalled"]])
def test_a_signal_to_the_command_s_group_reaches_the_command_and_not_what_ray_starts(
    meanwhile: list[str],
) -> None:
    told = in_another_group(meanwhile, process_group=0)
    before, after, of_child = told["groups"]
    assert before == after != of_child
    assert told["signals"] == 1 + len(meanwhile), "none that came meanwhile is missed"
    assert told["lives"]


def test_a_command_in_somebody_else_s_group_goes_back_to_it() -> None:
    """As under `make`. The group's leader has ended: the group must not end with it."""
    shell = ["sh", "-c", '"$@" & exit', "sh"]
    before, after, of_child = in_another_group([], before=shell, process_group=0)["groups"]
    assert before == after != of_child


def test_the_leader_of_a_session_starts_ray_in_its_own_group() -> None:
    before, after, of_child = in_another_group([], start_new_session=True)["groups"]
    assert before == after == of_child


def in_another_group(
    arguments: list[str], *, before: list[str] | None = None, **options: Any
) -> Any:
    """Return what a process of its own tells of itself and of a child that it started there."""
    command = [*(before or []), sys.executable, "-c", IN_ANOTHER_GROUP, *arguments]
    output = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, **options
    )
    return json.loads(output.stdout)
