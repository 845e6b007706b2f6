"""A model of which every learner rank holds a part (`learner.parallel: fsdp`: FSDP2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _register_process_group
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from learner.model.checkpoint import CheckpointWeights, WeightSource
from learner.model.loading import DTYPES, LoadedModel, load_model
from learner.model.ranks import DistributedRanks, Ranks
from shared.config import RunConfig
from shared.config.derive import EngineLocation, engines_in, is_sharded
from shared.errors import CollectiveError, LearnerError
from shared.weight_sync.checksum import BucketChecksum

T = TypeVar("T")

FAILED = 2**62
"""In the place of a rank's number of rows: it has an error to raise, and the others must not wait
for it.
"""


class ShardedModel:
    """A rank that holds a part of every parameter.

    One module around the model is the root, so that a forward may read parts of the model one by
    one: rows apply its head to some positions only. What is in no block (embeddings, norms,
    mergers, the head) is gathered with the root, once in a forward and once in its backward. Not
    run on a GPU.
    """

    holds_parts = True

    def __init__(
        self,
        model: Any,
        weights: WeightSource,
        ranks: DistributedRanks,
        *,
        device: torch.device,
        dtype: torch.dtype,
        every_rank_sends: bool,
    ) -> None:
        """Shards `model` in place and moves the shards to `device`.

        The model comes in float32, in host memory, the same on every rank. Its forwards compute in
        `dtype`, gradients are summed in float32, and the shards stay float32: under bfloat16 they
        are the master weights. `weights` is what the whole model would send, on rank 0 or, to an
        engine beside each rank, on every one.
        """
        self.weights = GatheredWeights(
            weights, is_kept=every_rank_sends or ranks.rank == 0, device=device, dtype=dtype
        )
        self._ranks = ranks
        self._root = _Root(model)
        mesh = _mesh(ranks, device)
        # cast_forward_inputs would round the rotary embeddings, which the model computes in
        # float32.
        policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        blocks = [
            module for module in model.modules() if type(module).__name__ in model._no_split_modules
        ]
        for module in (*blocks, self._root):
            # The root too gives its weights back after a forward: one without a backward, the
            # canary's, would leave them behind for the next update to outdate.
            sharded = fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
            # Sums, not means: what a step is divided by is known at its end (DESIGN 5, decisions 6
            # and 7). As plain sums, because gloo knows no others.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)

    def state_dict(self) -> dict[str, torch.Tensor] | None:
        return self.weights.state_dict()

    def forward(self, function: Callable[..., T], *arguments: Any) -> T:
        result: T = self._root(function, *arguments)
        return result

    def rows_of_all_ranks(self, rows: Iterable[T]) -> Iterator[T | None]:
        # Counted before the first is computed: a rank that asked afterwards would wait for one that
        # is in a row, which waits for it.
        try:
            having = list(rows)
        except Exception:
            self._ranks.max(FAILED)
            raise
        num_rows = self._ranks.max(len(having))
        if num_rows == FAILED:
            raise CollectiveError(
                "another learner rank came to no rows; check the rank that failed first",
                phase="rows",
            )
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
    """`DeviceMesh.from_group` for a group that is not made from torch's default one, which there
    may not be, or may be another's.
    """
    name = ranks.group.group_name
    _register_process_group(name, ranks.group)
    mesh = DeviceMesh(
        device.type, list(range(ranks.world_size)), _init_backend=False, _rank=ranks.rank
    )
    mesh._dim_group_names = [name]
    mesh._pg_registry[name] = ranks.group
    return mesh


class GatheredWeights:
    """The whole tensors of a sharded model, in host memory of the ranks that send, for as long as a
    sync or a checkpoint needs them.
    """

    def __init__(
        self, source: WeightSource, *, is_kept: bool, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._source = source
        self._is_kept = is_kept
        self._device = device
        self._dtype = dtype
        self._kept: list[tuple[str, torch.Tensor]] = []

    def gather(self) -> None:
        """A collective: a tensor at a time is whole on every device, and kept by those that
        send."""
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


# How the learner ranks hold the model: each all of it (`learner.parallel: ddp`), or each a
# part (`fsdp`: FSDP2).
#
# ddp   a rank's rows are its own affair; gradients are summed once, at the step's end. The ranks
# must not drift apart: `check` compares them. fsdp  every forward gathers block after block and
# every backward sums their gradients, so each row is a row of all ranks: `rows_of_all_ranks` makes
# their numbers equal.
#
# Weights leave, for a sync or a checkpoint, between two calls: gather -> weights, state_dict ->
# release


CHECKED_ELEMENTS = 4096
"""Of each parameter, at the most, when ranks are compared."""
INTEGER_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Parallel(Protocol):
    """`forward`, `rows_of_all_ranks`, `any_of_row`, `check` and `gather` are collectives under
    fsdp: all ranks come to them, in the same order.
    """

    @property
    def weights(self) -> WeightSource:
        """What a sync sends and a checkpoint holds; to be read where there is something to send,
        between `gather` and `release`.
        """
        ...

    @property
    def holds_parts(self) -> bool:
        """Whether a parameter of the model is no ordinary tensor, but this rank's shard of one."""
        ...

    def state_dict(self) -> dict[str, torch.Tensor] | None:
        """Between `gather` and `release`, on rank 0: the whole weights for a checkpoint, in host
        memory; None where the model itself holds them.
        """
        ...

    def forward(self, function: Callable[..., T], *arguments: Any) -> T:
        """`function(*arguments)`, which is one forward of the model, or of parts of it."""
        ...

    def rows_of_all_ranks(self, rows: Iterable[T]) -> Iterator[T | None]:
        """The rows in order and, where other ranks have more of them, None for each that is missing
        here.
        """
        ...

    def any_of_row(self, flag: bool) -> bool:
        """Whether the flag is set on a rank that this row is a row of: here, or anywhere."""
        ...

    def check(self) -> None:
        """LearnerError where the ranks do not hold the same weights."""
        ...

    def gather(self) -> None:
        """Make `weights` readable: they do not change until `release`."""
        ...

    def release(self) -> None:
        """What was gathered is not needed any more."""
        ...


