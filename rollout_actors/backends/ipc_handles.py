"""Weight transfer on GPUs to the engine of the learner's process, by vLLM's packed IPC.

Each GPU has one buffer, which is shared once per sync. The buckets are copied to it in turn.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch

from shared.weight_sync.checksum import ChecksummedWeights
from shared.weight_sync.offer import buckets


class CudaDevice:
    """A GPU of the engine, which belongs to the learner rank. Not tested on a GPU."""

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        # vLLM's workers find their handles by this id.
        self.uuid = str(torch.cuda.get_device_properties(self._device).uuid)

    def share(self, num_bytes: int) -> tuple[torch.Tensor, tuple[object, ...]]:
        """Return a new uint8 buffer, and the arguments to open it in another process."""
        from torch.multiprocessing.reductions import reduce_tensor

        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        # CUDA's memory handle: another process on this device opens it without a copy.
        _, arguments = reduce_tensor(buffer)
        return buffer, arguments

    def synchronize(self) -> None:
        """Wait for all copies to this device, because readers use other streams."""
        torch.cuda.synchronize(self._device)

    def collect(self) -> None:
        """Free shared buffers that have no references left, here and in the engine."""
        torch.cuda.ipc_collect()


def cuda_devices(tensor_parallel_size: int) -> tuple[CudaDevice, ...]:
    """Return the first visible GPUs. vLLM assigns the same ones to its workers."""
    return tuple(CudaDevice(index) for index in range(tensor_parallel_size))


def packed_buckets(
    weights: ChecksummedWeights, devices: Sequence[CudaDevice]
) -> Generator[dict[str, object]]:
    """Yield the update info of vLLM's packed `ipc` engine for each bucket, including checksums.

    Each is valid until the next one is requested. The buffers exist until the iterator ends or is
    closed.
    """
    cut = list(buckets(weights.terms.sent, weights.terms.bucket_bytes))
    largest = max(sum(spec.num_bytes for spec in bucket) for bucket in cut)
    # A handle per parameter would use up one of CUDA's counters in every sync, and torch returns
    # them late or never.
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
