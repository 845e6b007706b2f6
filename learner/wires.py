"""How weights leave the learner's process: one class for each transport that has a wire (DESIGN 9).

vllm is imported only when a group of GPUs is opened.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroupGloo, TCPStore

from shared.transports import Transport
from shared.weight_sync import Group, Terms, buckets, offsets

NUM_BUFFERS = 2
"""One bucket is packed while the one before is on its way."""


class Wire(Protocol):
    """Open groups, this process being rank 0 of each."""

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], terms: Terms) -> None:
        """Send every tensor to every group, in the terms' order and buckets, and wait until it is out."""
        ...

    def close(self) -> None:
        """Leave the groups: whoever waits for this rank sees a closed connection."""
        ...


class GlooWire:
    """Between processes with the weights in host memory. The groups' own timeout ends a broadcast that nobody receives."""

    def __init__(self, terms: Terms, listening: list[socket.socket]) -> None:
        # Kept from sync to sync: memory that the system hands out anew, page by page, takes several times as long as filling it.
        self._buffers: list[torch.Tensor] = []
        timeout = timedelta(seconds=terms.timeout_s)
        self._groups: list[Any] = [_open_gloo(group, bound, timeout) for group, bound in zip(terms.groups, listening, strict=True)]

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], terms: Terms) -> None:
        cut = [(bucket, offsets(bucket)) for bucket in buckets(terms.sent, terms.bucket_bytes)]
        buffers = self._room_for(max(starts[-1] for _, starts in cut), min(NUM_BUFFERS, len(cut)))
        sending: list[list[Any]] = [[] for _ in buffers]
        stream = iter(tensors)
        for turn, (bucket, (*starts, size)) in enumerate(cut):
            slot = turn % len(buffers)
            _wait(sending[slot])
            packed = buffers[slot][:size]
            for spec, start in zip(bucket, starts, strict=True):
                _, tensor = next(stream)
                packed[start : start + spec.num_bytes].copy_(tensor.reshape(-1).view(torch.uint8))
            sending[slot] = [group.broadcast([packed], _from_rank_0()) for group in self._groups]
        for works in sending:
            _wait(works)

    def _room_for(self, num_bytes: int, num_buffers: int) -> list[torch.Tensor]:
        if len(self._buffers) < num_buffers or len(self._buffers[0]) < num_bytes:
            self._buffers = [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(num_buffers)]
        return self._buffers[:num_buffers]

    def close(self) -> None:
        for group in self._groups:
            group.shutdown()
        # Gloo closes its connections when the last reference goes, and the traceback of a failed send holds one to this wire.
        self._groups = []


def _open_gloo(group: Group, bound: socket.socket, timeout: timedelta) -> ProcessGroupGloo:
    """`bound` has held the group's port since it was published. Returns when every receiver has come."""
    store = TCPStore(group.host, group.port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=bound.detach())
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    # Without it gloo asks the host's name for an address, which may be one that nobody else reaches.
    options._devices = [ProcessGroupGloo.create_device(hostname=group.host)]
    return ProcessGroupGloo(store, 0, group.world_size, options)


def _from_rank_0() -> Any:
    options = torch.distributed.BroadcastOptions()
    options.rootRank = 0
    return options


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()


class NcclWire:
    """Between GPUs, to vLLM's own `nccl` engine, with vLLM's own packing. Not run on a GPU.

    NCCL has no timeout: a late broadcast is given up by `WeightSender`, which leaves the groups; the receiving actor is ended by its pool.
    """

    def __init__(self, terms: Terms, listening: list[socket.socket]) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup
        from vllm.utils.nccl import unpinned_nccl_env

        self._communicators: list[Any] = []
        for group, bound in zip(terms.groups, listening, strict=True):
            joined = StatelessProcessGroup.create(group.host, group.port, 0, group.world_size, store_timeout=int(terms.timeout_s), listen_socket=bound)
            with unpinned_nccl_env():
                self._communicators.append(PyNcclCommunicator(joined, device=torch.cuda.current_device()))

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], terms: Terms) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        packed_nccl_broadcast_producer(
            iterator=iter(tensors),
            group=_Together(self._communicators),
            src=0,
            post_iter_func=lambda item: item[1],
            buffer_size_bytes=terms.bucket_bytes,
            num_buffers=NUM_BUFFERS,
        )

    def close(self) -> None:
        for communicator in self._communicators:
            communicator.destroy()
        self._communicators = []


class _Together:
    """Several communicators as the one that vLLM's producer broadcasts to: a bucket is packed once, whatever the number of groups. Not run on a GPU."""

    def __init__(self, communicators: list[Any]) -> None:
        self._communicators = communicators

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        # On one stream, one group after the other: two NCCL kernels of one process at once may wait for each other.
        for communicator in self._communicators:
            communicator.broadcast(tensor, src=src)


WIRES: dict[Transport, Callable[[Terms, list[socket.socket]], Wire]] = {Transport.GLOO: GlooWire, Transport.NCCL: NcclWire}
