"""Random segments for benchmarks of the learner's step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from learner.segments import EncodedPrompt, Segment
from learner.targets import Target, TokenRole
from shared.tokens.vocabulary import NUM_BINS

PATCH = 16
MERGE = 2
NUM_WORDS = 20
"""Number of tokens of a random segment's prompt, without the tokens of its image."""


class ImageIds(NamedTuple):
    """Ids of the tokens before and after an image in a prompt, and of its placeholder token."""

    start: int
    pad: int
    end: int


def random_segment(
    number: int,
    length: int,
    *,
    image: int,
    image_ids: ImageIds,
    words: range,
    coord_ids: Sequence[int],
) -> Segment:
    """Return a segment (prompt and target) of `length` random tokens.

    An eighth of the target's tokens are coordinate slots.

    Args:
        number: the seed, and the segment's position in the step.
        image: side of the prompt's image in tokens; 0: no image.
        words: range of the ids of all other tokens.
        coord_ids: the ids of the `NUM_BINS` coordinate tokens.
    """
    draw = np.random.default_rng(number)
    images = (image_ids.start, *[image_ids.pad] * image**2, image_ids.end) if image else ()
    prompt_ids = (*images, *draw.integers(words.start, words.stop, NUM_WORDS).tolist())
    num_target = length - len(prompt_ids)
    roles = np.full(num_target, TokenRole.STRUCTURE, dtype=np.uint8)
    slots = np.sort(draw.choice(num_target - 1, num_target // 32 * 4, replace=False))
    roles[slots] = TokenRole.COORD
    roles[-1] = TokenRole.CLOSING
    bins = draw.integers(0, NUM_BINS, len(slots))
    ids = draw.integers(words.start, words.stop, num_target)
    ids[slots] = np.array(coord_ids)[bins]
    side = image * MERGE
    pixels = draw.standard_normal((side**2, 3 * 2 * PATCH**2), dtype=np.float32)
    prompt = EncodedPrompt(
        prompt_ids,
        prompt_ids,
        torch.tensor([int(token == image_ids.pad) for token in prompt_ids]),
        torch.from_numpy(pixels),
        torch.tensor([[1, side, side]])[: bool(image)],
    )
    target = Target(
        str(number),
        tuple(ids.tolist()),
        roles,
        tuple(slots.tolist()),
        tuple(map(float, bins)),
        tuple(range(0, len(slots), 4)),
    )
    return Segment(number, prompt, target)
