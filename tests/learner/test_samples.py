"""An image that the learner could not decode is found before the start (DESIGN 7.1, issue 2)."""

import io
import struct

import pytest
from PIL import Image

from learner.samples import image_size

FORMATS = ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"]


def encoded(image_format: str, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    # Noise, so that nothing compresses to less than half a file.
    Image.effect_noise((40, 30), 90).convert(mode).save(file, format=image_format)
    return file.getvalue()


@pytest.mark.parametrize("image_format", FORMATS)
def test_an_image_has_its_width_and_height(image_format):
    assert image_size(encoded(image_format)) == (40, 30)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGBA", "I;16"])
def test_an_image_of_any_mode_that_becomes_rgb_has_its_size(mode):
    assert image_size(encoded("PNG", mode)) == (40, 30)


def test_a_picture_whose_range_no_file_tells_is_refused_before_the_start_with_the_remedy():
    file = io.BytesIO()
    Image.effect_noise((40, 30), 90).convert("F").save(file, format="TIFF")
    with pytest.raises(ValueError, match=r"floating-point numbers .*; save it with 8 or 16 bits a channel"):
        image_size(file.getvalue())


@pytest.mark.parametrize("image_format", FORMATS)
def test_a_file_that_ends_too_early_is_no_image_although_its_header_is_sound(image_format):
    data = encoded(image_format)
    with pytest.raises(ValueError):
        image_size(data[: len(data) // 2])


@pytest.mark.parametrize("data", [b"", b"not an image", b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + bytes(17)])
def test_what_is_no_image_is_refused_with_a_reason(data):
    with pytest.raises(ValueError) as caught:
        image_size(data)
    assert str(caught.value)
