"""A process group for weights in host memory, as a worker of an engine takes part in it; rank 0 is `learner.gloo_wire.GlooWire`."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, TCPStore

from shared.shared_memory import NOWHERE, Address, SharedMemory, this_machine
from shared.weight_terms import TensorSpec, buckets, offsets


class WeightGroup:
    """Joined. Where every worker of the group can open rank 0's shared memory, buckets are read there and the group only says when."""

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
        # Without it gloo asks the host's name for an address, which may be one that nobody else reaches (127.0.1.1 on a Debian machine).
        options._devices = [ProcessGroupGloo.create_device(hostname=address_towards(host, port))]
        self._group: Any = ProcessGroupGloo(store, rank, world_size, options)
        self._coming: deque[Any] = deque()
        try:
            self._shared = self._open() if self._agree(self._told(len(machine())) == list(machine())) else None
            self._group.set_timeout(timedelta(seconds=timeout_s))
        except BaseException:
            self.close()
            raise

    def receive(self, tensors: tuple[TensorSpec, ...], bucket_bytes: int) -> Iterator[tuple[tuple[TensorSpec, ...], torch.Tensor]]:
        """Every bucket and its bytes, as `offsets` places the tensors, each while the next one is on its way. They stay as they are until the next sync.

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
                # A new buffer per bucket: the reload keeps views of it until the last parameter of a layer has come, maybe in the next bucket.
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
        # Gloo closes its connections, which is what ends the others' waits, when nothing refers to the group any more, nor to anything that is on its way in
        # it; `shutdown` and `abort` of the group do not. Whoever drops the last one waits for what another thread
        # has under way, at most the group's timeout.
        self._coming.clear()
        self._group = self._shared = None

    def _told(self, num_numbers: int) -> list[int]:
        """By rank 0."""
        numbers = torch.zeros(num_numbers, dtype=torch.int64)
        self._broadcast(numbers).wait()
        return list(map(int, numbers.tolist()))

    def _open(self) -> torch.Tensor | None:
        """Rank 0's memory; None where it has none, or where a worker of the group cannot open it."""
        opened = SharedMemory.open(Address(*self._told(len(NOWHERE.numbers()))))
        all_have = self._agree(opened is not None)
        return torch.frombuffer(opened.memory, dtype=torch.uint8) if opened is not None and all_have else None

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
    """The address of this machine that connections to `host` leave from: who reaches one end reaches the other."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # of datagrams: nothing is sent
        return str(probe.getsockname()[0])
