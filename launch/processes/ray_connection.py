"""Ray's cluster at the configured address: the connection to it, and the resources of its nodes."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from launch.checks.host import needs_ray_token, ray_folder, ray_token_file
from launch.processes.placement import Resources
from shared.config.job import ClusterSection
from shared.errors import ConfigError

GRAFANA = Path(__file__).parents[1] / "templates" / "grafana.json"
"""A Grafana dashboard of the metrics of `launch.loggers.ray_metrics`."""
GRAFANA_FOLDER = "RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR"
"""Environment variable: folder into which Ray writes its dashboards of Grafana."""
LISTEN_S = 5.0
"""Limit in seconds to open a connection to the address of a Ray cluster."""
ANSWER_S = 60.0
"""Limit in seconds for the Ray cluster to answer. The time begins after Ray has been imported."""
REGISTER_S = 120.0
"""Limit in seconds for the processes of a cluster that Ray starts for a run to find each other."""
AGENT_PORTS = (
    "metrics_agent_port",
    "metrics_export_port",
    "runtime_env_agent_port",
    "dashboard_agent_listen_port",
)
"""Arguments of Ray's `services.start_raylet`: the ports of a node's agents."""
_HELD: list[socket.socket] = []
"""Sockets that keep the ports of agents until this process ends."""
_CHECK_OWN = (
    "check that this machine has memory and disk for Ray (`free -h`, `df -h /tmp`), or train in one"
    " process (cluster=local)"
)
_CHECK_CLUSTER = (
    "check `ray status` there, cluster.temp_dir and, if the cluster asks for a token,"
    " RAY_AUTH_MODE=token, or set cluster.address=local"
)
_GAVE_UP = 3
_ASK = f"""\
import json, os, sys, threading
import ray
gives_up = threading.Timer(float(sys.argv[2]), os._exit, [{_GAVE_UP}])
gives_up.daemon = True
gives_up.start()
try:
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
except Exception as error:
    sys.exit(f"{{type(error).__name__}}: {{error}}")
print(json.dumps([node["Resources"] for node in ray.nodes() if node["Alive"]]))
"""
"""A program that prints the resources of each node.

Its arguments are the address of the Ray cluster and the time limit in seconds.
"""


def cluster_nodes(cluster: ClusterSection, start_s: float) -> list[Resources]:
    """Return the CPUs and GPUs of each node of the Ray cluster, without starting Ray.

    For the address `local`, they are the CPUs and GPUs that Ray would find on this machine.

    `start_s` is timeouts.start_s, the limit in seconds for importing Ray.

    Raises:
        ConfigError: no cluster at the address answers in time.
    """
    # Asked from another process: if an address does not answer, `ray.init` waits for many minutes,
    # has no time limit, and cannot be interrupted.
    address = cluster.address
    if address == "local":
        cpus = float(len(os.sched_getaffinity(0)))
        gpus = 0
        if not version("torch").endswith("+cpu"):
            import torch

            gpus = torch.cuda.device_count()
        return [Resources(cpus=cpus, gpus=float(gpus))]
    _require_listener(address)
    command = [sys.executable, "-c", _ASK, address, str(ANSWER_S)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=start_s + ANSWER_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"cluster.address: Ray was not imported within timeouts.start_s = {start_s:g} s; end"
            " other work on this machine (`uptime` shows its load), or raise the key"
        ) from error
    if done.returncode == _GAVE_UP:
        raise ConfigError(
            f"cluster.address: {address} did not answer as a Ray cluster within {ANSWER_S:g} s;"
            f" give the port of `ray start --head` (6379), {_CHECK_CLUSTER}"
        )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise _no_cluster(address, lines[-1])
    return [Resources.of(node) for node in json.loads(done.stdout.splitlines()[-1])]


class Session(NamedTuple):
    """The console lines about a connection to Ray: its logs and its dashboard."""

    logs: Path
    """The folder of the logs of Ray's processes, on this node."""
    lines: tuple[str, ...]
    """Console lines about the address of Ray's dashboard, and about access to it."""


