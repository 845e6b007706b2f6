"""Compare the learner's step on one packed row with a step that computes all logits at once.

`python -m benchmarks.learner_step` (a small model, CPU) or, on a GPU, `--size 4b --device cuda
--dtype bfloat16`. The weights are random, and each segment has an image. Both steps must give the
same loss and gradient. Printed are the seconds, their ratio, tokens per second, the memory that
`rollmatch preflight` estimates and, on a GPU, the peak of torch's allocator. Then a whole step is
measured as in a run: some rows and AdamW's update, in bfloat16 with float32 master weights. At 4B
it needs more than a GPU of 80 GB has; `--no-update` leaves it out. `--compile` measures compiled
blocks too. Not yet run on a GPU.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from benchmarks.logit_memory import FIRST_COORD, PIPELINE, loss_of, plain_values
from benchmarks.segments import ImageIds, random_segment
from launch.checks.learner_memory import learner_estimate
from launch.checks.memory import CONTEXT, Estimate
from launch.checks.model_shape import ModelShape, RunSizes, VisionShape
from learner.collate import PackedRow, collate
from learner.host_memory import in_gib
from learner.model.attention import attend_by_segments, packed_row
from learner.model.compiled_blocks import compile_blocks
from learner.model.optimizer.adamw import Optimizer
from learner.model.packed_rows import prepare_vision_tower
from learner.model.ranks import Ranks
from learner.objectives.base import ChannelObjectives
from learner.objectives.coord_math import Normalizer
from learner.objectives.registry import build_objectives
from learner.segments import Segment
from learner.step import train_row
from learner.targets import TextWeights
from shared.config.model import ModelSection
from shared.config.pipeline import Channel
from shared.config.rollout import RolloutMatchingSection
from shared.config.training import LearnerSection, TrainingSection
from shared.tokens.vocabulary import NUM_BINS
from shared.weight_sync.transports import Device

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

ROWS = {"small": (2_000, 500, 64), "4b": (12_000, 1_700, 1_024)}
"""Defaults by size: tokens of a row, of each segment, and of each segment's image."""
LEAST_TEXT = 100
"""Tokens that a segment must have in addition to its image: its prompt, and some to learn."""
TRAINING = TrainingSection(seed=0, max_steps=100, learning_rate=1e-6)


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
    prepare_vision_tower(model)
    attend_by_segments(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def make_segment(number: int, length: int, vocabulary: int, image: int = 64) -> Segment:
    """Return a segment of `length` tokens, `image` of them (a square number) of its image."""
    return random_segment(
        number,
        length,
        image=math.isqrt(image),
        image_ids=ImageIds(START, IMAGE, END),
        words=range(2000, vocabulary),
        coord_ids=range(FIRST_COORD, FIRST_COORD + NUM_BINS),
    )


def every_position(model: Any, row: PackedRow, objectives: ChannelObjectives) -> float:
    """Run forward and backward in the simple way, and return the loss.

    It computes the logits of the whole row at once, in float32.
    """
    inputs = row.inputs
    with packed_row(row.lengths):
        logits_TV = model(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            attention_mask=None,
            **inputs.image_arguments(model.dtype),
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


def require_same(
    found: tuple[float, float, float, torch.Tensor],
    expected: tuple[float, float, float, torch.Tensor],
    dtype: torch.dtype,
) -> None:
    """Check that two results of `measure` have the same loss and gradient."""
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    assert abs(found[2] - expected[2]) <= tolerance * abs(expected[2]), (found[2], expected[2])
    assert (found[3] - expected[3]).norm() <= 10 * tolerance * expected[3].norm(), (
        "the gradients differ"
    )


def measure_update(
    model: Any, row: PackedRow, objectives: ChannelObjectives, arguments: argparse.Namespace
) -> tuple[float, float, float]:
    """Measure whole steps, each of several rows and one optimizer update.

    Return the median seconds of the rows, the median seconds of the update, and the peak bytes.
    """
    model.zero_grad(set_to_none=True)
    updater = Optimizer(model, TRAINING, Ranks())
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


def shape_of(model: Any) -> ModelShape:
    """Return what `ModelShape.read` reads from the model's checkpoint."""
    text = model.config.text_config
    vision = model.config.vision_config
    return ModelShape(
        {name: tuple(parameter.shape) for name, parameter in model.named_parameters()},
        hidden=text.hidden_size,
        layers=text.num_hidden_layers,
        intermediate=text.intermediate_size,
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        head_dim=text.head_dim,
        vocabulary=text.vocab_size,
        vision=VisionShape(
            vision.hidden_size, vision.depth, vision.intermediate_size, vision.spatial_merge_size**2
        ),
    )


def estimate_memory(model: Any, row: PackedRow, *, updates: bool) -> Estimate:
    """Return the preflight's estimate of what torch allocates to learn the row.

    `updates`: for a whole step with an update; else for the row's forward and backward only.
    """
    dtype = "bfloat16" if model.dtype is torch.bfloat16 else "float32"
    run = RunSizes(
        shape_of(model),
        ModelSection(path="random", dtype=dtype, gradient_checkpointing=True),
        TRAINING,
        LearnerSection(),
        RolloutMatchingSection(pipeline=PIPELINE),
        row.num_tokens,
        siblings=1,
        adapted_parts=(),
        num_fresh_tokens=0,
        may_send_full=False,
    )
    images = int((row.inputs.input_ids == IMAGE).sum())
    estimate = learner_estimate(run, Device(row.positions_N.device.type), image_tokens=images)
    # torch's allocator does not count the context.
    parts = dict(estimate.parts) | {CONTEXT: 0}
    if not updates:
        # The rows' gradients are in the model's own number type.
        gradients = run.num_trainable * run.size
        parts |= {"gradients": gradients, "master weights": 0, "optimizer": 0}
    return Estimate(estimate.what, parts)


def memory_text(peak: float, estimate: Estimate | None) -> str:
    """Return the measured peak, if there is one, and the estimate."""
    measured = f"  peak {in_gib(int(peak))}" if peak else ""
    return measured + ("" if estimate is None else f"  estimated {in_gib(estimate.total)}")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    parser.add_argument("--tokens", type=int, help="length of the row")
    parser.add_argument("--segment", type=int, help="length of each segment")
    parser.add_argument("--image", type=int, help="tokens of each segment's image, a square number")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, default=4, help="rows of the whole step")
    parser.add_argument("--no-update", action="store_true", help="measure no whole step")
    parser.add_argument("--compile", action="store_true", help="compare with compiled blocks too")
    arguments = parser.parse_args()
    for name, value in zip(("tokens", "segment", "image"), ROWS[arguments.size], strict=True):
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    if arguments.tokens < arguments.segment:
        parser.error(
            f"--tokens {arguments.tokens} is less than one segment (--segment {arguments.segment})"
        )
    if math.isqrt(arguments.image) ** 2 != arguments.image:
        parser.error(f"--image {arguments.image} is not a square number, such as 64 or 1024")
    if arguments.segment < arguments.image + LEAST_TEXT:
        parser.error(
            f"--segment {arguments.segment} has no room for --image {arguments.image} and"
            f" {LEAST_TEXT} tokens of text; lower --image or raise --segment"
        )
    return arguments


def main() -> None:
    arguments = read_options()
    device = torch.device(arguments.device)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[arguments.dtype]
    model = make_model(arguments.size, device, dtype)
    segments = [
        make_segment(n, arguments.segment, model.config.text_config.vocab_size, arguments.image)
        for n in range(arguments.tokens // arguments.segment)
    ]
    row = collate(
        segments, text_weights=TextWeights(1.0, 1.0), rope_index=model.model.get_rope_index
    ).to(device)
    objectives = build_objectives(
        PIPELINE, Channel.B, torch.arange(FIRST_COORD, FIRST_COORD + NUM_BINS, device=device)
    )

    def learn() -> float:
        return train_row(model, row, objectives, Normalizer()).loss

    ours = measure(model, learn, arguments.repeats, device)
    obvious = measure(
        model, lambda: every_position(model, row, objectives), arguments.repeats, device
    )
    require_same(ours, obvious, dtype)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters / 1e6:.0f} M parameters, {arguments.dtype} on {device}")
    print(
        f"a row of {row.num_tokens} tokens in {len(segments)} segments, {len(row.positions_N)} of"
        f" them supervised, each segment with an image of {arguments.image} tokens"
    )
    of_row = estimate_memory(model, row, updates=False)
    measured = (("learner/step.py", ours, of_row), ("every position", obvious, None))
    for name, (seconds, peak, loss, _), estimate in measured:
        print(
            f"{name:16} {seconds:8.3f} s  {row.num_tokens / seconds:8.0f} tokens/s  loss"
            f" {loss:.5f}{memory_text(peak, estimate)}"
        )
    print(f"ratio {obvious[0] / ours[0]:.2f}")
    tokens_per_s = row.num_tokens / ours[0]
    if arguments.compile:
        compile_blocks(model)
        compiled = measure(model, learn, arguments.repeats, device)
        require_same(compiled, ours, dtype)
        memory = memory_text(compiled[1], None)
        print(f"compiled blocks: {compiled[0]:.3f} s, ratio {ours[0] / compiled[0]:.2f}{memory}")
    if not arguments.no_update:
        rows_s, update_s, peak = measure_update(model, row, objectives, arguments)
        tokens_per_s = arguments.rows * row.num_tokens / (rows_s + update_s)
        print(
            f"a step of {arguments.rows} such rows {rows_s:.3f} s, its update {update_s:.3f} s:"
            f" {tokens_per_s:.0f} tokens/s"
            f"{memory_text(peak, estimate_memory(model, row, updates=True))}"
        )
    print(
        f"that is {6 * parameters * tokens_per_s / 1e12:.2f} TFLOP/s of the model, at 6 FLOP per"
        " parameter and token"
    )


if __name__ == "__main__":
    main()
