"""Images of prompts that come as tokens: what the vision tower is given, and whether the learner's processor makes as many tokens of each as the engine did.

Shape legend: P tokens, I images, R image patches, D patch values.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch

from learner.segments import decode_image
from shared.records import ImageRef


class EncodedImages(NamedTuple):
    """See `learner.segments.EncodedPrompt`."""

    pixel_values_RD: torch.Tensor
    image_grid_I3: torch.Tensor

    def first(self, number: int) -> EncodedImages:
        """The images before the others."""
        grid = self.image_grid_I3[:number]
        return EncodedImages(self.pixel_values_RD[: int(grid.prod(dim=1).sum())], grid)


class ImageEncoder:
    """By a checkpoint's own processor."""

    def __init__(self, processor: Any) -> None:
        """`processor`: of transformers' Qwen-VL models."""
        self._images, self._token_id = processor.image_processor, int(processor.image_token_id)
        self._patches_per_token = processor.image_processor.merge_size**2
        self._last: tuple[tuple[str, ...], EncodedImages] | None = None

    def modality(self, token_ids: Sequence[int]) -> torch.Tensor:
        """int [P]: 1 where a token stands for a part of an image, else 0."""
        return (torch.tensor(token_ids, dtype=torch.int64) == self._token_id).to(torch.int64)

    def encode(self, images: Sequence[ImageRef], token_ids: Sequence[int]) -> EncodedImages:
        """Of `token_ids`, whose placeholders are expanded.

        Raises ValueError where there is another number of placeholders than the images come to here, and RecordError for an image that cannot be decoded.
        """
        # The rollouts of a group show the same ones, and come one after the other.
        key = tuple(image.sha256 for image in images)
        if self._last is None or self._last[0] != key:
            made = self._images(images=[decode_image(image) for image in images], return_tensors="pt")
            self._last = key, EncodedImages(made["pixel_values"], made["image_grid_thw"])
        encoded = self._last[1]
        expected = [patches // self._patches_per_token for patches in encoded.image_grid_I3.prod(dim=1).tolist()]
        found = self._runs(token_ids)
        if found != expected:
            told = f"the engine has {found} tokens of its images, the learner {expected}"
            raise ValueError(f"{told}; engines and learner must load the same checkpoint, with the image size limits in its processor files")
        return encoded

    def num_images(self, token_ids: Sequence[int]) -> int:
        """That are shown in these tokens."""
        return len(self._runs(token_ids))

    def _runs(self, token_ids: Sequence[int]) -> list[int]:
        """Tokens of each image: other tokens mark its beginning and its end."""
        return [sum(1 for _ in run) for is_image, run in groupby(token_ids, key=lambda token_id: token_id == self._token_id) if is_image]