def connect(cluster: ClusterSection, **options: object) -> Session:
    """Call `ray.init` at the configured address.

    If the address is `local`, Ray starts a cluster for the run. Signals to this process's group do
    not reach the cluster's processes. The cluster's sockets are in a folder that only this user can
    enter.

    Raises ConfigError if no cluster is reached.
    """
    address = cluster.address
    if address == "local":
        options["_temp_dir"] = str(_private_ray_folder(cluster))
    else:
        _require_listener(address)
    import ray
    from ray.exceptions import AuthenticationError, RayError

    # A signal to this process's group must not end the learner, which then saves the weights.
    place = starting_in_another_group() if address == "local" else nullcontext()
    patience = patient_start() if address == "local" else nullcontext()
    try:
        with place, deaf_to_hangup(), patience:
            context = ray.init(
                address=address, log_to_driver=False, logging_level="error", **options
            )
    except (ConnectionError, ValueError, RuntimeError, OSError, RayError) as error:
        # Only the name of this class says that a token is the problem.
        kind = f"{type(error).__name__}: " if isinstance(error, AuthenticationError) else ""
        raise _no_cluster(address, f"{kind}{error}") from error
    except Exception as error:
        # Ray has no class for this error.
        if "timed out during startup" not in str(error):
            raise
        raise ConfigError(
            f"cluster.address: Ray's own processes did not start within {REGISTER_S:g} s;"
            " end other work on this machine (`ps aux --sort=-%cpu`), and start the run again"
        ) from error
    logs = Path(context.address_info["session_dir"]) / "logs"
    return Session(logs, tuple(who_gets_in(context.dashboard_url)))


@contextmanager
def patient_start() -> Iterator[None]:
    """Give the processes of a cluster that `ray.init` starts `REGISTER_S` seconds to start.

    On a busy machine Ray's own limits are too short. It has no settings for two of them: 30 s until
    the node registers, and 15 s until its agents report the ports that they chose. Therefore the
    ports are chosen here.
    """
    # Ray's `services.get_node_with_retry` is no help: it calls the function that is replaced here.
    from ray._private import services

    get_node = services.get_node
    start_raylet = services.start_raylet
    start_process = services.start_ray_process
    until_s = time.monotonic() + REGISTER_S
    ports: dict[str, int] = {}

    def patient_get_node(gcs_address: str, node_id: str) -> dict[str, Any]:
        while True:
            is_late = time.monotonic() >= until_s
            try:
                node = get_node(gcs_address, node_id)
                if ports and not is_late:
                    # Ray loses counts of metrics that are made before this agent listens.
                    host = gcs_address.rpartition(":")[0].strip("[]")
                    address = host, ports["metrics_agent_port"]
                    socket.create_connection(address, LISTEN_S).close()
                return node
            except (RuntimeError, OSError):  # it has not registered, or the agent does not listen
                if is_late:
                    raise
                time.sleep(0.1)

    def start_raylet_with_ports(*arguments: object, **options: Any) -> object:
        ports.update((name, _held_port()) for name in AGENT_PORTS)

        # Ray does not pass this port to the raylet, which would wait for it.
        def start_with_port(command: list[str], *others: object, **more: object) -> object:
            flag = f"--dashboard_agent_listen_port={ports['dashboard_agent_listen_port']}"
            return start_process([*command, flag], *others, **more)

        services.start_ray_process = start_with_port
        try:
            return start_raylet(*arguments, **options | ports)
        finally:
            services.start_ray_process = start_process

    services.get_node = patient_get_node
    services.start_raylet = start_raylet_with_ports
    limits = {
        "RAY_gcs_server_port_wait_time_s": f"{REGISTER_S:.0f}",
        "RAY_agent_register_timeout_ms": f"{1000 * REGISTER_S:.0f}",
    }
    added = limits.keys() - os.environ.keys()
    os.environ.update((name, limits[name]) for name in added)
    try:
        yield
    finally:
        services.get_node = get_node
        services.start_raylet = start_raylet
        for name in added:
            del os.environ[name]


