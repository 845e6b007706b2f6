"""Engines get the pixels that the learner gets."""

from __future__ import annotations

import io

import pytest
from PIL import Image, ImageOps

from rollout_actors.images import decode_images
from shared.errors import RolloutError
from shared.records import ImageRef


def ref(data: bytes) -> ImageRef:
    return ImageRef(path=None, data=data, sha256="")


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_pixels_bring_no_orientation_that_an_engine_would_turn_them_by(kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    Image.frombytes("RGB", (3, 2), bytes(range(0, 180, 10))).save(buffer, kind, exif=exif)
    (image,) = decode_images([ref(buffer.getvalue())], "a", actor="b")
    of_learner = Image.open(io.BytesIO(buffer.getvalue())).convert("RGB")
    turned = ImageOps.exif_transpose(image)  # what vLLM does
    assert (turned.size, turned.tobytes()) == ((3, 2), of_learner.tobytes())


def test_an_image_that_is_not_one_names_the_actor_and_the_sample() -> None:
    with pytest.raises(RolloutError, match="generate on b: image 0 of sample a"):
        decode_images([ref(b"no image")], "a", actor="b")
