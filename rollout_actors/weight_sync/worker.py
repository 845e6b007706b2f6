"""What vLLM's worker does in a weight sync whatever the transport: it watches what goes into the
model, and writes a receipt (DESIGN 9, FACTS 5).
"""

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
    """Stands in for the model while an update runs: passes the tensors on one by one, and keeps
    account of them.
    """

    def __init__(self, model: Any, bucket_bytes: int) -> None:
        super().__init__()
        self.model = model
        # An engine that serves adapters has put wrappers around its layers; loading reaches through
        # them, under the layers' own names.
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
        self._checksum = BucketChecksum()

    def load_weights(self, weights: Iterable[Named]) -> set[str]:
        """Called with as much of the weights as the transport likes; what this call brought is
        loaded when it returns.
        """
        started, elsewhere_s = time.perf_counter(), self._wait_s + self.verify_s
        loaded = self.hand_over(self._checked(weights))
        self.loaded |= loaded
        self.load_s += time.perf_counter() - started - (self._wait_s + self.verify_s - elsewhere_s)
        return loaded

    def hand_over(self, tensors: Iterator[Named]) -> set[str]:
        """Tensors, each after its checksum, to vLLM's loader; the names of the parameters it
        filled. What goes wrong from here on, only the canary sees.
        """
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
            self._size, self._checksum = 0, BucketChecksum()


class VerifyingWorker(GuardedWorker):
    """What a rollout engine asks of its worker besides vLLM's own update calls. Becomes a base
    class of vLLM's `Worker` (`worker_extension_cls`).
    """

    weight_transfer_engine: WeightTransferEngine[Any, Any]
    _watch: ChecksumLoader

    def begin_verified_load(self, bucket_bytes: int) -> None:
        """Before `start_weight_update`: while the parameters are still in place, and their names
        known.
        """
        engine = self.weight_transfer_engine
        self._watch = self.make_watch(engine.model, bucket_bytes)
        engine.set_weight_update_target(self._watch, engine.model_config)

    def make_watch(self, model: nn.Module, bucket_bytes: int) -> ChecksumLoader:
        return ChecksumLoader(model, bucket_bytes)

    def load_report(self) -> dict[str, Any]:
        """After `finish_weight_update`: the fields of
        `rollout_actors.weight_sync.receiver.LoadReport`.
        """
        watch = self._watch
        return {
            "checksums": watch.checksums,
            "sent": watch.sent,
            "missing": sorted(watch.expected - watch.loaded),
            "unexpected": sorted(watch.loaded - watch.expected),
            "load_s": watch.load_s,
            "verify_s": watch.verify_s,
            "logprobs": [repr(logprob) for logprob in watch.logprobs],
        }

    def abandon_update(self) -> None:
        """After a failure: leave the group, which ends the sender's wait, and bring the model back
        from the meta device.

        The weights are then the old ones, the new ones, or some of each: good for nothing but a
        full sync.
        """
        self.weight_transfer_engine.shutdown()
        if not self._weight_update_active:
            self.start_weight_update()
        self.finish_weight_update()

    # vLLM's, declared for the type checker alone: a definition here would collide with the
    # worker's.
    _weight_update_active: bool
    start_weight_update: Any
    finish_weight_update: Any
