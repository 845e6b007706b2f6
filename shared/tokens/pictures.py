"""Images as a model family encodes them: inputs of its vision tower, and placeholder tokens.

Qwen-VL resizes an image and cuts it into patches. Each patch is a row of `pixel_values`, and the
image's grid (`image_grid_thw`) gives the numbers of patches. InternVL cuts an image into tiles of
one size. Each tile is a row [3, height, width]; if there are several, a tile with the whole image
follows. Here an image in tiles has a grid too: [tiles, tokens down a tile, tokens across a tile].

Shape legend: I images, R patches or tiles, D patch values (for a tile: 3, height, width).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from shared.errors import ConfigError
from shared.grounding.json_list import PictureResize
from shared.model_families import TILING_PROCESSORS

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

_TILE_AXES = 4
"""Number of axes of `pixel_values` with tiles; with patches it is two."""
# The processor cuts tiles whatever its image processor's setting is, so the image processor gets it
# here as an argument.
_CUT = MappingProxyType({"crop_to_patches": True})


class EncodedImages(NamedTuple):
    """Images encoded as inputs of the vision tower: patches or tiles, and the grid of each image.

    Example: images of 8 x 8 and 4 x 4 patches have R = 80 and the grid [[1, 8, 8], [1, 4, 4]];
    images of 7 and 4 tiles with 16 x 16 tokens have R = 11 and the grid [[7, 16, 16], [4, 16, 16]].
    """

    pixel_values_RD: torch.Tensor
    image_grid_I3: torch.Tensor

    def first(self, number: int) -> EncodedImages:
        grid = self.image_grid_I3[:number]
        rows_I = grid[:, 0] if self.pixel_values_RD.ndim == _TILE_AXES else grid.prod(dim=1)
        return EncodedImages(self.pixel_values_RD[: int(rows_I.sum())], grid)

    def arguments(self) -> dict[str, torch.Tensor]:
        """Return the images as keyword arguments of the model's forward; empty without images."""
        if not len(self.image_grid_I3):
            return {}  # text models have none, and Qwen-VL rejects empty pixel values
        if self.pixel_values_RD.ndim == _TILE_AXES:
            return {"pixel_values": self.pixel_values_RD}  # all of one size: needs no grid
        return {"pixel_values": self.pixel_values_RD, "image_grid_thw": self.image_grid_I3}


