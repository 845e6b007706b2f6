"""Weight sync inside vLLM's worker: receives the weights, and verifies what was loaded
(decision 38).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from rollout_actors.repeat_guard.vllm import GuardedWorker
from rollout_actors.weight_sync.unsynced import UnsyncedMemory
from shared.weight_sync.checksum import BucketChecksum
from shared.weight_sync.gloo import GlooReceiver
from shared.weight_sync.offer import CANARY, CHECKSUMS, TensorSpec, offsets

Named = tuple[str, torch.Tensor]
InitInfo = TypeVar("InitInfo", bound=WeightTransferInitInfo)
UpdateInfo = TypeVar("UpdateInfo", bound=WeightTransferUpdateInfo)


class VllmModel(Protocol):
    """The methods of a vLLM model that a weight sync uses."""

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]: ...
    def load_weights(self, weights: Iterable[Named]) -> set[str]: ...


class ChecksumLoader(nn.Module):
    """Stands in for vLLM's model during a weight sync, and records the tensors that it loads.

    It passes each received tensor to the real model and computes checksums.
    """

    def __init__(self, model: VllmModel, bucket_bytes: int) -> None:
        super().__init__()
        self.model = model
        # An engine that serves adapters has wrapped its layers. Loading works through the wrappers,
        # with the layers' own names.
        self.expected = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
        self.loaded: set[str] = set()
        # Checksums of the received buckets. vLLM's own checksums see empty tensors on CPU, because
        # linear weights are packed there.
        self.checksums: list[int] = []
        self.sent: list[int] = []  # the sender's checksums, which arrive after the weights
        self.logprobs: list[float] = []  # the canary's log-probabilities, if they arrive last
        self.load_s = 0.0
        self.verify_s = 0.0
        self._wait_s = 0.0
        self._bucket_bytes = bucket_bytes
        self._size = 0
        self._checksum = BucketChecksum()

    def load_weights(self, weights: Iterable[Named]) -> set[str]:
        """Load received tensors into the model. Return the names of the loaded parameters."""
        started = time.perf_counter()
        elsewhere_s = self._wait_s + self.verify_s
        loaded = self.hand_over(self._checked(weights))
        self.loaded |= loaded
        # Waiting and checking happen inside the loader's iteration, and are not loading time.
        elsewhere_s = self._wait_s + self.verify_s - elsewhere_s
        self.load_s += time.perf_counter() - started - elsewhere_s
        return loaded

    def hand_over(self, tensors: Iterator[Named]) -> set[str]:
        """Pass tensors, whose checksums are computed, to vLLM's model. Return the loaded names."""
        # From here on only the canary detects errors.
        return self.model.load_weights(tensors)

    def _checked(self, weights: Iterable[Named]) -> Iterator[Named]:
        stream = iter(weights)
        # `next` waits for the transport. After `yield` vLLM loads the tensor.
        while True:
            started = time.perf_counter()
            named = next(stream, None)
            arrived = time.perf_counter()
            self._wait_s += arrived - started
            if named is None:
                return
            name, tensor = named
            if name == CHECKSUMS:
                self._close_bucket()
                # A clone, because bytes in a packed bucket may start at any offset.
                self.sent = tensor.clone().view(torch.int64).tolist()
                continue
            if name == CANARY:
                self.logprobs = tensor.clone().view(torch.float64).tolist()
                continue
            # The checksum is of the tensor that the model gets, so it detects transport errors.
            self._checksum.add(tensor)
            self._size += tensor.nbytes
            if self._size > self._bucket_bytes:
                self._close_bucket()
            self.verify_s += time.perf_counter() - arrived
            yield named

    def _close_bucket(self) -> None:
        if self._size:
            self.checksums.append(self._checksum.value())
            self._checksum = BucketChecksum()
            self._size = 0


