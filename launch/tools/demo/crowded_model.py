"""Makes the model of the crowded scenes: the demo's model with a pre-trained vision tower.

From random weights, a run learns the digits' places but not their names: only one token in twenty
belongs to a name, and the gradient of a name reaches the tower through the whole language model. So
the tower is trained first, with labels for every image token: its digit, the distances to the
digit's edges, the token's position, and the box as the model's own coordinate tokens. Linear heads
predict the labels from the inputs of the language model (the tower's output and deepstack
features), and are then discarded. docs/explanation/evidence.md has the figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from launch.tools.demo.model import HIDDEN, MERGE, PATCH, random_model
from launch.tools.demo.once import make_once
from launch.tools.demo.scenes import CROWDED_CANVAS as CANVAS
from launch.tools.demo.scenes import CROWDED_SIZES as SIZES
from launch.tools.demo.scenes import NAMES, SPLITS, Placed, crowded_scenes, draw, load_all_digits
from shared.tokens.vocabulary import NUM_BINS, coord_token

NOTHING = len(NAMES)
"""Label of an image token outside all digits."""
TOKENS = CANVAS // (PATCH * MERGE)
"""Number of image tokens along a side of a scene."""
TEXT_SETTINGS = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [12, 10, 10],
        "mrope_interleaved": True,
    },
}
"""Settings of the language model. Finding one digit among many needs more layers and wider heads
than the demo's model has (docs/explanation/evidence.md)."""
BATCH = 8
"""Scenes per update. The number of updates matters more than this size
(docs/explanation/evidence.md).
"""
LEARNING_RATE = 2e-3
LR_WARMUP_STEPS = 30
MIN_LR_RATIO = 0.05
COORD_WEIGHT = 0.3
COORD_SIGMA = 16.0
"""Standard deviation of a coordinate's target distribution, in bins: 2.6 pixels."""


class DenseLabels(NamedTuple):
    """The labels of a scene's image tokens, in order, for training the vision tower."""

    digit: np.ndarray
    """[TOKENS * TOKENS]: index into `NAMES` of the token's digit, or `NOTHING`."""
    edges: np.ndarray
    """[TOKENS * TOKENS, 4] float32: distances from the token's centre to the digit's left, upper,
    right and lower edge. The unit is the largest digit's side."""


def dense_labels(scene: Sequence[Placed]) -> DenseLabels:
    """Label each image token with the digit that contains it and has the nearest centre."""
    middle_T = (np.arange(TOKENS) + 0.5) * (CANVAS / TOKENS)
    digit = np.full((TOKENS, TOKENS), NOTHING)
    edges = np.zeros((TOKENS, TOKENS, 4), dtype=np.float32)
    nearest = np.full((TOKENS, TOKENS), np.inf)
    for placed in scene:
        if not placed.name:
            continue
        right, bottom = placed.left + placed.size, placed.top + placed.size
        x, y = middle_T[None, :], middle_T[:, None]
        distance = (x - (placed.left + right) / 2) ** 2 + (y - (placed.top + bottom) / 2) ** 2
        is_on = (x >= placed.left) & (x < right) & (y >= placed.top) & (y < bottom)
        is_on &= distance < nearest
        nearest[is_on] = distance[is_on]
        digit[is_on] = NAMES.index(placed.name)
        of_all = np.broadcast_arrays(x - placed.left, y - placed.top, right - x, bottom - y)
        edges[is_on] = np.stack(of_all, axis=-1)[is_on] / max(SIZES)
    return DenseLabels(digit.ravel(), edges.reshape(-1, 4))


