"""What `benchmarks.learner_step` takes as sizes, and the memory that it says a step should take."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.learner_step import (
    estimate_memory,
    make_model,
    make_segment,
    read_options,
    shape_of,
)
from launch.checks.model_shape import ModelShape
from learner.collate import PackedRow, collate
from learner.targets import TextWeights

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")


def options(monkeypatch: pytest.MonkeyPatch, text: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["learner_step", *text.split()])
    return read_options()


def test_at_4b_a_row_has_seven_segments_with_images_of_1024_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = options(monkeypatch, "--size 4b")
    assert (found.tokens, found.segment, found.image) == (12_000, 1_700, 1_024)
    found = options(monkeypatch, "--image 256 --no-update")
    assert (found.segment, found.image, found.no_update) == (500, 256, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--image 63", "--image 63 is not a square number"),
        ("--image 1024", "--segment 500 has no room for --image 1024"),
        ("--tokens 400", "--tokens 400 is less than one segment"),
    ],
)
def test_sizes_that_do_not_fit_each_other_are_refused(
    text: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    with pytest.raises(SystemExit):
        options(monkeypatch, text)
    assert message in capsys.readouterr().err


def row_of(model: Any, image: int) -> PackedRow:
    segments = [make_segment(number, 400, 20_000, image) for number in range(2)]
    rope = model.model.get_rope_index
    return collate(segments, text_weights=TextWeights(1.0, 1.0), rope_index=rope)


def test_the_estimate_is_of_the_model_that_a_preflight_would_read(tmp_path: Path) -> None:
    model = make_model("small", CPU, torch.bfloat16)
    model.save_pretrained(tmp_path)
    assert shape_of(model) == ModelShape.read(tmp_path)


@pytest.mark.parametrize(("dtype", "of_update"), [(torch.float32, 8), (torch.bfloat16, 14)])
def test_an_update_adds_moments_masters_and_float32_gradients_and_an_image_its_patches(
    dtype: torch.dtype, of_update: int
) -> None:
    model = make_model("small", CPU, dtype)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    totals = {
        (image, updates): estimate_memory(model, row_of(model, image), updates=updates).total
        for image in (64, 256)
        for updates in (False, True)
    }
    for image in (64, 256):
        assert totals[image, True] - totals[image, False] == of_update * num_parameters
    assert totals[256, True] > totals[64, True]
