"""Compare attention by segments with masked attention: values, gradients, time and memory.

It runs in bfloat16 on a GPU, with one flash kernel for all segments, and in float32 on a CPU. The
row has 12,000 tokens in segments of 1,700, and the heads of a 4B model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F

from benchmarks.gpu.probe import largest_difference, median_s, options
from learner.model.attention import RowBorders, segment_attention


class Layer(torch.nn.Module):
    is_causal = True
    num_key_value_groups = 4


def main() -> None:
    arguments = options(__doc__)
    device = arguments.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    num_tokens, longest = (160, 30) if arguments.toy else (12_000, 1_700)
    draw = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn((1, heads, num_tokens, 128), generator=draw).to(device, dtype).requires_grad_()
        for heads in (32, 8, 8)
    )
    segments = RowBorders.of(
        [min(longest, num_tokens - start) for start in range(0, num_tokens, longest)], device
    )
    number = torch.arange(num_tokens, device=device)
    owner = torch.bucketize(number, segments.starts[1:], right=True)
    sees = (owner[:, None] == owner) & (number[:, None] >= number)

    def by_segments() -> torch.Tensor:
        return segment_attention(Layer(), query, key, value, segments)[0].transpose(1, 2)

    def masked() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, sees[None, None], enable_gqa=True)

    def step(attend: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        output = attend()
        gradients = torch.autograd.grad(output.float().square().sum(), (query, key, value))
        return [output.detach(), *gradients]

    results = {}
    for name, attend in (("by segments", by_segments), ("masked", masked)):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = median_s(partial(step, attend), device)
        peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
        results[name] = seconds, step(attend)
        print(f"{name:12} {seconds:.5f} s forward and backward, peak {peak:.2f} GiB", flush=True)
    print(f"ratio {results['masked'][0] / results['by segments'][0]:.2f}")
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5
    pairs = zip(results["by segments"][1], results["masked"][1], strict=True)
    for what, (ours, other) in zip(("output", "dQ", "dK", "dV"), pairs, strict=True):
        relative = largest_difference(ours, other) / other.abs().max().item()
        print(f"{what:6} largest relative difference {relative:.1e}")
        assert relative < tolerance


if __name__ == "__main__":
    main()
