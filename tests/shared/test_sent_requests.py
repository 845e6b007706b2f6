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
        of_pictures = [value for value in self.objects if isinstance(value, dict)]
        return [data.tobytes() for value in of_pictures for data in value.values()]

    def received(self, sent: SentRequests) -> list[RolloutRequest]:
        return sent.with_data(lambda refs: [self.objects[ref] for ref in refs])


@pytest.fixture
def store() -> Store:
    return Store()


def picture(data: bytes) -> ImageRef:
    return ImageRef(None, data, hashlib.sha256(data).hexdigest())


def request(position: int, *images: ImageRef) -> RolloutRequest:
    return RolloutRequest(0, position, str(position), (1, 2), images, GREEDY, position)


def test_an_engine_gets_the_requests_that_were_sent_and_each_picture_leaves_once(store) -> None:
    a, b, c = map(picture, (b"a", b"bb", b"ccc"))
    requests = [request(0, a), request(1, a, b), request(2), request(3, c)]
    sent = PictureShelf(store.put).send(requests)
    assert all(image.data is None for one in sent.requests for image in one.images)
    assert store.received(sent) == requests
    assert store.pictures == [b"a", b"bb", b"ccc"]


def test_a_picture_of_an_earlier_step_is_neither_read_nor_sent_again(store, tmp_path) -> None:
    shelf = PictureShelf(store.put)
    path = tmp_path / "a.png"
    path.write_bytes(b"a")
    on_disk = replace(picture(b"a"), path=path, data=None)
    # One whose hash nobody has taken is read and hashed.
    (received,) = store.received(shelf.send([request(0, ImageRef(path, None, ""))]))
    assert received.images == (replace(on_disk, data=b"a"),)
    shelf.send([request(0, on_disk)])
    path.unlink()
    again = store.received(shelf.send([request(1, on_disk)]))
    assert again == [request(1, replace(on_disk, data=b"a"))]
    assert store.pictures == [b"a"]
    with pytest.raises(RecordError, match=r"cannot read .*a\.png"):
        PictureShelf(store.put).send([request(1, on_disk)])


def test_pictures_that_were_not_shown_for_longest_leave_the_shelf_and_are_sent_again(store) -> None:
    shelf = PictureShelf(store.put, max_bytes=20)
    a, b, c = (picture(letter * 10) for letter in (b"a", b"b", b"c"))
    for shown in (a, b, a, c, a):
        shelf.send([request(0, shown)])
    assert store.pictures == [b"a" * 10, b"b" * 10, b"c" * 10]
    shelf.send([request(0, b)])
    assert store.pictures[3:] == [b"b" * 10]


def test_requests_whose_pictures_are_more_than_the_shelf_holds_have_all_of_them(store) -> None:
    requests = [request(position, picture(bytes([position]) * 10)) for position in range(5)]
    assert store.received(PictureShelf(store.put, max_bytes=20).send(requests)) == requests


def test_any_cut_of_the_requests_is_found_in_the_objects_with_its_own_pictures_alone(store) -> None:
    size = REQUESTS_TOGETHER
    num = 2 * size + 3
    requests = [request(position, picture(bytes([position // 2]))) for position in range(num)]
    refs = PictureShelf(store.put).put_each(requests)
    for ends in ([0, num], [0, 5, size, num], [0, size - 1, size + 1, num]):
        parts = []
        for start, stop in pairwise(ends):
            objects, places = in_objects(refs[start:stop])
            assert len(objects) == (stop - 1) // size - start // size + 1
            sent = SentRequests.chosen([store.objects[ref] for ref in objects], places)
            assert len(sent.pictures) == (stop - 1) // 2 - start // 2 + 1
            parts.append(store.received(sent))
        assert list(chain(*parts)) == requests
    assert len(store.pictures) == (num + 1) // 2


def test_what_environments_are_asked_travels_as_it_is(store) -> None:
    sent = PictureShelf(store.put).send(["asked", "too"])
    assert SentRequests.chosen([sent], None) == SentRequests(("asked", "too"), {})
