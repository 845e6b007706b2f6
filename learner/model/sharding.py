"""The models in a learner rank, whole or in parts (`learner.parallel: ddp | fsdp`).

ddp     A rank's rows are its own affair; gradients are summed once, at the step's end. The ranks
        must not drift apart: `check` compares them.
fsdp    FSDP2: every forward gathers block after block and every backward sums their gradients, so
        each row is a row of all ranks: `rows_of_all_ranks` makes their numbers equal, and tells
        where all of them run the vision tower.

Weights leave, for a sync or a checkpoint, between two calls:

    gather -> weights, state_dict -> release
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar, TypeVarTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _register_process_group
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from learner.model.adapters import without_adapter
from learner.model.checkpoint import CheckpointWeights, WeightSource
from learner.model.loading import DTYPES, LoadedModel, load_model
from learner.model.ranks import Ranks
from shared.config import RunConfig
from shared.errors import CollectiveError, LearnerError
from shared.weight_sync.checksum import BucketChecksum

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

FAILED = 2**62
"""In the place of a rank's number of rows: it has an error to raise, and the others must not wait
for it."""
CHECKED_ELEMENTS = 4096
"""At the most, of each parameter, when ranks are compared."""
INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Parallel:
    """A model as one rank holds it: whole, alone or among others that hold it too.

    In `ShardedModel`, a part of it. `forward`, `rows_of_all_ranks`, `any_of_row`, `check` and
    `gather` are collectives there: all ranks come to them, in the same order.
    """

    holds_parts = False
    """Whether the model's parameters are this rank's shards (DTensor) and not ordinary tensors."""
    mesh: DeviceMesh | None = None
    """The ranks that hold the parts."""

    def __init__(self, model: nn.Module, weights: WeightSource, ranks: Ranks) -> None:
        self.weights = weights
        """Weights for a sync or a checkpoint; read them only between `gather` and `release`."""
        self._model = model
        self._ranks = ranks

    def forward(self, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """Return `function(*arguments)`, which is one forward of the model, or of parts of it."""
        return function(*arguments)

    def rows_of_all_ranks(
        self,
        rows: Iterable[T],
        shows_images: Callable[[T], bool],  # noqa: ARG002 (asked where ranks compute together)
    ) -> Iterator[tuple[T | None, bool]]:
        """Yield the rows in order, then None for each that another rank has more.

        With each comes whether it has to run the vision tower because another rank's does.
        """
        return ((row, False) for row in rows)

    def any_of_row(self, flag: bool) -> bool:
        """Return whether the flag is set on a rank that this row is a row of: here, or anywhere."""
        return flag

    def check(self) -> None:
        """Raise LearnerError where the ranks do not hold the same weights."""
        # A sample of every parameter's bits is enough: an update that went another way shows in all
        # of them.
        if self._ranks.world_size > 1:
            _require_same(self._ranks, self._model, _sampled_sum)

    def gather(self) -> None:
        """Make `weights` readable: they do not change until `release`."""

    def state_dict(self) -> dict[str, torch.Tensor] | None:
        """Return the whole weights in host memory, on rank 0, between `gather` and `release`.

        None where the model itself holds them.
        """
        return None

    def release(self) -> None:
        """Drop what was gathered."""


class ShardedModel(Parallel):
    """A part of every parameter in each rank, and its own source of weights. Not run on a GPU."""

    holds_parts = True

    def __init__(
        self,
        model: PreTrainedModel,
        weights: WeightSource,
        ranks: Ranks,
        *,
        device: torch.device,
        dtype: torch.dtype,
        every_rank_sends: bool,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """Shard `model` in place and move the shards to `device`.

        The model comes in float32, in host memory, the same on every rank. Its forwards compute in
        `dtype`, gradients are summed in float32, and the shards stay float32: under bfloat16 they
        are the master weights.

        Args:
            weights: what the whole model would send.
            every_rank_sends: each to an engine beside it; else rank 0 alone sends.
            mesh: that of another model of these ranks; None: this is the first.
        """
        super().__init__(model, self, ranks)
        self._source = weights
        self._sends = every_rank_sends or ranks.rank == 0
        self._device = device
        self._dtype = dtype
        self._gathered: list[tuple[str, torch.Tensor]] = []
        """Whole tensors in host memory, of a rank that sends."""
        self._root = _Root(model)
        self.mesh = _mesh(ranks, device) if mesh is None else mesh
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
            sharded = fully_shard(
                module, mesh=self.mesh, reshard_after_forward=True, mp_policy=policy
            )
            # Sums, not means: what a step is divided by is known at its end (decisions 6
            # and 7). As plain sums, because gloo knows no others.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)

    def forward(self, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
        result: T = self._root(function, *arguments)
        return result

    def rows_of_all_ranks(
        self, rows: Iterable[T], shows_images: Callable[[T], bool]
    ) -> Iterator[tuple[T | None, bool]]:
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
        if not num_rows:
            return
        shown = [shows_images(row) for row in having] + [False] * (num_rows - len(having))
        anywhere = self._ranks.any_of(shown)
        of_all = [*having, *[None] * (num_rows - len(having))]
        for row, here, there in zip(of_all, shown, anywhere, strict=True):
            yield row, there and not here

    def any_of_row(self, flag: bool) -> bool:
        return bool(self._ranks.max(int(flag)))

    def check(self) -> None:
        pass  # each value is held once

    def gather(self) -> None:
        """Make one tensor at a time whole on every device, and keep it where it is sent."""
        self.release()
        for name, tensor in self._source.tensors():
            cast = tensor.to(self._dtype)
            whole = cast.full_tensor() if isinstance(cast, DTensor) else cast
            if self._sends:
                self._gathered.append((name, whole.cpu().contiguous()))

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self._gathered)

    def release(self) -> None:
        self._gathered = []

    def specs(self) -> Iterator[tuple[str, torch.dtype, torch.Size]]:
        for name, _, shape in self._source.specs():
            yield name, self._dtype, shape

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._gathered:
            yield name, tensor.to(self._device)


class _Root(nn.Module):
    """The module around the model whose forward is any function that reads it."""

    # Rows apply the model's head to some positions only. What is in no block (embeddings, norms,
    # mergers, the head) is gathered with it, once in a forward and once in its backward.

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
        return function(*arguments)


def _mesh(ranks: Ranks, device: torch.device) -> DeviceMesh:
    """Do what `DeviceMesh.from_group` does, without torch's default group."""
    # The default group may be missing, or be an engine's.
    assert ranks.group is not None, "a model is sharded over several ranks"
    name = ranks.group.group_name
    _register_process_group(name, ranks.group)
    mesh = DeviceMesh(
        device.type, list(range(ranks.world_size)), _init_backend=False, _rank=ranks.rank
    )
    mesh._dim_group_names = [name]
    mesh._pg_registry[name] = ranks.group
    return mesh


