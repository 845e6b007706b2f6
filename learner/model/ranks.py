"""The learner ranks (processes that train together): placement, devices and collectives."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import (
    AllreduceOptions,
    DistError,
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    ReduceOp,
    TCPStore,
)

from shared.chunking import cut_past
from shared.config.derive import rank_name
from shared.errors import CollectiveError, LearnerError, Timeout, late
from shared.run_files import Span
from shared.weight_sync.gloo import gloo_options
from shared.weight_sync.transports import Device, TransportKind

BUCKET_ELEMENTS = 2**24
"""Number of gradient elements that are summed at once: 64 MiB in float32."""
GROUP_NAME = "rollmatch.learner"
CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""The environment variable of cuBLAS for its workspaces. Deterministic products need it."""


@dataclass(frozen=True, slots=True)
class ReceiverGroup:
    """The engine workers that receive weights together, in one process group of a weight sync.

    Learner rank 0 is rank 0 of the process group.
    """

    num_workers: int
    port: int = 0
    """The port of the process group on learner rank 0's node; 0: any free port."""


@dataclass(frozen=True, slots=True)
class RankTopology:
    """Number, device and addresses of one learner rank, and the engines that get its weights.

    Example: `RankTopology(TransportKind.GLOO, (ReceiverGroup(3),))` is the only rank of a run with
    three rollout actors on CPU.
    """

    transport: TransportKind
    """How full weights are sent in a weight sync (`WeightOffer.transport`)."""
    receivers: tuple[ReceiverGroup, ...]
    """The engines to send weights to: one group of all rollout actors, or one for each server. It
    is empty if the engine is in the learner's process."""
    address: str = "127.0.0.1"
    """Address of this node that the engines and other learner ranks can reach."""
    device: Device = Device.CPU
    rank: int = 0
    world_size: int = 1
    rendezvous: str = ""
    """`address:port` at which rank 0 connects the ranks (`Rendezvous`); empty with one rank."""


