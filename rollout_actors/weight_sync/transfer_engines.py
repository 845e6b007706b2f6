"""vLLM's transfer engines for weights in host memory and in this very process (decision 38)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
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

from shared.weight_sync.gloo import GlooReceiver
from shared.weight_sync.offer import TensorSpec, offsets

InitInfo = TypeVar("InitInfo", bound=WeightTransferInitInfo)
UpdateInfo = TypeVar("UpdateInfo", bound=WeightTransferUpdateInfo)


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """The group to join. Field names are those of vLLM's NCCL transport."""

    master_address: str
    master_port: int
    rank_offset: int
    """This engine's first rank; each engine has its own."""
    world_size: int
    packed_buffer_size_bytes: int
    join_s: float
    """Longest time of the joining."""
    timeout_s: float
    """Longest time of every later wait in the group."""


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """The metadata of a whole sync, once: what will come, in order."""

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
    """Begins and ends an update of a model in host memory."""

    supports_draft_weight_update = False

    def start_weight_update(self) -> None:
        # Linear weights are packed on CPU, so nothing may be copied into them directly: the reload
        # unpacks and repacks each layer.
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class then waits for an accelerator, which is not there.
        self.receive_weights(self.parse_update_info(update_info))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        # Tied embeddings: the reload fills the embedding, whose memory the head shares, but on CPU
        # the head multiplies with a packed copy of its own, which nobody renews. Without this the
        # engine samples with the old head, silently.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
            elif isinstance(module, RoutedExperts):
                # The kernel multiplies with packed matrices, and a reload leaves them unpacked.
                kernel = module.quant_method.moe_kernel
                kernel.fused_experts.process_weights_after_loading(module)


class GlooTransferEngine(HostTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Receives packed buckets from rank 0, each while the one before is loaded."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    _group: GlooReceiver | None = None
    _bucket_bytes = 0

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        self.shutdown()
        config = self.parallel_config
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
        # One call for all of them: at the beginning of each vLLM's loader walks the whole model
        # several times.
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
    """Nothing to join."""


@dataclass
class InProcessUpdateInfo(WeightTransferUpdateInfo):
    """One sync's weights, from hand to hand, and their checksums behind them."""

    weights: Iterable[tuple[str, torch.Tensor]]
    """One layer's must stay as they are until the next layer's have come."""


class InProcessTransferEngine(HostTransferEngine[InProcessInitInfo, InProcessUpdateInfo]):
    """Takes the learner's tensors from the learner's own process, one at a time."""

    init_info_cls = InProcessInitInfo
    update_info_cls = InProcessUpdateInfo

    def init_transfer_engine(self, init_info: InProcessInitInfo) -> None:
        pass

    @torch.no_grad()
    def receive_weights(self, update_info: InProcessUpdateInfo) -> None:
        self.model.load_weights(update_info.weights)

    def shutdown(self) -> None:
        pass
