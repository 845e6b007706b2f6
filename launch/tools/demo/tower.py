"""Trains the vision tower of a random model on labels for every image token.

From random weights, a run learns the objects' places but not their names: only one token in twenty
belongs to a name, and the gradient of a name reaches the tower through the whole language model. So
the tower is trained first, with labels for every image token: the name of its object, the distances
to the object's edges, the token's position, and the box as the model's own coordinate tokens.
Linear heads predict the labels from the inputs of the language model (the tower's output and
deepstack features), and are then discarded. docs/explanation/evidence.md has the figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import nn

from launch.tools.demo.model import HIDDEN, MERGE
from shared.tokens.vocabulary import NUM_BINS

BATCH = 8
"""Images per update. The number of updates matters more than this size
(docs/explanation/evidence.md).
"""
LEARNING_RATE = 2e-3
LR_WARMUP_STEPS = 30
MIN_LR_RATIO = 0.05
COORD_WEIGHT = 0.3
COORD_SIGMA = 16.0
"""Standard deviation of a coordinate's target distribution, in bins."""
UNIT = 0.3
"""The unit of distances to edges, as a fraction of the image's width: the largest digit's side."""


class LabelledBox(NamedTuple):
    """An object at `[left, right) x [top, bottom)`, in pixels of its image."""

    left: float
    top: float
    right: float
    bottom: float
    name: int
    """Index of the object's name."""


class LabelledImage(NamedTuple):
    image: Image.Image
    boxes: Sequence[LabelledBox]


class DenseLabels(NamedTuple):
    """The labels of an image's T tokens, row by row."""

    name: np.ndarray
    """[T]: index of the name of the token's object, or -1 outside of all objects."""
    edges: np.ndarray
    """[T, 4] float32: distances from the token's centre to the object's left, upper, right and
    lower edge. The unit is `UNIT` of the image's width."""


def dense_labels(
    boxes: Sequence[LabelledBox], size: tuple[int, int], tokens: tuple[int, int]
) -> DenseLabels:
    """Label each image token with the object that contains it and has the nearest centre.

    Args:
        size: width and height of the image, in pixels.
        tokens: number of image tokens along the width and along the height.
    """
    x = ((np.arange(tokens[0]) + 0.5) * (size[0] / tokens[0]))[None, :]
    y = ((np.arange(tokens[1]) + 0.5) * (size[1] / tokens[1]))[:, None]
    shape = tokens[1], tokens[0]
    name = np.full(shape, -1)
    edges = np.zeros((*shape, 4), dtype=np.float32)
    nearest = np.full(shape, np.inf)
    for box in boxes:
        distance = (x - (box.left + box.right) / 2) ** 2 + (y - (box.top + box.bottom) / 2) ** 2
        is_on = (x >= box.left) & (x < box.right) & (y >= box.top) & (y < box.bottom)
        is_on &= distance < nearest
        nearest[is_on] = distance[is_on]
        name[is_on] = box.name
        of_all = np.broadcast_arrays(x - box.left, y - box.top, box.right - x, box.bottom - y)
        edges[is_on] = np.stack(of_all, axis=-1)[is_on] / (UNIT * size[0])
    return DenseLabels(name.ravel(), edges.reshape(-1, 4))


def teach_tower(
    tower: nn.Module,
    image_processor: Callable[..., dict[str, torch.Tensor]],
    coord_CD: torch.Tensor,
    images: Iterator[LabelledImage],
    *,
    num_names: int,
    steps: int,
    report: Callable[[str], None],
) -> None:
    """Train the tower in place, by AdamW with a cosine schedule.

    Args:
        coord_CD: embeddings of the model's coordinate tokens.
        images: endless; each update takes `BATCH`.
        report: called with lines about the progress.
    """
    head = nn.Linear(HIDDEN, num_names + 1 + 4 + 2)
    to_coord_tokens = nn.Linear(HIDDEN, 4 * HIDDEN)
    bin_C = torch.arange(NUM_BINS, dtype=torch.float32)
    parameters = [*tower.parameters(), *head.parameters(), *to_coord_tokens.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.98))
    # Most tokens lie outside all objects.
    weight_of_name = torch.ones(num_names + 1)
    weight_of_name[num_names] = 0.5
    for step in range(steps):
        fall = 0.5 * (1.0 + math.cos(math.pi * step / steps))
        rate = min(1.0, (step + 1) / LR_WARMUP_STEPS) * (MIN_LR_RATIO + (1 - MIN_LR_RATIO) * fall)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate
        batch = [next(images) for _ in range(BATCH)]
        inputs = image_processor([one.image for one in batch], return_tensors="pt")
        labels, middles, extents = [], [], []
        for one, (_, rows, columns) in zip(batch, inputs["image_grid_thw"].tolist(), strict=True):
            width, height = columns // MERGE, rows // MERGE
            labels.append(dense_labels(one.boxes, one.image.size, (width, height)))
            middle_x, middle_y = ((torch.arange(count) + 0.5) / count for count in (width, height))
            middles.append(torch.cartesian_prod(middle_y, middle_x))
            extent = np.array(one.image.size * 2, dtype=np.float64)
            extents.append(np.broadcast_to(extent, (width * height, 4)))
        name = torch.from_numpy(np.concatenate([one.name for one in labels]))
        edges = torch.from_numpy(np.concatenate([one.edges for one in labels]))
        middle = torch.cat(middles)
        seen = tower(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
        given = torch.stack([seen.pooler_output, *seen.deepstack_features]).sum(dim=0)
        names, sides, places = head(given).split([num_names + 1, 4, 2], dim=1)
        is_on = name >= 0
        name[~is_on] = num_names
        side_error = nn.functional.l1_loss(sides[is_on], edges[is_on])
        loss = nn.functional.cross_entropy(names, name, weight=weight_of_name) + side_error
        loss += nn.functional.l1_loss(places, middle)
        # Coordinates as in the language model: products with its coordinate tokens.
        logits = to_coord_tokens(given[is_on]).view(-1, 4, HIDDEN) @ coord_CD.T
        outward = torch.tensor([-1.0, -1.0, 1.0, 1.0])
        extent = np.concatenate(extents)
        extent_N4, unit_N1, bins_N4 = (
            torch.from_numpy(values.astype(np.float32))[is_on]
            for values in (extent, UNIT * extent[:, :1], (NUM_BINS - 1) / (extent - 1))
        )
        sides_px = extent_N4 * middle[is_on][:, [1, 0, 1, 0]] + unit_N1 * outward * edges[is_on]
        # A box ends at its last pixel.
        sides_px -= torch.tensor([0.0, 0.0, 1.0, 1.0])
        distance = bin_C - bins_N4[..., None] * sides_px[..., None]
        target = torch.softmax(-0.5 * (distance / COORD_SIGMA) ** 2, dim=-1)
        loss += COORD_WEIGHT * nn.functional.cross_entropy(
            logits.flatten(0, 1), target.flatten(0, 1)
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0 or step + 1 == steps:
            right = (names[is_on].argmax(dim=1) == name[is_on]).float().mean()
            report(
                f"tower     {step + 1}/{steps}  names right under {right:.2f} of the tokens,"
                f" edges {100 * UNIT * side_error.item():.1f} % of the width off"
            )
