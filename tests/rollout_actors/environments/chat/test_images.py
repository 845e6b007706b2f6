"""Images inside messages, as they are written down to be read."""

from __future__ import annotations

import base64
import copy
import hashlib
from types import SimpleNamespace
from typing import Any

import pytest
from scene_support import png

from rollout_actors.engine import sampling as images
from rollout_actors.environments.chat.images import MessageImages, without_images

URL = "data:image/png;base64," + base64.b64encode(b"three bytes thrice!").decode()
DESCRIBED = (
    f"data:image/png, {len(URL.partition(',')[2].rstrip('=')) * 3 // 4} bytes, sha256 of the URL"
    f" {hashlib.sha256(URL.encode()).hexdigest()[:16]}"
)
QUESTION = {"type": "text", "text": "What is in data:image/png;base64,AAAA?"}


def shown(url: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image_url", "image_url": url}, QUESTION]}


def described(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize(
    "url",
    [{"url": URL}, {"url": URL, "detail": "high"}, URL],
    ids=["as OpenAI's", "with its detail", "bare"],
)
def test_in_place_of_an_images_data_are_their_size_and_their_hash_and_the_other_parts_stay(
    url: Any,
) -> None:
    (message,) = without_images([shown(url)])
    assert message == {"role": "user", "content": [described(DESCRIBED), QUESTION]}


def test_the_messages_that_were_given_keep_their_images() -> None:
    messages = [shown({"url": URL}), {"role": "assistant", "content": "a box"}]
    before = copy.deepcopy(messages)
    without_images(messages)
    assert messages == before


def test_text_stays() -> None:
    assert without_images(f"Once upon {URL}") == f"Once upon {URL}"
    messages = [
        {"role": "user", "content": f"Is {URL} a picture?"},
        {"role": "assistant", "content": None, "tool_calls": ["{}"]},
    ]
    assert without_images(messages) == messages


@pytest.mark.parametrize(
    "part",
    [
        described("https://example.org/a.png"),
        {"type": "image_url"},
        {"type": "input_audio", "input_audio": {"data": "AA"}},
        "bare",
    ],
)
def test_a_part_that_is_no_image_of_data_stays(part: Any) -> None:
    messages = [{"role": "user", "content": [part, QUESTION]}]
    assert without_images(messages) == messages


def test_the_same_image_is_called_the_same_and_another_one_something_else() -> None:
    (message,) = without_images(
        [
            {
                "role": "tool",
                "tool_call_id": "a",
                "content": [described(URL), described(URL), described(URL + "AAAA")],
            }
        ]
    )
    first, same, other = message["content"]
    assert first == same != other
    assert (message["role"], message["tool_call_id"]) == ("tool", "a")


def test_a_message_of_the_openai_library_is_one_too() -> None:
    given = SimpleNamespace(model_dump=lambda *, exclude_none: shown({"url": URL}))
    (message,) = without_images([given])
    assert message["content"][0] == described(DESCRIBED)


def test_an_image_is_read_once_however_many_messages_and_rollouts_show_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[bytes] = []
    monkeypatch.setattr(images, "decode_image", read.append)
    data = png(31, 17)
    messages = [shown({"url": "data:image/png;base64," + base64.b64encode(data).decode()})] * 2
    for of_rollout in (MessageImages(), MessageImages()):
        assert [image.data for _ in range(2) for image in of_rollout.of(messages)] == [data] * 4
    assert read == [data]
