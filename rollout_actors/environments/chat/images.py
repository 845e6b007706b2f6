"""Images inside chat messages: decoded for an engine, and replaced by a description for a log."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache

from rollout_actors.environments.chat.messages import as_mapping
from rollout_actors.environments.types import GivenMessage, Messages
from shared.records import ImageRef

BASE64 = ";base64"


class MessageImages:
    """Extracts the images from the messages of one rollout, and decodes each image only once.

    Every model call of the rollout repeats the earlier messages.
    """

    def __init__(self) -> None:
        self._known: dict[str, ImageRef] = {}

    def of(self, messages: Sequence[GivenMessage]) -> tuple[ImageRef, ...]:
        """Return the images in these messages, in order.

        Raises:
            ValueError: an image is not in the message itself, or cannot be decoded; or a part is
                neither text nor image.
        """
        images = []
        for message in messages:
            content = as_mapping(message).get("content")
            for part in () if content is None or isinstance(content, str) else content:
                match part:
                    case {"type": "image_url", "image_url": {"url": url} | str(url)}:
                        images.append(self._image(url))
                    case {"type": "text"}:
                        pass
                    case _:
                        is_mapping = isinstance(part, Mapping)
                        kind = part.get("type") if is_mapping else type(part).__name__
                        raise ValueError(
                            f"content: a part of a message must be text or image_url, got {kind!r}"
                        )
        return tuple(images)

    def _image(self, url: str) -> ImageRef:
        if url in self._known:
            return self._known[url]
        head, found, body = url.partition(",")
        if not (found and head.startswith("data:") and head.endswith(BASE64)):
            raise ValueError(
                "image_url: must be data:image/png;base64,..., because engines download nothing;"
                f" got {url[:60]!r}"
            )
        try:
            data = base64.b64decode(body, validate=True)
        except binascii.Error as error:
            raise ValueError(f"image_url: {url[:60]!r}... is not base64 ({error})") from error
        try:
            _decode(data)
        except ValueError as error:
            raise ValueError(
                f"image_url: {url[:60]!r}... cannot be decoded: {error}; send a whole PNG, JPEG"
                " or WebP file"
            ) from error
        image = ImageRef(path=None, data=data, sha256=hashlib.sha256(data).hexdigest())
        self._known[url] = image
        return image


# Cached, because the rollouts of an example show the same images and begin one after the other. An
# invalid image raises here: if the engine refused it, more than this rollout would end.
@lru_cache(maxsize=32)
def _decode(data: bytes) -> None:
    # Imported here, because environments without images do not need Pillow.
    from rollout_actors.engine.sampling import decode_image

    decode_image(data)


def shown_in(messages: Messages) -> list[object]:
    """Return the parts of a prompt that are not text (images), in order.

    Compare these parts too, because prompts with equal tokens may show different images.
    """
    if isinstance(messages, str):
        return []
    shown: list[object] = []
    for message in messages:
        content = as_mapping(message).get("content")
        for part in content if isinstance(content, list | tuple) else ():
            if not (isinstance(part, Mapping) and part.get("type") == "text"):
                shown.append(part)
    return shown


def without_images(messages: Messages) -> Messages:
    """Return the messages with each image's data replaced by its size and hash, for logs."""
    if isinstance(messages, str):
        return messages
    result = []
    for message in map(as_mapping, messages):
        content = message.get("content")
        if isinstance(content, list | tuple):
            content = [_described(part) for part in content]
        result.append({**message, "content": content})
    return result


def _described(part: object) -> object:
    match part:
        case {"type": "image_url", "image_url": {"url": str(url)} | str(url)} if url.startswith(
            "data:"
        ):
            head, _, body = url.partition(",")
            num_bytes = len(body.rstrip("=")) * 3 // 4
            digest = hashlib.sha256(url.encode()).hexdigest()[:16]
            text = f"{head.removesuffix(BASE64)}, {num_bytes} bytes, sha256 of the URL {digest}"
            return {"type": "image_url", "image_url": {"url": text}}
        case _:
            return part
