"""The images of a request, as pixels."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

from PIL import Image, UnidentifiedImageError

from shared.errors import RolloutError
from shared.pictures import on_white
from shared.records import ImageRef


def decode_images(refs: Sequence[ImageRef], sample_id: str, *, actor: str) -> list[Image.Image]:
    """As `decode_image`, of every image. Raises RolloutError naming the sample and the image that cannot be decoded."""
    images = []
    for i, ref in enumerate(refs):
        assert ref.data is not None, f"image {i} of {sample_id} travels without its bytes"
        try:
            images.append(decode_image(ref.data))
        except ValueError as error:
            file = "" if ref.path is None else f" ({ref.path})"
            raise RolloutError(f"image {i} of sample {sample_id}{file} cannot be decoded: {error}", actor=actor, phase="generate") from error
    return images


def open_image(data: bytes) -> Image.Image:
    """Open an image by its header alone, so that it can be measured before it is decoded. Raises ValueError with the reason."""
    return _read(lambda: Image.open(io.BytesIO(data)))


def decode_image(data: bytes) -> Image.Image:
    """RGB pixels as the file has them, on white where they are transparent, and nothing besides. Raises ValueError with the reason."""
    image = _read(lambda: on_white(Image.open(io.BytesIO(data))))
    # vLLM would turn an image by its EXIF orientation; the learner does not, and boxes are in the file's own axes.
    image.info = {}
    return image


def _read(read: Callable[[], Image.Image]) -> Image.Image:
    try:
        return read()
    except UnidentifiedImageError as error:
        # Pillow's own words are of the object that it read from.
        raise ValueError("it is of no format that is known") from error
    except MemoryError:
        raise
    except Exception as error:
        # All of them: on damaged files Pillow's decoders raise whatever their parsing runs into (OSError, SyntaxError, struct.error, EOFError, ...).
        raise ValueError(str(error) or type(error).__name__) from error