class VerifyingWorker(GuardedWorker):
    """Methods that this project adds to vLLM's worker (`worker_extension_cls`) for weight syncs."""

    weight_transfer_engine: WeightTransferEngine[WeightTransferInitInfo, WeightTransferUpdateInfo]
    _loader: ChecksumLoader
    _unsynced: UnsyncedMemory

    # vLLM's attributes, declared for the type checker. A definition here would collide with the
    # worker's.
    _weight_update_active: bool
    start_weight_update: Callable[[], None]
    finish_weight_update: Callable[[], None]

    def begin_verified_load(self, bucket_bytes: int) -> None:
        """Record the tensors of the next weight update, for `load_report`.

        `bucket_bytes`: size of the buckets for their checksums. Call it before
        `start_weight_update`, while the model's parameters are in place.
        """
        engine = self.weight_transfer_engine
        self._loader = self.make_loader(engine.model, bucket_bytes)
        engine.set_weight_update_target(self._loader, engine.model_config)

    def make_loader(self, model: VllmModel, bucket_bytes: int) -> ChecksumLoader:
        return ChecksumLoader(model, bucket_bytes)

    def load_report(self) -> dict[str, object]:
        """Return the fields of a `LoadReport` about the last weight update, once it is finished."""
        loader = self._loader
        return {
            "checksums": loader.checksums,
            "sent": loader.sent,
            "missing": sorted(loader.expected - loader.loaded),
            "unexpected": sorted(loader.loaded - loader.expected),
            "load_s": loader.load_s,
            "verify_s": loader.verify_s,
            # As text: JSON has no NaN, and `repr` keeps all bits.
            "logprobs": [repr(logprob) for logprob in loader.logprobs],
        }

    def keep_unsynced(self) -> None:
        """Copy the weight memory that no sync writes, before the engine sleeps at level 2."""
        self._unsynced = UnsyncedMemory(self.model_runner.get_model())

    def restore_unsynced(self) -> None:
        """Write back what `keep_unsynced` copied, once the memory of the weights is there again."""
        self._unsynced.restore()
        del self._unsynced

    def unlink_shared_memory(self) -> None:
        """Unlink the shared memory of vLLM's CPU workers, which every worker has mapped.

        A killed worker would leave it in /dev/shm. Unlinked, Linux frees it when the last worker
        ends.
        """
        for name in re.findall(r"/dev/shm/vllm_\S+$", Path("/proc/self/maps").read_text(), re.M):
            Path(name).unlink(missing_ok=True)  # each worker finds the names of all

    def abandon_update(self) -> None:
        """End a failed weight update: leave the process group, and restore the model.

        The sender stops waiting. The model then has old and new weights, and needs a full sync.
        """
        # Start and finish without an update restore a whole model. If an update has begun, finish
        # is enough.
        self.weight_transfer_engine.shutdown()
        if not self._weight_update_active:
            self.start_weight_update()
        self.finish_weight_update()


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """How a worker joins the gloo process group. Field names are as in vLLM's NCCL transport."""

    master_address: str
    master_port: int
    rank_offset: int
    """Rank of this engine's first worker in the process group, different for each engine."""
    world_size: int
    packed_buffer_size_bytes: int
    join_s: float
    """Time limit for joining the process group."""
    timeout_s: float
    """Time limit for each later wait in the process group."""


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """Names, dtypes and shapes of all tensors of one weight sync, in the order of sending."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]

    def tensors(self) -> tuple[TensorSpec, ...]:
        specs = []
        for name, dtype, shape in zip(self.names, self.dtype_names, self.shapes, strict=True):
            num_bytes = torch.Size(shape).numel() * torch_dtype(dtype).itemsize
            specs.append(TensorSpec(name, dtype, tuple(shape), num_bytes))
        return tuple(specs)


def torch_dtype(name: str) -> torch.dtype:
    dtype = torch.__dict__[name]
    assert isinstance(dtype, torch.dtype), name
    return dtype


class HostTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Base class of the two transports on CPU: starts and finishes an update of vLLM's model."""

    supports_draft_weight_update = False

    def start_weight_update(self) -> None:
        # On CPU linear weights are packed, so a direct copy is impossible. The reload unpacks and
        # repacks each layer.
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, object]) -> None:
        # The base class would then wait for an accelerator, which does not exist here.
        self.receive_weights(self.parse_update_info(update_info))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        # With tied embeddings the reload fills the embedding, whose memory the head shares. But on
        # CPU the head uses its own packed copy, which the reload does not update. Without this step
        # the engine silently samples with the old head.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
            elif isinstance(module, RoutedExperts):
                # The kernel uses packed matrices, and a reload leaves them unpacked.
                kernel = module.quant_method.moe_kernel
                kernel.fused_experts.process_weights_after_loading(module)


class GlooTransferEngine(HostTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Receives weights over gloo, from the learner's rank 0 to a worker on CPU.

    It loads each bucket (a packed part of the weights) while the next one arrives.
    """

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    _group: GlooReceiver | None = None
    _bucket_bytes = 0

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        self.shutdown()
        config = self.parallel_config
        # The worker's rank in the group: the engine's earlier replicas and devices come first.
        rank = init_info.rank_offset + config.data_parallel_index * config.world_size + config.rank
        self._bucket_bytes = init_info.packed_buffer_size_bytes
        self._group = GlooReceiver(
            init_info.master_address,
            init_info.master_port,
            rank=rank,
            world_size=init_info.world_size,
            join_s=init_info.join_s,
            timeout_s=init_info.timeout_s,
        )

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        if self._group is None:
            raise RuntimeError("the weight transfer group was not joined")
        # One call for all tensors, because vLLM's loader walks the whole model several times at
        # the start of each call.
        self.model.load_weights(self._arriving(self._group, update_info.tensors()))

    def _arriving(
        self, group: GlooReceiver, tensors: tuple[TensorSpec, ...]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket, packed in group.receive(tensors, self._bucket_bytes):
            for spec, start in zip(bucket, offsets(bucket)[:-1], strict=True):
                values = packed[start : start + spec.num_bytes]
                yield spec.name, values.view(torch_dtype(spec.dtype)).view(spec.shape)

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


@dataclass
class InProcessInitInfo(WeightTransferInitInfo):
    """Empty, because the engine in the learner's process joins no process group."""


@dataclass
class InProcessUpdateInfo(WeightTransferUpdateInfo):
    """The weights of one weight sync as the learner's own tensors, followed by their checksums."""

    weights: Iterable[tuple[str, torch.Tensor]]
    """Names and tensors. A layer's tensors must not change until the next layer's have arrived."""


class InProcessTransferEngine(HostTransferEngine[InProcessInitInfo, InProcessUpdateInfo]):
    """Receives weights from the learner in the same process on CPU, one tensor at a time."""

    init_info_cls = InProcessInitInfo
    update_info_cls = InProcessUpdateInfo

    def init_transfer_engine(self, init_info: InProcessInitInfo) -> None:
        pass

    @torch.no_grad()
    def receive_weights(self, update_info: InProcessUpdateInfo) -> None:
        self.model.load_weights(update_info.weights)

    def shutdown(self) -> None:
        pass
