"""A model of which every learner rank holds a part (`learner.parallel: fsdp`: FSDP2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _register_process_group
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from learner.ranks import DistributedRanks
from learner.weight_source import WeightSource
from shared.errors import CollectiveError

T = TypeVar("T")

FAILED = 2**62
"""In the place of a rank's number of rows: it has an error to raise, and the others must not wait for it."""


class ShardedModel:
    """A rank that holds a part of every parameter.

    One module around the model is the root, so that a forward may read parts of the model one by one: rows apply its head to some positions only. What is in
    no block (embeddings, norms, mergers, the head) is gathered with the root, once in a forward and once in its backward. Not run on a GPU.
    """

    holds_parts = True

    def __init__(self, model: Any, weights: WeightSource, ranks: DistributedRanks, *, device: torch.device, dtype: torch.dtype, every_rank_sends: bool) -> None:
        """Shards `model` in place and moves the shards to `device`.

        The model comes in float32, in host memory, the same on every rank. Its forwards compute in `dtype`, gradients are summed in float32,
        and the shards stay float32: under bfloat16 they are the master weights. `weights` is what the whole model would send,
        on rank 0 or, to an engine beside each rank, on every one.
        """
        self.weights = GatheredWeights(weights, is_kept=every_rank_sends or ranks.rank == 0, device=device, dtype=dtype)
        self._ranks = ranks
        self._root = _Root(model)
        mesh = _mesh(ranks, device)
        # cast_forward_inputs would round the rotary embeddings, which the model computes in float32.
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        blocks = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
        for module in (*blocks, self._root):
            # The root too gives its weights back after a forward: one without a backward, the canary's, would leave them behind for the next update to outdate.
            sharded = fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
            # Sums, not means: what a step is divided by is known at its end (DESIGN 5, decisions 6 and 7). As plain sums, because gloo knows no others.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)

    def state_dict(self) -> dict[str, torch.Tensor] | None:
        return self.weights.state_dict()

    def forward(self, function: Callable[..., T], *arguments: Any) -> T:
        result: T = self._root(function, *arguments)
        return result

    def rows_of_all_ranks(self, rows: Iterable[T]) -> Iterator[T | None]:
        # Counted before the first is computed: a rank that asked afterwards would wait for one that is in a row, which waits for it.
        try:
            having = list(rows)
        except Exception:
            self._ranks.max(FAILED)
            raise
        num_rows = self._ranks.max(len(having))
        if num_rows == FAILED:
            raise CollectiveError("another learner rank came to no rows; check the rank that failed first", phase="rows")
        yield from having
        yield from [None] * (num_rows - len(having))

    def any_of_row(self, flag: bool) -> bool:
        return bool(self._ranks.max(int(flag)))

    def check(self) -> None:
        """Nothing to do: each value is held once."""

    def gather(self) -> None:
        self.weights.gather()

    def release(self) -> None:
        self.weights.release()


class _Root(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., T], *arguments: Any) -> T:
        return function(*arguments)


def _mesh(ranks: DistributedRanks, device: torch.device) -> DeviceMesh:
    """`DeviceMesh.from_group` for a group that is not made from torch's default one, which there may not be, or may be another's."""
    name = ranks.group.group_name
    _register_process_group(name, ranks.group)
    mesh = DeviceMesh(device.type, list(range(ranks.world_size)), _init_backend=False, _rank=ranks.rank)
    mesh._dim_group_names = [name]
    mesh._pg_registry[name] = ranks.group
    return mesh


class GatheredWeights:
    """The whole tensors of a sharded model, in host memory of the ranks that send, for as long as a sync or a checkpoint needs them."""

    def __init__(self, source: WeightSource, *, is_kept: bool, device: torch.device, dtype: torch.dtype) -> None:
        self._source = source
        self._is_kept = is_kept
        self._device = device
        self._dtype = dtype
        self._kept: list[tuple[str, torch.Tensor]] = []

    def gather(self) -> None:
        """A collective: a tensor at a time is whole on every device, and kept by those that send."""
        self.release()
        for name, tensor in self._source.tensors():
            cast = tensor.to(self._dtype)
            whole = cast.full_tensor() if isinstance(cast, DTensor) else cast
            if self._is_kept:
                self._kept.append((name, whole.cpu().contiguous()))

    def release(self) -> None:
        self._kept = []

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self._kept)

    def specs(self) -> Iterator[tuple[str, torch.dtype, torch.Size]]:
        for name, _, shape in self._source.specs():
            yield name, self._dtype, shape

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._kept:
            yield name, tensor.to(self._device)