def _held_port() -> int:
    """Return a free port, and keep it from programs that ask the system for any free port.

    A server that asks for this port can listen there if it sets SO_REUSEADDR, as servers do.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    _HELD.append(held)
    return int(held.getsockname()[1])


def _private_ray_folder(cluster: ClusterSection) -> Path:
    """Make the folder of Ray's sessions, the file with this user's Ray token, and a dashboard file.

    Return the folder. Raises ConfigError.
    """
    folder = ray_folder(cluster)
    private, token = folder.parent, ray_token_file()
    try:
        private.mkdir(mode=0o700, parents=True, exist_ok=True)
        if private.is_symlink() or private.stat().st_uid != os.getuid():
            raise ConfigError(
                f"cluster.temp_dir: {private} is not a folder of this user; remove it, or set"
                " cluster.temp_dir to a folder of yours"
            )
        private.chmod(0o700)
        # The provisioning that Ray writes for Grafana finds every dashboard in this folder.
        dashboards = Path(os.environ.setdefault(GRAFANA_FOLDER, str(private / "grafana")))
        dashboards.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(GRAFANA, dashboards / "rollmatch.json")
        if needs_ray_token(cluster):
            token.parent.mkdir(mode=0o700, exist_ok=True)
            # Created atomically and with mode 0600: another run may start at the same time.
            with tempfile.NamedTemporaryFile("w", dir=token.parent) as part:
                part.write(secrets.token_hex(32))
                part.flush()
                with suppress(FileExistsError):
                    token.hardlink_to(part.name)
        elif token.exists() and token.stat().st_uid == os.getuid():
            token.chmod(0o600)  # a token that Ray wrote follows the umask
    except OSError as error:
        raise ConfigError(
            f"cluster: {error.filename} cannot be written ({error.strerror}), but Ray's sockets and"
            " token are put there; set cluster.temp_dir and HOME to folders of yours, or train in"
            " one process (cluster=local)"
        ) from error
    return folder


def who_gets_in(dashboard_url: str) -> list[str]:
    """Return console lines about access to Ray: by its dashboard, if it has one, and its token."""
    is_open = os.environ.get("RAY_AUTH_MODE") == "disabled"
    lines = []
    if dashboard_url:
        ray = Path(sys.executable).parent / "ray"
        how = "" if is_open else f"; it asks for a token, which `{ray} get-auth-token` prints"
        lines.append(f"dashboard http://{dashboard_url}{how}")
    if is_open:
        lines.append(
            "warning   RAY_AUTH_MODE=disabled: anyone who reaches Ray's ports can run code as this"
            " user; unset it on a machine or in a network that others use"
        )
    return lines


@contextmanager
def deaf_to_hangup() -> Iterator[None]:
    """Make processes started in the `with` block ignore SIGHUP, the signal of a closed terminal.

    This is needed if this process leads the session, as under `ssh -t HOST COMMAND`: the processes
    then stay in this process's group, which gets the signal.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def starting_in_another_group() -> Iterator[None]:
    """Put processes started in the `with` block into another process group of this session.

    This process joins that group during the block, and then returns to its own group. If this
    process leads the session, it cannot leave its group, and nothing is changed.
    """
    group = os.getpgrp()
    if os.getsid(0) == os.getpid():
        yield
        return
    # `cat` waits for the end of its input, and so also ends with this process. The first one makes
    # the new group. The second one keeps the old group alive while this process is not in it.
    leader = subprocess.Popen(["cat"], stdin=subprocess.PIPE, process_group=0)
    keeper = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    try:
        os.setpgid(0, leader.pid)
        yield
    finally:
        os.setpgid(0, group)
        leader.kill()
        leader.communicate()
        keeper.kill()
        keeper.communicate()
        # The return code has the first signal that killed the process. If it is not our SIGKILL, it
        # was sent to the old group meanwhile, and this process has missed it.
        if keeper.returncode != -signal.SIGKILL:
            os.kill(os.getpid(), -keeper.returncode)


def connected_nodes() -> list[Resources]:
    """Return the resources of each node of the Ray cluster to which this process is connected."""
    import ray

    return [Resources.of(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def _require_listener(address: str) -> None:
    """Raise ConfigError if no process accepts connections at `HOST:PORT` or `ray://HOST:PORT`."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return  # only Ray can resolve a name such as `auto`
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=LISTEN_S).close()
    except TimeoutError as error:
        raise _no_cluster(address, f"no connection within {LISTEN_S:g} s") from error
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, str(error)) from error


def _no_cluster(address: str, reason: str) -> ConfigError:
    remedy = _CHECK_OWN if address == "local" else _CHECK_CLUSTER
    if "authenticat" in reason.lower():
        remedy = (
            "set RAY_AUTH_MODE=token here and give this machine the cluster's token"
            " (~/.ray/auth_token)"
        )
    return ConfigError(f"cluster.address: {address} gives no Ray cluster ({reason}); {remedy}")
