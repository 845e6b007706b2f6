"""Images inside messages, as they are written down to be read."""

from __future__ import annotations

import base64
import copy
import hashlib
from types import SimpleNamespace
from typing import Any

import pytest
from environment_support import shown
from scene_support import png

from rollout_actors.engine import sampling as images
from rollout_actors.environments.chat.images import MessageImages, without_images

DATA = b"three bytes thrice!"
URL = "data:image/png;base64," + base64.b64encode(DATA).decode()
DIGEST = hashlib.sha256(URL.encode()).hexdigest()[:16]
DESCRIBED = f"data:image/png, {len(DATA)} bytes, sha256 of the URL {DIGEST}"
QUESTION = {"type": "text", "text": "What is in data:image/png;base64,AAAA?"}


def image(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": url}


def message_of(*parts: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "a", "content": [*parts, QUESTION]}


@pytest.mark.parametrize(
    "url",
    [{"url": URL}, {"url": URL, "detail": "high"}, URL],
    ids=["as OpenAI's", "with its detail", "bare"],
)
def test_in_place_of_an_images_data_are_their_size_and_their_hash_and_the_rest_stays(url):
    message = message_of(image(url))
    before = copy.deepcopy(message)
    expected = message_of(image({"url": DESCRIBED}))
    of_the_library = SimpleNamespace(model_dump=lambda *, exclude_none: message)
    assert without_images([message, of_the_library]) == [expected, expected]
    assert message == before


@pytest.mark.parametrize(
    "messages",
    [
        f"Once upon {URL}",
        [{"role": "user", "content": f"Is {URL} a picture?"}],
        [{"role": "assistant", "content": None, "tool_calls": ["{}"]}],
        [message_of(image({"url": "https://example.org/a.png"}))],
        [message_of({"type": "image_url"})],
        [message_of({"type": "input_audio", "input_audio": {"data": "AA"}})],
        [message_of("bare")],
    ],
)
def test_text_and_parts_that_are_no_image_of_data_stay(messages):
    assert without_images(messages) == messages


def test_the_same_image_is_called_the_same_and_another_one_something_else():
    (message,) = without_images([message_of(image(URL), image(URL), image(URL + "AAAA"))])
    first, same, other, _ = message["content"]
    assert first == same != other


def test_an_image_is_read_once_however_many_messages_and_rollouts_show_it(monkeypatch):
    read: list[bytes] = []
    monkeypatch.setattr(images, "decode_image", read.append)
    data = png(31, 17)
    for of_rollout in (MessageImages(), MessageImages()):
        for _ in range(2):
            assert [one.data for one in of_rollout.of([shown(data)] * 2)] == [data] * 2
    assert read == [data]
