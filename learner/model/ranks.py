"""The learner ranks of a run, as one of them sees the others."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

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

# What a learner rank is told of its place in the run. Not configuration: it follows from the
# cluster.


@dataclass(frozen=True, slots=True)
class ReceiverGroup:
    """Engine workers that take weights over one process group, of which learner rank 0 is rank
    0."""

    num_workers: int
    port: int = 0
    """Where the group is opened on rank 0's node; 0: any free one."""


@dataclass(frozen=True, slots=True)
class RankTopology:
    """Where one learner rank is, and who is around it."""

    transport: TransportKind
    """Of the weight sync (`WeightOffer.transport`)."""
    receivers: tuple[ReceiverGroup, ...]
    """One for all rollout actors, or one for each server; none where the engine lives in the
    learner's process.
    """
    address: str = "127.0.0.1"
    """Of this node, which the engines, and the other ranks, reach."""
    device: Device = Device.CPU
    rank: int = 0
    world_size: int = 1
    rendezvous: str = ""
    """`address:port` at which rank 0 gathers the ranks; empty where there is one."""


# The learner's device: a GPU does its work later than it is told to, a CPU at once.
#
# What has to be done for that reason is here, so that a test can watch it without a GPU.


class LearnerDevice:
    """The device of one learner rank. Not run on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def use_full_float32(self) -> None:
        """Have this process multiply float32 in float32 on a GPU.

        By default cuDNN's convolutions use TF32, whose 10 bits are too few for the tolerances at
        which learner and engine are compared; another library may ask for it in products.
        """
        if self.device.type == "cuda":
            # Not `fp32_precision` of each operation: `cudnn.allow_tf32`, which others read, then
            # raises.
            torch.set_float32_matmul_precision("highest")
            torch.backends.cudnn.allow_tf32 = False

    def wait(self) -> None:
        """Return when all that the calling thread has queued on the device is done.

        An optimizer update is only queued when `Optimizer.update` returns. Another stream or
        another process that reads the weights then may find those of the step before.
        """
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


BUCKET_ELEMENTS = 2**24
"""Gradients that are summed at once: 64 MiB in float32."""


class Ranks(Protocol):
    """Every method but `of_phase`, `pop_spans` and the properties is a collective: all ranks call
    it, in the same order.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def sum(self, value: int) -> int:
        """Over all ranks."""
        ...

    def max(self, value: int) -> int:
        """Over all ranks."""
        ...

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, of which all ranks have equally many, whether it is set on any rank."""
        ...

    def first_difference(self, values: Sequence[int]) -> int | None:
        """Where the ranks' values, equally many, differ first; None where they are the same. Every
        rank gets the same answer.
        """
        ...

    def sum_gradients(self, gradients: Sequence[torch.Tensor]) -> None:
        """In place, over all ranks, each of which has as many of the same shapes: afterwards every
        rank holds the same bits.
        """
        ...

    def barrier(self) -> None: ...

    def meet(self, flag: bool) -> bool:
        """A barrier whose wait is timed; whether the flag is set on any rank."""
        ...

    def of_phase(self, phase: str) -> Any:
        """A context: a LearnerError that leaves it says which rank it is of, other errors stay as
        they are, and a lost or late peer is a CollectiveError.
        """
        ...

    def pop_spans(self) -> list[Span]:
        """What `meet` and `sum_gradients` took since the last call."""
        ...


class OneRank:
    """A learner of one rank: there is nobody to ask."""

    rank = 0
    world_size = 1

    def sum(self, value: int) -> int:
        return value

    def max(self, value: int) -> int:
        return value

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        return list(flags)

    def first_difference(self, values: Sequence[int]) -> int | None:
        return None

    def sum_gradients(self, gradients: Sequence[torch.Tensor]) -> None:
        pass

    def barrier(self) -> None:
        pass

    def meet(self, flag: bool) -> bool:
        return flag

    @contextmanager
    def of_phase(self, phase: str) -> Iterator[None]:
        yield

    def pop_spans(self) -> list[Span]:
        return []


class DistributedRanks:
    """Several ranks over one process group. A collective that a peer does not join ends after
    `timeout_s` with a CollectiveError.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        group: ProcessGroup,
        device: LearnerDevice,
        *,
        timeout_s: float,
        sums_in_backward: bool,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.group = group
        self._device = device
        self._timeout_s = timeout_s
        self._sums_in_backward = sums_in_backward
        self._times: list[Span] = []
        self._track = rank_name(rank, world_size)

    def sum(self, value: int) -> int:
        return self._reduced([value], ReduceOp.SUM)[0]

    def max(self, value: int) -> int:
        return self._reduced([value], ReduceOp.MAX)[0]

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        return [bool(flag) for flag in self._reduced(list(map(int, flags)), ReduceOp.MAX)]

    def first_difference(self, values: Sequence[int]) -> int | None:
        highest, lowest = self._reduced(values, ReduceOp.MAX), self._reduced(values, ReduceOp.MIN)
        return next(
            (
                index
                for index, (high, low) in enumerate(zip(highest, lowest, strict=True))
                if high != low
            ),
            None,
        )

    def barrier(self) -> None:
        self._reduced([0], ReduceOp.SUM)

    def meet(self, flag: bool) -> bool:
        started_s = time.time()
        any_flag = bool(self.max(int(flag)))
        self._times.append(Span(self._track, "wait for ranks", started_s, time.time()))
        return any_flag

    def sum_gradients(self, gradients: Sequence[torch.Tensor]) -> None:
        if self._sums_in_backward:
            return
        started_s = time.time()
        for bucket in cut_past(gradients, BUCKET_ELEMENTS, torch.Tensor.numel):
            # In float32, whatever the gradients are: a sum over ranks must not lose more than the
            # sum over rows.
            flat = torch.cat([gradient.reshape(-1).float() for gradient in bucket])
            self._all_reduce(flat, ReduceOp.SUM)
            for gradient, summed in zip(
                bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True
            ):
                gradient.copy_(summed.view_as(gradient))
        # On a GPU the sums are only queued so far: a lost peer and the time belong to them, and not
        # to whatever waits for the device next.
        self._device.wait()
        self._times.append(Span(self._track, "reduce gradients", started_s, time.time()))

    @contextmanager
    def of_phase(self, phase: str) -> Iterator[None]:
        try:
            yield
        except CollectiveError:
            raise
        except LearnerError as error:
            raise LearnerError(
                f"rank {self.rank} of {self.world_size}: {error.message}", phase=error.phase
            ) from error
        except RuntimeError as error:
            if not _is_lost_peer(error):
                raise
            # It may have been told at once, because the other's process is not there.
            told = (
                f"another one did not answer within timeouts.learn_s = {self._timeout_s:g} s, or"
                " its connection broke; check the rank that failed first"
            )
            raise CollectiveError(
                f"rank {self.rank} of {self.world_size}: {told} ({error})", phase=phase
            ) from error

    def pop_spans(self) -> list[Span]:
        times, self._times = self._times, []
        return times

    def _reduced(self, values: Sequence[int], how: Any) -> list[int]:
        tensor = torch.tensor(values, dtype=torch.int64)
        self._all_reduce(tensor, how)
        return tensor.tolist()

    def _all_reduce(self, tensor: torch.Tensor, how: Any) -> None:
        options = AllreduceOptions()
        options.reduceOp = how
        options.timeout = timedelta(seconds=self._timeout_s)
        self.group.allreduce([tensor], options).wait()


