"""The learner's end of a weight sync: offers its parameters, then broadcasts them to every rollout engine (DESIGN 9).

vllm is imported only when a group is opened, so the learner's step runs where it is not installed.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch

from learner.place import ReceiverGroup
from learner.weight_source import WeightSource
from shared.canary import CanaryProbe
from shared.checksum import BLOCK, bucket_checksum, tensor_checksum
from shared.errors import WeightSyncError
from shared.rollouts import WeightOffer
from shared.weight_sync import MARGIN_S, SendReport, TensorSpec, Terms, buckets, offsets

LEARNER = "learner"
INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

T = TypeVar("T")


class Wire(Protocol):
    """An open group, this process being rank 0."""

    def send(self, tensors: Iterator[tuple[str, torch.Tensor]], terms: Terms) -> None:
        """Broadcast every tensor, in the terms' order and buckets, and wait until it is out."""
        ...

    def close(self) -> None:
        """Leave the group: whoever waits for this rank sees a closed connection."""
        ...


class WeightSender:
    """Sends one source's weights again and again over one group, and opens a new group on a new port after a failure.

    Holds: a listening socket between the first offer and the first send, the group after that. Not thread-safe: one sync at a time.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        transport: str,
        receivers: tuple[ReceiverGroup, ...],
        timeout_s: float,
        host: str = "127.0.0.1",
        bucket_bytes: int = 64 << 20,
    ) -> None:
        """`receivers` are the engines' workers; `host` is an address of this node that they can reach."""
        if transport not in WIRES:
            raise ValueError(f"no weight transport {transport!r}; there are {', '.join(WIRES)}")
        self._source = source
        self._transport = transport
        (group,) = receivers
        self._world_size = 1 + group.num_workers
        self._timeout_s = timeout_s
        self._host = host
        self._bucket_bytes = bucket_bytes
        self._socket: socket.socket | None = None
        self._port = 0
        self._wire: Wire | None = None

    def offer(self, version: int, canary: CanaryProbe) -> WeightOffer:
        """What `send` will send: names, sizes, a checksum per bucket, and where to join. The weights must not change in between."""
        if self._wire is None and self._socket is None:
            self._socket = socket.create_server((self._host, 0), backlog=self._world_size)
            self._port = self._socket.getsockname()[1]
        tensors = tuple(
            TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.numel() * tensor.element_size())
            for name, tensor in self._source.tensors()
        )
        terms = Terms(
            host=self._host,
            port=self._port,
            world_size=self._world_size,
            timeout_s=self._timeout_s,
            bucket_bytes=self._bucket_bytes,
            tensors=tensors,
            checksums=self._checksums(tensors),
        )
        return WeightOffer(version=version, transport=self._transport, rendezvous={"terms": terms}, canary=canary)

    def send(self, offer: WeightOffer) -> SendReport:
        """Broadcast the offered weights; returns when they are out, not when they are verified. Raises WeightSyncError."""
        terms = Terms.of(offer)
        phase_s = {}
        try:
            started = time.perf_counter()
            if self._wire is None:
                self._wire = self._bounded(lambda: self._open(terms), "rendezvous")
            phase_s["rendezvous"] = time.perf_counter() - started
            started = time.perf_counter()
            wire = self._wire
            self._bounded(lambda: wire.send(self._source.tensors(), terms), "wire")
            phase_s["wire"] = time.perf_counter() - started
        except WeightSyncError:
            self.close()
            raise
        return SendReport(bytes=terms.num_bytes, phase_s=phase_s)

    def close(self) -> None:
        """Leave the group; the next offer opens another, on a new port. Also to be called when the set of receivers changes. Twice is harmless."""
        if self._wire is not None:
            self._wire.close()
        if self._socket is not None:
            self._socket.close()
        self._wire = self._socket = None

    def _open(self, terms: Terms) -> Wire:
        assert self._socket is not None, "send follows its offer"
        # The group takes over the socket that has held the port since the offer: nobody else can have bound it.
        listening, self._socket = self._socket, None
        return WIRES[self._transport](terms, listening)

    def _checksums(self, tensors: tuple[TensorSpec, ...]) -> tuple[int, ...]:
        values = self._source.tensors()
        checksums = []
        for bucket in buckets(tensors, self._bucket_bytes):
            checksums.append(bucket_checksum(_checksum(next(values)[1]) for _ in bucket))
        return tuple(checksums)

    def _bounded(self, work: Callable[[], T], phase: str) -> T:
        """`work()` in a thread, because a collective that waits for a peer cannot be interrupted from inside. A late thread is left behind:
        it ends when `close` or the peer's end breaks the group, and as a daemon it does not hold the process."""
        result: Future[T] = Future()
        threading.Thread(target=_run, args=(work, result), name=f"weight-{phase}", daemon=True).start()
        try:
            return result.result(timeout=self._timeout_s + MARGIN_S)
        except Exception as error:
            late = f"not done with {self._world_size - 1} receivers after timeouts.sync_phase_s = {self._timeout_s:g} s"
            what = late if isinstance(error, TimeoutError) else str(error)
            check = f"check that every rollout actor is alive and reaches {self._host}:{self._port}"
            raise WeightSyncError(f"{what}; {check}", actor=LEARNER, phase=phase) from error


