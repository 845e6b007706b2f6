"""Keeps the bytes of vLLM's weight memory that no parameter occupies, while the engine sleeps.

Sleep level 2 discards this memory and restores only the registered buffers, such as the tables of
rotary embeddings. A model may have other tensors there: Qwen3-VL adds `deepstack_input_embeds` (a
list of zeros) to the hidden states of text, and layers with adapters have the adapters' matrices. A
weight sync does not write them. The canary does not notice lost values either, because its own
forward resets the rows of `deepstack_input_embeds` that it reads. Not tested on a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch
from torch import nn

Range = tuple[int, int]
"""Address of the first byte, and address after the last byte."""


class UnsyncedMemory:
    """A copy, in host memory, of the bytes of vLLM's weight memory that no parameter occupies."""

    def __init__(self, model: nn.Module) -> None:
        """Copy the bytes from the engine in this process, whose model is `model`."""
        from vllm.device_allocator import cumem, get_mem_allocator_instance

        torch.accelerator.synchronize()
        self._memcpy = cumem.libcudart.cudaMemcpy
        allocated = [
            (address, address + data.handle[1])
            for address, data in get_mem_allocator_instance().pointer_to_data.items()
            if data.tag == "weights"
        ]
        self._copies: list[tuple[int, torch.Tensor]] = []
        for begin, end in not_parameters(allocated, model.parameters()):
            copy = torch.empty(end - begin, dtype=torch.uint8)
            self._memcpy(copy.data_ptr(), begin, copy.nbytes)
            self._copies.append((begin, copy))

    def restore(self) -> None:
        """Write the copy back to the same addresses."""
        for begin, copy in self._copies:
            self._memcpy(begin, copy.data_ptr(), copy.nbytes)


def not_parameters(allocated: Iterable[Range], parameters: Iterable[torch.Tensor]) -> list[Range]:
    """Return the parts of the allocated memory that no parameter occupies, by rising address.

    Each parameter lies within one allocation. A parameter with gaps between its values counts as
    unoccupied memory.

    Example: of bytes 100 to 120 and a parameter of 8 bytes at 104, (100, 104) and (112, 120).
    """
    taken = deque(
        sorted(
            (parameter.data_ptr(), parameter.data_ptr() + parameter.nbytes)
            for parameter in parameters
            if _is_dense(parameter)
        )
    )
    left = []
    for begin, end in sorted(allocated):
        while taken and taken[0][0] < end:
            first, after = taken.popleft()
            if begin < first:
                left.append((begin, first))
            begin = max(begin, after)
        if begin < end:
            left.append((begin, end))
    return left


def _is_dense(tensor: torch.Tensor) -> bool:
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() == 1 + sum((size - 1) * stride for size, stride in strides)
