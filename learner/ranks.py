"""The learner ranks of a run, as one of them sees the others."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import AllreduceOptions, DistError, ProcessGroup, ReduceOp

from learner.device import LearnerDevice
from shared.chunking import cut_past
from shared.config.derive import rank_name
from shared.errors import CollectiveError, LearnerError
from shared.timeline import Span

BUCKET_ELEMENTS = 2**24
"""Gradients that are summed at once: 64 MiB in float32."""


class Ranks(Protocol):
    """Every method but `of_phase`, `take_times` and the properties is a collective: all ranks call it, in the same order."""

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
        """Where the ranks' values, equally many, differ first; None where they are the same. Every rank gets the same answer."""
        ...

    def sum_gradients(self, gradients: Sequence[torch.Tensor]) -> None:
        """In place, over all ranks, each of which has as many of the same shapes: afterwards every rank holds the same bits."""
        ...

    def barrier(self) -> None: ...

    def meet(self, flag: bool) -> bool:
        """A barrier whose wait is timed; whether the flag is set on any rank."""
        ...

    def of_phase(self, phase: str) -> Any:
        """A context: a LearnerError that leaves it says which rank it is of, other errors stay as they are, and a lost or late peer is a CollectiveError."""
        ...

    def take_times(self) -> list[Span]:
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

    def take_times(self) -> list[Span]:
        return []


class DistributedRanks:
    """Several ranks over one process group. A collective that a peer does not join ends after `timeout_s` with a CollectiveError."""

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
        return next((index for index, (high, low) in enumerate(zip(highest, lowest, strict=True)) if high != low), None)

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
            # In float32, whatever the gradients are: a sum over ranks must not lose more than the sum over rows.
            flat = torch.cat([gradient.reshape(-1).float() for gradient in bucket])
            self._all_reduce(flat, ReduceOp.SUM)
            for gradient, summed in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
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
            raise LearnerError(f"rank {self.rank} of {self.world_size}: {error.message}", phase=error.phase) from error
        except RuntimeError as error:
            if not _is_lost_peer(error):
                raise
            # It may have been told at once, because the other's process is not there.
            told = f"another one did not answer within timeouts.learn_s = {self._timeout_s:g} s, or its connection broke; check the rank that failed first"
            raise CollectiveError(f"rank {self.rank} of {self.world_size}: {told} ({error})", phase=phase) from error

    def take_times(self) -> list[Span]:
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
    """NCCL's errors have a class of their own, gloo's are known by the source file that they name."""
    return isinstance(error, DistError) or "third_party/gloo" in str(error)
