"""Run one job on two hosts, and compare it with a run on one: needs root, `ip` and `nft`.

    python -m benchmarks.two_hosts [--only NAME ...]

A host is a set of Linux namespaces (network, processes, mounts, name) on this machine, with its own
address, /tmp, /dev/shm and firewall; files are shared. The learner and Ray's head are on the first
host, two rollout actors on the second, all on CPU. Between the hosts only the ports of
docs/tutorials/several_nodes.md are open. Exit status 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

from benchmarks.recovery import LIMIT_S, compare, wait_for_steps

ROOT = Path(__file__).resolve().parents[1]
HEAD, WORKER, NEW = "10.77.0.1", "10.77.0.2", "10.77.0.3"
RAY = Path(sys.executable).with_name("ray")
PORTS = {
    "node-manager-port": 6380,
    "object-manager-port": 6381,
    "metrics-export-port": 6382,
}
"""Options of `ray start` on every node. Ray's own choices are in `SENDING`, as in `slurm`."""
SENDING = "40000-40999"
"""Range from which the system chooses all other ports, also those of weight syncs."""
OPEN = ("6379", "6380", "6381", "6382", "10002-19999", SENDING)
STEPS = 24
JOB = (
    *("+experiment=stage2_3v1", "objective=boxes", "model=demo", "data=demo", "data.val=null"),
    *("custom.object_field_order=desc_first", "training.effective_batch_size=8"),
    *(f"training.max_steps={STEPS}", "training.eval_steps=null", "training.packing_window=4"),
    *("stage2_ab.schedule.warmup_steps=1", "stage2_ab.schedule.b_ratio=1.0"),
    *("stage2_ab.channel_b.rollouts_per_step=12", "rollout_matching.max_new_tokens=84"),
    *("rollout_matching.vllm.actors.num_actors=2", "checkpoint.save_steps=2", "resume=auto"),
)
SPREAD = (
    *(f"cluster.address={HEAD}:6379", "learner.cpus=1"),
    "rollout_matching.vllm.actors.cpus_per_actor=2",
)
"""The two actors have room only on the second host, which has 4 CPUs in Ray, the head 1."""


class FailedError(Exception):
    """A check that a scenario did not pass."""


