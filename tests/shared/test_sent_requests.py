"""Requests travel without their pictures, and each distinct picture once."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import pytest

from shared.errors import RecordError
from shared.records import ImageRef
from shared.rollouts import DecodeMode, DecodeSettings, RolloutRequest
from shared.sent_requests import REQUESTS_TOGETHER, PictureShelf, SentRequests, in_objects

GREEDY = DecodeSettings(DecodeMode.GREEDY, 0.0, 1.0, -1, 1.0, 8, 1, (), (), return_logprobs=True)


class Store:
    """Objects by their references, which are numbers."""

    def __init__(self) -> None:
        self.objects: list[Any] = []

    def put(self, value: Any) -> int:
        self.objects.append(value)
        return len(self.objects) - 1

    @property
    def pictures(self) -> list[bytes]:
        return [
            data.tobytes()
            for value in self.objects
            if isinstance(value, dict)
            for data in value.values()
        ]

    def received(self, sent: SentRequests) -> list[RolloutRequest]:
        return sent.with_data(lambda refs: [self.objects[ref] for ref in refs])


def picture(data: bytes) -> ImageRef:
    return ImageRef(None, data, hashlib.sha256(data).hexdigest())


def request(position: int, *images: ImageRef) -> RolloutRequest:
    return RolloutRequest(0, position, str(position), (1, 2), images, GREEDY, position)


def test_an_engine_gets_the_requests_that_were_sent_and_each_picture_leaves_once() -> None:
    store = Store()
    shelf = PictureShelf(store.put)
    a, b, c = map(picture, (b"a", b"bb", b"ccc"))
    requests = [request(0, a), request(1, a, b), request(2), request(3, c)]
    sent = shelf.send(requests)
    assert all(image.data is None for one in sent.requests for image in one.images)
    assert store.received(sent) == requests
    assert store.pictures == [b"a", b"bb", b"ccc"]


def test_a_picture_of_an_earlier_step_is_neither_read_nor_sent_again(tmp_path: Any) -> None:
    store = Store()
    shelf = PictureShelf(store.put)
    path = tmp_path / "a.png"
    path.write_bytes(b"a")
    on_disk = replace(picture(b"a"), path=path, data=None)
    shelf.send([request(0, on_disk)])
    path.unlink()
    assert store.received(shelf.send([request(1, on_disk)])) == [
        request(1, replace(on_disk, data=b"a"))
    ]
    assert store.pictures == [b"a"]
    with pytest.raises(RecordError, match=r"cannot read .*a\.png"):
        PictureShelf(store.put).send([request(1, on_disk)])


def test_a_picture_whose_hash_nobody_has_taken_is_read_and_hashed(tmp_path: Any) -> None:
    store = Store()
    path = tmp_path / "a.png"
    path.write_bytes(b"a")
    (received,) = store.received(
        PictureShelf(store.put).send([request(0, ImageRef(path, None, ""))])
    )
    assert received.images == (replace(picture(b"a"), path=path),)


def test_pictures_that_were_not_shown_for_longest_leave_the_shelf_and_are_sent_again() -> None:
    store = Store()
    shelf = PictureShelf(store.put, max_bytes=20)
    a, b, c = (picture(letter * 10) for letter in (b"a", b"b", b"c"))
    for shown in (a, b, a, c):
        shelf.send([request(0, shown)])
    shelf.send([request(0, a)])
    assert store.pictures == [b"a" * 10, b"b" * 10, b"c" * 10]
    shelf.send([request(0, b)])
    assert store.pictures[3:] == [b"b" * 10]


def test_requests_whose_pictures_are_more_than_the_shelf_holds_have_all_of_them() -> None:
    store = Store()
    requests = [request(position, picture(bytes([position]) * 10)) for position in range(5)]
    assert store.received(PictureShelf(store.put, max_bytes=20).send(requests)) == requests


def test_any_cut_of_the_requests_is_found_in_the_objects_with_its_own_pictures_alone() -> None:
    store = Store()
    num = 2 * REQUESTS_TOGETHER + 3
    requests = [request(position, picture(bytes([position // 2]))) for position in range(num)]
    refs = PictureShelf(store.put).put_each(requests)
    for ends in (
        [0, num],
        [0, 5, REQUESTS_TOGETHER, num],
        [0, REQUESTS_TOGETHER - 1, REQUESTS_TOGETHER + 1, num],
    ):
        parts = []
        for start, stop in pairwise(ends):
            objects, places = in_objects(refs[start:stop])
            assert len(objects) == (stop - 1) // REQUESTS_TOGETHER - start // REQUESTS_TOGETHER + 1
            sent = SentRequests.chosen([store.objects[ref] for ref in objects], places)
            assert len(sent.pictures) == (stop - 1) // 2 - start // 2 + 1
            parts.append(store.received(sent))
        assert list(chain(*parts)) == requests
    assert len(store.pictures) == (num + 1) // 2


def test_what_environments_are_asked_travels_as_it_is() -> None:
    sent = PictureShelf(Store().put).send(["asked", "too"])
    assert SentRequests.chosen([sent], None) == SentRequests(("asked", "too"), {})