def make_crowded_model(
    out: Path,
    *,
    seed: int,
    prompt: str,
    steps: int,
    report: Callable[[str], None],
) -> bool:
    """Train the tower and write the checkpoint of crowded scenes to `out` with `make_once`.

    Return whether the folder is new.

    Args:
        steps: updates of the tower, each with `BATCH` new scenes of training digits; may be 0.
        report: called with lines about the progress.
    """

    def make(folder: Path) -> None:
        model, processor = random_model(seed, prompt, canvas=CANVAS, text_settings=TEXT_SETTINGS)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            first = processor.tokenizer.convert_tokens_to_ids(coord_token(0))
            coord_CD = model.get_input_embeddings().weight[first : first + NUM_BINS].detach()
            tower = model.model.visual
            _teach_tower(tower, processor.image_processor, coord_CD, seed, steps, report)
        model.save_pretrained(folder)
        processor.save_pretrained(folder)

    settings: dict[str, str | int] = {"scenes": "crowded", "seed": seed}
    settings |= {"prompt": prompt, "tower_steps": steps}
    return make_once(out, settings, make)


def _teach_tower(
    tower: nn.Module,
    image_processor: Callable[..., dict[str, torch.Tensor]],
    coord_CD: torch.Tensor,
    seed: int,
    steps: int,
    report: Callable[[str], None],
) -> None:
    head = nn.Linear(HIDDEN, NOTHING + 1 + 4 + 2)
    to_coord_tokens = nn.Linear(HIDDEN, 4 * HIDDEN)
    bin_C = torch.arange(NUM_BINS, dtype=torch.float32)
    middle_T = (torch.arange(TOKENS) + 0.5) / TOKENS
    middle = torch.cartesian_prod(middle_T, middle_T).repeat(BATCH, 1)
    parameters = [*tower.parameters(), *head.parameters(), *to_coord_tokens.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.98))
    train = crowded_scenes(load_all_digits()[SPLITS["train"]], np.random.default_rng([seed, 3]))
    # Most tokens lie outside all digits.
    weight_of_digit = torch.ones(NOTHING + 1)
    weight_of_digit[NOTHING] = 0.5
    for step in range(steps):
        fall = 0.5 * (1.0 + math.cos(math.pi * step / steps))
        rate = min(1.0, (step + 1) / LR_WARMUP_STEPS) * (MIN_LR_RATIO + (1 - MIN_LR_RATIO) * fall)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate
        batch = [next(train) for _ in range(BATCH)]
        labels = [dense_labels(scene) for scene in batch]
        digit = torch.from_numpy(np.concatenate([one.digit for one in labels]))
        edges = torch.from_numpy(np.concatenate([one.edges for one in labels]))
        inputs = image_processor([draw(scene) for scene in batch], return_tensors="pt")
        seen = tower(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
        given = torch.stack([seen.pooler_output, *seen.deepstack_features]).sum(dim=0)
        names, sides, places = head(given).split([NOTHING + 1, 4, 2], dim=1)
        is_on = digit != NOTHING
        side_error = nn.functional.l1_loss(sides[is_on], edges[is_on])
        loss = nn.functional.cross_entropy(names, digit, weight=weight_of_digit) + side_error
        loss += nn.functional.l1_loss(places, middle)
        # Coordinates as in the language model: products with its coordinate tokens.
        logits = to_coord_tokens(given[is_on]).view(-1, 4, HIDDEN) @ coord_CD.T
        outward = torch.tensor([-1.0, -1.0, 1.0, 1.0])
        sides_px = CANVAS * middle[is_on][:, [1, 0, 1, 0]] + max(SIZES) * outward * edges[is_on]
        # A box ends at its last pixel.
        sides_px -= torch.tensor([0.0, 0.0, 1.0, 1.0])
        distance = bin_C - (NUM_BINS - 1) / (CANVAS - 1) * sides_px[..., None]
        target = torch.softmax(-0.5 * (distance / COORD_SIGMA) ** 2, dim=-1)
        loss += COORD_WEIGHT * nn.functional.cross_entropy(
            logits.flatten(0, 1), target.flatten(0, 1)
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0 or step + 1 == steps:
            right = (names[is_on].argmax(dim=1) == digit[is_on]).float().mean()
            report(
                f"tower     {step + 1}/{steps}  names right under {right:.2f} of the tokens,"
                f" edges {max(SIZES) * side_error.item():.1f} pixels off"
            )
