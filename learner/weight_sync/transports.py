"""The senders' ends of transports with a wire: NCCL here, gloo in `shared.weight_sync`.

vllm is imported only when a group of GPUs is opened: the learner's step does without it.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterable
from typing import Any

import torch

from shared.weight_sync.gloo import NUM_BUFFERS, GlooSender
from shared.weight_sync.offer import FullOffer
from shared.weight_sync.transports import TransportKind


class NcclSender:
    """Sends from GPU to GPUs, to vLLM's own `nccl` engine, by vLLM's own packing.

    Not run on a GPU. NCCL has no timeout: a late broadcast is given up by `WeightSender`, which
    leaves the groups. A receiver that hangs in one stays there until its process ends.
    """

    def __init__(self, terms: FullOffer, listening: list[socket.socket]) -> None:
        """Open every group as its rank 0; `listening` have held the ports since the offer."""
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup
        from vllm.utils.nccl import unpinned_nccl_env

        self._communicators: list[Any] = []
        for group, bound in zip(terms.groups, listening, strict=True):
            joined = StatelessProcessGroup.create(
                group.host,
                group.port,
                0,
                group.world_size,
                store_timeout=math.ceil(terms.join_limit.seconds),
                listen_socket=bound,
            )
            with unpinned_nccl_env():
                communicator = PyNcclCommunicator(joined, device=torch.cuda.current_device())
            if communicator.disabled:  # its broadcasts would do nothing, without a word
                raise RuntimeError(
                    f"vLLM has no NCCL library for the group at {group.host}:{group.port}, or was"
                    " told to use none; see VLLM_NCCL_SO_PATH"
                )
            self._communicators.append(communicator)

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]], terms: FullOffer) -> None:
        """Send every tensor to every group, in the terms' order, and wait until it is out."""
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        packed_nccl_broadcast_producer(
            iterator=iter(tensors),
            group=_BroadcastToAll(self._communicators),
            src=0,
            post_iter_func=lambda item: item[1],
            buffer_size_bytes=terms.bucket_bytes,
            num_buffers=NUM_BUFFERS,
        )

    def close(self) -> None:
        """Leave the groups: whoever waits for this rank sees a closed connection."""
        for communicator in self._communicators:
            communicator.destroy()
        self._communicators = []


class _BroadcastToAll:
    """Several communicators in place of one, so that a bucket is packed once. Not run on a GPU."""

    def __init__(self, communicators: list[Any]) -> None:
        self._communicators = communicators

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        # One after the other: two NCCL kernels of one process at once may wait for each other.
        for communicator in self._communicators:
            communicator.broadcast(tensor, src=src)


SENDERS: dict[
    TransportKind, Callable[[FullOffer, list[socket.socket]], GlooSender | NcclSender]
] = {
    TransportKind.GLOO: GlooSender,
    TransportKind.NCCL: NcclSender,
}