@dataclass
class Host:
    """A set of namespaces with one network card. All its processes end with `init`."""

    address: str
    init: int
    """Id of the first process of the host, as this machine sees it."""
    environ: dict[str, str]

    def inside(self, *command: str) -> list[str]:
        return [
            "nsenter",
            "-t",
            str(self.init),
            "-n",
            "-m",
            "-p",
            "-u",
            f"--wdns={Path.cwd()}",
            *command,
        ]

    def call(self, *command: str, limit_s: float = 120.0) -> str:
        """Run a command on this host, and return what it printed. Raises FailedError."""
        done = subprocess.run(
            self.inside(*command),
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        if done.returncode:
            raise FailedError(f"{' '.join(command)} on {self.address}: {done.stdout}{done.stderr}")
        return done.stdout

    def start_ray(self, *options: str, **variables: str) -> None:
        ports = [f"--{name}={port}" for name, port in PORTS.items()]
        names = [f"{name}={value}" for name, value in variables.items()]
        self.call("env", *names, str(RAY), "start", *options, *ports)

    def start_job(self, folder: Path, *overrides: str) -> subprocess.Popen[bytes]:
        words = [*JOB, f"telemetry.run_dir={folder}", *overrides]
        return subprocess.Popen(
            self.inside(sys.executable, "-m", "launch.train", *words),
            env=self.environ,
            **_log(folder),
        )

    def firewall(self, *ports: str) -> None:
        """Drop connections from other hosts to ports that are not listed; count the others."""
        rules = "\n".join(f"tcp dport {port} ct state new counter accept" for port in ports)
        table = f"""table inet firewall {{
            chain input {{ type filter hook input priority 0; policy drop;
                iif lo accept
                ct state established,related accept
                {rules}
                ct state new counter
            }}
        }}"""
        self.call("bash", "-c", f"nft flush ruleset; nft -f - <<< '{table}'")

    def connections(self) -> dict[str, int]:
        """Return how many connections each open port got from other hosts; `other`: dropped."""
        found = {}
        for line in self.call("nft", "list", "chain", "inet", "firewall", "input").splitlines():
            if count := re.search(r"counter packets (\d+)", line):
                port = re.search(r"dport (\S+)", line)
                found[port[1] if port else "other"] = int(count[1])
        return found

    def lose(self) -> None:
        """Cut the power: no packet is sent any more, not even one that closes a connection."""
        self.call("ip", "link", "set", "eth0", "down")
        os.kill(self.init, 9)


@contextmanager
def network() -> Iterator[Callable[[str], Host]]:
    """Yield a function that adds a host with an address to a new network. All end at the end."""
    bridge = f"rm{os.getpid()}"
    environ = os.environ | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HUB_OFFLINE": "1",
    }
    with ExitStack() as ends:
        _run("ip", "link", "add", bridge, "type", "bridge")
        ends.callback(_run, "ip", "link", "delete", bridge)
        _run("ip", "link", "set", bridge, "up")

        def add(address: str) -> Host:
            last = address.rpartition(".")[2]
            # The name has no address, as on a machine that no name server knows.
            ready, shows = os.pipe()
            boot = (
                f"hostname host-{last}; mount --bind {ROOT} /mnt; mount -t tmpfs none /tmp;"
                # The repository may be below /tmp.
                f" mkdir -p {ROOT}; mount --move /mnt {ROOT}; mount -t tmpfs none /dev/shm;"
                f" echo up >&{shows}; exec {shows}>&-; exec sleep infinity"
            )
            spaces = ("--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc")
            process = subprocess.Popen(
                ["unshare", *spaces, "--kill-child", "bash", "-c", boot],
                pass_fds=[shows],
                stderr=DEVNULL,
            )
            ends.callback(process.wait)
            ends.callback(process.kill)
            os.close(shows)
            if os.read(ready, 2) == b"":
                raise FailedError("this machine does not permit namespaces (run as root)")
            os.close(ready)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            host = Host(address, int(children.read_text()), environ)
            outside = f"{bridge}-{last}"
            # It stays for a moment after the end of its host's processes.
            ends.callback(subprocess.run, ["ip", "link", "delete", outside], stderr=DEVNULL)
            inside = ("peer", "name", "eth0", "netns", str(host.init))
            _run("ip", "link", "add", outside, "type", "veth", *inside)
            _run("ip", "link", "set", outside, "master", bridge, "up")
            host.call("ip", "link", "set", "lo", "up")
            host.call("ip", "address", "add", f"{address}/24", "dev", "eth0")
            host.call("ip", "link", "set", "eth0", "up")
            host.call("sysctl", f"net.ipv4.ip_local_port_range={SENDING.replace('-', ' ')}")
            host.firewall(*OPEN)
            return host

        yield add


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _log(folder: Path) -> dict[str, Any]:
    """Return the arguments of Popen that append a run's output to a file next to its folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    return {"stdout": folder.with_suffix(".log").open("a"), "stderr": subprocess.STDOUT}


def _wait_for(text: str, folder: Path, process: subprocess.Popen[bytes]) -> float:
    """Wait until the run has printed the text; return the seconds."""
    started_s = time.monotonic()
    while text not in folder.with_suffix(".log").read_text():
        if process.poll() is not None or time.monotonic() - started_s > LIMIT_S:
            raise FailedError(f"{folder}.log has no {text!r}")
        time.sleep(0.1)
    return time.monotonic() - started_s


def cluster(add: Callable[[str], Host], **variables: str) -> tuple[Host, Host]:
    """Start Ray on two hosts; `variables`: environment of Ray on the second."""
    head, worker = add(HEAD), add(WORKER)
    head.start_ray("--head", "--num-cpus=1", f"--node-ip-address={HEAD}")
    join(worker, **variables)
    return head, worker


def join(worker: Host, **variables: str) -> None:
    worker.start_ray(f"--address={HEAD}:6379", "--num-cpus=4", **variables)


def wait(process: subprocess.Popen[bytes], expected: int) -> float:
    """Wait for the end of a run; return the seconds. Raises FailedError for another exit status."""
    started_s = time.monotonic()
    status = process.wait(timeout=LIMIT_S)
    if status != expected:
        raise FailedError(f"exit status {status}, not {expected}")
    return time.monotonic() - started_s


def require_error(folder: Path, text: str) -> None:
    """Print the last lines of the run's error. Raises FailedError if it does not have the text."""
    error = (folder / "error.txt").read_text()
    print(error.partition("The above exception")[2] or error)
    if text not in error:
        raise FailedError(f"{folder}/error.txt has no {text!r}")


