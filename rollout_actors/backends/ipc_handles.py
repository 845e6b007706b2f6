"""How the learner's weights come to the processes of an engine beside it, each on its own GPU
(CUDA's shared memory is of one GPU).

By vLLM's packed IPC: one buffer on each GPU, which is shared once in a sync, and into which one
bucket after the other is copied. A handle for each parameter would cost a counter of CUDA's for
each of them in every sync, which torch gives back late or never.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Protocol

import torch

from shared.weight_sync.checksum import ChecksummedWeights
from shared.weight_sync.offer import buckets


class SharingDevice(Protocol):
    """A GPU of the engine. All of them belong to the learner rank, whose own is among them."""

    uuid: str
    """By which a worker of vLLM knows the handles that are for it."""

    def share(self, num_bytes: int) -> tuple[torch.Tensor, tuple[Any, ...]]:
        """A new buffer of so many bytes on this device, uint8, and what a process on this device
        rebuilds it from."""
        ...

    def synchronize(self) -> None:
        """Wait until everything that was copied to this device is there: whoever reads it does so
        on a stream of its own."""
        ...

    def collect(self) -> None:
        """Give back the memory of shared buffers that nobody refers to any more, here or in the
        engine."""
        ...


class CudaDevice:
    """Not run on a GPU."""

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        self.uuid = str(torch.cuda.get_device_properties(self._device).uuid)

    def share(self, num_bytes: int) -> tuple[torch.Tensor, tuple[Any, ...]]:
        from torch.multiprocessing.reductions import reduce_tensor

        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        _, arguments = reduce_tensor(buffer)
        return buffer, arguments

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def collect(self) -> None:
        torch.cuda.ipc_collect()


def cuda_devices(tensor_parallel_size: int) -> tuple[SharingDevice, ...]:
    """The GPUs of an engine beside the learner: the first of those that this process sees, as vLLM
    gives them to its workers.
    """
    return tuple(CudaDevice(index) for index in range(tensor_parallel_size))


def packed_buckets(
    weights: ChecksummedWeights, devices: Sequence[SharingDevice]
) -> Generator[dict[str, Any]]:
    """Yield the update info of vLLM's packed `ipc` engine for each bucket of the weights, and of
    what comes behind them.

    Each is valid until the next one is asked for; the buffers are kept until the iterator ends or
    is closed. The handles are by the devices' UUIDs, as every worker looks for its own.
    """
    cut = list(buckets(weights.terms.sent, weights.terms.bucket_bytes))
    largest = max(sum(spec.num_bytes for spec in bucket) for bucket in cut)
    shared = [(device, *device.share(largest)) for device in devices]
    handles = {device.uuid: arguments for device, _, arguments in shared}
    stream = iter(weights)
    for bucket in cut:
        begin = 0
        for spec in bucket:
            _, tensor = next(stream)
            bytes_N = tensor.detach().reshape(-1).view(torch.uint8)
            for _, buffer, _ in shared:
                buffer[begin : begin + spec.num_bytes].copy_(bytes_N, non_blocking=True)
            begin += spec.num_bytes
        for device, _, _ in shared:
            device.synchronize()
        yield {
            "names": [spec.name for spec in bucket],
            "dtype_names": [spec.dtype for spec in bucket],
            "shapes": [list(spec.shape) for spec in bucket],
            "tensor_sizes": [spec.num_bytes for spec in bucket],
            "ipc_handles": handles,
        }
