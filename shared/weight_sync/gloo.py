"""The learner's end of the transport between processes with their weights in host memory;
`shared.weight_sync.phases.gloo` is the engines'.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, TCPStore

from shared.weight_sync.offer import FullOffer, ProcessGroupSpec, TensorSpec, buckets, offsets
from shared.weight_sync.shared_memory import NOWHERE, Address, SharedMemory, this_machine

# What the learner's gloo groups are opened with, its ranks' and its ends of a sync's;
# `shared.weight_sync.phases.gloo` opens the engines' ends alike.


def gloo_options(host: str, timeout: timedelta) -> Any:
    """Of a group whose collectives end after `timeout`, and whose other ranks reach this one at
    `host`.
    """
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    # Without it gloo asks the host's name for an address, which may be one that nobody else
    # reaches.
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    return options


NUM_BUFFERS = 2
"""Of buckets that go over the network: one is packed while the one before is on its way."""


class GlooSender:
    """`learner.weight_sync.transports.WeightTransport`. The groups' own timeout ends a broadcast
    that nobody receives.

    Where all receivers of a group are on this machine, they read the buckets in memory that they
    share with this process, and the group's broadcasts of one byte tell them when. Else the buckets
    themselves are broadcast. Shared memory holds a whole sync, so nobody waits until a bucket has
    been read. It is taken when the first group of receivers on this machine has formed, and given
    back with the groups.
    """

    def __init__(self, terms: FullOffer, listening: list[socket.socket]) -> None:
        """`listening` have held the groups' ports since they were published. Returns when every
        receiver has come.
        """
        sizes = [offsets(bucket)[-1] for bucket in buckets(terms.sent, terms.bucket_bytes)]
        joining, timeout = (
            timedelta(seconds=terms.join_limit.seconds),
            timedelta(seconds=terms.timeout_s),
        )
        shared = cache(lambda: SharedMemory.create(sum(sizes)))
        self._groups: list[_RankZeroGroup] = []
        self._places: list[torch.Tensor] = []
        try:
            for group, bound in zip(terms.groups, listening, strict=True):
                self._groups.append(_RankZeroGroup(group, bound, joining, timeout, shared))
        except BaseException:
            # Neither those that have joined nor the memory wait until the traceback, which refers
            # to them, is gone.
            self.close()
            shared.cache_clear()
            raise
        # Kept from sync to sync: memory that the system hands out anew, page by page, takes several
        # times as long as filling it.
        if any(group.reads_shared for group in self._groups):
            memory = shared()
            assert memory is not None
            memory.forget()
            self._places = list(torch.frombuffer(memory.memory, dtype=torch.uint8).split(sizes))
        else:
            room = torch.empty(NUM_BUFFERS, max(sizes), dtype=torch.uint8)
            self._places = [room[turn % NUM_BUFFERS, :size] for turn, size in enumerate(sizes)]

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], terms: FullOffer) -> None:
        cut = [(bucket, offsets(bucket)) for bucket in buckets(terms.sent, terms.bucket_bytes)]
        assert [starts[-1] for _, starts in cut] == [len(place) for place in self._places], (
            "a source sends the same tensors every time"
        )
        stream = iter(tensors)
        for turn, ((bucket, (*starts, _)), packed) in enumerate(
            zip(cut, self._places, strict=True)
        ):
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


class _RankZeroGroup:
    """One process group, as its rank 0."""

    def __init__(
        self,
        group: ProcessGroupSpec,
        bound: socket.socket,
        joining: timedelta,
        timeout: timedelta,
        shared: Callable[[], SharedMemory | None],
    ) -> None:
        """Returns when all receivers have come, after `joining` at the latest; from then on
        `timeout` bounds every wait for them.

        `shared` is asked only if all of them are on this machine.
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
            self._group: Any = ProcessGroupGloo(
                store, 0, group.world_size, gloo_options(group.host, joining)
            )
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
        """Begins to; `packed` stays as it is until `wait` has returned as often as this was
        called."""
        self._sending.append(self._broadcast(self._it_is_there if self.reads_shared else packed))

    def wait(self) -> None:
        """Until what was sent first, of what has not been waited for, has arrived."""
        self._sending.popleft().wait()

    def finish(self) -> None:
        """Waits until all has arrived and every receiver has loaded it. One that fails while it
        loads leaves its group: then this fails too.
        """
        while self._sending:
            self.wait()
        self._agree(True)

    def close(self) -> None:
        # Gloo closes its connections, which is what ends the others' waits, when nothing refers to
        # the group any more, nor to anything that is on its way in it; `shutdown` and `abort` of
        # the group do not. Whoever drops the last one waits for what another thread has under way,
        # at most the group's timeout.
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