def metrics(host: Host) -> list[str]:
    """Return the names of the run's metrics at the host's endpoint."""
    url = f"http://{host.address}:{PORTS['metrics-export-port']}/metrics"
    page = host.call("curl", "--silent", "--fail", url)
    return sorted(set(re.findall(r"^(ray_rollmatch_\w+)\{", page, re.M)))


def require_equal(one: Path, two: Path) -> None:
    lines, differs = compare(one, two)
    if differs:
        raise FailedError("\n".join(lines))


def on_one(folder: Path, _: Path) -> None:
    """The run that the others are compared with: on one host, with its own cluster."""
    with network() as add:
        few = ("learner.cpus=0.5", "rollout_matching.vllm.actors.cpus_per_actor=0.5")
        wait(add(HEAD).start_job(folder, *few), 0)


def on_two(folder: Path, reference: Path) -> None:
    """The same run on two hosts: places of the processes, metrics, and the ports that are used."""
    with network() as add:
        head, worker = cluster(add)
        process = head.start_job(folder, *SPREAD)
        wait_for_steps(folder, 1, process)
        for host in (head, worker):
            lines = host.call("ps", "-eo", "args").splitlines()
            names = sorted({line.split()[0] for line in lines if line.startswith("ray::")})
            print(f"processes {host.address}: {', '.join(names)}")
            if ("ray::LearnerActor" in names) != (host is head):
                raise FailedError("the learner is not on the first host, or on both")
        deadline = time.monotonic() + 60.0
        # Ray publishes them every few seconds.
        while "ray_rollmatch_loss" not in metrics(head) and time.monotonic() < deadline:
            time.sleep(0.5)
        for host in (head, worker):
            print(f"metrics   {host.address}: {', '.join(metrics(host))}")
            if ("ray_rollmatch_loss" in metrics(host)) != (host is head):
                raise FailedError("the run's metrics are not on the driver's host, or on both")
        wait(process, 0)
        for host in (head, worker):
            connections = host.connections()
            print(f"connected {host.address}: {connections}")
            if connections["other"]:
                raise FailedError("connections to closed ports were tried")
        (card,) = json.loads(worker.call("ip", "-json", "-statistics", "link", "show", "eth0"))
        print(f"received  {WORKER}: {card['stats64']['rx']['bytes'] / 1e6:.0f} MB")
        require_equal(reference, folder)


def lost(folder: Path, reference: Path) -> None:
    """The second host is lost and not replaced: the run ends, and continues on a new host."""
    with network() as add:
        head, worker = cluster(add)
        job = (*SPREAD, "rollout_matching.vllm.actors.max_restarts=0")
        process = head.start_job(folder, *job)
        wait_for_steps(folder, 3, process)
        worker.lose()
        print(f"ended     {wait(process, 1):.0f} s after the loss")
        require_error(folder, "its node was lost")
        join(add(NEW))
        wait(head.start_job(folder, *job), 0)
        require_equal(reference, folder)


