"""Engines get the pixels that the learner gets."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageOps

from learner.segments import decode_image
from rollout_actors.engine.sampling import decode_images
from shared.errors import RolloutError
from shared.records import ImageRef


def seen_by_engine(data: bytes, path: Path | None = None) -> Image.Image:
    (image,) = decode_images([ImageRef(path=path, data=data, sha256="")], "a", actor="b")
    return image


def seen_by_learner(data: bytes) -> Image.Image:
    return decode_image(ImageRef(path=None, data=data, sha256=""))


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_an_engine_gets_the_learners_upright_pixels_and_does_not_turn_them_again(kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = saved(Image.frombytes("RGB", (3, 2), bytes(range(0, 180, 10))), kind, exif=exif)
    of_learner = seen_by_learner(data)
    of_engine = ImageOps.exif_transpose(seen_by_engine(data))  # what vLLM does
    assert (of_engine.size, of_engine.tobytes()) == ((2, 3), of_learner.tobytes())


NO_FORMAT = "cannot be decoded: its format is not known$"
NO_RANGE = "cannot be decoded: its pixels are floating-point .*; save it with 8 or 16 bits"


@pytest.mark.parametrize(
    ("data", "path", "told"),
    [
        (b"no image", None, f"image 0 of sample a {NO_FORMAT}"),
        (b"no image", Path("x/y.png"), rf"image 0 of sample a \(x/y.png\) {NO_FORMAT}"),
        (saved(Image.new("F", (2, 2), 0.5), "TIFF"), None, f"image 0 of sample a {NO_RANGE}"),
    ],
    ids=["no image", "no image in a file", "pixels without a range"],
)
def test_an_image_that_is_not_one_names_the_actor_the_sample_the_file_and_the_reason(
    data: bytes, path: Path | None, told: str
) -> None:
    with pytest.raises(RolloutError, match=f"generate on b: {told}"):
        seen_by_engine(data, path)


@pytest.mark.parametrize("mode", ["RGB", "L", "LA", "RGBA", "P", "I;16"])
def test_engine_and_learner_see_the_same_pixels_also_where_they_are_transparent(mode: str) -> None:
    noise = Image.effect_noise((9, 8), 90)
    image = noise.convert(mode)
    if mode in ("LA", "RGBA"):
        image.putalpha(noise)
    data = saved(image, **({"transparency": 5} if mode == "P" else {}))
    of_engine = seen_by_engine(data)
    of_learner = seen_by_learner(data)
    assert (of_engine.mode, of_engine.tobytes()) == (of_learner.mode, of_learner.tobytes())
