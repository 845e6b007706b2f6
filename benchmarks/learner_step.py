"""Compare the learner's step on one packed row with a step that computes all logits at once.

`python -m benchmarks.learner_step` (a small model, CPU) or, on a GPU, `--size 4b --tokens 12000
--device cuda --dtype bfloat16`. The weights are random, and each segment has an image. Both steps
must give the same loss and gradient. Printed are the seconds, their ratio, tokens per second and,
on a GPU, the peak memory. Then a whole step is measured as in a run: some rows and AdamW's update,
in bfloat16 with float32 master weights. Not yet run on a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from benchmarks.logit_memory import FIRST_COORD, PIPELINE, loss_of, plain_values
from benchmarks.segments import ImageIds, random_segment
from learner.collate import PackedRow, collate
from learner.model.attention import attend_by_segments
from learner.model.loading import project_patches_as_matrix
from learner.model.optimizer import Optimizer
from learner.model.ranks import Ranks
from learner.objectives.base import ChannelObjectives
from learner.objectives.coord_math import Normalizer
from learner.objectives.registry import build_objectives
from learner.segments import Segment
from learner.step import train_row
from learner.targets import TextWeights
from shared.config.pipeline import Channel
from shared.config.training import TrainingSection
from shared.tokens.vocabulary import NUM_BINS

IMAGE = 1
VIDEO = 2
START = 3
END = 4
SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "small": (
        {
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "vocab_size": 20_000,
        },
        {
            "hidden_size": 128,
            "intermediate_size": 512,
            "num_heads": 4,
            "depth": 3,
            "out_hidden_size": 256,
            "deepstack_visual_indexes": [0, 1, 2],
        },
    ),
    "4b": (
        {
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 152_936,
        },
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_heads": 16,
            "depth": 24,
            "out_hidden_size": 2560,
            "deepstack_visual_indexes": [5, 11, 17],
        },
    ),
}


def make_model(size: str, device: torch.device, dtype: torch.dtype) -> Any:
    text, vision = SIZES[size]
    half = text["head_dim"] // 2
    section = [half - 2 * (half // 3), half // 3, half // 3]
    config = Qwen3VLConfig(
        text_config=text
        | {
            "max_position_embeddings": 32_768,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": section,
                "mrope_interleaved": True,
            },
        },
        vision_config=vision
        | {
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 2304,
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = Qwen3VLForConditionalGeneration(config)
    torch.set_default_dtype(previous)
    project_patches_as_matrix(model)
    attend_by_segments(model)
    model.gradient_checkpointing_enable()
    return model.train()


def make_segment(number: int, length: int, vocabulary: int) -> Segment:
    """Return a segment of `length` tokens with an image of 8 x 8 merged patches."""
    return random_segment(
        number,
        length,
        image=8,
        image_ids=ImageIds(START, IMAGE, END),
        words=range(2000, vocabulary),
        coord_ids=range(FIRST_COORD, FIRST_COORD + NUM_BINS),
    )


def every_position(model: Any, row: PackedRow, objectives: ChannelObjectives) -> float:
    """Run forward and backward in the simple way, and return the loss.

    It computes the logits of the whole row at once, in float32.
    """
    inputs = row.inputs
    logits_TV = model(
        input_ids=inputs.input_ids,
        position_ids=inputs.position_ids,
        attention_mask=None,
        pixel_values=inputs.pixel_values.to(model.dtype),
        image_grid_thw=inputs.image_grid_thw,
        use_cache=False,
    ).logits[0]
    loss = loss_of(
        plain_values(logits_TV.float()[row.positions_N], row, objectives.coord_ids_C, ()),
        row,
        objectives,
    )
    loss.backward()
    return loss.item()


def measure(
    model: Any, step: Callable[[], float], repeats: int, device: torch.device
) -> tuple[float, float, float, torch.Tensor]:
    """Run a step repeatedly and measure it.

    Return the median seconds, peak bytes, loss, and the gradient of the last layer's norm.
    """
    seconds = []
    for _ in range(repeats + 1):  # the first is a warm-up
        model.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        started = time.perf_counter()
        loss = step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    peak = float(torch.cuda.max_memory_allocated()) if device.type == "cuda" else 0.0
    return (
        statistics.median(seconds[1:]),
        peak,
        loss,
        model.model.language_model.norm.weight.grad.float().clone(),
    )


def measure_update(
    model: Any, row: PackedRow, objectives: ChannelObjectives, arguments: argparse.Namespace
) -> tuple[float, float, float]:
    """Measure whole steps, each of several rows and one optimizer update.

    Return the median seconds of the rows, the median seconds of the update, and the peak bytes.
    """
    config = TrainingSection(seed=0, max_steps=100, learning_rate=1e-6)
    model.zero_grad(set_to_none=True)
    updater = Optimizer(model, config, Ranks())
    if row.positions_N.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    rows_s = []
    update_s = []
    for step in range(arguments.repeats + 1):  # the first one creates the moments
        started = time.perf_counter()
        for _ in range(arguments.rows):
            # reads the loss, so it waits for the device
            train_row(model, row, objectives, Normalizer())
        learned = time.perf_counter()
        updater.update(step, arguments.rows * len(row.segments))
        if row.positions_N.is_cuda:
            torch.cuda.synchronize()
        rows_s.append(learned - started)
        update_s.append(time.perf_counter() - learned)
    peak = float(torch.cuda.max_memory_allocated()) if row.positions_N.is_cuda else 0.0
    return statistics.median(rows_s[1:]), statistics.median(update_s[1:]), peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    parser.add_argument("--tokens", type=int, default=2000, help="length of the row")
    parser.add_argument("--segment", type=int, default=500, help="length of each segment")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, default=4, help="rows of the whole step")
    arguments = parser.parse_args()
    if arguments.tokens < arguments.segment:
        parser.error(
            f"--tokens {arguments.tokens} is less than one segment (--segment {arguments.segment})"
        )
    device = torch.device(arguments.device)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[arguments.dtype]
    model = make_model(arguments.size, device, dtype)
    segments = [
        make_segment(n, arguments.segment, model.config.text_config.vocab_size)
        for n in range(arguments.tokens // arguments.segment)
    ]
    row = collate(
        segments, text_weights=TextWeights(1.0, 1.0), rope_index=model.model.get_rope_index
    ).to(device)
    objectives = build_objectives(
        PIPELINE, Channel.B, torch.arange(FIRST_COORD, FIRST_COORD + NUM_BINS, device=device)
    )
    ours = measure(
        model,
        lambda: train_row(model, row, objectives, Normalizer()).loss,
        arguments.repeats,
        device,
    )
    obvious = measure(
        model, lambda: every_position(model, row, objectives), arguments.repeats, device
    )
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    assert abs(ours[2] - obvious[2]) <= tolerance * abs(obvious[2]), (ours[2], obvious[2])
    assert (ours[3] - obvious[3]).norm() <= 10 * tolerance * obvious[3].norm(), (
        "the gradients differ"
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters / 1e6:.0f} M parameters, {arguments.dtype} on {device}")
    print(
        f"a row of {row.num_tokens} tokens in {len(segments)} segments, {len(row.positions_N)} of"
        " them supervised"
    )
    for name, (seconds, peak, loss, _) in (("learner/step.py", ours), ("every position", obvious)):
        memory = f"  peak {peak / 2**30:.1f} GiB" if peak else ""
        print(
            f"{name:16} {seconds:8.3f} s  {row.num_tokens / seconds:8.0f} tokens/s  loss"
            f" {loss:.5f}{memory}"
        )
    print(f"ratio {obvious[0] / ours[0]:.2f}")
    rows_s, update_s, peak = measure_update(model, row, objectives, arguments)
    tokens_per_s = arguments.rows * row.num_tokens / (rows_s + update_s)
    memory = f"  peak {peak / 2**30:.1f} GiB" if peak else ""
    print(
        f"a step of {arguments.rows} such rows {rows_s:.3f} s, its update {update_s:.3f} s:"
        f" {tokens_per_s:.0f} tokens/s{memory}"
    )
    print(
        f"that is {6 * parameters * tokens_per_s / 1e12:.2f} TFLOP/s of the model, at 6 FLOP per"
        " parameter and token"
    )


if __name__ == "__main__":
    main()
