"""A process group for weights in host memory, as a worker of an engine joins it."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroupGloo, TCPStore


def join_group(host: str, port: int, *, rank: int, world_size: int, timeout_s: float) -> Any:
    """The `ProcessGroupGloo` of which rank 0 (`learner.wires.GlooWire`) hosts the store at `host:port`; returns when all have come."""
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    # Without it gloo asks the host's name for an address, which may be one that nobody else reaches (127.0.1.1 on a Debian machine).
    options._devices = [ProcessGroupGloo.create_device(hostname=address_towards(host, port))]
    return ProcessGroupGloo(store, rank, world_size, options)


def address_towards(host: str, port: int) -> str:
    """The address of this machine that connections to `host` leave from: who reaches one end reaches the other."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # of datagrams: nothing is sent
        return str(probe.getsockname()[0])
