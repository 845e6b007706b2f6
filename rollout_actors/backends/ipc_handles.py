"""Weights for the engine beside the learner on GPUs, by vLLM's packed IPC.

Each GPU has one buffer, shared once in a sync, into which one bucket after the other is copied.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch

from shared.weight_sync.checksum import ChecksummedWeights
from shared.weight_sync.offer import buckets


class CudaDevice:
    """A GPU of the engine, which belongs to the learner rank. Not run on a GPU."""

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        # By this a worker of vLLM finds the handles that are for it.
        self.uuid = str(torch.cuda.get_device_properties(self._device).uuid)

    def share(self, num_bytes: int) -> tuple[torch.Tensor, tuple[object, ...]]:
        """Return a new buffer, uint8, and what a process on this device rebuilds it from."""
        from torch.multiprocessing.reductions import reduce_tensor

        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        # CUDA's handle of the memory: another process opens it, and no byte is copied.
        _, arguments = reduce_tensor(buffer)
        return buffer, arguments

    def synchronize(self) -> None:
        """Wait until all copies to this device are done: readers use streams of their own."""
        torch.cuda.synchronize(self._device)

    def collect(self) -> None:
        """Free shared buffers that nobody refers to any more, here or in the engine."""
        torch.cuda.ipc_collect()


def cuda_devices(tensor_parallel_size: int) -> tuple[CudaDevice, ...]:
    """Return the first GPUs that this process sees, as vLLM gives them to its workers."""
    return tuple(CudaDevice(index) for index in range(tensor_parallel_size))


def packed_buckets(
    weights: ChecksummedWeights, devices: Sequence[CudaDevice]
) -> Generator[dict[str, object]]:
    """Yield the update info of vLLM's packed `ipc` engine for each bucket, the checksums' included.

    Each is valid until the next one is asked for; the buffers are kept until the iterator ends or
    is closed.
    """
    cut = list(buckets(weights.terms.sent, weights.terms.bucket_bytes))
    largest = max(sum(spec.num_bytes for spec in bucket) for bucket in cut)
    # A handle for each parameter would cost one of CUDA's counters in every sync, which torch gives
    # back late or never.
    buffers = []
    handles = {}
    for device in devices:
        buffer, handles[device.uuid] = device.share(largest)
        buffers.append(buffer)
    stream = iter(weights)
    for bucket in cut:
        begin = 0
        for spec in bucket:
            _, tensor = next(stream)
            bytes_N = tensor.detach().reshape(-1).view(torch.uint8)
            for buffer in buffers:
                buffer[begin : begin + spec.num_bytes].copy_(bytes_N, non_blocking=True)
            begin += spec.num_bytes
        for device in devices:
            device.synchronize()
        yield {
            "names": [spec.name for spec in bucket],
            "dtype_names": [spec.dtype for spec in bucket],
            "shapes": [list(spec.shape) for spec in bucket],
            "tensor_sizes": [spec.num_bytes for spec in bucket],
            "ipc_handles": handles,
        }
