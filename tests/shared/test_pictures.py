"""Pictures as a model is shown them: as vLLM's own loader reads them, and where they are opaque as they always were."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shared.pictures import on_white

NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (16, 17, 4), dtype=np.uint8), "RGBA")
SHADES = Image.fromarray(np.arange(72, dtype=np.uint16).reshape(8, 9) * 900)

PALETTE = NOISE.convert("RGB").convert("P")


def saved(picture: Image.Image, kind: str = "PNG", **fields: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **fields)
    return file.getvalue()


OPAQUE = {
    "RGB": saved(NOISE.convert("RGB")),
    "JPEG": saved(NOISE.convert("RGB"), "JPEG"),
    "RGB with a colour that is called transparent": saved(NOISE.convert("RGB"), transparency=NOISE.convert("RGB").getpixel((0, 0))),
    "L": saved(NOISE.convert("L")),
    "1": saved(NOISE.convert("1")),
    "P": saved(NOISE.convert("RGB").convert("P")),
    "CMYK": saved(NOISE.convert("CMYK"), "JPEG"),
    "I;16": saved(SHADES),
    "F": saved(NOISE.convert("F"), "TIFF"),
    "RGBA, all of it opaque": saved(NOISE.convert("RGB").convert("RGBA")),
}
TRANSPARENT = {
    "RGBA": saved(NOISE),
    "LA": saved(NOISE.convert("LA")),
    "WEBP": saved(NOISE, "WEBP", lossless=True),
    "P with one colour": saved(PALETTE, transparency=PALETTE.getpixel((0, 0))),
    "P with an alpha for each": saved(NOISE.convert("RGB").convert("P"), transparency=bytes(range(256))),
    "L with one shade": saved(NOISE.convert("L"), transparency=NOISE.convert("L").getpixel((0, 0))),
    "1": saved(NOISE.convert("1"), transparency=0),
}


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def shown(data: bytes) -> tuple[str, tuple[int, int], bytes]:
    picture = on_white(opened(data))
    return picture.mode, picture.size, picture.tobytes()


@pytest.mark.parametrize("kind", OPAQUE)
def test_an_opaque_picture_is_what_pillow_converts_it_to_to_the_bit(kind: str) -> None:
    plain = opened(OPAQUE[kind]).convert("RGB")
    assert shown(OPAQUE[kind]) == ("RGB", plain.size, plain.tobytes())


@pytest.mark.parametrize("kind", TRANSPARENT)
def test_behind_what_is_transparent_is_white(kind: str) -> None:
    pixels = np.asarray(opened(TRANSPARENT[kind]).convert("RGBA"))
    alpha = pixels[..., 3:].astype(float) / 255
    assert (alpha < 1).any(), "this is what is looked at"
    found = np.asarray(on_white(opened(TRANSPARENT[kind])))
    assert np.abs(found - (pixels[..., :3] * alpha + 255 * (1 - alpha))).max() <= 1, "Pillow's rounding"


def test_the_picture_that_was_given_stays_as_it_is() -> None:
    given = NOISE.copy()
    on_white(given)
    assert (given.mode, given.tobytes()) == ("RGBA", NOISE.tobytes())


@pytest.mark.engine
@pytest.mark.parametrize("kind", [*OPAQUE, *TRANSPARENT])
def test_vllms_own_loader_reads_the_same_pixels(kind: str) -> None:
    from vllm.multimodal.media import ImageMediaIO

    data = (OPAQUE | TRANSPARENT)[kind]
    picture = ImageMediaIO().load_bytes(data).media
    assert shown(data) == (picture.mode, picture.size, picture.tobytes())
