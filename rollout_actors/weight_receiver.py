"""The engine's end of a weight sync, inside vLLM's worker process (DESIGN 9, FACTS 5).

`GlooWeightReceiver` and `InProcessWeightReceiver` are the transports for weights in host memory and in this very process, loaded into vLLM by
its plugin. `ReceiptWorker` is mixed into vLLM's worker (`worker_extension_cls`) and is the same for every transport: it watches what goes into
the model and writes a receipt.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rollout_actors.gloo_group import WeightGroup
from rollout_actors.repeat_guard_vllm import GuardedWorker
from shared.checksum import BucketChecksum
from shared.weight_terms import CANARY, CHECKSUMS, TensorSpec, offsets

Named = tuple[str, torch.Tensor]
InitInfo = TypeVar("InitInfo", bound=WeightTransferInitInfo)
UpdateInfo = TypeVar("UpdateInfo", bound=WeightTransferUpdateInfo)


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """Where to join. Field names are those of vLLM's NCCL transport."""

    master_address: str
    master_port: int
    rank_offset: int
    """This engine's first rank; each engine has its own."""
    world_size: int
    packed_buffer_size_bytes: int
    timeout_s: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """What will come, in order: the metadata of a whole sync, once."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]

    def tensors(self) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(name, dtype, tuple(shape), torch.Size(shape).numel() * torch_dtype(dtype).itemsize)
            for name, dtype, shape in zip(self.names, self.dtype_names, self.shapes, strict=True)
        )


def torch_dtype(name: str) -> torch.dtype:
    dtype = torch.__dict__[name]
    assert isinstance(dtype, torch.dtype), name
    return dtype


class HostWeightReceiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """The update's beginning and end for a model in host memory."""

    supports_draft_weight_update = False

    def start_weight_update(self) -> None:
        # Linear weights are packed on CPU, so nothing may be copied into them directly: the reload unpacks and repacks each layer.
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class then waits for an accelerator, which is not there.
        self.receive_weights(self.parse_update_info(update_info))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        # Tied embeddings: the reload fills the embedding, whose memory the head shares, but on CPU the head multiplies with a packed
        # copy of its own, which nobody renews. Without this the engine samples with the old head, silently.
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)


class GlooWeightReceiver(HostWeightReceiver[GlooInitInfo, GlooUpdateInfo]):
    """Receives packed buckets from rank 0, each while the one before is loaded."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    _group: WeightGroup | None = None
    _bucket_bytes = 0

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        self.shutdown()
        config = self.parallel_config
        rank = init_info.rank_offset + config.data_parallel_index * config.world_size + config.rank
        self._bucket_bytes = init_info.packed_buffer_size_bytes
        self._group = WeightGroup(init_info.master_address, init_info.master_port, rank=rank, world_size=init_info.world_size, timeout_s=init_info.timeout_s)

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        if self._group is None:
            raise RuntimeError("the weight transfer group was not joined")
        # One call for all of them: at the beginning of each vLLM's loader walks the whole model several times.
        self.model.load_weights(
            (spec.name, packed[start : start + spec.num_bytes].view(torch_dtype(spec.dtype)).view(spec.shape))
            for bucket, packed in self._group.receive(update_info.tensors(), self._bucket_bytes)
            for spec, start in zip(bucket, offsets(bucket)[:-1], strict=True)
        )

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


@dataclass
class InProcessInitInfo(WeightTransferInitInfo):
    """Nothing to join."""


@dataclass
class InProcessUpdateInfo(WeightTransferUpdateInfo):
    """One sync's weights, from hand to hand."""

    weights: Iterable[Named]
    """The weights themselves, and their checksums behind them. One layer's must stay as they are until the next layer's have come."""


class InProcessWeightReceiver(HostWeightReceiver[InProcessInitInfo, InProcessUpdateInfo]):
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


