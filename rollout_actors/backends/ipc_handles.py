"""Weight transfer from a learner rank to the vLLM engine on its own GPUs, by shared GPU memory.

Each GPU has one buffer, which is shared once per weight sync. The weights are copied into it in
parts (buckets), one after another, in the format of vLLM's packed `ipc` transport.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch

from shared.weight_sync.checksum import ChecksummedWeights
from shared.weight_sync.offer import buckets


class CudaDevice:
    """A GPU that a learner rank and its engine use together. Not tested on a GPU."""

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        # vLLM's workers find their handles by this id.
        self.uuid = str(torch.cuda.get_device_properties(self._device).uuid)

    def share(self, num_bytes: int) -> tuple[torch.Tensor, tuple[object, ...]]:
        """Return a new uint8 buffer on this GPU, and arguments to open it in another process."""
        from torch.multiprocessing.reductions import reduce_tensor

        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        # CUDA's memory handle: another process on this device opens it without a copy.
        _, arguments = reduce_tensor(buffer)
        return buffer, arguments

    def synchronize(self) -> None:
        """Wait until all copies to this GPU are done, because readers use other CUDA streams."""
        torch.cuda.synchronize(self._device)

    def collect(self) -> None:
        """Free shared buffers that neither this process nor the engine refers to any more."""
        torch.cuda.ipc_collect()


def cuda_devices(tensor_parallel_size: int) -> tuple[CudaDevice, ...]:
    """Return the first `tensor_parallel_size` visible GPUs, which vLLM's workers use too."""
    return tuple(CudaDevice(index) for index in range(tensor_parallel_size))


def packed_buckets(
    weights: ChecksummedWeights, devices: Sequence[CudaDevice]
) -> Generator[dict[str, object]]:
    """Copy the weights bucket by bucket into shared GPU memory, and yield how to read each bucket.

    Each item is the argument of vLLM's weight update for one bucket, valid until the next item is
    requested. The buffers exist until the iterator ends or is closed.
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
