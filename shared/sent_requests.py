"""Requests on their way to engines, without the bytes of their pictures, which are sent once,
whoever shows them and however often.

Several requests are one object, and the pictures among them that were not sent before are another,
a box. An engine reads the boxes that its requests name from its node's part of Ray's object store,
without a copy; where a box is not there yet, or not any more, the store fetches it from the
sender's. So a node is sent a picture again only after it has left the sender's shelf, or the node's
store. No Ray here: who sends brings `put`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from shared.records import ImageRef
from shared.rollouts import RolloutRequest

REQUESTS_TOGETHER = 32
"""Requests of one object. The first engine waits for as many; an object for each would cost the
driver as much as it costs the sender.
"""

SHELF_BYTES = 1 << 29
"""Of pictures that a sender holds for later requests: 3,500 of 150 kB."""


class RequestRef(NamedTuple):
    """Where a request is."""

    sent: Any
    """Reference to a `SentRequests`."""
    place: int
    """Among its requests."""


@dataclass(frozen=True, slots=True)
class SentRequests:
    """Some requests in order.

    Example:
        Of two requests for one picture, `pictures` has one entry: `SentRequests((first, second),
        {sha256: box})`.
    """

    requests: tuple[Any, ...]
    """`RolloutRequest`s whose images have no `data`, or what environments are asked, which has no
    images.
    """
    pictures: Mapping[str, Any]
    """By its sha256 a reference to each picture's box, a dictionary of uint8 arrays by sha256."""

    @classmethod
    def chosen(cls, objects: Sequence[SentRequests], places: range | None) -> SentRequests:
        """The requests at these places of all the objects' requests, one object behind the other,
        and their pictures; None: all of them.
        """
        requests = tuple(request for one in objects for request in one.requests)
        if places is not None:
            requests = requests[places.start : places.stop]
        pictures = {sha256: picture for one in objects for sha256, picture in one.pictures.items()}
        shown = dict.fromkeys(image.sha256 for request in requests for image in _images(request))
        return cls(requests, {sha256: pictures[sha256] for sha256 in shown})

    def with_data(
        self, get: Callable[[list[Any]], list[Mapping[str, np.ndarray]]]
    ) -> list[RolloutRequest]:
        """The requests with the bytes of their images; `get` gives the boxes for their
        references."""
        refs = list(dict.fromkeys(self.pictures.values()))
        boxes = dict(zip(refs, get(refs), strict=True))
        data = {sha256: boxes[ref][sha256].tobytes() for sha256, ref in self.pictures.items()}
        return [
            replace(
                request,
                images=tuple(replace(image, data=data[image.sha256]) for image in request.images),
            )
            for request in self.requests
        ]


def in_objects(refs: Sequence[RequestRef]) -> tuple[list[Any], range]:
    """References to the objects that hold these requests, which follow each other, and the places
    that `SentRequests.chosen` takes.
    """
    first = refs[0].place
    return list(dict.fromkeys(ref.sent for ref in refs)), range(first, first + len(refs))


class PictureShelf:
    """Pictures that a process has sent, by their hashes: who shows one of them again sends no
    bytes. Bounded: those that were not shown for longest leave, though requests under way keep
    theirs. May be used from several threads."""

    def __init__(self, put: Callable[[Any], Any], max_bytes: int = SHELF_BYTES) -> None:
        """`put` makes an object of a value and returns its reference."""
        self._put = put
        self._free = max_bytes
        self._boxes: OrderedDict[Any, dict[str, int]] = OrderedDict()
        """The size of each picture, by box; the last one was used last."""
        self._box_of: dict[str, Any] = {}
        self._lock = threading.Lock()

    def send(self, requests: Sequence[Any]) -> SentRequests:
        """Reads the files of pictures that are not held. RecordError where one is gone or has
        changed.
        """
        with self._lock:
            new: dict[str, np.ndarray] = {}
            sent = tuple(self._without_data(request, new) for request in requests)
            if new:
                # One for all of them: an object costs a millisecond, whatever its size.
                box = self._put(new)
                self._boxes[box] = {sha256: len(data) for sha256, data in new.items()}
                self._box_of.update(dict.fromkeys(new, box))
                self._free -= sum(map(len, new.values()))
            pictures = {
                image.sha256: self._box_of[image.sha256]
                for request in sent
                for image in _images(request)
            }
            for box in dict.fromkeys(pictures.values()):
                self._boxes.move_to_end(box)
            while self._free < 0:
                _, sizes = self._boxes.popitem(last=False)
                self._free += sum(sizes.values())
                for sha256 in sizes:
                    del self._box_of[sha256]
        return SentRequests(sent, pictures)

    def put_each(self, requests: Sequence[Any]) -> list[RequestRef]:
        """Send all of them from this process, in order."""
        refs = []
        for first in range(0, len(requests), REQUESTS_TOGETHER):
            some = requests[first : first + REQUESTS_TOGETHER]
            sent = self._put(self.send(some))
            refs += [RequestRef(sent, place) for place in range(len(some))]
        return refs

    def _without_data(self, request: Any, new: dict[str, np.ndarray]) -> Any:
        """The request without the bytes of its images, of which those that are not held are in
        `new`.
        """
        images = []
        for image in _images(request):
            if image.sha256 not in self._box_of and image.sha256 not in new:
                image = image.with_data()
                assert image.data is not None
                new[image.sha256] = np.frombuffer(image.data, dtype=np.uint8)
            images.append(replace(image, data=None))
        return replace(request, images=tuple(images)) if images else request


def _images(request: Any) -> tuple[ImageRef, ...]:
    return request.images if isinstance(request, RolloutRequest) else ()
