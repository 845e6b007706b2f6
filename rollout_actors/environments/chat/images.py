"""Images inside messages, as an engine takes them beside its tokens."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from rollout_actors.environments.chat.messages import as_mapping
from rollout_actors.environments.types import Messages
from shared.records import ImageRef

BASE64 = ";base64"


class MessageImages:
    """Of one rollout, whose messages come again with every call: each image is read once."""

    def __init__(self) -> None:
        self._known: dict[str, ImageRef] = {}

    def of(self, messages: Sequence[Any]) -> tuple[ImageRef, ...]:
        """In the order in which they are shown. Raises ValueError for an image that is not in the
        message itself or cannot be read, and for parts that are neither text nor image."""
        return tuple(
            self._image(url)
            for message in messages
            for url in _urls(as_mapping(message).get("content"))
        )

    def _image(self, url: str) -> ImageRef:
        if url not in self._known:
            head, found, body = url.partition(",")
            if not (found and head.startswith("data:") and head.endswith(BASE64)):
                raise ValueError(
                    "image_url: engines fetch nothing, so an image is written as"
                    f" data:image/png;base64,..., got {url[:60]!r}"
                )
            try:
                data = base64.b64decode(body, validate=True)
            except binascii.Error as error:
                raise ValueError(f"image_url: {url[:60]!r}... is not base64 ({error})") from error
            try:
                _require_picture(data)
            except ValueError as error:
                raise ValueError(
                    f"image_url: {url[:60]!r}... cannot be decoded: {error}; send a whole PNG, JPEG"
                    " or WebP file"
                ) from error
            self._known[url] = ImageRef(
                path=None, data=data, sha256=hashlib.sha256(data).hexdigest()
            )
        return self._known[url]


# the rollouts of an example show the same ones, and begin one after the other
@lru_cache(maxsize=32)
def _require_picture(data: bytes) -> None:
    """ValueError with the reason: the engine's refusal would not be this rollout's alone."""
    # as long as Pillow takes, environments without images do without
    from rollout_actors.engine.sampling import decode_image

    decode_image(data)


def shown_in(messages: Messages) -> list[Any]:
    """What a prompt shows beside its text, in order: two prompts may be the same tokens and show
    different images.
    """
    if isinstance(messages, str):
        return []
    contents = [
        content
        for message in messages
        if isinstance(content := as_mapping(message).get("content"), list | tuple)
    ]
    return [
        part
        for content in contents
        for part in content
        if not (isinstance(part, Mapping) and part.get("type") == "text")
    ]


def without_images(messages: Messages) -> Messages:
    """The same to be read: in place of an image's data their size and their hash."""
    if isinstance(messages, str):
        return messages
    return [
        {**message, "content": _without_data(message.get("content"))}
        for message in map(as_mapping, messages)
    ]


def _without_data(content: Any) -> Any:
    if not isinstance(content, list | tuple):
        return content
    return [
        (
            part
            if (url := _data_url(part)) is None
            else {"type": "image_url", "image_url": {"url": _described(url)}}
        )
        for part in content
    ]


def _data_url(part: Any) -> str | None:
    match part:
        case {"type": "image_url", "image_url": {"url": str(url)} | str(url)} if url.startswith(
            "data:"
        ):
            return str(url)
        case _:
            return None


def _described(url: str) -> str:
    head, _, body = url.partition(",")
    return (
        f"{head.removesuffix(BASE64)}, {len(body.rstrip('=')) * 3 // 4} bytes, sha256 of the URL"
        f" {hashlib.sha256(url.encode()).hexdigest()[:16]}"
    )


def _urls(content: Any) -> Iterator[str]:
    for part in () if content is None or isinstance(content, str) else content:
        match part:
            case {"type": "image_url", "image_url": Mapping() as image}:
                yield image["url"]
            case {"type": "image_url", "image_url": str(url)}:
                yield url
            case {"type": "text"}:
                pass
            case _:
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise ValueError(f"content: a part of a message is text or image_url, got {kind!r}")
