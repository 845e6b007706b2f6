"""vLLM's worker in a weight sync: it checks what goes into the model (decision 38)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import WeightTransferEngine

from rollout_actors.repeat_guard.vllm import GuardedWorker
from shared.weight_sync.checksum import BucketChecksum
from shared.weight_sync.offer import CANARY, CHECKSUMS

Named = tuple[str, torch.Tensor]


class ChecksumLoader(nn.Module):
    """Stands in for the model during an update: passes tensors on one by one and keeps account."""

    def __init__(self, model: Any, bucket_bytes: int) -> None:
        super().__init__()
        self.model = model
        # An engine that serves adapters has put wrappers around its layers; loading reaches through
        # them, under the layers' own names.
        self.expected = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
        self.loaded: set[str] = set()
        self.checksums: list[int] = []  # of the buckets that arrived
        self.sent: list[int] = []  # the sender's, which arrive behind the weights
        self.logprobs: list[float] = []  # the canary's, where they arrive last
        self.load_s = 0.0
        self.verify_s = 0.0
        self._wait_s = 0.0
        self._bucket_bytes = bucket_bytes
        self._size = 0
        self._checksum = BucketChecksum()

    def load_weights(self, weights: Iterable[Named]) -> set[str]:
        """Load what the transport brings in one call; return the names."""
        started = time.perf_counter()
        elsewhere_s = self._wait_s + self.verify_s
        loaded = self.hand_over(self._checked(weights))
        self.loaded |= loaded
        # Waiting and checking happen inside the loader's iteration: they are not loading.
        elsewhere_s = self._wait_s + self.verify_s - elsewhere_s
        self.load_s += time.perf_counter() - started - elsewhere_s
        return loaded

    def hand_over(self, tensors: Iterator[Named]) -> set[str]:
        """Give checked tensors to vLLM's loader; return the names of the parameters it filled."""
        # What goes wrong from here on, only the canary sees.
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
                # A clone, because bytes in a packed bucket may begin anywhere.
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
            self._checksum = BucketChecksum()
            self._size = 0


class VerifyingWorker(GuardedWorker):
    """A base class of vLLM's `Worker` (`worker_extension_cls`) with the further calls of a sync."""

    weight_transfer_engine: WeightTransferEngine[Any, Any]
    _loader: ChecksumLoader

    # vLLM's, declared for the type checker alone: a definition here would collide with the
    # worker's.
    _weight_update_active: bool
    start_weight_update: Any
    finish_weight_update: Any

    def begin_verified_load(self, bucket_bytes: int) -> None:
        """Watch the next update. Called before `start_weight_update`, while the parameters are in
        place and their names known.
        """
        engine = self.weight_transfer_engine
        self._loader = self.make_loader(engine.model, bucket_bytes)
        engine.set_weight_update_target(self._loader, engine.model_config)

    def make_loader(self, model: nn.Module, bucket_bytes: int) -> ChecksumLoader:
        return ChecksumLoader(model, bucket_bytes)

    def load_report(self) -> dict[str, Any]:
        """Return the fields of a `LoadReport`, after `finish_weight_update`."""
        loader = self._loader
        return {
            "checksums": loader.checksums,
            "sent": loader.sent,
            "missing": sorted(loader.expected - loader.loaded),
            "unexpected": sorted(loader.loaded - loader.expected),
            "load_s": loader.load_s,
            "verify_s": loader.verify_s,
            "logprobs": [repr(logprob) for logprob in loader.logprobs],
        }

    def abandon_update(self) -> None:
        """Leave the group, which ends the sender's wait, and bring the model back from the meta
        device: of old and new weights, good for nothing but a full sync.
        """
        self.weight_transfer_engine.shutdown()
        if not self._weight_update_active:
            self.start_weight_update()
        self.finish_weight_update()
