"""The learner ranks of a run: where one of them is, its device, and how it speaks to the others."""

from __future__ import annotations

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
"""Gradients that are summed at once: 64 MiB in float32."""
GROUP_NAME = "rollmatch.learner"


@dataclass(frozen=True, slots=True)
class ReceiverGroup:
    """Engine workers that take weights over one process group, whose rank 0 is learner rank 0."""

    num_workers: int
    port: int = 0
    """Where the group is opened on rank 0's node; 0: any free one."""


@dataclass(frozen=True, slots=True)
class RankTopology:
    """The place of one learner rank in the run, which follows from the cluster.

    Example: `RankTopology(TransportKind.GLOO, (ReceiverGroup(3),))` is the only rank of a run with
    three actors on CPU.
    """

    transport: TransportKind
    """The way of full weights (`WeightOffer.transport`)."""
    receivers: tuple[ReceiverGroup, ...]
    """One for all rollout actors, or one for each server; none where the engine lives in the
    learner's process."""
    address: str = "127.0.0.1"
    """This node's, which the engines and the other ranks reach."""
    device: Device = Device.CPU
    rank: int = 0
    world_size: int = 1
    rendezvous: str = ""
    """`address:port` at which rank 0 gathers the ranks; empty where there is one."""


class LearnerDevice:
    """The device of one learner rank: a GPU does its work later than it is told to, a CPU at once.

    A class, so that a test can watch it without a GPU. Not run on a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def use_full_float32(self) -> None:
        """Have this process multiply float32 in float32 on a GPU."""
        # By default cuDNN's convolutions use TF32, whose 10 bits are too few for the tolerances at
        # which learner and engine are compared; another library may ask for it in products.
        if self.device.type == "cuda":
            # Not `fp32_precision` of each operation: with it, reading `cudnn.allow_tf32`, as
            # others do, raises.
            torch.set_float32_matmul_precision("highest")
            torch.backends.cudnn.allow_tf32 = False

    def wait(self) -> None:
        """Return when all that the calling thread has queued on the device is done.

        An optimizer update is only queued when `Optimizer.update` returns. Another stream or
        another process that reads the weights then may find those of the step before.
        """
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


class Ranks:
    """The learner ranks of a run, as one of them sees the others; `Ranks()` is one alone.

    Every method but `of_phase` and `pop_spans` is a collective: all ranks call it, in the same
    order. One that a peer does not join ends after `timeout_s` with a CollectiveError.

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
        sums_in_backward: bool = False,
    ) -> None:
        """Keep what the collectives need.

        Args:
            group: None where this rank is alone: then no method asks anybody.
            device: where the gradients are.
            sums_in_backward: the backward of every row sums gradients over the ranks already.
        """
        self.rank = rank
        self.world_size = world_size
        self.group = group
        self._device = device
        self._timeout_s = timeout_s
        self._sums_in_backward = sums_in_backward
        self._spans: list[Span] = []
        self._track = rank_name(rank, world_size)

    def sum(self, value: int) -> int:
        return self._reduced([value], ReduceOp.SUM)[0]

    def max(self, value: int) -> int:
        return self._reduced([value], ReduceOp.MAX)[0]

    def all_of(self, value: int) -> list[int]:
        """Return every rank's value, in rank order."""
        own = [value if rank == self.rank else 0 for rank in range(self.world_size)]
        return self._reduced(own, ReduceOp.SUM)

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag, of which all ranks have equally many, whether any rank's is set."""
        return [bool(flag) for flag in self._reduced(list(map(int, flags)), ReduceOp.MAX)]

    def first_difference(self, values: Sequence[int]) -> int | None:
        """Return where the ranks' values, equally many, differ first; None where they are equal."""
        highest = self._reduced(values, ReduceOp.MAX)
        lowest = self._reduced(values, ReduceOp.MIN)
        pairs = enumerate(zip(highest, lowest, strict=True))
        return next((index for index, (high, low) in pairs if high != low), None)

    def barrier(self) -> None:
        """Return when all ranks have come."""
        self._reduced([0], ReduceOp.SUM)

    def together(self, write: Callable[[], None], phase: str) -> None:
        """Write this rank's part, and return when every rank has written its own.

        Where one fails all of them raise, and are ready for another attempt: the rank that failed
        its own error, the others a CollectiveError of the phase.
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
            raise CollectiveError("another rank could not write its part", phase=phase)

    def meet(self, flag: bool) -> bool:
        """Wait for all ranks, timed; return whether any rank's flag is set."""
        started_s = time.time()
        any_flag = bool(self.max(int(flag)))
        if self.group is not None:
            self._spans.append(Span(self._track, "wait for ranks", started_s, time.time()))
        return any_flag

    def sum_gradients(self, gradients: Sequence[torch.Tensor]) -> None:
        """Sum in place over the ranks, each of which has as many of the same shapes.

        Afterwards every rank holds the same bits.
        """
        if self.group is None or self._sums_in_backward:
            return
        started_s = time.time()
        for bucket in cut_past(gradients, BUCKET_ELEMENTS, torch.Tensor.numel):
            # In float32, whatever the gradients are: a sum over ranks must not lose more than the
            # sum over rows.
            flat = torch.cat([gradient.reshape(-1).float() for gradient in bucket])
            self._all_reduce(self.group, flat, ReduceOp.SUM)
            parts = flat.split([gradient.numel() for gradient in bucket])
            for gradient, summed in zip(bucket, parts, strict=True):
                gradient.copy_(summed.view_as(gradient))
        # On a GPU the sums are only queued so far: a lost peer and the time belong to them, and not
        # to whatever waits for the device next.
        if self._device is not None:
            self._device.wait()
        self._spans.append(Span(self._track, "reduce gradients", started_s, time.time()))

    @contextmanager
    def of_phase(self, phase: str) -> Iterator[None]:
        """Name this rank in a LearnerError that leaves the block, among several ranks.

        A lost or late peer becomes a CollectiveError of the phase; other errors stay as they are.
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
            # It may have been told at once, because the other's process is not there.
            raise CollectiveError(
                f"rank {self.rank} of {self.world_size}: another one did not answer within"
                f" timeouts.learn_s = {self._timeout_s:g} s, or its connection broke; check the"
                f" rank that failed first ({error})",
                phase=phase,
            ) from error

    def pop_spans(self) -> list[Span]:
        """Return what `meet` and `sum_gradients` took since the last call."""
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
    """Tell whether a collective raised it, because another rank was lost or late."""
    # NCCL's errors have a class of their own, gloo's are known by the source file that they name.
    return isinstance(error, DistError) or "third_party/gloo" in str(error)


class Rendezvous:
    """A store at which the other ranks find rank 0.

    Its port is bound, on `address` alone, before anybody is told of it.
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
    sums_in_backward: bool,
) -> Ranks:
    """Return the ranks of the run when all have come. Raises CollectiveError after `timeout_s`.

    Args:
        rendezvous: rank 0's, opened before `place` was made.
        timeout_s: the configuration's timeouts.learn_s, of this and of every collective.
    """
    if place.world_size == 1:
        return Ranks()
    assert (rendezvous is not None) == (place.rank == 0), "rank 0 alone hosts the rendezvous"
    address, port = place.rendezvous.rsplit(":", 1)
    timeout = timedelta(seconds=timeout_s)
    try:
        if rendezvous is not None:
            store = rendezvous.store
        else:
            store = TCPStore(
                address, int(port), is_master=False, wait_for_workers=False, timeout=timeout
            )
        group = open_group(place, store, timeout)
    except (DistError, RuntimeError) as error:
        message = late(
            f"the other learner ranks at {place.rendezvous}",
            Timeout(timeout_s, "timeouts.learn_s"),
            "the rank that failed first, and whether nodes reach each other",
        )
        raise CollectiveError(
            f"rank {place.rank} of {place.world_size}: {message} ({error})", phase="start"
        ) from error
    return Ranks(
        place.rank,
        place.world_size,
        group,
        device,
        timeout_s=timeout_s,
        sums_in_backward=sums_in_backward,
    )