class LoadWatch(nn.Module):
    """Stands in for the model while an update runs: passes the tensors on one by one, and keeps account of them."""

    def __init__(self, model: Any, bucket_bytes: int) -> None:
        super().__init__()
        self.model = model
        # An engine that serves adapters has put wrappers around its layers; loading reaches through them, under the layers' own names.
        self.expected = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
        self.loaded: set[str] = set()
        self.checksums: list[int] = []
        """Of what arrived, for each bucket."""
        self.sent: list[int] = []
        """The sender's, which arrive behind the weights."""
        self.logprobs: list[float] = []
        """Of the canary, where they arrive last."""
        self.load_s = 0.0
        self.verify_s = 0.0
        self._wait_s = 0.0
        self._bucket_bytes = bucket_bytes
        self._size = 0
        self._checksum = BucketChecksum(torch)

    def load_weights(self, weights: Iterable[Named]) -> set[str]:
        """Called with as much of the weights as the transport likes; what this call brought is loaded when it returns."""
        started, elsewhere_s = time.perf_counter(), self._wait_s + self.verify_s
        loaded = self.hand_over(self._checked(weights))
        self.loaded |= loaded
        self.load_s += time.perf_counter() - started - (self._wait_s + self.verify_s - elsewhere_s)
        return loaded

    def hand_over(self, tensors: Iterator[Named]) -> set[str]:
        """Tensors, each after its checksum, to vLLM's loader; the names of the parameters it filled. What goes wrong from here on, only the canary sees."""
        loaded: set[str] = self.model.load_weights(tensors)
        return loaded

    def _checked(self, weights: Iterable[Named]) -> Iterator[Named]:
        stream = iter(weights)
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
                self.sent = tensor.clone().view(torch.int64).tolist()
                continue
            if name == CANARY:
                self.logprobs = tensor.clone().view(torch.float64).tolist()
                continue
            self._checksum.add(tensor)
            self._size += tensor.nbytes
            if self._size > self._bucket_bytes:
                self._close_bucket()
            self.verify_s += time.perf_counter() - arrived
            yield named

    def _close_bucket(self) -> None:
        if self._size:
            self.checksums.append(self._checksum.value())
            self._size, self._checksum = 0, BucketChecksum(torch)


class ReceiptWorker(GuardedWorker):
    """What a rollout engine asks of its worker besides vLLM's own update calls. Becomes a base class of vLLM's `Worker`."""

    weight_transfer_engine: WeightTransferEngine[Any, Any]
    _watch: LoadWatch

    def begin_receipt(self, bucket_bytes: int) -> None:
        """Before `start_weight_update`: while the parameters are still in place, and their names known."""
        engine = self.weight_transfer_engine
        self._watch = self.make_watch(engine.model, bucket_bytes)
        engine.set_weight_update_target(self._watch, engine.model_config)

    def make_watch(self, model: nn.Module, bucket_bytes: int) -> LoadWatch:
        return LoadWatch(model, bucket_bytes)

    def receipt(self) -> dict[str, Any]:
        """After `finish_weight_update`: the fields of `rollout_actors.receipt.Receipt`."""
        watch = self._watch
        return {
            "checksums": watch.checksums,
            "sent": watch.sent,
            "missing": sorted(watch.expected - watch.loaded),
            "unexpected": sorted(watch.loaded - watch.expected),
            "load_s": watch.load_s,
            "verify_s": watch.verify_s,
            "logprobs": watch.logprobs,
        }

    def abandon_update(self) -> None:
        """After a failure: leave the group, which ends the sender's wait, and bring the model back from the meta device.

        The weights are then the old ones, the new ones, or some of each: good for nothing but a full sync.
        """
        self.weight_transfer_engine.shutdown()
        if not self._weight_update_active:
            self.start_weight_update()
        self.finish_weight_update()

    # vLLM's, declared for the type checker alone: a definition here would collide with the worker's.
    _weight_update_active: bool
    start_weight_update: Any
    finish_weight_update: Any
