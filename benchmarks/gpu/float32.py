"""Measure float32 errors on a GPU against float64, with default and with full precision.

cuDNN's convolutions use TF32 by default. After `LearnerDevice.use_full_float32` a convolution, a
matrix product and attention must each be within 1e-5 of float64, relative to the largest value.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from benchmarks.gpu.probe import largest_difference, options
from learner.model.ranks import LearnerDevice


def main() -> None:
    arguments = options(__doc__)
    device = arguments.device
    draw = torch.Generator().manual_seed(0)
    size = 64 if arguments.toy else 1024

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).to(device)

    patches = drawn(size, 3, 2, 16, 16)
    kernel = drawn(size, 3, 2, 16, 16)
    left = drawn(size, size)
    right = drawn(size, size)
    query, key, value = (drawn(1, 4, size, 64) for _ in range(3))
    cases: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
        "convolution": (F.conv3d, (patches, kernel)),
        "product": (torch.matmul, (left, right)),
        "attention": (F.scaled_dot_product_attention, (query, key, value)),
    }
    errors: dict[str, list[float]] = {name: [] for name in cases}
    for is_full in (False, True):
        if is_full:
            LearnerDevice(device).use_full_float32()
        for name, (function, tensors) in cases.items():
            exact = function(*(tensor.cpu().double() for tensor in tensors))
            error = largest_difference(function(*tensors).cpu(), exact)
            errors[name].append(error / exact.abs().max().item())
    for name, (default, full) in errors.items():
        print(f"{name:12} relative error by default {default:.1e}, in full {full:.1e}")
        assert full < 1e-5, f"{name} is not computed in float32"


if __name__ == "__main__":
    main()
