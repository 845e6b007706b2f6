"""The model on several learner ranks, replicated or sharded (`learner.parallel: ddp | fsdp`).

ddp     Each rank trains its own rows. Gradients are summed once, before an update. `check`
        verifies that the ranks hold the same weights.
fsdp    FSDP2: each forward gathers the blocks one by one, and each backward sums their gradients.
        So the ranks of a copy of the model must run the same number of rows and run the vision
        tower together: `rows_of_all_ranks` arranges both, and shares the rows over all ranks.
        With `learner.shard_size` (HSDP) there are several copies, on a mesh of copies x shards.
        Each copy runs FSDP2 for itself. Gradients are summed over the copies once, as with ddp,
        and not after every row, as FSDP2 does it on a mesh of two dimensions.

For a weight sync, `weights` are read one by one; of a sharded model that is a collective. For a
checkpoint, `state_dict` gathers them in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _register_process_group
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from learner.model.adapters import compute_magnitudes, without_adapter
from learner.model.checkpoint import CheckpointWeights, WeightSource
from learner.model.loading import DTYPES, LoadedModel, load_model
from learner.model.optimizer.adamw import local_part, whole_tensor
from learner.model.ranks import Ranks
from learner.model.weights import exchange_parameters
from learner.packing import Row, moves_to_equal
from learner.run_state import row_as_bytes, row_from_bytes
from shared.config import RunConfig
from shared.errors import CollectiveError, LearnerError
from shared.weight_sync.checksum import BucketChecksum

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

FAILED = 2**62
"""A failed rank sends this instead of its number of rows, so that no other rank waits for it."""
CHECKED_ELEMENTS = 4096
"""How many elements of each parameter are compared between ranks to find different weights."""
INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Parallel:
    """The model as one learner rank holds and runs it: here as a whole (a single rank, or ddp).

    `ShardedModel` holds a shard instead. In it `forward`, `rows_of_all_ranks`, `any_of_row`,
    `check`, `weights.tensors` and `state_dict` are collectives: all ranks call them in the same
    order.

    An engine for larger models (Megatron-Bridge, NeMo AutoModel: tensor, context, expert
    parallelism) would implement this interface. It must run a row's forward and sum gradients in
    its backward (`forward`, `rows_of_all_ranks`), give whole weights by the checkpoint's names
    (`weights`, `state_dict`), and update, save and load its parts as `Optimizer` does.
    """

    holds_parts = False
    """Whether this rank's parameters are shards (DTensor) instead of ordinary tensors."""
    mesh: DeviceMesh | None = None
    """torch's device mesh of the ranks that hold this rank's copy of the model; None if the model
    is not sharded."""

    def __init__(self, model: nn.Module, weights: WeightSource, ranks: Ranks) -> None:
        self.weights = weights
        """The whole weights, made one by one."""
        self._model = model
        self._ranks = ranks

    def forward(self, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """Return `function(*arguments)`, which must run one forward of the model or its modules.

        A sharded model gathers its weights for the call.
        """
        return function(*arguments)

    def rows_of_all_ranks(
        self,
        rows: Iterable[Row],
        shows_images: Callable[[Row], bool],  # noqa: ARG002 (used only by ShardedModel)
        *,
        last: bool,  # noqa: ARG002 (as above)
    ) -> Iterator[tuple[Row | None, bool]]:
        """Yield this rank's packed rows in order, then None for each further row of other ranks.

        A sharded model needs a forward on all of its ranks. They share the rows of all ranks, and
        until the `last` rows of a step or pass, rows that are too few for all ranks wait for the
        next call. The second value of each pair says whether this rank must run the vision tower
        although its row has no images, because another rank's row has images. `shows_images`
        returns whether a row has images.
        """
        return ((row, False) for row in rows)

    def any_of_row(self, flag: bool) -> bool:
        """Return whether the flag is true on this rank or, with shards, on any rank of its copy."""
        return flag

    def check(self) -> None:
        """Raise LearnerError if the ranks hold different weights."""
        # A sample of each parameter is enough: a different update changes all of them.
        if self._ranks.world_size > 1:
            _require_same(self._ranks, self._model, _sampled_sum, self._ranks)

    def help_to_send(self) -> None:
        """Take part in the iteration of rank 0 over `weights`, on a rank that sends nothing."""

    def state_dict(self) -> dict[str, torch.Tensor] | None:
        """Return the whole weights in host memory, on rank 0; None if the model is not sharded."""
        return None


class ShardedModel(Parallel):
    """A model whose weights are sharded over `ranks.shards` (FSDP2).

    It is also the source of weights for syncs and checkpoints. Not tested on a GPU.
    """

    holds_parts = True

    def __init__(
        self,
        model: PreTrainedModel,
        weights: WeightSource,
        ranks: Ranks,
        *,
        device: torch.device,
        dtype: torch.dtype,
        mesh: DeviceMesh | None = None,
        rows: dict[nn.Parameter, torch.Tensor] | None = None,
    ) -> None:
        """Shard `model` in place and move the shards to `device`.

        The model must be in float32, in host memory, and equal on all ranks. Its forwards compute
        in `dtype`. Gradients are summed in float32, and the shards stay float32: with bfloat16 they
        are the master weights.

        Args:
            weights: source of the whole model's weights.
            rows: this rank's rows of parameters without values (`LoadedModel.rows`). They are taken
                out, so that each exists only once.
            mesh: torch's device mesh of an earlier model of these ranks; None creates one.
        """
        super().__init__(model, self, ranks)
        self._source = weights
        self._rows = RowShares(ranks)
        self._dtype = dtype
        self._root = _Root(model)
        self.mesh = _mesh(ranks.shards, device) if mesh is None else mesh
        rows = {} if rows is None else rows
        named = [(n, p) for n, p in model.named_parameters(remove_duplicate=False) if p in rows]
        on_meta = {p: nn.Parameter(p.to("meta"), p.requires_grad) for p in rows}
        exchange_parameters(model, lambda _, parameter: on_meta.get(parameter, parameter))
        # cast_forward_inputs would round the rotary embeddings, which must stay float32.
        policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        blocks = [
            module for module in model.modules() if type(module).__name__ in model._no_split_modules
        ]
        for module in (*blocks, self._root):
            # The root reshards after a forward too. The canary's forward has no backward, so the
            # gathered weights would remain, and the next update would make them stale.
            sharded = fully_shard(
                module, mesh=self.mesh, reshard_after_forward=True, mp_policy=policy
            )
            # Sums, not means: the divisor is known only at the step's end (decisions 6 and 7).
            # Plain sums, because gloo does not support other reductions.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
        # FSDP2 takes new parameters over at its first forward.
        shards = {
            parameter: nn.Parameter(
                DTensor.from_local(
                    # A copy, because the rows may be a view of a file.
                    rows.pop(parameter).to(device, copy=True),
                    self.mesh,
                    [Shard(0)],
                    run_check=False,
                    shape=empty.shape,
                    stride=empty.stride(),
                )
            )
            for parameter, empty in on_meta.items()
        }
        of_names = {name: shards[parameter] for name, parameter in named}
        model.load_state_dict(of_names, strict=False, assign=True)
        compute_magnitudes(model)

    def forward(self, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
        result: T = self._root(function, *arguments)
        return result

    def rows_of_all_ranks(
        self, rows: Iterable[Row], shows_images: Callable[[Row], bool], *, last: bool
    ) -> Iterator[tuple[Row | None, bool]]:
        having = self._rows.take(rows, last=last)
        num_rows = self._ranks.shards.max(len(having))
        if not num_rows:
            return
        shown = [shows_images(row) for row in having] + [False] * (num_rows - len(having))
        anywhere = self._ranks.shards.any_of(shown)
        of_all = [*having, *[None] * (num_rows - len(having))]
        for row, here, there in zip(of_all, shown, anywhere, strict=True):
            yield row, there and not here

    def any_of_row(self, flag: bool) -> bool:
        return bool(self._ranks.shards.max(int(flag)))

    def check(self) -> None:
        # Within a copy of the model, each value exists on only one rank.
        if self._ranks.replicas.world_size > 1:
            _require_same(self._ranks, self._model, _sampled_sum, self._ranks.replicas)

    def help_to_send(self) -> None:
        if self._ranks.rank < self._ranks.shards.world_size:  # in the copy of rank 0
            for _ in self.tensors():
                pass

    def state_dict(self) -> dict[str, torch.Tensor] | None:
        if self._ranks.rank == 0:
            return {name: tensor.cpu() for name, tensor in self.tensors()}
        self.help_to_send()
        return None

    def specs(self) -> Iterator[tuple[str, torch.dtype, torch.Size]]:
        for name, _, shape in self._source.specs():
            yield name, self._dtype, shape

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        with self._ranks.of_phase("gather"):
            for name, tensor in self._source.tensors():
                yield name, whole_tensor(tensor.to(self._dtype)).contiguous()


class RowShares:
    """Shares packed rows over all ranks, so that each has equally many, up to one.

    A rank may have many rows and others none, such as the only rank with a group of rollouts. Each
    row is a forward of all ranks of a copy: without sharing, such rows are learned one after
    another, while the other ranks learn nothing.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._waiting: list[Row] = []
        """At most one row, which waits for rows of the other ranks."""

    def take(self, rows: Iterable[Row], *, last: bool) -> list[Row]:
        """Return this rank's share of the rows of all ranks. A collective.

        Until the `last` rows of a step, all ranks get equally many, and the others wait for the
        next call.

        Raises:
            CollectiveError: another rank failed while it made its rows.

        Example: 3 rows of rank 0 and none of rank 1 are one row for each, and one that waits.
        """
        # Compare the counts before computing the first row. Otherwise a rank that compares later
        # and a rank that computes a row would wait for each other.
        ranks = self._ranks
        try:
            having = [*self._waiting, *rows]
        except Exception:
            ranks.all_of(FAILED)
            raise
        counts = ranks.all_of(len(having))
        if FAILED in counts:
            raise CollectiveError(
                "another learner rank failed while it made its rows; look at the first error of the"
                " other ranks",
                phase="rows",
            )
        moves = moves_to_equal(counts)
        sent = [row_as_bytes(having.pop()) for source, _ in moves if source == ranks.rank]
        having += map(row_from_bytes, ranks.exchange(moves, sent))
        size = len(having) if last else sum(counts) // ranks.world_size
        self._waiting = having[size:]
        return having[:size]


class _Root(nn.Module):
    """A wrapper of the model whose forward calls any function that uses the model."""

    # Rows apply the model's head only to some positions, so the model's own forward is not used.
    # Parameters outside of blocks (embeddings, norms, mergers, the head) belong to this module.
    # They are gathered once in a forward and once in its backward.

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
        return function(*arguments)


def _mesh(ranks: Ranks, device: torch.device) -> DeviceMesh:
    """Return a mesh like `DeviceMesh.from_group`, without torch's default group."""
    # The default group may not exist, or may belong to an engine.
    assert ranks.group is not None, "sharding needs several ranks"
    name = ranks.group.group_name
    _register_process_group(name, ranks.group)
    mesh = DeviceMesh(
        device.type, list(range(ranks.world_size)), _init_backend=False, _rank=ranks.rank
    )
    mesh._dim_group_names = [name]
    # torch's own method needs the default group too.
    mesh.get_local_rank = lambda mesh_dim=None: ranks.rank  # type: ignore[method-assign] # noqa: ARG005
    mesh._pg_registry[name] = ranks.group
    return mesh


def load_parallel(
    config: RunConfig, device: torch.device, ranks: Ranks, mesh: DeviceMesh | None = None
) -> tuple[LoadedModel, Parallel]:
    """Load the checkpoint `model.path` on this rank, sharded if the run configures it.

    `mesh` is torch's device mesh of an earlier model, if there is one. Raises ConfigError like
    `load_model`, and LearnerError if the ranks loaded different weights.
    """
    if not config.learner.is_sharded:
        loaded = load_model(config, device)
        if ranks.world_size > 1:
            _require_same(ranks, loaded.model, _whole_checksum, ranks)
        return loaded, Parallel(loaded.model, CheckpointWeights(loaded.model), ranks)
    # In host memory are only weights that are read whole, until they are sharded.
    mesh = _mesh(ranks.shards, device) if mesh is None else mesh
    loaded = load_model(config, torch.device("cpu"), mesh)
    _require_same_files(ranks, Path(config.model.path))
    parallel = ShardedModel(
        loaded.model,
        CheckpointWeights(loaded.model),
        ranks,
        device=device,
        dtype=DTYPES[config.model.dtype],
        mesh=mesh,
        rows=loaded.rows,
    )
    return replace(loaded, device=device, coord_ids_C=loaded.coord_ids_C.to(device)), parallel


@dataclass(frozen=True, slots=True)
class Reference:
    """The initial policy of a run, with which `reference_kl` compares the learner's policy.

    With an adapter it is the learner's model without the adapter, which costs a forward but no
    memory. Otherwise it is a second model, loaded from `model.path` and sharded like the learner's
    model. A resumed run has the same reference, because it loads the trained tensors of its
    checkpoint only into the learner's model.
    """

    learner: PreTrainedModel
    """The model that is trained."""
    copy: PreTrainedModel | None
    """The second model, with the frozen initial weights; None with an adapter."""
    parallel: Parallel
    """How the ranks run the reference's model: `copy`, or the learner's model without adapter."""

    def forward(self, function: Callable[[PreTrainedModel, *Ts], T], *arguments: *Ts) -> T:
        """Return `function(model, *arguments)`, where `model` computes the initial policy.

        No gradient is computed.

        The function runs one forward. If the model is sharded, this is a collective.
        """
        with torch.no_grad():
            if self.copy is not None:
                return self.parallel.forward(function, self.copy, *arguments)
            with without_adapter(self.learner):
                return self.parallel.forward(function, self.learner, *arguments)


def load_reference(
    config: RunConfig, loaded: LoadedModel, parallel: Parallel, ranks: Ranks
) -> Reference | None:
    """Return the run's initial policy if an objective compares with it (`reference_kl`); else None.

    Args:
        loaded, parallel: the learner's model, from `load_parallel`.

    Raises:
        ConfigError, LearnerError: like `load_parallel`.
    """
    if not config.rollout_matching.pipeline.needs_reference:
        return None
    if config.model.adapter is not None:
        return Reference(loaded.model, None, parallel)
    copy, its_parallel = load_parallel(config, loaded.device, ranks, parallel.mesh)
    # `eval` gives the same results because there is no dropout, and does not recompute activations.
    copy.model.requires_grad_(False).eval()
    return Reference(loaded.model, copy.model, its_parallel)


def _require_same(
    ranks: Ranks, model: nn.Module, number_of: Callable[[torch.Tensor], int], equal: Ranks
) -> None:
    """Raise LearnerError on all `ranks` if `number_of` a parameter differs between ranks `equal`.

    `equal` are those that must have the same parameters as this rank.
    """
    names, parameters = zip(*model.named_parameters(), strict=True)
    numbers = [number_of(local_part(parameter.detach())) for parameter in parameters]
    _require_equal(ranks, names, numbers, equal)


def _require_same_files(ranks: Ranks, folder: Path) -> None:
    """Raise LearnerError on all ranks if they read different weights from `folder`."""
    checksums: dict[str, int] = {}
    for file in sorted(folder.glob("*.safetensors")):
        # Reading instead of mapping: the memory of one tensor is enough.
        with safe_open(file, "pt", backend="pread") as opened:
            for name in opened.keys():  # noqa: SIM118
                checksums[name] = _whole_checksum(opened.get_tensor(name))
    # Files may have other tensors in addition to those of the model, but lists must be as long.
    of_names = BucketChecksum()
    for name in checksums:
        of_names.add(torch.tensor(list(name.encode()), dtype=torch.uint8))
    _require_equal(ranks, ["one that only some ranks have"], [of_names.value()], ranks)
    _require_equal(ranks, list(checksums), list(checksums.values()), ranks)


def _require_equal(ranks: Ranks, names: Sequence[str], numbers: list[int], equal: Ranks) -> None:
    """Raise LearnerError on all `ranks` if `numbers` differ between ranks `equal`.

    `names` are of the parameters with these numbers. Ranks of another part of the model have the
    same names.
    """
    index = equal.first_difference(numbers)
    num_after = ranks.max(0 if index is None else len(names) - index)
    if num_after:
        raise LearnerError(
            "the learner ranks do not hold the same weights; the first parameter that differs is"
            f" {names[-num_after]}. Check that model.path is the same checkpoint on every node and"
            " that the nodes have the same devices and versions, then resume from the last"
            " checkpoint",
            phase="check",
        )


def _sampled_sum(parameter: torch.Tensor) -> int:
    values = parameter.reshape(-1)[:CHECKED_ELEMENTS]
    # Sum the bits as integers: the result does not depend on the order.
    return int(values.view(INTEGER_OF_SIZE[values.element_size()]).sum(dtype=torch.int64))


def _whole_checksum(parameter: torch.Tensor) -> int:
    checksum = BucketChecksum()
    checksum.add(parameter)
    return checksum.value()
