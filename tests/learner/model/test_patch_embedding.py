"""The patch embedding of every family computes the convolution that its checkpoint is of."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from config_support import configuration
from tiny_qwen import TOWERS, make_stock_model
from torch import nn
from transformers import AutoModelForImageTextToText

from launch.tools.demo.model import make_demo_model
from learner.model.loading import load_model
from learner.model.packed_rows import PatchProjection, prepare_vision_tower
from shared.prompts import DEFAULT_USER_PROMPT


@pytest.fixture(scope="module", params=["demo", *TOWERS])
def tower(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The vision tower of one family, as transformers loads it."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "demo":
        make_demo_model(folder / "model", seed=17, prompt=DEFAULT_USER_PROMPT)
    else:
        make_stock_model(folder / "model", request.param)
    return AutoModelForImageTextToText.from_pretrained(folder / "model").model.visual


@pytest.mark.slow
def test_values_and_gradients_are_those_of_the_convolution(tower: Any) -> None:
    changed = copy.deepcopy(tower)
    prepare_vision_tower(changed)
    generator = torch.Generator().manual_seed(0)
    size = tower.patch_embed.proj.weight[0].numel()
    patches_RD = 2 * torch.rand(40, size, generator=generator) - 1
    towards_RE = torch.rand(40, len(tower.patch_embed.proj.weight), generator=generator)
    results = []
    for embed in (tower.patch_embed, changed.patch_embed):
        given_RD = patches_RD.clone().requires_grad_()
        embedded_RE = embed(given_RD)
        # A mean, as a step's loss is: gradients then have the size of the values.
        (embedded_RE * towards_RE).mean().backward()
        gradients = {name: parameter.grad for name, parameter in embed.named_parameters()}
        results.append({"value": embedded_RE, "input": given_RD.grad, **gradients})
    for name, expected in results[0].items():
        largest = expected.abs().max().item()
        torch.testing.assert_close(results[1][name], expected, atol=1e-6 * largest, rtol=0)


def test_parameters_keep_their_names_shapes_and_values(tower: Any) -> None:
    changed = copy.deepcopy(tower)
    prepare_vision_tower(changed)
    assert isinstance(changed.patch_embed.proj, PatchProjection)
    assert list(changed.state_dict()) == list(tower.state_dict())
    for name, value in tower.state_dict().items():
        assert torch.equal(changed.state_dict()[name], value)


def test_a_learner_loads_no_convolution(
    demo_checkpoint: Path, demo_data: Path, tmp_path: Path
) -> None:
    config = configuration(demo_checkpoint, demo_data, tmp_path)
    model = load_model(config, torch.device("cpu")).model
    kinds = {type(module) for module in model.modules() if isinstance(module, nn.Conv3d)}
    assert kinds == {PatchProjection}


def test_a_convolution_whose_patches_overlap_is_not_taken_for_a_patch_embedding() -> None:
    with pytest.raises(AssertionError, match="do not overlap"):
        prepare_vision_tower(nn.Sequential(nn.Conv3d(1, 1, kernel_size=2, stride=1)))
