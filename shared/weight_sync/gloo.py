"""Sender and receiver of the transport `rollmatch_gloo`, for weights in host memory (decision 38).

Weights are sent in buckets of several tensors, to one process group per engine. If all receivers of
a group are on the sender's machine, they read the buckets from shared memory, and a broadcast of
one byte says when a bucket is ready. Otherwise the buckets are broadcast.

    GlooSender (rank 0)               GlooReceiver (rank 1, 2, ...)
    id of this machine     ------>    is it my machine?       all say yes
    address of the memory  ------>    can I open it?          all say yes
    bucket, or one byte    ------>    loads it, while the next one is on its way
                           <----->    all have loaded

No other module of `shared` imports this one, because it needs torch.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch.distributed import (
    BroadcastOptions,
    ProcessGroupGloo,
    TCPStore,
    Work,
)

from shared.weight_sync.offer import FullOffer, ProcessGroupSpec, TensorSpec, buckets, offsets
from shared.weight_sync.shared_memory import NOWHERE, Address, SharedMemory, this_machine

NUM_BUFFERS = 2
"""Number of buffers for sending over the network: a bucket is packed while another is sent."""


def gloo_options(host: str, timeout: timedelta) -> Any:
    """Return gloo's options of a process group with this timeout.

    `host` is the address at which the other ranks of the group reach this rank.
    """
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    # Otherwise Gloo resolves the host's name, which may be 127.0.1.1 on a Debian machine.
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    return options


class _Member:
    """One rank's membership in a gloo group, with its unfinished transfers."""

    def __init__(self, group: Any, timeout: timedelta) -> None:
        self._group = group
        self._timeout = timeout
        self._under_way: deque[Work] = deque()

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._group.set_timeout(timeout)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Start a broadcast of `tensor` from rank 0.

        The tensor is in use until the matching `wait` returns.
        """
        options = BroadcastOptions()
        options.rootRank = 0
        self._under_way.append(self._group.broadcast([tensor], options))

    def wait(self) -> None:
        """Wait for the oldest unfinished broadcast."""
        self._under_way.popleft().wait()

    def wait_for_all(self) -> None:
        while self._under_way:
            self.wait()

    def agree(self, yes: bool) -> bool:
        """Wait for the votes of all ranks, and return whether all voted yes."""
        # Rank 0 collects the votes. In gloo's allreduce each rank waits for its neighbour, so the
        # loss of a rank would go around, and each rank on its way leave before the next notices.
        votes = torch.full([self._group.size()], yes, dtype=torch.int32).split(1)
        is_first = self._group.rank() == 0
        if is_first:
            for source, vote in enumerate(votes[1:], 1):
                self._under_way.append(self._group.recv([vote], source, 0))
            while self._under_way:
                self._under_way.popleft().wait(self._timeout)
        answer = torch.stack(votes).amin(0)
        self.broadcast(answer)
        if not is_first:
            self._under_way.append(self._group.send([votes[0]], 0, 0))
        self.wait()
        # Only now: gloo does not always end the wait of a send if rank 0 leaves.
        while self._under_way:
            self._under_way.popleft().wait(self._timeout)
        return bool(answer)

    def leave(self) -> None:
        # Gloo closes its connections, which ends the others' waits, once nothing refers to the
        # group or to its unfinished work; its `shutdown` and `abort` do not. Dropping the last
        # reference waits for unfinished work of other threads, at most for the group's timeout.
        self._under_way.clear()
        self._group = None


class GlooSender:
    """The learner's end of the gloo transport: rank 0 of every process group.

    Groups are kept from one weight sync to the next. Shared memory holds all weights, so the sender
    does not wait until a bucket has been read. The memory is allocated when the first group on this
    machine has formed, and freed with the groups.
    """

    def __init__(self, terms: FullOffer, listening: list[socket.socket]) -> None:
        """Open the process groups of `terms`; return when all receivers have connected to them.

        `listening` are the open sockets at the groups' ports.
        """
        sizes = [offsets(bucket)[-1] for bucket in buckets(terms.sent, terms.bucket_bytes)]
        joining = timedelta(seconds=terms.join_limit.seconds)
        timeout = timedelta(seconds=terms.timeout_s)
        shared = cache(lambda: SharedMemory.create(sum(sizes)))
        self._groups: list[_RankZero] = []
        self._buffers: list[torch.Tensor] = []
        try:
            for group, bound in zip(terms.groups, listening, strict=True):
                self._groups.append(_RankZero(group, bound, joining, timeout, shared))
        except BaseException:
            # Free members and memory now, not when the traceback, which refers to them, is freed.
            self.close()
            shared.cache_clear()
            raise
        # Kept from sync to sync: allocating new memory page by page takes several times as long as
        # filling it.
        if any(group.reads_shared for group in self._groups):
            memory = shared()
            assert memory is not None
            memory.forget()
            self._buffers = list(torch.frombuffer(memory.memory, dtype=torch.uint8).split(sizes))
        else:
            room = torch.empty(NUM_BUFFERS, max(sizes), dtype=torch.uint8)
            self._buffers = [room[turn % NUM_BUFFERS, :size] for turn, size in enumerate(sizes)]

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], terms: FullOffer) -> None:
        """Send all tensors in the order of `terms` to all groups, and wait until they are
        loaded."""
        packing = list(buckets(terms.sent, terms.bucket_bytes))
        assert [offsets(bucket)[-1] for bucket in packing] == list(map(len, self._buffers)), (
            "every sync must send the same tensors"
        )
        stream = iter(tensors)
        for turn, (bucket, packed) in enumerate(zip(packing, self._buffers, strict=True)):
            if turn >= NUM_BUFFERS:
                # The buffer may hold the bucket before the previous one.
                for group in self._groups:
                    group.wait()
            for spec, start in zip(bucket, offsets(bucket)[:-1], strict=True):
                _, tensor = next(stream)
                packed[start : start + spec.num_bytes].copy_(tensor.reshape(-1).view(torch.uint8))
            for group in self._groups:
                group.send(packed)
        for group in self._groups:
            group.wait_for_all()
            group.agree(True)

    def close(self) -> None:
        """Leave the process groups. Receivers that wait for the sender get an error."""
        for group in self._groups:
            group.leave()
        # The traceback of a failed send refers to this sender.
        self._groups = []
        self._buffers = []


class _RankZero(_Member):
    """Rank 0's membership in a gloo group: the learner's end of the group."""

    def __init__(
        self,
        group: ProcessGroupSpec,
        bound: socket.socket,
        joining: timedelta,
        timeout: timedelta,
        shared: Callable[[], SharedMemory | None],
    ) -> None:
        """Create the group; return when all receivers have joined. `joining` limits this wait.

        Args:
            timeout: limit of every later wait.
            shared: returns the shared memory, or None; called only if all receivers are on this
                machine.
        """
        store = TCPStore(
            group.host,
            group.port,
            is_master=True,
            wait_for_workers=False,
            timeout=joining,
            master_listen_fd=bound.detach(),
        )
        try:
            options = gloo_options(group.host, joining)
            super().__init__(ProcessGroupGloo(store, 0, group.world_size, options), joining)
        finally:
            # The store listens on the group's port, and a failure's traceback would keep it alive.
            del store
        self._one_byte = torch.ones(1, dtype=torch.uint8)
        self.reads_shared = False
        """Whether every receiver of this group has opened the shared memory."""
        try:
            if self._all_accept(this_machine()):
                memory = shared()
                address = NOWHERE if memory is None else memory.address
                self.reads_shared = self._all_accept(address)
            self.set_timeout(timeout)
        except BaseException:
            self.leave()
            raise

    def send(self, packed: torch.Tensor) -> None:
        """Start to send a packed bucket; `packed` is in use until the matching `wait` returns."""
        self.broadcast(self._one_byte if self.reads_shared else packed)

    def _all_accept(self, numbers: Sequence[int]) -> bool:
        """Send the numbers, and return whether every receiver accepts them."""
        self.broadcast(torch.tensor(numbers, dtype=torch.int64))
        self.wait()
        return self.agree(True)


class GlooReceiver:
    """The receiving end of the gloo transport, in one worker process of an engine."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        rank: int,
        world_size: int,
        join_s: float,
        timeout_s: float,
        machine: Callable[[], Sequence[int]] = this_machine,
    ) -> None:
        """Join the sender's process group at `host:port`; return when all ranks have joined.

        Raises RuntimeError if not all have joined after `join_s` seconds.

        Args:
            rank: this worker's rank in the group, from 1.
            timeout_s: limit of every later wait, in seconds.
            machine: returns the id of this worker's machine.
        """
        joining = timedelta(seconds=join_s)
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=joining)
        options = gloo_options(address_towards(host, port), joining)
        self._member = _Member(ProcessGroupGloo(store, rank, world_size, options), joining)
        self._shared: torch.Tensor | None = None
        try:
            here = list(machine())
            if self._member.agree(self._numbers(len(here)) == here):
                opened = SharedMemory.open(Address(*self._numbers(len(NOWHERE))))
                # All or none: if one receiver cannot open it, the buckets themselves are sent.
                if self._member.agree(opened is not None) and opened is not None:
                    self._shared = torch.frombuffer(opened.memory, dtype=torch.uint8)
            self._member.set_timeout(timedelta(seconds=timeout_s))
        except BaseException:
            self.close()
            raise

    def receive(
        self, tensors: tuple[TensorSpec, ...], bucket_bytes: int
    ) -> Iterator[tuple[tuple[TensorSpec, ...], torch.Tensor]]:
        """Yield each bucket's tensors and its bytes, while the next bucket is on its way.

        `shared.weight_sync.offer.offsets` gives the byte at which each tensor begins. The bytes do
        not change until the next weight sync.
        """
        arriving: deque[tuple[tuple[TensorSpec, ...], torch.Tensor]] = deque()
        begin = 0
        for bucket in buckets(tensors, bucket_bytes):
            size = offsets(bucket)[-1]
            if self._shared is not None:
                packed = self._shared[begin : begin + size]
                begin += size
                self._member.broadcast(torch.empty(1, dtype=torch.uint8))
            else:
                # A new buffer per bucket: the reload keeps views of it until a layer's last
                # parameter has arrived, which may be in the next bucket.
                packed = torch.empty(size, dtype=torch.uint8)
                self._member.broadcast(packed)
            arriving.append((bucket, packed))
            if len(arriving) > 1:
                self._member.wait()
                yield arriving.popleft()
        for last in arriving:
            self._member.wait()
            yield last
        # Rank 0 waits until all receivers have loaded the last bucket.
        self._member.agree(True)

    def close(self) -> None:
        """Leave the process group. Other ranks that wait for this rank get an error."""
        self._member.leave()
        self._shared = None

    def _numbers(self, count: int) -> list[int]:
        """Return `count` numbers that rank 0 broadcasts."""
        numbers = torch.zeros(count, dtype=torch.int64)
        self._member.broadcast(numbers)
        self._member.wait()
        return list(map(int, numbers.tolist()))


def address_towards(host: str, port: int) -> str:
    """Return the address that this machine uses for connections to `host` at `port`."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # a datagram socket: nothing is sent
        return str(probe.getsockname()[0])