def load_parallel(
    config: RunConfig, device: torch.device, ranks: Ranks, mesh: DeviceMesh | None = None
) -> tuple[LoadedModel, Parallel]:
    """Load the checkpoint, held as the configuration says. `mesh`: of one that was loaded before.

    Raises ConfigError as `load_model` does, and LearnerError where the ranks loaded different
    weights: all of them are compared, this once.
    """
    # What is sharded goes by way of host memory: the whole may not fit the device.
    loaded = load_model(config, torch.device("cpu") if config.learner.is_sharded else device)
    if ranks.world_size > 1:
        _require_same(ranks, loaded.model, _whole_checksum)
    source = CheckpointWeights(loaded.model)
    if not config.learner.is_sharded:
        return loaded, Parallel(loaded.model, source, ranks)
    parallel = ShardedModel(
        loaded.model,
        source,
        ranks,
        device=device,
        dtype=DTYPES[config.model.dtype],
        every_rank_sends=config.rollout_matching.in_learner,
        mesh=mesh,
    )
    return replace(loaded, device=device, coord_ids_C=loaded.coord_ids_C.to(device)), parallel


@dataclass(frozen=True, slots=True)
class Reference:
    """The policy that a run started with, which `reference_kl` compares the learner's with.

    With an adapter it is the learner's own model without it, which costs a forward and no memory.
    Else it is the checkpoint of `model.path` a second time, held like the first. Both are the same
    after a resume: a resumed run loads `model.path`, then the trained tensors of its checkpoint
    into the learner's model only.
    """

    learner: PreTrainedModel
    """The learner's model."""
    copy: PreTrainedModel | None
    """The second model, frozen; None with an adapter."""
    parallel: Parallel
    """The sharding of the model that computes: the copy, or the learner's."""

    def forward(self, function: Callable[[PreTrainedModel, *Ts], T], *arguments: *Ts) -> T:
        """Return `function(model, *arguments)`, which is one forward, without gradient.

        Where the model is sharded, all ranks call it at once.
        """
        with torch.no_grad():
            if self.copy is not None:
                return self.parallel.forward(function, self.copy, *arguments)
            with without_adapter(self.learner):
                return self.parallel.forward(function, self.learner, *arguments)


def load_reference(
    config: RunConfig, loaded: LoadedModel, parallel: Parallel, ranks: Ranks
) -> Reference | None:
    """Return the reference of a run that declares `reference_kl`; None for others.

    Args:
        loaded, parallel: the learner's, as `load_parallel` returned them.

    Raises:
        ConfigError, LearnerError: as `load_parallel`.
    """
    if not config.rollout_matching.pipeline.needs_reference:
        return None
    if config.model.adapter is not None:
        return Reference(loaded.model, None, parallel)
    copy, its_parallel = load_parallel(config, loaded.device, ranks, parallel.mesh)
    # `eval` computes the same, since there is no dropout, and recomputes no activations.
    copy.model.requires_grad_(False).eval()
    return Reference(loaded.model, copy.model, its_parallel)


def _require_same(ranks: Ranks, model: nn.Module, number_of: Callable[[torch.Tensor], int]) -> None:
    """Raise LearnerError where `number_of` a parameter is not the same on all ranks."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    index = ranks.first_difference([number_of(parameter.detach()) for parameter in parameters])
    if index is not None:
        raise LearnerError(
            "the learner ranks do not hold the same weights; the first parameter that differs is"
            f" {names[index]}. Check that model.path is the same checkpoint on every node and that"
            " they have the same devices and versions, and go on from the last checkpoint",
            phase="check",
        )


def _sampled_sum(parameter: torch.Tensor) -> int:
    values = parameter.reshape(-1)[:CHECKED_ELEMENTS]
    # The bits as integers, whose sum does not depend on the order.
    return int(values.view(INTEGER_OF_SIZE[values.element_size()]).sum(dtype=torch.int64))


def _whole_checksum(parameter: torch.Tensor) -> int:
    checksum = BucketChecksum()
    checksum.add(parameter)
    return checksum.value()
