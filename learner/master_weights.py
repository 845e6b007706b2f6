"""float32 weights and gradients behind a model that computes in fewer bits.

A number in bfloat16 has 8 significant bits: an update of less than 1/512 of a weight is lost when it is added, and so is a row's gradient in the sum of many.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


class MasterWeights:
    """One float32 tensor per parameter, on which the optimizer works; a parameter in float32 is its own.

    After every backward a parameter's gradient is added to its master's, in float32, and dropped.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.masters = [parameter if parameter.dtype is torch.float32 else _master(parameter) for parameter in self.parameters]
        """In the order of `parameters`."""
        self._copies = [(parameter, master) for parameter, master in zip(self.parameters, self.masters, strict=True) if parameter is not master]

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the parameters, to the nearest."""
        if self._copies:
            parameters, masters = zip(*self._copies, strict=True)
            torch._foreach_copy_(parameters, masters)

    def own_masters(self) -> list[torch.Tensor]:
        """Those masters that are no parameters of the model: what a move of the model leaves behind."""
        return [master for _, master in self._copies]

    def move_to(self, device: torch.device) -> None:
        """Take the own masters there, with their gradients so far."""
        for master in self.own_masters():
            # A gradient has to be where its tensor is.
            gradient, master.grad = master.grad, None
            master.data = master.data.to(device)
            master.grad = None if gradient is None else gradient.to(device)


def _master(parameter: nn.Parameter) -> torch.Tensor:
    master = parameter.detach().float()

    def add(parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None, "the hook runs after a gradient was accumulated"
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad.add_(gradient)
        parameter.grad = None

    parameter.register_post_accumulate_grad_hook(add)
    return master
