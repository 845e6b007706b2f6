"""What the processes of an engine open the learner's weights with, each on its own GPU (CUDA's shared memory is of one GPU)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch


class SharingDevice(Protocol):
    """A GPU of the engine. All of them belong to the learner rank, whose own is among them."""

    uuid: str
    """By which a worker of vLLM knows the handles that are for it."""

    def share(self, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[Any, ...]]:
        """The tensor on this device, copied where it lies on another one, and what a process on this device rebuilds it from."""
        ...

    def synchronize(self) -> None:
        """Wait until everything that is shared is there: whoever reads it does so on a stream of its own."""
        ...


class CudaDevice:
    """Not run on a GPU."""

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        self.uuid = str(torch.cuda.get_device_properties(self._device).uuid)

    def share(self, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[Any, ...]]:
        from torch.multiprocessing.reductions import reduce_tensor

        here = tensor.detach().to(self._device, non_blocking=True).contiguous()
        _, arguments = reduce_tensor(here)
        return here, arguments

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


def cuda_devices(tensor_parallel_size: int) -> tuple[SharingDevice, ...]:
    """The GPUs of an engine beside the learner: the first of those that this process sees, as vLLM gives them to its workers."""
    return tuple(CudaDevice(index) for index in range(tensor_parallel_size))


def ipc_handles(tensors: Iterable[tuple[str, torch.Tensor]], devices: Sequence[SharingDevice]) -> tuple[list[dict[str, tuple[Any, ...]]], list[torch.Tensor]]:
    """For each tensor one handle per device, by the device's UUID, as every worker of vLLM's `ipc` engine looks for its own; and what is to be kept.

    The tensors have to be kept until the engine has finished its update, because its loader holds on to them until a layer is complete: on the learner's
    own device they are its parameters, on every other one a copy of all of them.
    """
    handles, kept = [], []
    for _, tensor in tensors:
        shared = {device.uuid: device.share(tensor) for device in devices}
        handles.append({uuid: arguments for uuid, (_, arguments) in shared.items()})
        kept += [here for here, _ in shared.values()]
    for device in devices:
        device.synchronize()
    return handles, kept
