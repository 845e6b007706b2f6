"""The prompts of samples: their chat messages, and their images as the model sees them."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shared.data.limits import MAX_PIXELS, above
from shared.errors import RecordError

if TYPE_CHECKING:
    from PIL.Image import Image

    from shared.records import Sample


DEFAULT_USER_PROMPT = "Locate every object in the image. Answer with one JSON object."
"""The default user message. It is neutral and short, because every prompt contains its tokens."""
LIST_USER_PROMPT = "Locate every object in the image. Report bbox coordinates and labels in JSON."
"""The user message for answers in the list formats of Qwen's models, in words of their training."""
PHRASE_USER_PROMPT = (
    "Detect every object in the image. Output the bounding box coordinates in [x0, y0, x1, y1]"
    " format."
)
"""The user message for answers in the format of the model Rex-Omni, in words of its training.

Rex-Omni's own prompts name classes: `Detect cat, dog. Output ...`.
"""
_BLANK = re.compile(r"\{(phrase|classes)\}")


@dataclass(frozen=True, slots=True)
class Prompts:
    """Gives each sample its prompt: the texts of its row, or else a template of the run.

    Example: the template `Find {phrase}.` and a row with `"phrase": "the red car"` give "Find the
    red car."
    """

    templates: tuple[str, ...] = (DEFAULT_USER_PROMPT,)
    """Templates of the user message. Of several, `seed` and the sample's id choose one."""
    system: str | None = None
    seed: int = 0

    @property
    def have_blanks(self) -> bool:
        """Return whether a template contains `{phrase}` or `{classes}`, which rows must define."""
        return any(_BLANK.search(template) for template in self.templates)

    def texts(self, sample: Sample) -> tuple[str | None, str]:
        """Return the sample's system message (or None) and its user message.

        Raises RecordError if the template contains `{phrase}` or `{classes}` and the row has none.
        """
        system = self.system if sample.system is None else sample.system
        if sample.prompt is not None:
            return system, sample.prompt
        drawn = hashlib.sha256(f"{self.seed}:{sample.sample_id}".encode()).digest()[:8]
        user = self.templates[int.from_bytes(drawn) % len(self.templates)]
        values = {"phrase": sample.phrase, "classes": ", ".join(sample.classes)}

        def value_of(blank: re.Match[str]) -> str:
            value = values[blank[1]]
            if not value:
                remedy = "add it to the row, or write the row's own `prompt`"
                raise RecordError(
                    f"is missing, but the prompt is {user!r}", field=blank[1], remedy=remedy
                )
            return value

        # In one pass: values of the row are not templates, even if they contain `{phrase}`.
        return system, _BLANK.sub(value_of, user)


def detection_messages(
    num_images: int, system_prompt: str | None, user_prompt: str
) -> list[dict[str, object]]:
    """Return the chat messages of one sample in the format of Hugging Face processors.

    An image is only `{"type": "image"}` there. The processor receives the images themselves in a
    separate argument, in the same order.
    """
    messages: list[dict[str, object]] = []
    if system_prompt is not None:
        messages.append({"role": "system", "content": [{"type": "text", "text": system_prompt}]})
    images = [{"type": "image"} for _ in range(num_images)]
    content = [*images, {"type": "text", "text": user_prompt}]
    return [*messages, {"role": "user", "content": content}]


WHITE = (255, 255, 255)
WITHOUT_RANGE = {"I": "integers of 32 bits", "F": "floating-point numbers"}
"""Pillow modes whose pixels have no known range, so that it is not known which value is white."""
BITS_PER_SAMPLE = 258
"""Number of the TIFF tag with the bits per colour value. Pillow reads 12-bit values as 16-bit
values.
"""
EXIF_ORIENTATION = 0x0112


class PictureTooLargeError(ValueError):
    """Error about an image with more pixels than `MAX_PIXELS`, according to its header."""


def open_picture(source: bytes | Path) -> Image:
    """Open an encoded image, or an image file, with Pillow, without decoding its pixels.

    Raises:
        PictureTooLargeError: the image has more than `MAX_PIXELS` pixels.
        Exception: any error that Pillow raises for damaged files.
    """
    from PIL import Image  # runs of text models need no Pillow

    refusal = f"it has {above('MAX_PIXELS', MAX_PIXELS)}; scale it down"
    try:
        picture = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
    except Image.DecompressionBombError as error:
        raise PictureTooLargeError(refusal) from error
    if picture.width * picture.height > MAX_PIXELS:
        raise PictureTooLargeError(f"{refusal}: {picture.width} x {picture.height}")
    return picture


def on_white(picture: Image) -> Image:
    """Return 8-bit RGB pixels of an image as a viewer and vLLM's loader show it.

    The image is rotated by its EXIF orientation, and transparent pixels get a white background.
    Pixels with more than 8 bits lose the lower bits. Engines and learner both use this function.

    Raises ValueError if the range of the pixel values is not known, and so the value of white is
    not.
    """
    pixels = _rgb(picture)
    # Read after the pixels: Pillow rotates a TIFF while it loads it, and removes the tag.
    orientation = orientation_of(picture)
    if orientation == 1:
        return pixels
    from PIL.Image import Transpose  # the caller has imported Pillow

    methods = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    turned = pixels.transpose(methods[orientation])
    turned.info = {}  # removes the orientation, so that no reader rotates the image again
    return turned


def orientation_of(picture: Image) -> int:
    """Return the EXIF orientation of an opened image, 1 to 8; 1 means upright.

    A damaged EXIF block counts as 1, as in vLLM and in browsers.
    """
    try:
        orientation = picture.getexif().get(EXIF_ORIENTATION, 1)
    except MemoryError:
        raise
    # Pillow's parser raises many kinds of errors for damaged blocks.
    except Exception:
        return 1
    return int(orientation) if orientation in range(1, 9) else 1


def _rgb(picture: Image) -> Image:
    # Pillow scales the pixels of a PPM to 16 bits.
    if picture.mode.startswith("I;16") or (picture.mode, picture.format) == ("I", "PPM"):
        picture = _of_8_bits(picture)
    if picture.mode in WITHOUT_RANGE:
        raise ValueError(
            f"its pixels are {WITHOUT_RANGE[picture.mode]} (Pillow's mode {picture.mode}), whose"
            " value for white is unknown; save it with 8 or 16 bits per channel, such as PNG"
        )
    # vLLM uses RGB pixels unchanged, even if the file declares one colour as transparent.
    if picture.mode == "RGB" or (
        picture.mode not in ("RGBA", "LA", "PA") and "transparency" not in picture.info
    ):
        return picture.convert("RGB")
    rgba = picture.convert("RGBA")
    rgb = rgba.convert("RGB")
    rgb.paste(WHITE, (0, 0, *rgb.size))
    rgb.paste(rgba, mask=rgba.getchannel("A"))
    return rgb


def _of_8_bits(picture: Image) -> Image:
    """Scale a deeper grey image to 8 bits; Pillow's `convert` makes all values above 255 white."""
    tags: Mapping[int, tuple[int, ...]] = getattr(picture, "tag_v2", {})  # only TIFF has tags
    below = tags.get(BITS_PER_SAMPLE, (16,))[0] - 8
    pixels = picture.convert("I")
    grey = pixels.point([min(value >> below, 255) for value in range(1 << 16)], "L")
    if "transparency" in picture.info:
        unseen = picture.info["transparency"]
        grey.putalpha(
            pixels.point([0 if value == unseen else 255 for value in range(1 << 16)], "L")
        )
    return grey
