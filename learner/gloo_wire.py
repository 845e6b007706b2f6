"""The learner's end of the transport between processes with their weights in host memory; `rollout_actors.gloo_group` is the engines'."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, TCPStore

from learner.gloo import gloo_options
from shared.shared_memory import NOWHERE, SharedMemory, this_machine
from shared.weight_terms import FullTerms, Group, buckets, offsets

NUM_BUFFERS = 2
"""Of buckets that go over the network: one is packed while the one before is on its way."""


class GlooWire:
    """`learner.wires.Wire`. The groups' own timeout ends a broadcast that nobody receives.

    Where all receivers of a group are on this machine, they read the buckets in memory that they share with this process, and the group's broadcasts of one
    byte tell them when. Else the buckets themselves are broadcast. Shared memory holds a whole sync, so nobody waits until a bucket has been read.
    It is taken when the first group of receivers on this machine has formed, and given back with the groups.
    """

    def __init__(self, terms: FullTerms, listening: list[socket.socket]) -> None:
        """`listening` have held the groups' ports since they were published. Returns when every receiver has come."""
        sizes = [offsets(bucket)[-1] for bucket in buckets(terms.sent, terms.bucket_bytes)]
        joining, timeout = timedelta(seconds=terms.join_limit.seconds), timedelta(seconds=terms.timeout_s)
        shared = cache(lambda: SharedMemory.create(sum(sizes)))
        self._groups: list[_Group] = []
        self._places: list[torch.Tensor] = []
        try:
            for group, bound in zip(terms.groups, listening, strict=True):
                self._groups.append(_Group(group, bound, joining, timeout, shared))
        except BaseException:
            # Neither those that have joined nor the memory wait until the traceback, which refers to them, is gone.
            self.close()
            shared.cache_clear()
            raise
        # Kept from sync to sync: memory that the system hands out anew, page by page, takes several times as long as filling it.
        if any(group.reads_shared for group in self._groups):
            memory = shared()
            assert memory is not None
            memory.forget()
            self._places = list(torch.frombuffer(memory.memory, dtype=torch.uint8).split(sizes))
        else:
            room = torch.empty(NUM_BUFFERS, max(sizes), dtype=torch.uint8)
            self._places = [room[turn % NUM_BUFFERS, :size] for turn, size in enumerate(sizes)]

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], terms: FullTerms) -> None:
        cut = [(bucket, offsets(bucket)) for bucket in buckets(terms.sent, terms.bucket_bytes)]
        assert [starts[-1] for _, starts in cut] == [len(place) for place in self._places], "a source sends the same tensors every time"
        stream = iter(tensors)
        for turn, ((bucket, (*starts, _)), packed) in enumerate(zip(cut, self._places, strict=True)):
            if turn >= NUM_BUFFERS:
                # The bucket before the last one may have been packed in the same place.
                for group in self._groups:
                    group.wait()
            for spec, start in zip(bucket, starts, strict=True):
                _, tensor = next(stream)
                packed[start : start + spec.num_bytes].copy_(tensor.reshape(-1).view(torch.uint8))
            for group in self._groups:
                group.send(packed)
        for group in self._groups:
            group.finish()

    def close(self) -> None:
        for group in self._groups:
            group.close()
        # The traceback of a failed send refers to this wire.
        self._groups, self._places = [], []


class _Group:
    """One process group, as its rank 0."""

    def __init__(self, group: Group, bound: socket.socket, joining: timedelta, timeout: timedelta, shared: Callable[[], SharedMemory | None]) -> None:
        """Returns when all receivers have come, after `joining` at the latest; from then on
        `timeout` bounds every wait for them.

        `shared` is asked only if all of them are on this machine.
        """
        store = TCPStore(group.host, group.port, is_master=True, wait_for_workers=False, timeout=joining, master_listen_fd=bound.detach())
        try:
            self._group: Any = ProcessGroupGloo(store, 0, group.world_size, gloo_options(group.host, joining))
        finally:
            # It listens on the group's port, and the traceback of a failure would keep it.
            del store
        self._sending: deque[Any] = deque()
        self._it_is_there = torch.ones(1, dtype=torch.uint8)
        try:
            self.reads_shared = self._tell(this_machine()) and self._share(shared())
            """Whether every receiver of this group has opened the shared memory."""
            self._group.set_timeout(timeout)
        except BaseException:
            self.close()
            raise

    def send(self, packed: torch.Tensor) -> None:
        """Begins to; `packed` stays as it is until `wait` has returned as often as this was called."""
        self._sending.append(self._broadcast(self._it_is_there if self.reads_shared else packed))

    def wait(self) -> None:
        """Until what was sent first, of what has not been waited for, has arrived."""
        self._sending.popleft().wait()

    def finish(self) -> None:
        """Waits until all has arrived and every receiver has loaded it. One that fails while it loads leaves its group: then this fails too."""
        while self._sending:
            self.wait()
        self._agree(True)

    def close(self) -> None:
        # Gloo closes its connections, which is what ends the others' waits, when nothing refers to the group any more, nor to anything that is on its way in
        # it; `shutdown` and `abort` of the group do not. Whoever drops the last one waits for what another thread
        # has under way, at most the group's timeout.
        self._sending.clear()
        self._group = None

    def _share(self, memory: SharedMemory | None) -> bool:
        return self._tell((NOWHERE if memory is None else memory.address).numbers())

    def _tell(self, numbers: Sequence[int]) -> bool:
        """Whether every receiver can do something with them."""
        self._broadcast(torch.tensor(numbers, dtype=torch.int64)).wait()
        return self._agree(True)

    def _agree(self, yes: bool) -> bool:
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
