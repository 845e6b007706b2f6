"""Pictures as a model is shown them: as vLLM's own loader reads them, and where they are opaque as
they always were.
"""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shared.prompts import on_white

NOISE = Image.fromarray(
    np.random.default_rng(0).integers(0, 255, (16, 17, 4), dtype=np.uint8), "RGBA"
)
DEPTHS = np.arange(72, dtype=np.uint16).reshape(8, 9) * 900
SHADES = Image.fromarray(DEPTHS)
PALETTE = NOISE.convert("RGB").convert("P")


def saved(picture: Image.Image, kind: str = "PNG", **fields: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **fields)
    return file.getvalue()


OPAQUE = {
    "RGB": saved(NOISE.convert("RGB")),
    "JPEG": saved(NOISE.convert("RGB"), "JPEG"),
    "RGB with a colour that is called transparent": saved(
        NOISE.convert("RGB"), transparency=NOISE.convert("RGB").getpixel((0, 0))
    ),
    "L": saved(NOISE.convert("L")),
    "1": saved(NOISE.convert("1")),
    "P": saved(NOISE.convert("RGB").convert("P")),
    "CMYK": saved(NOISE.convert("CMYK"), "JPEG"),
    "RGBA, all of it opaque": saved(NOISE.convert("RGB").convert("RGBA")),
}
TRANSPARENT = {
    "RGBA": saved(NOISE),
    "LA": saved(NOISE.convert("LA")),
    "WEBP": saved(NOISE, "WEBP", lossless=True),
    "P with one colour": saved(PALETTE, transparency=PALETTE.getpixel((0, 0))),
    "P with an alpha for each": saved(
        NOISE.convert("RGB").convert("P"), transparency=bytes(range(256))
    ),
    "L with one shade": saved(NOISE.convert("L"), transparency=NOISE.convert("L").getpixel((0, 0))),
    "1": saved(NOISE.convert("1"), transparency=0),
}


def png_of_16_bits(colour_type: int, pixels: Any, *more: bytes) -> bytes:
    """A PNG file, which Pillow does not write so deep in colour. `more`: chunks before the
    pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    head = chunk(
        b"IHDR", struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 16, colour_type, 0, 0, 0)
    )
    between = b"".join(chunk(data[:4], data[4:]) for data in more)
    return (
        b"\x89PNG\r\n\x1a\n"
        + head
        + between
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def tiff_of_12_bits() -> bytes:
    """Pillow reads it as 16 bits. Two pixels, 0xFFF and 0x800, in three bytes."""
    tags = {256: 2, 257: 1, 258: 12, 259: 1, 262: 1, 273: 8, 277: 1, 278: 1, 279: 3}
    directory = (
        struct.pack("<H", len(tags))
        + b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
        + bytes(4)
    )
    return b"II*\0" + struct.pack("<I", 12) + b"\xff\xf8\x00\x00" + directory


DEEP = {
    "grey PNG": saved(SHADES),
    "grey TIFF": saved(SHADES, "TIFF"),
    "grey TIFF, high byte first": saved(
        Image.frombytes("I;16B", (9, 8), DEPTHS.astype(">u2").tobytes()), "TIFF"
    ),
    "PGM": saved(SHADES, "PPM"),
    "grey and alpha": png_of_16_bits(4, np.stack([DEPTHS, np.full_like(DEPTHS, 65535)], -1)),
    "colour": png_of_16_bits(2, np.stack([DEPTHS] * 3, -1)),
}
WITHOUT_RANGE = {
    "F": saved(NOISE.convert("F"), "TIFF"),
    "F between 0 and 1": saved(Image.fromarray(DEPTHS.astype(np.float32) / 65535), "TIFF"),
    "I": saved(Image.fromarray(DEPTHS.astype(np.int32)), "TIFF"),
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


@pytest.mark.parametrize("kind", DEEP)
def test_pixels_of_16_bits_are_shown_by_their_upper_8_in_grey_as_in_colour(kind: str) -> None:
    picture = on_white(opened(DEEP[kind]))
    assert picture.mode == "RGB"
    assert np.array_equal(np.asarray(picture), np.stack([DEPTHS >> 8] * 3, -1))


def test_pixels_of_12_bits_are_shown_by_their_upper_8() -> None:
    picture = on_white(opened(tiff_of_12_bits()))
    assert [picture.getpixel((column, 0)) for column in (0, 1)] == [
        (255, 255, 255),
        (128, 128, 128),
    ]


def test_behind_the_one_transparent_shade_of_16_bits_is_white() -> None:
    pixels = np.asarray(
        on_white(opened(png_of_16_bits(0, DEPTHS, b"tRNS" + struct.pack(">H", 900))))
    )
    assert pixels[0, 1].tolist() == [255, 255, 255]
    assert pixels[0, 2].tolist() == [1800 >> 8] * 3


@pytest.mark.parametrize("kind", WITHOUT_RANGE)
def test_pixels_without_a_range_are_refused_with_the_remedy(kind: str) -> None:
    with pytest.raises(
        ValueError,
        match=(
            r"its pixels are (floating-point numbers|integers of 32 bits) .*; save it with 8 or 16"
            r" bits a channel"
        ),
    ):
        on_white(opened(WITHOUT_RANGE[kind]))


@pytest.mark.parametrize("kind", TRANSPARENT)
def test_behind_what_is_transparent_is_white(kind: str) -> None:
    pixels = np.asarray(opened(TRANSPARENT[kind]).convert("RGBA"))
    alpha = pixels[..., 3:].astype(float) / 255
    assert (alpha < 1).any(), "this is what is looked at"
    found = np.asarray(on_white(opened(TRANSPARENT[kind])))
    assert np.abs(found - (pixels[..., :3] * alpha + 255 * (1 - alpha))).max() <= 1, (
        "Pillow's rounding"
    )


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