class LearnerDevice:
    """The CPU or GPU of one learner rank. A GPU executes queued work asynchronously.

    It is a class so that tests can observe it without a GPU. Not tested on a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def use_full_float32(self) -> None:
        """Disable TF32, so that float32 products on a GPU have full precision."""
        # By default cuDNN's convolutions use TF32. Its 10 bits are too few for the tolerances of
        # the comparison between learner and engine. Other libraries may enable it for products.
        if self.device.type == "cuda":
            # Do not set `fp32_precision` of each operation: reading `cudnn.allow_tf32`, as other
            # packages do, would then raise.
            torch.set_float32_matmul_precision("highest")
            torch.backends.cudnn.allow_tf32 = False

    def use_deterministic_kernels(self) -> None:
        """Let a GPU compute the same bits each time; an operation that cannot raises RuntimeError.

        It applies to the process, and must be called before CUDA starts.
        """
        if self.device.type != "cuda":
            return
        # cuBLAS reads it when it starts. By default, with several streams, it chooses a workspace
        # at run time, and the order of sums depends on it.
        assert CUBLAS_WORKSPACE in os.environ or not torch.cuda.is_initialized(), "CUDA has started"
        os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")
        torch.use_deterministic_algorithms(True)

    def wait(self) -> None:
        """Wait until the device has finished all work that this thread has queued on it.

        When `Optimizer.update` returns, the update is only queued. Without this wait, another
        stream or process could read the previous step's weights.
        """
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor from host memory to `device`. The host does not wait for a GPU.

    Not tested on a GPU.
    """
    # Other copies to a GPU end with a wait for all work that is queued there.
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Ranks:
    """The learner ranks of a run, and their collective operations, such as sums of gradients.

    `Ranks()` stands for a single rank. All methods except `of_phase` and `pop_spans` are
    collectives: all ranks call them in the same order. If a rank does not join, the others raise
    CollectiveError after `timeout_s`.

    Example: with rank 0 holding 3 and rank 1 holding 5, `ranks.sum(...)` is 8 on both.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        group: ProcessGroup | None = None,
        device: LearnerDevice | None = None,
        *,
        timeout_s: float = 0.0,
    ) -> None:
        """Store the arguments of the collectives. Until `join_ranks` arranges them, no rank shards.

        Args:
            group: process group of the ranks; None for a single rank: no method communicates.
            device: device of the gradients.
        """
        self.rank = rank
        self.world_size = world_size
        self.group = group
        self._device = device
        self._timeout_s = timeout_s
        self.shards = self if group is None else Ranks()
        """The ranks that hold one copy of the model together, this rank among them."""
        self.replicas = self
        """The ranks that hold the same part of the model as this rank, one of each copy."""
        self._spans: list[Span] = []
        self._track = rank_name(rank, world_size)

    def sum(self, value: int) -> int:
        return self._reduced([value], ReduceOp.SUM)[0]

    def max(self, value: int) -> int:
        return self._reduced([value], ReduceOp.MAX)[0]

    def all_of(self, value: int) -> list[int]:
        """Return the `value` that each rank passes, as a list in rank order."""
        own = [value if rank == self.rank else 0 for rank in range(self.world_size)]
        return self._reduced(own, ReduceOp.SUM)

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether it is true on at least one rank.

        All ranks pass equally many flags.
        """
        return [bool(flag) for flag in self._reduced(list(map(int, flags)), ReduceOp.MAX)]

    def first_difference(self, values: Sequence[int]) -> int | None:
        """Return the first index at which the ranks' `values` differ, or None.

        All ranks pass equally many values.
        """
        highest = self._reduced(values, ReduceOp.MAX)
        lowest = self._reduced(values, ReduceOp.MIN)
        pairs = enumerate(zip(highest, lowest, strict=True))
        return next((index for index, (high, low) in pairs if high != low), None)

    def barrier(self) -> None:
        """Wait until all ranks have called this method."""
        self._reduced([0], ReduceOp.SUM)

    def together(self, write: Callable[[], None], phase: str) -> None:
        """Call `write` on every rank, and return when all ranks have written their part.

        If one rank fails, all ranks raise and can try again. The failed rank raises its own error,
        the others a CollectiveError of the phase.
        """
        failure: Exception | None = None
        try:
            write()
        except Exception as error:
            failure = error
        someone_failed = self.max(int(failure is not None))
        if failure is not None:
            raise failure
        if someone_failed:
            raise CollectiveError(
                "another learner rank failed in this phase; look at the first error of the other"
                " ranks",
                phase=phase,
            )

    def meet(self, flag: bool) -> bool:
        """Wait for all ranks, and return whether `flag` is true on at least one.

        The wait is recorded as a time span (`pop_spans`).
        """
        started_s = time.time()
        any_flag = bool(self.max(int(flag)))
        if self.group is not None:
            self._spans.append(Span(self._track, "wait for ranks", started_s, time.time()))
        return any_flag

    def sum_gradients(self, gradients: Sequence[torch.Tensor]) -> None:
        """Sum the gradients over `replicas`, in place. All pass tensors of the same shapes.

        Afterwards they hold bitwise equal values. Over `shards`, each row's backward already sums.
        """
        group = self.replicas.group
        if group is None:
            return
        started_s = time.time()
        for bucket in cut_past(gradients, BUCKET_ELEMENTS, torch.Tensor.numel):
            # Always in float32: a sum over ranks must not be less precise than the sum over rows.
            flat = torch.cat([gradient.reshape(-1).float() for gradient in bucket])
            self._all_reduce(group, flat, ReduceOp.SUM)
            parts = flat.split([gradient.numel() for gradient in bucket])
            for gradient, summed in zip(bucket, parts, strict=True):
                gradient.copy_(summed.view_as(gradient))
        # On a GPU the sums are only queued so far. Wait here, so that a lost rank and the time are
        # attributed to the sums and not to a later wait.
        if self._device is not None:
            self._device.wait()
        self._spans.append(Span(self._track, "reduce gradients", started_s, time.time()))

    def exchange(self, moves: Sequence[tuple[int, int]], sent: Sequence[bytes]) -> list[bytes]:
        """Send bytes between pairs of ranks, and return what this rank receives, in order.

        Args:
            moves: source and destination of each message; the same list on all ranks.
            sent: the messages from this rank, in order.

        Example: with moves [(0, 2), (1, 2)], rank 2 returns the messages of ranks 0 and 1.
        """
        own = iter(sent)
        sending = []
        received = []
        for tag, (source, destination) in enumerate(moves):
            assert self.group is not None, "a single rank has no other rank to send to"
            if source == self.rank:
                content = torch.frombuffer(bytearray(next(own)), dtype=torch.uint8)
                size = torch.tensor([len(content)])
                for tensor in (size, content):
                    # The tensor must live until it is sent.
                    sending.append((tensor, self.group.send([tensor], destination, tag)))
            elif destination == self.rank:
                size = torch.empty(1, dtype=torch.int64)
                self.group.recv([size], source, tag).wait()
                content = torch.empty(int(size), dtype=torch.uint8)
                self.group.recv([content], source, tag).wait()
                received.append(content.numpy().tobytes())
        for _, work in sending:
            work.wait()
        return received

    @contextmanager
    def of_phase(self, phase: str) -> Iterator[None]:
        """Name this rank in a LearnerError that the block raises, if there are several ranks.

        If a collective fails because another rank is lost or late, its error becomes a
        CollectiveError with this phase. Other errors do not change.
        """
        if self.group is None:
            yield
            return
        try:
            yield
        except CollectiveError:
            raise
        except LearnerError as error:
            raise LearnerError(
                f"rank {self.rank} of {self.world_size}: {error.message}", phase=error.phase
            ) from error
        except RuntimeError as error:
            if not is_of_collective(error):
                raise
            # The error comes without delay if the other rank's process has ended.
            raise CollectiveError(
                f"rank {self.rank} of {self.world_size}: another rank did not answer within"
                f" timeouts.learn_s = {self._timeout_s:g} s, or its connection broke; look at the"
                f" first error of the other ranks ({error})",
                phase=phase,
            ) from error

    def pop_spans(self) -> list[Span]:
        """Return and clear the recorded time spans of the calls of `meet` and `sum_gradients`."""
        spans = self._spans
        self._spans = []
        return spans

    def _reduced(self, values: Sequence[int], operation: ReduceOp.RedOpType) -> list[int]:
        if self.group is None:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        self._all_reduce(self.group, tensor, operation)
        return tensor.tolist()

    def _all_reduce(
        self, group: ProcessGroup, tensor: torch.Tensor, operation: ReduceOp.RedOpType
    ) -> None:
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(operation)
        options.timeout = timedelta(seconds=self._timeout_s)
        group.allreduce([tensor], options).wait()


