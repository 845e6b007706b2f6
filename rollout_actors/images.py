"""The images of a request, as pixels."""

from __future__ import annotations

import io
from collections.abc import Sequence

from PIL import Image, UnidentifiedImageError

from shared.errors import RolloutError
from shared.records import ImageRef


def decode_images(refs: Sequence[ImageRef], sample_id: str, *, actor: str) -> list[Image.Image]:
    """RGB pixels of every image as the file has them, and nothing besides. Raises RolloutError naming the sample and the image that cannot be decoded."""
    images = []
    for i, ref in enumerate(refs):
        assert ref.data is not None, f"image {i} of {sample_id} travels without its bytes"
        try:
            image = Image.open(io.BytesIO(ref.data)).convert("RGB")
        except (UnidentifiedImageError, OSError) as error:
            raise RolloutError(f"image {i} of sample {sample_id} ({ref.path}) cannot be decoded: {error}", actor=actor, phase="generate") from error
        # vLLM would turn an image by its EXIF orientation; the learner does not, and boxes are in the file's own axes.
        image.info = {}
        images.append(image)
    return images