# A process group for weights in host memory, as a worker of an engine takes part in it; rank 0 is
# `shared.weight_sync.phases.gloo.GlooWire`.


class GlooReceiver:
    """Joined. Where every worker of the group can open rank 0's shared memory, buckets are read
    there and the group only says when.
    """

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
        """Returns when all have come to the store that rank 0 hosts at `host:port`. Raises
        RuntimeError after `join_s`.

        Args:
            timeout_s: of every wait after that.
            machine: tells on which one this worker is.
        """
        timeout = timedelta(seconds=join_s)
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        # Without it gloo asks the host's name for an address, which may be one that nobody else
        # reaches (127.0.1.1 on a Debian machine).
        options._devices = [ProcessGroupGloo.create_device(hostname=address_towards(host, port))]
        self._group: Any = ProcessGroupGloo(store, rank, world_size, options)
        self._coming: deque[Any] = deque()
        try:
            self._shared = (
                self._open() if self._agree(self._told(len(machine())) == list(machine())) else None
            )
            self._group.set_timeout(timedelta(seconds=timeout_s))
        except BaseException:
            self.close()
            raise

    def receive(
        self, tensors: tuple[TensorSpec, ...], bucket_bytes: int
    ) -> Iterator[tuple[tuple[TensorSpec, ...], torch.Tensor]]:
        """Every bucket and its bytes, as `offsets` places the tensors, each while the next one is
        on its way. They stay as they are until the next sync.

        Rank 0 waits until all are through with the last bucket.
        """
        following: tuple[tuple[TensorSpec, ...], torch.Tensor] | None = None
        begin = 0
        for bucket in buckets(tensors, bucket_bytes):
            size = offsets(bucket)[-1]
            if self._shared is not None:
                packed = self._shared[begin : begin + size]
                begin += size
                self._coming.append(self._broadcast(torch.empty(1, dtype=torch.uint8)))
            else:
                # A new buffer per bucket: the reload keeps views of it until the last parameter of
                # a layer has come, maybe in the next bucket.
                packed = torch.empty(size, dtype=torch.uint8)
                self._coming.append(self._broadcast(packed))
            if following is not None:
                self._coming.popleft().wait()
                yield following
            following = (bucket, packed)
        if following is not None:
            self._coming.popleft().wait()
            yield following
        self._agree(True)

    def close(self) -> None:
        # Gloo closes its connections, which is what ends the others' waits, when nothing refers to
        # the group any more, nor to anything that is on its way in it; `shutdown` and `abort` of
        # the group do not. Whoever drops the last one waits for what another thread has under way,
        # at most the group's timeout.
        self._coming.clear()
        self._group = self._shared = None

    def _told(self, num_numbers: int) -> list[int]:
        """By rank 0."""
        numbers = torch.zeros(num_numbers, dtype=torch.int64)
        self._broadcast(numbers).wait()
        return list(map(int, numbers.tolist()))

    def _open(self) -> torch.Tensor | None:
        """Rank 0's memory; None where it has none, or where a worker of the group cannot open
        it."""
        opened = SharedMemory.open(Address(*self._told(len(NOWHERE.numbers()))))
        all_have = self._agree(opened is not None)
        return (
            torch.frombuffer(opened.memory, dtype=torch.uint8)
            if opened is not None and all_have
            else None
        )

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


def address_towards(host: str, port: int) -> str:
    """The address of this machine that connections to `host` leave from: who reaches one end
    reaches the other.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # of datagrams: nothing is sent
        return str(probe.getsockname()[0])
