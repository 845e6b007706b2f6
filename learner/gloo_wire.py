"""The learner's end of the transport between processes with their weights in host memory; `rollout_actors.gloo_group` is the engines'."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, TCPStore

from shared.shared_memory import NAME_BYTES, SharedMemory
from shared.weight_terms import FullTerms, Group, buckets, offsets

NUM_BUFFERS = 2
"""Of buckets that go over the network: one is packed while the one before is on its way."""


class GlooWire:
    """`learner.wires.Wire`. The groups' own timeout ends a broadcast that nobody receives.

    Where all receivers of a group are on this machine, they read the buckets in memory that they share with this process, and the group's broadcasts of one
    byte tell them when. Else the buckets themselves are broadcast. Shared memory holds a whole sync, so nobody waits until a bucket has been read.
    """

    def __init__(self, terms: FullTerms, listening: list[socket.socket]) -> None:
        """`listening` have held the groups' ports since they were published. Returns when every receiver has come."""
        sizes = [offsets(bucket)[-1] for bucket in buckets(terms.sent, terms.bucket_bytes)]
        shared = SharedMemory.create(sum(sizes))
        timeout = timedelta(seconds=terms.timeout_s)
        try:
            self._groups = [_Group(group, bound, timeout, shared) for group, bound in zip(terms.groups, listening, strict=True)]
        finally:
            if shared is not None:
                shared.forget()
        # Kept from sync to sync: memory that the system hands out anew, page by page, takes several times as long as filling it.
        if shared is not None and any(group.reads_shared for group in self._groups):
            room = torch.frombuffer(shared.memory, dtype=torch.uint8)
            self._places = list(room.split(sizes))
        else:
            room = torch.empty(NUM_BUFFERS, max(sizes), dtype=torch.uint8)
            self._places = [room[turn % NUM_BUFFERS, :size] for turn, size in enumerate(sizes)]

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], terms: FullTerms) -> None:
        cut = [(bucket, offsets(bucket)) for bucket in buckets(terms.sent, terms.bucket_bytes)]
        assert [starts[-1] for _, starts in cut] == [len(place) for place in self._places], "a source sends the same tensors every time"
        stream = iter(tensors)
        sending: list[list[Any]] = []
        for turn, ((bucket, (*starts, _)), packed) in enumerate(zip(cut, self._places, strict=True)):
            if turn >= NUM_BUFFERS:
                # The bucket before the last one may have been packed in the same place.
                _wait(sending[turn - NUM_BUFFERS])
            for spec, start in zip(bucket, starts, strict=True):
                _, tensor = next(stream)
                packed[start : start + spec.num_bytes].copy_(tensor.reshape(-1).view(torch.uint8))
            sending.append([group.send(packed) for group in self._groups])
        for works in sending:
            _wait(works)
        # One that fails while it loads leaves its group: then this fails too, and the next sync begins with new groups.
        for group in self._groups:
            group.agree(True)

    def close(self) -> None:
        for group in self._groups:
            group.close()
        # Gloo closes its connections when the last reference goes, and the traceback of a failed send holds one to this wire.
        self._groups = []


class _Group:
    """One process group, as its rank 0."""

    def __init__(self, group: Group, bound: socket.socket, timeout: timedelta, shared: SharedMemory | None) -> None:
        store = TCPStore(group.host, group.port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=bound.detach())
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        # Without it gloo asks the host's name for an address, which may be one that nobody else reaches.
        options._devices = [ProcessGroupGloo.create_device(hostname=group.host)]
        self._group: Any = ProcessGroupGloo(store, 0, group.world_size, options)
        self._it_is_there = torch.ones(1, dtype=torch.uint8)
        name = b"" if shared is None else shared.path.encode()
        self._broadcast(torch.tensor(list(name.ljust(NAME_BYTES, b"\0")), dtype=torch.uint8)).wait()
        self.reads_shared = self.agree(shared is not None)
        """Whether every receiver of this group has opened the shared memory."""

    def send(self, packed: torch.Tensor) -> Any:
        return self._broadcast(self._it_is_there if self.reads_shared else packed)

    def close(self) -> None:
        self._group.shutdown()

    def agree(self, yes: bool) -> bool:
        """Whether every rank says so, once every rank has come to say it."""
        vote = torch.tensor([yes], dtype=torch.int32)
        options: Any = torch.distributed.AllreduceOptions()
        options.reduceOp = torch.distributed.ReduceOp.MIN
        self._group.allreduce([vote], options).wait()
        return bool(vote.item())

    def _broadcast(self, tensor: torch.Tensor) -> Any:
        options = torch.distributed.BroadcastOptions()
        options.rootRank = 0
        return self._group.broadcast([tensor], options)


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()
