"""Engines get the pixels that the learner gets."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image, ImageOps

from learner.segments import decode_image
from rollout_actors.engine.sampling import decode_images
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


@pytest.mark.parametrize(
    ("path", "told"),
    [
        (None, "image 0 of sample a cannot"),
        (Path("x/y.png"), r"image 0 of sample a \(x/y.png\) cannot"),
    ],
)
def test_it_names_the_file_where_there_is_one_and_no_address_in_memory(
    path: Path | None, told: str
) -> None:
    with pytest.raises(
        RolloutError, match=rf"{told} be decoded: it is of no format that is known$"
    ):
        decode_images([ImageRef(path=path, data=b"no image", sha256="")], "a", actor="b")


@pytest.mark.parametrize("mode", ["RGB", "L", "LA", "RGBA", "P", "I;16"])
def test_engine_and_learner_see_the_same_pixels(mode: str) -> None:
    buffer = io.BytesIO()
    Image.effect_noise((9, 8), 90).convert(mode).save(
        buffer, "PNG", **({"transparency": 5} if mode == "P" else {})
    )
    (image,) = decode_images([ref(buffer.getvalue())], "a", actor="b")
    of_learner = decode_image(ref(buffer.getvalue()))
    assert (image.mode, image.tobytes()) == (of_learner.mode, of_learner.tobytes())


def test_an_engine_names_the_sample_whose_pixels_have_no_known_range() -> None:
    buffer = io.BytesIO()
    Image.new("F", (2, 2), 0.5).save(buffer, "TIFF")
    with pytest.raises(
        RolloutError,
        match=(
            r"image 0 of sample a cannot be decoded: its pixels are floating-point numbers .*; save"
            r" it with 8 or 16 bits"
        ),
    ):
        decode_images([ref(buffer.getvalue())], "a", actor="b")


def test_both_see_white_behind_what_is_transparent() -> None:
    buffer = io.BytesIO()
    Image.new("RGBA", (2, 2), (0, 0, 0, 0)).save(buffer, "PNG")
    (image,) = decode_images([ref(buffer.getvalue())], "a", actor="b")
    assert (
        image.getpixel((0, 0))
        == decode_image(ref(buffer.getvalue())).getpixel((0, 0))
        == (255, 255, 255)
    )
