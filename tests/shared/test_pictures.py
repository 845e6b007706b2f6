"""Pictures as a model is shown them, and the messages that show them: as vLLM's own loader reads
them, and where they are opaque as they always were.
"""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from shared.prompts import detection_messages, on_white

NOISE = Image.fromarray(
    np.random.default_rng(0).integers(0, 255, (16, 17, 4), dtype=np.uint8), "RGBA"
)
COLOUR = NOISE.convert("RGB")
GREY = NOISE.convert("L")
PALETTE = COLOUR.convert("P")
DEPTHS = np.arange(72, dtype=np.uint16).reshape(8, 9) * 900
SHADES = Image.fromarray(DEPTHS)
HIGH_BYTE_FIRST = Image.frombytes("I;16B", (9, 8), DEPTHS.astype(">u2").tobytes())


def saved(picture: Image.Image, kind: str = "PNG", **fields: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **fields)
    return file.getvalue()


OPAQUE = {
    "RGB": saved(COLOUR),
    "JPEG": saved(COLOUR, "JPEG"),
    "a colour that is called transparent": saved(COLOUR, transparency=COLOUR.getpixel((0, 0))),
    "L": saved(GREY),
    "1": saved(NOISE.convert("1")),
    "P": saved(PALETTE),
    "CMYK": saved(NOISE.convert("CMYK"), "JPEG"),
    "RGBA, all of it opaque": saved(COLOUR.convert("RGBA")),
}
TRANSPARENT = {
    "RGBA": saved(NOISE),
    "LA": saved(NOISE.convert("LA")),
    "WEBP": saved(NOISE, "WEBP", lossless=True),
    "P with one colour": saved(PALETTE, transparency=PALETTE.getpixel((0, 0))),
    "P with an alpha for each": saved(PALETTE, transparency=bytes(range(256))),
    "L with one shade": saved(GREY, transparency=GREY.getpixel((0, 0))),
    "1": saved(NOISE.convert("1"), transparency=0),
}


def png_of_16_bits(colour_type: int, pixels: Any, transparent: bytes = b"") -> bytes:
    """A PNG file, which Pillow does not write so deep in colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + checksum

    height, width = pixels.shape[:2]
    head = struct.pack(">IIBBBBB", width, height, 16, colour_type, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    chunks = [chunk(b"IHDR", head)]
    if transparent:
        chunks.append(chunk(b"tRNS", transparent))
    chunks += [chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def tiff_of_12_bits() -> bytes:
    """Pillow reads it as 16 bits. Two pixels, 0xFFF and 0x800, in three bytes."""
    tags = {256: 2, 257: 1, 258: 12, 259: 1, 262: 1, 273: 8, 277: 1, 278: 1, 279: 3}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    directory = struct.pack("<H", len(tags)) + entries + bytes(4)
    return b"II*\0" + struct.pack("<I", 12) + b"\xff\xf8\x00\x00" + directory


DEEP = {
    "grey PNG": saved(SHADES),
    "grey TIFF": saved(SHADES, "TIFF"),
    "grey TIFF, high byte first": saved(HIGH_BYTE_FIRST, "TIFF"),
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


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF", "MPO"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_turned_by_its_exif_orientation_once(orientation: int, kind: str) -> None:
    data = saved(COLOUR, kind, exif=turned(orientation))
    expected = ImageOps.exif_transpose(opened(data)).convert("RGB")
    picture = on_white(opened(data))
    assert picture.size == (expected.size if orientation < 5 else COLOUR.size[::-1])
    assert picture.tobytes() == expected.tobytes()
    # vLLM would turn what is handed to it with an orientation that is left.
    assert ImageOps.exif_transpose(picture).tobytes() == picture.tobytes()


@pytest.mark.parametrize("mode", ["P", "RGBA", "I;16"])
def test_deep_and_transparent_pictures_are_turned_as_others_are(mode: str) -> None:
    plain = SHADES if mode == "I;16" else NOISE.convert(mode)
    expected = on_white(opened(saved(plain))).transpose(Image.Transpose.ROTATE_270)
    assert shown(saved(plain, exif=turned(6)))[1:] == (expected.size, expected.tobytes())


@pytest.mark.parametrize("exif", [b"Exif\0\0garbage", turned(9), turned(0)])
def test_an_exif_block_that_is_damaged_turns_nothing(exif: Any) -> None:
    for kind in ("JPEG", "PNG", "WEBP"):
        data = saved(COLOUR, kind, exif=exif)
        assert shown(data)[1:] == (COLOUR.size, opened(data).convert("RGB").tobytes())


def test_pixels_of_12_bits_are_shown_by_their_upper_8() -> None:
    picture = on_white(opened(tiff_of_12_bits()))
    assert [picture.getpixel((column, 0)) for column in (0, 1)] == [(255,) * 3, (128,) * 3]


def test_behind_the_one_transparent_shade_of_16_bits_is_white() -> None:
    data = png_of_16_bits(0, DEPTHS, transparent=struct.pack(">H", 900))
    pixels = np.asarray(on_white(opened(data)))
    assert pixels[0, 1].tolist() == [255, 255, 255]
    assert pixels[0, 2].tolist() == [1800 >> 8] * 3


@pytest.mark.parametrize("kind", WITHOUT_RANGE)
def test_pixels_without_a_range_are_refused_with_the_remedy(kind: str) -> None:
    message = (
        r"its pixels are (floating-point numbers|integers of 32 bits) .*; save it with 8 or 16 bits"
    )
    with pytest.raises(ValueError, match=message):
        on_white(opened(WITHOUT_RANGE[kind]))


@pytest.mark.parametrize("kind", TRANSPARENT)
def test_behind_what_is_transparent_is_white(kind: str) -> None:
    picture = opened(TRANSPARENT[kind])
    pixels = np.asarray(picture.convert("RGBA"))
    alpha = pixels[..., 3:].astype(float) / 255
    assert (alpha < 1).any(), "this is what is looked at"
    before = (picture.mode, picture.tobytes())
    found = np.asarray(on_white(picture))
    expected = pixels[..., :3] * alpha + 255 * (1 - alpha)
    assert np.abs(found - expected).max() <= 1, "Pillow's rounding"
    assert (picture.mode, picture.tobytes()) == before


@pytest.mark.engine
@pytest.mark.parametrize("kind", [*OPAQUE, *TRANSPARENT])
def test_vllms_own_loader_reads_the_same_pixels(kind: str) -> None:
    from vllm.multimodal.media import ImageMediaIO

    data = (OPAQUE | TRANSPARENT)[kind]
    picture = ImageMediaIO().load_bytes(data).media
    assert shown(data) == (picture.mode, picture.size, picture.tobytes())


def test_images_stand_before_the_text_of_the_user_message_and_a_system_prompt_before_both():
    system = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    image = {"type": "image"}
    user = {"role": "user", "content": [image, image, {"type": "text", "text": "Where?"}]}
    assert detection_messages(2, system_prompt=None, user_prompt="Where?") == [user]
    both = detection_messages(2, system_prompt="Be brief.", user_prompt="Where?")
    assert both == [system, user]