def open_group(place: RankTopology, store: TCPStore, timeout: timedelta) -> ProcessGroup:
    """Open gloo for what lies in host memory and, on GPUs, NCCL for what lies there.

    The group is an object of its own and not torch's default one, which an engine in the same
    process may open for itself. NCCL was not run on a GPU.
    """
    group = ProcessGroup(PrefixStore(GROUP_NAME, store), place.rank, place.world_size)
    gloo = ProcessGroup.BackendType.GLOO
    on_cpu = ProcessGroupGloo(
        PrefixStore(f"{GROUP_NAME}.gloo", store),
        place.rank,
        place.world_size,
        gloo_options(place.address, timeout),
    )
    group._register_backend(torch.device("cpu"), gloo, on_cpu)
    if place.device is Device.CUDA:
        from torch.distributed import ProcessGroupNCCL

        nccl_options = ProcessGroupNCCL.Options()
        nccl_options._timeout = timeout
        on_gpu = ProcessGroupNCCL(
            PrefixStore(f"{GROUP_NAME}.nccl", store), place.rank, place.world_size, nccl_options
        )
        group._set_default_backend(ProcessGroup.BackendType.NCCL)
        # The first GPU that this process sees is where its tensors are.
        group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, on_gpu)
    else:
        group._set_default_backend(gloo)
    # torch keeps a register of groups by name; another run's in this process has another
    # rendezvous.
    group._set_group_name(f"{GROUP_NAME}@{place.rendezvous}")  # type: ignore[arg-type]
    return group
