"""How the learner ranks hold the model: each all of it (`learner.parallel: ddp`), or each a part (`fsdp`: FSDP2).

ddp   a rank's rows are its own affair; gradients are summed once, at the step's end. The ranks must not drift apart: `check` compares them.
fsdp  every forward gathers block after block and every backward sums their gradients, so each row is a row of all ranks: `rows_of_all_ranks` makes their
      numbers equal.

Weights leave, for a sync or a checkpoint, between two calls: gather -> weights, state_dict -> release
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from learner.loading import DTYPES, LoadedModel, load_model
from learner.ranks import DistributedRanks, Ranks
from learner.sharded import ShardedModel
from learner.weight_source import CheckpointWeights, WeightSource
from shared.checksum import BucketChecksum
from shared.config import RunConfig
from shared.config.derive import EnginePlace, engines_in, is_sharded
from shared.errors import LearnerError

T = TypeVar("T")

CHECKED_ELEMENTS = 4096
"""Of each parameter, at the most, when ranks are compared."""
INTEGER_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Parallel(Protocol):
    """`forward`, `rows_of_all_ranks`, `any_of_row`, `check` and `gather` are collectives under fsdp: all ranks come to them, in the same order."""

    @property
    def weights(self) -> WeightSource:
        """What a sync sends and a checkpoint holds; to be read where there is something to send, between `gather` and `release`."""
        ...

    @property
    def holds_parts(self) -> bool:
        """Whether a parameter of the model is no ordinary tensor, but this rank's shard of one."""
        ...

    def state_dict(self) -> dict[str, torch.Tensor] | None:
        """Between `gather` and `release`, on rank 0: the whole weights for a checkpoint, in host memory; None where the model itself holds them."""
        ...

    def forward(self, function: Callable[..., T], *arguments: Any) -> T:
        """`function(*arguments)`, which is one forward of the model, or of parts of it."""
        ...

    def rows_of_all_ranks(self, rows: Iterable[T]) -> Iterator[T | None]:
        """The rows in order and, where other ranks have more of them, None for each that is missing here."""
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
        """By a sample of every parameter's bits: an update that went another way shows in all of them."""
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
            f"the learner ranks do not hold the same weights; the first parameter that differs is {names[where]}. Check that model.path is the same "
            "checkpoint on every node and that the nodes have the same devices and versions, and go on from the last checkpoint",
            phase="check",
        )


def _sampled_sum(parameter: torch.Tensor) -> int:
    values = parameter.reshape(-1)[:CHECKED_ELEMENTS]
    return int(values.view(INTEGER_OF_SIZE[values.element_size()]).sum(dtype=torch.int64))


def _whole_checksum(parameter: torch.Tensor) -> int:
    checksum = BucketChecksum(torch)
    checksum.add(parameter)
    return checksum.value()


def load_parallel(config: RunConfig, device: torch.device, ranks: Ranks) -> tuple[LoadedModel, Parallel]:
    """The checkpoint, held as the configuration says.

    Raises ConfigError as `load_model` does, and LearnerError where the ranks loaded different weights: all of them are compared, this once.
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
    parallel = ShardedModel(loaded.model, source, ranks, device=device, dtype=dtype, every_rank_sends=engines_in(config) is EnginePlace.RANKS)
    return replace(loaded, device=device, coord_ids_C=loaded.coord_ids_C.to(device)), parallel
