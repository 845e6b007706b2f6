"""Pictures as a model is shown them: one rule for engines and learner. No imaging library here; who calls this has opened the picture with his."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

WHITE = (255, 255, 255)


def on_white(picture: Image) -> Image:
    """RGB pixels, with white behind what is transparent, as vLLM's own loader shows it. Of an opaque picture what `convert("RGB")` gives."""
    # vLLM takes RGB as it is, also where the file calls one of its colours transparent.
    if picture.mode == "RGB" or (picture.mode not in ("RGBA", "LA", "PA") and "transparency" not in picture.info):
        return picture.convert("RGB")
    rgba = picture.convert("RGBA")
    made = rgba.convert("RGB")
    made.paste(WHITE, (0, 0, *made.size))
    made.paste(rgba, mask=rgba.getchannel("A"))
    return made