def _is_lost_peer(error: RuntimeError) -> bool:
    """NCCL's errors have a class of their own, gloo's are known by the source file that they
    name."""
    return isinstance(error, DistError) or "third_party/gloo" in str(error)


# How the learner ranks of a run come together.
#
# Their group is an object of its own and not torch's default group, which an engine in the same
# process may open for itself.


GROUP_NAME = "rollmatch.learner"


class Rendezvous:
    """Where the other ranks find rank 0: a store on a port that is bound, on `address` alone,
    before anybody is told of it.
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
    """Return the group of the place's ranks, when all have come.

    Args:
        rendezvous: rank 0's, opened before `place` was made.
        device: where the gradients are.
        timeout_s: of every collective, the configuration's timeouts.learn_s.
        sums_in_backward: the backward of every row sums gradients over the ranks already.
    """
    if place.world_size == 1:
        return OneRank()
    assert (rendezvous is not None) == (place.rank == 0), (
        "rank 0 hosts the rendezvous, and only rank 0"
    )
    address, port = place.rendezvous.rsplit(":", 1)
    timeout = timedelta(seconds=timeout_s)
    try:
        store = (
            rendezvous.store
            if rendezvous is not None
            else TCPStore(
                address, int(port), is_master=False, wait_for_workers=False, timeout=timeout
            )
        )
        group = open_group(place, store, timeout)
    except (DistError, RuntimeError) as error:
        others = f"the other learner ranks at {place.rendezvous}"
        told = late(
            others,
            Timeout(timeout_s, "timeouts.learn_s"),
            "the rank that failed first, and whether nodes reach each other",
        )
        raise CollectiveError(
            f"rank {place.rank} of {place.world_size}: {told} ({error})", phase="start"
        ) from error
    return DistributedRanks(
        place.rank,
        place.world_size,
        group,
        device,
        timeout_s=timeout_s,
        sums_in_backward=sums_in_backward,
    )


def open_group(place: RankTopology, store: Any, timeout: timedelta) -> ProcessGroup:
    """Gloo for what lies in host memory, NCCL for what lies on a GPU. The latter was not run on a
    GPU.
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
    # the first that this process sees, which is where its tensors are
    if place.device is Device.CUDA:
        from torch.distributed import ProcessGroupNCCL

        nccl_options = ProcessGroupNCCL.Options()
        nccl_options._timeout = timeout
        on_gpu = ProcessGroupNCCL(
            PrefixStore(f"{GROUP_NAME}.nccl", store), place.rank, place.world_size, nccl_options
        )
        group._set_default_backend(ProcessGroup.BackendType.NCCL)
        group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, on_gpu)
    else:
        group._set_default_backend(gloo)
    # torch keeps a register of groups by name; another run's in this process has another
    # rendezvous.
    group._set_group_name(f"{GROUP_NAME}@{place.rendezvous}")  # type: ignore[arg-type]
    return group
