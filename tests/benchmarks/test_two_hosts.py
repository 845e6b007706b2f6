"""Weights between two hosts, which are namespaces of this machine (benchmarks/two_hosts.py)."""

import os
import shutil
import subprocess
import sys

import pytest

from benchmarks.two_hosts import HEAD, OPEN, SENDING, WORKER, network

pytestmark = pytest.mark.slow
LIMIT_S = 240
"""Limit for what only a hang exceeds: torch is imported within it."""

BOTH = f"""
import socket
import sys
import torch
from shared.weight_sync.gloo import GlooReceiver, GlooSender
from shared.weight_sync.offer import FullOffer, ProcessGroupSpec, TensorSpec
limit_s = float(sys.argv[1])
group = ProcessGroupSpec("{HEAD}", {SENDING.split("-")[0]}, world_size=2, key="a")
terms = FullOffer((group,), limit_s, 16, tuple(TensorSpec(name, "uint8", (16,), 16) for name in "ab"))
"""
SENDER = """
bound = socket.create_server((group.host, group.port))
print("listens", flush=True)
weights = [(spec.name, torch.full((spec.num_bytes,), i, dtype=torch.uint8)) for i, spec in enumerate(terms.sent, 7)]
wire = GlooSender(terms, [bound])
wire.send(weights, terms)
print([one.reads_shared for one in wire._groups])
"""
RECEIVER = """
joined = GlooReceiver(group.host, group.port, rank=1, world_size=2, join_s=limit_s, timeout_s=limit_s)
received = [packed.numpy().tobytes() for _, packed in joined.receive(terms.sent, terms.bucket_bytes)]
print(b"".join(received)[:32].hex())
"""


def run(host, program, limit_s):
    command = host.inside(sys.executable, "-c", BOTH + program, str(limit_s))
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=host.environ, stdout=pipe, stderr=pipe, text=True)


@pytest.fixture
def hosts():
    """Two hosts without a name server and without a route to other networks."""
    missing = [name for name in ("ip", "nft", "nsenter", "unshare") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"this machine does not have {', '.join(missing)}")
    is_permitted = subprocess.run(
        ["unshare", "--net", "ip", "link", "add", "probe", "type", "veth"],
        capture_output=True,
        check=False,
    )
    if os.getuid() != 0 or is_permitted.returncode:
        pytest.skip(f"no network namespace is permitted: {is_permitted.stderr.decode()}")
    with network() as add:
        yield add(HEAD), add(WORKER)


def test_weights_cross_the_network_of_two_hosts_on_the_ports_that_the_tutorial_opens(hosts):
    head, worker = hosts
    sender = run(head, SENDER, LIMIT_S)
    assert sender.stdout.readline() == "listens\n", sender.stderr.read()
    received, error = run(worker, RECEIVER, LIMIT_S).communicate(timeout=LIMIT_S)
    assert received == "07" * 16 + "08" * 16 + "\n", error
    assert sender.communicate(timeout=LIMIT_S)[0] == "[False]\n", "not through the machine's memory"
    dropped = [host.connections()["other"] for host in hosts]
    assert dropped == [0, 0]
    assert head.connections()[SENDING] >= 1


def test_a_receiver_gives_up_in_time_if_the_port_is_closed(hosts):
    head, worker = hosts
    head.firewall(*(ports for ports in OPEN if ports != SENDING))
    sender = run(head, SENDER, 5)
    assert sender.stdout.readline() == "listens\n", sender.stderr.read()
    receiver = run(worker, RECEIVER, 5)
    _, error = receiver.communicate(timeout=LIMIT_S)
    assert receiver.returncode == 1 and f"{HEAD}, " in error
    assert head.connections()["other"] >= 1
    sender.communicate(timeout=LIMIT_S)