class WholeModel:
    """A rank that holds all of the model, alone or among others that do."""

    holds_parts = False

    def __init__(self, model: nn.Module, weights: WeightSource, ranks: Ranks) -> None:
        self.weights = weights
        self._model = model
        self._ranks = ranks

    def state_dict(self) -> dict[str, torch.Tensor] | None:
        return None

    def forward(self, function: Callable[..., T], *arguments: Any) -> T:
        return function(*arguments)

    def rows_of_all_ranks(self, rows: Iterable[T]) -> Iterator[T | None]:
        return iter(rows)

    def any_of_row(self, flag: bool) -> bool:
        return flag

    def check(self) -> None:
        """By a sample of every parameter's bits: an update that went another way shows in all of
        them.
        """
        if self._ranks.world_size > 1:
            _require_same(self._ranks, self._model, _sampled_sum)

    def gather(self) -> None:
        pass

    def release(self) -> None:
        pass


def _require_same(ranks: Ranks, model: nn.Module, number_of: Callable[[torch.Tensor], int]) -> None:
    """LearnerError where `number_of` a parameter is not the same on all ranks."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    where = ranks.first_difference([number_of(parameter.detach()) for parameter in parameters])
    if where is not None:
        raise LearnerError(
            "the learner ranks do not hold the same weights; the first parameter that differs is"
            f" {names[where]}. Check that model.path is the same checkpoint on every node and that"
            " the nodes have the same devices and versions, and go on from the last checkpoint",
            phase="check",
        )


def _sampled_sum(parameter: torch.Tensor) -> int:
    values = parameter.reshape(-1)[:CHECKED_ELEMENTS]
    return int(values.view(INTEGER_OF_SIZE[values.element_size()]).sum(dtype=torch.int64))


def _whole_checksum(parameter: torch.Tensor) -> int:
    checksum = BucketChecksum(torch)
    checksum.add(parameter)
    return checksum.value()


def load_parallel(
    config: RunConfig, device: torch.device, ranks: Ranks
) -> tuple[LoadedModel, Parallel]:
    """The checkpoint, held as the configuration says.

    Raises ConfigError as `load_model` does, and LearnerError where the ranks loaded different
    weights: all of them are compared, this once.
    """
    # What is sharded goes by way of host memory: the whole may not fit the device.
    loaded = load_model(config, torch.device("cpu") if is_sharded(config) else device)
    if ranks.world_size > 1:
        _require_same(ranks, loaded.model, _whole_checksum)
    if not is_sharded(config):
        return loaded, WholeModel(loaded.model, CheckpointWeights(loaded.model), ranks)
    assert isinstance(ranks, DistributedRanks)
    dtype = DTYPES[config.model.dtype]
    source = CheckpointWeights(loaded.model)
    parallel = ShardedModel(
        loaded.model,
        source,
        ranks,
        device=device,
        dtype=dtype,
        every_rank_sends=engines_in(config) is EngineLocation.RANKS,
    )
    return replace(loaded, device=device, coord_ids_C=loaded.coord_ids_C.to(device)), parallel