class Pictures:
    """Encodes images as the processor of a Qwen-VL checkpoint does."""

    takes_modality = True
    """Whether the model's forward takes `mm_token_type_ids`, which mark the tokens of images."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    @property
    def token_id(self) -> int:
        """Id of the placeholder token of images.

        A request has one placeholder per image. An expanded prompt has one placeholder per token of
        the image.
        """
        return int(self._processor.image_token_id)

    @property
    def around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids of the tokens that an expanded prompt has before and after the tokens of an image."""
        return (), ()

    @property
    def resize(self) -> PictureResize:
        """The rule for the size to which the model resizes an image."""
        images = self._processor.image_processor
        side = images.patch_size * images.merge_size
        return PictureResize(side, images.size.shortest_edge, images.size.longest_edge)

    def limits(self, low: int, high: int) -> dict[str, Any]:
        """Return settings of the image processor that resize images to `low` to `high` pixels.

        vLLM takes them as `mm_processor_kwargs`.
        """
        return {"size": {"shortest_edge": low, "longest_edge": high}}

    def limit(self, low: int, high: int) -> None:
        """Let the processor resize images to `low` to `high` pixels (width times height)."""
        images = self._processor.image_processor
        images.size = type(images.size)(**self.limits(low, high)["size"])

    def num_tokens(self, width: int, height: int) -> int:
        """Return the number of tokens of an image of this size in pixels, without `around`.

        Raises ValueError for a shape of image that the processor does not accept.
        """
        images = self._processor.image_processor
        return int(images.get_number_of_image_patches(height, width)) // images.merge_size**2

    def encode(self, images: Sequence[Image]) -> EncodedImages:
        encoded = self._processor.image_processor(images=images, return_tensors="pt")
        return EncodedImages(encoded["pixel_values"], encoded["image_grid_thw"])

    def token_counts(self, image_grid_I3: torch.Tensor) -> list[int]:
        """Return the number of tokens of each image, without the tokens in `around`."""
        per_token = self._processor.image_processor.merge_size**2
        return [patches // per_token for patches in image_grid_I3.prod(dim=1).tolist()]

    def expand(self, token_ids: Sequence[int], image_grid_I3: torch.Tensor) -> tuple[int, ...]:
        """Expand a prompt: replace each image's placeholder by the tokens of the image.

        Raises ValueError if the numbers of placeholders and images differ.
        """
        placeholder = self.token_id
        before, behind = self.around
        number = token_ids.count(placeholder)
        if number != len(image_grid_I3):
            raise ValueError(
                f"a prompt has {number} placeholders for {len(image_grid_I3)} images; give it one"
                " placeholder per image"
            )
        counts = iter(self.token_counts(image_grid_I3))
        expanded: list[int] = []
        for token_id in token_ids:
            if token_id == placeholder:
                expanded += [*before, *[placeholder] * next(counts), *behind]
            else:
                expanded.append(token_id)
        return tuple(expanded)


class TiledPictures(Pictures):
    """Encodes images as the processor of an InternVL checkpoint does, in tiles."""

    takes_modality = False

    @property
    def around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self._processor.start_image_token_id,), (self._processor.end_image_token_id,)

    @property
    def resize(self) -> TileResize:
        images = self._processor.image_processor
        side = images.size.height
        few, most = (number * side**2 for number in (images.min_patches, images.max_patches))
        return TileResize(side, few, most)

    def limits(self, low: int, high: int) -> dict[str, Any]:
        tile = self.resize.side**2
        return {"min_patches": max(1, low // tile), "max_patches": high // tile, **_CUT}

    def limit(self, low: int, high: int) -> None:
        for name, value in self.limits(low, high).items():
            setattr(self._processor.image_processor, name, value)

    def num_tokens(self, width: int, height: int) -> int:
        images = self._processor.image_processor
        tiles = images.get_number_of_image_patches(height, width, dict(_CUT))
        return int(tiles) * self._processor.image_seq_length

    def encode(self, images: Sequence[Image]) -> EncodedImages:
        encode = self._processor.image_processor
        encoded = encode(images=images, return_tensors="pt", **_CUT)
        tiles_I = encoded["num_patches"]
        side = isqrt(self._processor.image_seq_length)
        grid = [[tiles, side, side] for tiles in tiles_I.tolist()]
        return EncodedImages(encoded["pixel_values"], tiles_I.new_tensor(grid))

    def token_counts(self, image_grid_I3: torch.Tensor) -> list[int]:
        counts: list[int] = image_grid_I3.prod(dim=1).tolist()
        return counts


@dataclass(frozen=True, slots=True)
class TileResize(PictureResize):
    """Computes the size to which InternVL's processor resizes an image: whole tiles, within limits.

    `side` is the side of a tile in pixels; the limits are numbers of pixels of all tiles.

    Example: `TileResize(448, 448**2, 12 * 448**2).size_of(640, 480)` is (1792, 1344): 4 x 3 tiles.
    """

    def size_of(self, width: int, height: int) -> tuple[int, int]:
        # This costs nothing after the first image: the processor has imported it.
        from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

        few, most = (pixels // self.side**2 for pixels in (self.min_pixels, self.max_pixels))
        columns, rows = get_optimal_tiled_canvas((height, width), (self.side,) * 2, few, most)
        return columns * self.side, rows * self.side


def pixel_limits(pictures: Pictures | None, most: int, model: object, key: str) -> tuple[int, int]:
    """Return the least and most pixels of an image, for `Pictures.limits`.

    Args:
        pictures: None for a model that reads no images.
        most: the value of the configuration key `key`.
        model: path of the checkpoint, for messages.

    Raises ConfigError if `most` is too few pixels for the processor, or without `pictures`.
    """
    if pictures is None:
        raise ConfigError(
            f"{key}: {most} has no effect, because {model} reads no images; remove the key"
        )
    low = pictures.resize.min_pixels
    least = max(low, pictures.resize.side**2)
    if most < least:
        raise ConfigError(
            f"{key}: {most} is less than the {least} pixels that the processor of {model}"
            f" needs for an image; set it to at least {least}"
        )
    return low, most


def pictures_of(processor: Any) -> Pictures:
    """Return the image encoding that suits a checkpoint's processor, by the processor's class."""
    is_tiling = type(processor).__name__ in TILING_PROCESSORS
    return TiledPictures(processor) if is_tiling else Pictures(processor)
