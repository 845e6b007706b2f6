"""Compare the patch embedding as a matrix product with transformers' `Conv3d`, in bfloat16.

The output must agree with float64, and the gradients with the gradients of the convolution. The
script prints the seconds of a forward and backward of both, or cuDNN's error if the convolution
fails.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from benchmarks.gpu.probe import largest_difference, median_s, options
from learner.model.packed_rows import prepare_vision_tower


def main() -> None:
    arguments = options(__doc__)
    device = arguments.device
    num_patches, width = (64, 128) if arguments.toy else (16_384, 1152)
    torch.manual_seed(0)
    shape = (2, 16, 16)
    plain = nn.Sequential(nn.Conv3d(3, width, kernel_size=shape, stride=shape))
    exact = copy.deepcopy(plain).double()
    plain = plain.to(device, torch.bfloat16)
    ours = copy.deepcopy(plain)
    prepare_vision_tower(ours)
    patches = torch.randn(num_patches, 3, *shape).to(torch.bfloat16)
    inputs = patches.to(device)

    def step(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad(set_to_none=True)
        output = model(inputs)
        output.float().square().mean().backward()
        return output, model[0].weight.grad

    exact.load_state_dict(
        {name: tensor.double().cpu() for name, tensor in plain.state_dict().items()}
    )
    few = min(num_patches, 256)
    expected = exact(patches[:few].double())
    error = largest_difference(step(ours)[0][:few].cpu(), expected)
    relative = error / expected.abs().max().item()
    print(f"{num_patches} patches to {width}: relative error of the product {relative:.1e}")
    assert relative < 1e-2
    ours_s = median_s(lambda: step(ours), device)
    print(f"product     {ours_s:.5f} s forward and backward")
    try:
        plain_s = median_s(lambda: step(plain), device)
    except RuntimeError as error_of_cudnn:  # a possible result of this probe
        print(f"convolution failed: {error_of_cudnn}")
        return
    difference = largest_difference(step(ours)[1], step(plain)[1])
    largest = step(plain)[1].abs().max().item()
    print(f"convolution {plain_s:.5f} s, ratio {plain_s / ours_s:.2f}")
    print(f"largest difference of the gradients {difference / largest:.1e}, relative")
    assert difference < 2e-2 * largest


if __name__ == "__main__":
    main()