def replaced(folder: Path, reference: Path) -> None:
    """The second host is lost, and another one joins: the run continues by itself."""
    with network() as add:
        head, worker = cluster(add)
        process = head.start_job(folder, *SPREAD)
        wait_for_steps(folder, 3, process)
        worker.lose()
        print(f"noticed   {_wait_for('its node was lost', folder, process):.0f} s after the loss")
        join(add(NEW))
        print(f"came back {_wait_for('is back after', folder, process):.0f} s after the message")
        wait(process, 0)
        require_equal(reference, folder)


def slurm(folder: Path, reference: Path) -> None:
    """deploy/slurm_nodes.sbatch starts Ray and the run, with stand-ins for SLURM's commands."""
    with network() as add, tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        head, worker = add(HEAD), add(WORKER)
        bin = Path(temporary)
        asked = bin / "asked"
        os.mkfifo(asked)
        programs = {
            "scontrol": "printf 'host-1\\nhost-2\\n'",
            # The first host runs the command itself, and passes it on to the other one.
            "srun": f"""for word; do [[ $word == --nodelist=* ]] && node=${{word#*=}}; done
                while [[ $1 == --* ]]; do shift; done
                [[ $node == host-1 ]] && exec "$@"
                {{ export -p; printf '%q ' "$@"; }} > {asked}; exec sleep infinity""",
        }
        for name, program in programs.items():
            (bin / name).write_text(f"#!/bin/bash\n{program}\n")
            (bin / name).chmod(0o755)
        subprocess.Popen(
            worker.inside("bash", "-c", f". {asked}"),
            env=worker.environ,
            stdout=DEVNULL,
            stderr=DEVNULL,
        )
        head.environ = head.environ | {
            "PATH": f"{bin}:{os.environ['PATH']}",
            "HEAD_INTERFACE": "eth0",
            "SLURM_CPUS_PER_TASK": "3",
            "SLURM_JOB_NODELIST": "host-[1-2]",
            "SLURM_NNODES": "2",
        }
        spread = ("learner.cpus=1", "rollout_matching.vllm.actors.cpus_per_actor=2")
        words = [*JOB, f"telemetry.run_dir={folder}", *spread]
        script = head.inside("bash", "deploy/slurm_nodes.sbatch", *words)
        wait(subprocess.Popen(script, env=head.environ, **_log(folder)), 0)
        require_equal(reference, folder)


def closed(folder: Path, _: Path) -> None:
    """The range of the weight syncs is closed on the learner's host."""
    with network() as add:
        head, _worker = cluster(add)
        head.firewall(*(ports for ports in OPEN if ports != SENDING))
        process = head.start_job(folder, *SPREAD)
        print(f"ended     after {wait(process, 1):.0f} s, connections {head.connections()}")
        require_error(folder, f"this machine can connect to {HEAD}:")


def interface(folder: Path, reference: Path) -> None:
    """GLOO_SOCKET_IFNAME names an interface that the second host does not have: no effect."""
    with network() as add:
        head, _worker = cluster(add, GLOO_SOCKET_IFNAME="ib0")
        process = head.start_job(folder, *SPREAD)
        wait(process, 0)
        require_equal(reference, folder)


SCENARIOS = {
    each.__name__: each for each in (on_one, on_two, lost, replaced, slurm, closed, interface)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--out", type=Path, default=Path("outputs/two_hosts"))
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if options.only[0] != "on_one" and not (out / "on_one").exists():
        sys.exit(
            f"--only: begin with on_one, which {out} does not have and others are compared with"
        )
    failed = False
    for name in options.only:
        print(f"\n{name}: {SCENARIOS[name].__doc__}", flush=True)
        shutil.rmtree(out / name, ignore_errors=True)
        (out / f"{name}.log").unlink(missing_ok=True)
        started_s = time.monotonic()
        try:
            SCENARIOS[name](out / name, out / "on_one")
        except (FailedError, SystemExit, subprocess.TimeoutExpired) as error:
            print(f"FAILED    {error}")
            failed = True
        print(f"took      {time.monotonic() - started_s:.0f} s", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
