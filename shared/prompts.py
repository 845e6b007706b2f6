"""What the model is asked."""

from __future__ import annotations

from typing import Any

DEFAULT_USER_PROMPT = "Locate every object in the image. Answer with one JSON object."
"""Neutral and short: its tokens are paid in every prompt."""


def detection_messages(num_images: int, *, system_prompt: str | None, user_prompt: str) -> list[dict[str, Any]]:
    """The chat of one sample, as Hugging Face processors read it: an optional system message, then the images followed by the text.

    An image is a bare `{"type": "image"}` in its place; the pixels are given to the processor beside the messages, in the same order.
    """
    system = [] if system_prompt is None else [{"role": "system", "content": [{"type": "text", "text": system_prompt}]}]
    images = [{"type": "image"} for _ in range(num_images)]
    return [*system, {"role": "user", "content": [*images, {"type": "text", "text": user_prompt}]}]