def is_of_collective(error: Exception) -> bool:
    """Return whether a collective operation raised the error: another rank was lost or late."""
    # NCCL has its own error class. Errors of gloo contain its source path.
    return isinstance(error, DistError) or "third_party/gloo" in str(error)


class Rendezvous:
    """The key-value store on learner rank 0, through which the ranks find each other.

    Its port is bound only on `address`, and before the address is passed to other ranks.
    """

    def __init__(self, address: str) -> None:
        listening = socket.create_server(
            (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET
        )
        port = listening.getsockname()[1]
        self.endpoint = f"{address}:{port}"
        self.store = TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )


def join_ranks(
    place: RankTopology,
    rendezvous: Rendezvous | None,
    device: LearnerDevice,
    *,
    timeout_s: float,
    num_shards: int,
) -> Ranks:
    """Connect all learner ranks of the run. Raises CollectiveError after `timeout_s`.

    Args:
        rendezvous: the store to which the other ranks connect, on rank 0; None on other ranks.
        timeout_s: timeouts.learn_s, the limit of this and of every collective.
        num_shards: number of successive ranks that hold one copy of the model together. Example:
            of 4 ranks, with 2 shards, rank 3 has the `shards` 2 and 3 and the `replicas` 1 and 3.
    """
    if place.world_size == 1:
        return Ranks()
    assert (rendezvous is not None) == (place.rank == 0), "only rank 0 hosts the rendezvous"
    address, port = place.rendezvous.rsplit(":", 1)
    timeout = timedelta(seconds=timeout_s)
    try:
        if rendezvous is not None:
            store = rendezvous.store
        else:
            store = TCPStore(
                address, int(port), is_master=False, wait_for_workers=False, timeout=timeout
            )
        ranks = Ranks(
            *(place.rank, place.world_size, open_group(place, store, timeout), device),
            timeout_s=timeout_s,
        )
        if num_shards == place.world_size:
            ranks.shards = ranks
            ranks.replicas = Ranks()
        elif num_shards > 1:
            first = place.rank - place.rank % num_shards
            of_copy = range(first, first + num_shards)
            of_part = range(place.rank % num_shards, place.world_size, num_shards)
            ranks.shards, ranks.replicas = (
                Ranks(
                    *(members.index(place.rank), len(members)),
                    *(open_group(place, store, timeout, members), device),
                    timeout_s=timeout_s,
                )
                for members in (of_copy, of_part)
            )
        return ranks
    except (DistError, RuntimeError) as error:
        message = late(
            f"the other learner ranks at {place.rendezvous}",
            Timeout(timeout_s, "timeouts.learn_s"),
            "the first error of the other ranks, and that the nodes can reach each other",
        )
        raise CollectiveError(
            f"rank {place.rank} of {place.world_size}: {message} ({error})", phase="start"
        ) from error


def open_group(
    place: RankTopology, store: TCPStore, timeout: timedelta, members: range | None = None
) -> ProcessGroup:
    """Open a process group of the learner ranks: gloo for host memory, NCCL for GPUs.

    `members`: the ranks in the group, this rank among them; None: all. It is not torch's default
    group, because an engine in the same process may open that one. NCCL was not tested on a GPU.
    """
    name = GROUP_NAME
    if members is None:
        members = range(place.world_size)
    else:
        name += f".{members.start}-{members.stop}-{members.step}"
    rank = members.index(place.rank)
    size = len(members)
    group = ProcessGroup(PrefixStore(name, store), rank, size)
    gloo = ProcessGroup.BackendType.GLOO
    on_cpu = ProcessGroupGloo(
        PrefixStore(f"{name}.gloo", store), rank, size, gloo_options(place.address, timeout)
    )
    group._register_backend(torch.device("cpu"), gloo, on_cpu)
    if place.device is Device.CUDA:
        from torch.distributed import ProcessGroupNCCL

        nccl_options = ProcessGroupNCCL.Options()
        nccl_options._timeout = timeout
        on_gpu = ProcessGroupNCCL(PrefixStore(f"{name}.nccl", store), rank, size, nccl_options)
        group._set_default_backend(ProcessGroup.BackendType.NCCL)
        # The process's tensors are on the first GPU that it sees.
        group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, on_gpu)
    else:
        group._set_default_backend(gloo)
    # torch registers groups by name. The rendezvous makes names unique among runs in one process.
    group._set_group_name(f"{name}@{place.rendezvous}")  # type: ignore[arg-type]
    return group
