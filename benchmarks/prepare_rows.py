"""The gain of preparing the next rows while the device works: segments made between, and beside.

`python -m benchmarks.prepare_rows [--device 0.6] [--samples 24]`. Prompts with a picture of one
megapixel are encoded, and rollouts of 60 boxes parsed, matched and completed, as a channel-B step
does it, with the demo's tokenizer. The device is a sleep for every row of four segments, which
takes no processor from the rest, as a GPU does; engines generate for one row's time. Both ways in
turn, and their segments must have the same bits.
"""

from __future__ import annotations

import argparse
import io
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from PIL import Image
from transformers import Qwen2VLImageProcessor

from launch.cli import CONF, as_mapping, as_schema_overrides
from launch.tools.demo.model import make_demo_model
from learner.algorithms.base import Ahead
from learner.algorithms.matched_targets import ground_truth_target
from learner.algorithms.rollout_matching import RolloutMatchingStep
from learner.model.loading import load_tokens
from learner.segments import PromptEncoder, Segment
from learner.targets import target_settings
from shared.config import load_config
from shared.config.pipeline import Channel
from shared.prompts import DEFAULT_USER_PROMPT
from shared.records import GeometryKind, GroundTruthObject, ImageRef, Sample
from shared.rollouts import FinishReason, Rollout
from shared.schedule import StepPlan

WIDTH = 1152
HEIGHT = 896
PER_ROW = 4
NUM_BOXES = 60


def make_sample(number: int) -> Sample:
    draw = np.random.default_rng(number)
    encoded = io.BytesIO()
    pixels = np.linspace(0, 200, WIDTH)[None, :, None] + draw.integers(0, 55, (HEIGHT, WIDTH, 3))
    Image.fromarray(pixels.astype(np.uint8)).save(encoded, format="JPEG", quality=85)
    tops = np.sort(draw.choice(900, NUM_BOXES, replace=False)).tolist()
    objects = tuple(
        GroundTruthObject(GeometryKind.BBOX, (100, top, 400, top + 60), "zero") for top in tops
    )
    return Sample(
        f"s{number}", (ImageRef(None, encoded.getvalue(), str(number)),), WIDTH, HEIGHT, objects
    )


def make_rollout(position: int, prompt: Sequence[int], response: Sequence[int]) -> Rollout:
    return Rollout(
        0,
        position,
        f"s{position}",
        tuple(prompt),
        tuple(response),
        None,
        None,
        None,
        FinishReason.LENGTH,
        (),
        0,
        "nobody",
        0,
        0,
        0.0,
    )


class Between:
    """Everything is made when it is asked for: the way without `Ahead`."""

    map = staticmethod(map)


def run_step(
    way: Any, work: dict[str, Any], samples: list[Sample], rollouts: list[Rollout], device_s: float
) -> tuple[float, list[Segment]]:
    """(seconds from the answers to the last row, the segments) of a step."""
    step = RolloutMatchingStep(
        SimpleNamespace(**work, ahead=way),
        StepPlan(0, Channel.B, len(samples), 0, False, False),
        range(len(samples)),
        samples,
        Mock(),
    )
    time.sleep(device_s)  # engines generate
    started_s = time.perf_counter()
    segments = []
    for segment in step.segments(rollouts, version=0):
        segments.append(segment)
        if len(segments) % PER_ROW == 0:
            time.sleep(device_s)
    return time.perf_counter() - started_s, segments


def require_same(ours: list[Segment], theirs: list[Segment]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.prompt.token_ids == b.prompt.token_ids, "other prompts"
        assert torch.equal(a.prompt.pixel_values_RD, b.prompt.pixel_values_RD), "other pixels"
        assert (a.target.token_ids, a.target.coord_targets) == (
            b.target.token_ids,
            b.target.coord_targets,
        ), "other targets"
        assert np.array_equal(a.target.roles, b.target.roles), "other roles"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", type=float, default=0.6, help="seconds of a row of four segments"
    )
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        make_demo_model(model, seed=17, prompt=DEFAULT_USER_PROMPT)
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = load_config(
                as_mapping(
                    compose(
                        "train",
                        as_schema_overrides(["+experiment=stage2_3v1", f"model.path={model}"]),
                    )
                )
            )
        tokens = load_tokens(config)
    # The demo's own limits are those of its small pictures.
    tokens.processor.image_processor = Qwen2VLImageProcessor(
        patch_size=16, merge_size=2, min_pixels=65_536, max_pixels=2_000_000
    )
    encoder = PromptEncoder(tokens.processor, config.prompts)
    work = {
        "config": config,
        "tokens": tokens,
        "encoder": encoder,
        "settings": target_settings(config),
        "log": None,
    }
    samples = [make_sample(number) for number in range(arguments.samples)]
    prompt = encoder.encode(samples[0]).token_ids
    texts = [
        ground_truth_target(sample, tokens.codec, work["settings"]).token_ids for sample in samples
    ]
    rollouts = [
        make_rollout(position, prompt, text[: len(text) * 3 // 4])
        for position, text in enumerate(texts)
    ]
    seconds: dict[str, list[float]] = {"between": [], "beside": []}
    beside = Ahead()
    for _ in range(arguments.repeats):
        between_s, expected = run_step(Between, work, samples, rollouts, arguments.device)
        beside_s, segments = run_step(beside, work, samples, rollouts, arguments.device)
        require_same(segments, expected)
        seconds["between"].append(between_s)
        seconds["beside"].append(beside_s)
    beside.close()
    device_s = arguments.device * (arguments.samples // PER_ROW)
    print(
        f"{arguments.samples} samples of {WIDTH} x {HEIGHT}, {len(prompt)} prompt tokens,"
        f" {len(texts[0])} of ground truth; device {device_s:.2f} s a step"
    )
    for name, values in seconds.items():
        median = statistics.median(values)
        print(
            f"{name:8} {median:6.2f} s  over the device's time {median - device_s:6.2f} s "
            f" ({min(values):.2f} to {max(values):.2f})"
        )
    ratios = [
        between / beside
        for between, beside in zip(seconds["between"], seconds["beside"], strict=True)
    ]
    print(
        f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}). Both ways"
        " gave the same segments."
    )


if __name__ == "__main__":
    main()
