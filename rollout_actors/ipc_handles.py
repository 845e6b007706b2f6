"""What a process on the same GPU opens this one's tensors with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def ipc_handles(tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[list[dict[str, tuple[Any, ...]]], list[torch.Tensor]]:
    """One handle per tensor, as vLLM's `ipc` engine takes it, and the tensors, to be kept until the engine is done. Not run on a GPU."""
    from torch.multiprocessing.reductions import reduce_tensor

    handles, kept = [], []
    for _, tensor in tensors:
        shared = tensor.detach().contiguous()
        uuid = str(torch.cuda.get_device_properties(shared.device).uuid)
        _, arguments = reduce_tensor(shared)
        handles.append({uuid: arguments})
        kept.append(shared)
    # The engine reads on a stream of its own: what was computed here has to be there.
    torch.cuda.synchronize()
    return handles, kept
