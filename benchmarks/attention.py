"""Compare attention by segments with masked attention on the same packed row.

`python -m benchmarks.attention` (CPU, float32): one row, cut into more and more segments. Mask and
borders are made as in transformers. Then only the attention of some layers runs, forward and
backward. Outputs and gradients of both versions must agree. The script prints the fastest time of
each version (they alternate), their ratio (masked / by segments), and how much each raises the
peak resident set in a separate process.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AttentionInterface, Qwen3Config
from transformers.masking_utils import create_causal_mask

from benchmarks.logit_memory import peak_bytes
from learner.model.attention import (
    SEGMENT_ATTENTION,
    RowBorders,
    packed_row,
    register_segment_attention,
)

MASKED = "sdpa"
HEADS = 8
KV_HEADS = 2
HEAD_DIM = 64


class Case:
    """A packed row to measure: `num_tokens` in `num_segments` segments of nearly equal length."""

    def __init__(self, num_tokens: int, num_segments: int, num_layers: int) -> None:
        draw = torch.Generator().manual_seed(0)
        ends = torch.arange(1, num_segments + 1) * num_tokens // num_segments
        self.lengths = ends.diff(prepend=torch.zeros(1, dtype=torch.int64)).tolist()
        self.position_ids = torch.cat([torch.arange(length) for length in self.lengths])[None]
        heads = (HEADS, KV_HEADS, KV_HEADS)
        shapes = [(1, number, num_tokens, HEAD_DIM) for number in heads]
        self.layers = []
        for _ in range(num_layers):
            layer = [torch.randn(shape, generator=draw) for shape in shapes]
            self.layers.append([tensor.requires_grad_() for tensor in layer])

    def run(self, attention: str) -> list[torch.Tensor]:
        """Run forward and backward; return the layers' outputs and their inputs' gradients."""
        config = Qwen3Config(num_attention_heads=HEADS, num_key_value_heads=KV_HEADS)
        config._attn_implementation = attention
        with packed_row(self.lengths):
            mask = create_causal_mask(
                config,
                inputs_embeds=torch.empty(1, self.position_ids.shape[1], 1),
                attention_mask=None,
                past_key_values=None,
                position_ids=self.position_ids,
            )
        is_by_segments = attention == SEGMENT_ATTENTION and len(self.lengths) > 1
        assert isinstance(mask, RowBorders) == is_by_segments, type(mask)
        layer: Any = SimpleNamespace(is_causal=True, num_key_value_groups=HEADS // KV_HEADS)
        attend = AttentionInterface()[attention]
        outputs = [
            attend(layer, *inputs, mask, scaling=HEAD_DIM**-0.5)[0] for inputs in self.layers
        ]
        inputs = [tensor for layer in self.layers for tensor in layer]
        gradients = torch.autograd.grad([output.square().sum() for output in outputs], inputs)
        return [*(output.detach() for output in outputs), *gradients]


def measured_s(case: Case, repeats: int) -> tuple[float, float]:
    """Return the fastest seconds of masked attention and of attention by segments.

    Their results must agree.
    """
    seconds: dict[str, list[float]] = {MASKED: [], SEGMENT_ATTENTION: []}
    results = {}
    for _ in range(repeats + 1):  # the first is a warm-up
        for attention, taken in seconds.items():
            started = time.perf_counter()
            results[attention] = case.run(attention)
            taken.append(time.perf_counter() - started)
    for ours, masked in zip(results[SEGMENT_ATTENTION], results[MASKED], strict=True):
        torch.testing.assert_close(ours, masked, atol=1e-5, rtol=1e-5)
    masked_s, by_segments_s = (min(taken[1:]) for taken in seconds.values())
    return masked_s, by_segments_s


def measured_bytes(attention: str, *sizes: int) -> int:
    """Return the peak memory of one kind of attention in bytes, measured in a separate process."""
    arguments = [*map(str, ("--tokens", sizes[0], "--segments", sizes[1], "--layers", sizes[2]))]
    command = [sys.executable, "-m", "benchmarks.attention", *arguments, "--peak-of", attention]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048, help="length of the row")
    parser.add_argument("--segments", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--peak-of", choices=[MASKED, SEGMENT_ATTENTION], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    register_segment_attention()
    if arguments.peak_of is not None:
        Case(64, 2, 1).run(arguments.peak_of)  # so torch's first-use memory is not counted
        case = Case(arguments.tokens, arguments.segments[0], arguments.layers)
        print(peak_bytes(lambda: case.run(arguments.peak_of)))
        return
    print(
        f"{arguments.layers} layers over a row of {arguments.tokens} tokens, {HEADS} heads and "
        f"{KV_HEADS} of keys and values, {HEAD_DIM} wide, float32, "
        f"{torch.get_num_threads()} threads"
    )
    print("segments  masked s    ours s  ratio  masked MB  ours MB")
    for num_segments in arguments.segments:
        sizes = arguments.tokens, num_segments, arguments.layers
        masked_s, ours_s = measured_s(Case(*sizes), arguments.repeats)
        masked, ours = (measured_bytes(one, *sizes) / 1e6 for one in (MASKED, SEGMENT_ATTENTION))
        times = f"{masked_s:9.3f} {ours_s:9.3f} {masked_s / ours_s:6.2f}"
        print(f"{num_segments:8} {times} {masked:10.0f} {ours:8.0f}", flush=True)


if __name__ == "__main__":
    main()