def _run(work: Callable[[], T], result: Future[T]) -> None:
    try:
        result.set_result(work())
    except Exception as error:  # delivered to the waiting thread by the future
        result.set_exception(error)


def _checksum(tensor: torch.Tensor) -> int:
    positions = torch.arange(1, min(BLOCK, tensor.numel()) + 1, device=tensor.device)
    return tensor_checksum(tensor.reshape(-1).view(INTEGER_OF_SIZE[tensor.element_size()]), positions)


class GlooWire:
    """Between processes with the weights in host memory. The group's own timeout ends a broadcast that nobody receives."""

    def __init__(self, terms: Terms, listening: socket.socket) -> None:
        from vllm.distributed.utils import stateless_init_torch_distributed_process_group

        self._group: Any = stateless_init_torch_distributed_process_group(
            terms.host, terms.port, 0, terms.world_size, "gloo", listen_socket=listening, timeout=timedelta(seconds=terms.timeout_s)
        )

    def send(self, tensors: Iterator[tuple[str, torch.Tensor]], terms: Terms) -> None:
        options = torch.distributed.BroadcastOptions()
        options.rootRank = 0
        for bucket in buckets(terms.tensors, terms.bucket_bytes):
            *starts, size = offsets(bucket)
            packed = torch.empty(size, dtype=torch.uint8)
            for spec, start in zip(bucket, starts, strict=True):
                name, tensor = next(tensors)
                assert name == spec.name, f"offered {spec.name}, sending {name}"
                packed[start : start + spec.num_bytes].copy_(tensor.reshape(-1).view(torch.uint8))
            self._group.broadcast([packed], options).wait()

    def close(self) -> None:
        from vllm.distributed.utils import stateless_destroy_torch_distributed_process_group

        stateless_destroy_torch_distributed_process_group(self._group)
        # Gloo closes its connections when the last reference goes, and the traceback of a failed send holds one to this wire.
        self._group = None


class NcclWire:
    """Between GPUs, to vLLM's own `nccl` engine, with vLLM's own packing. Not run on a GPU.

    NCCL has no timeout: a late broadcast is given up by `WeightSender`, which leaves the group; the receiving actor is ended by its pool.
    """

    def __init__(self, terms: Terms, listening: socket.socket) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup
        from vllm.utils.nccl import unpinned_nccl_env

        group = StatelessProcessGroup.create(terms.host, terms.port, 0, terms.world_size, store_timeout=int(terms.timeout_s), listen_socket=listening)
        with unpinned_nccl_env():
            self._communicator: Any = PyNcclCommunicator(group, device=torch.cuda.current_device())

    def send(self, tensors: Iterator[tuple[str, torch.Tensor]], terms: Terms) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        packed_nccl_broadcast_producer(
            iterator=tensors, group=self._communicator, src=0, post_iter_func=lambda item: item[1], buffer_size_bytes=terms.bucket_bytes, num_buffers=2
        )

    def close(self) -> None:
        self._communicator.destroy()


WIRES: dict[str, Callable[[Terms, socket.socket], Wire]] = {"rollmatch_gloo": GlooWire, "nccl": NcclWire}
