"""The patch embedding of a vision tower, computed as the one matrix product that it is.

transformers writes it as a `Conv3d` over patches that do not overlap. cuDNN has no usable bfloat16
backward for that convolution, and computes it slowly where it does.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class PatchProjection(nn.Conv3d):
    """A `Conv3d` whose input is one kernel in size. Parameters and their names stay as they are."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Project patches [R, C, T, H, W] of the kernel's size to [R, E, 1, 1, 1]."""
        projected_RE = F.linear(input.flatten(1), self.weight.flatten(1), self.bias)
        return projected_RE[:, :, None, None, None]


def project_patches_as_matrix(model: nn.Module) -> None:
    """Exchange, in place, the forward of every patch embedding in `model`; there may be none."""
    for module in model.modules():
        if type(module) is nn.Conv3d:
            # A patch embedding is given patches of the kernel's size, so it must cut none itself.
            assert module.stride == module.kernel_size, "a patch embedding's patches do not overlap"
            # The class and not the attribute `forward`, so that copies of the model are right too.
            module.__class__ = PatchProjection
