"""Requests sent to engines through Ray's object store; each image is sent once.

Several requests form one object. Those of their images that were not sent before form another
object, a box. An engine reads the boxes of its requests from its node's object store without a
copy. The sender remembers the images that it has sent (`PictureShelf`). So a node receives an image
again only after the sender has forgotten it, or the node's store has dropped it. This module does
not import Ray: the sender passes `put`.
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
"""Requests per object in Ray's store.

With fewer requests per object, the driver needs more time. With more, the first engine starts
later, because it waits for all requests of an object.
"""

SHELF_BYTES = 1 << 29
"""Bytes of images that a sender keeps for later requests: 3,500 images of 150 kB."""


class RequestRef(NamedTuple):
    """A reference to one request in Ray's store: number `offset` of the requests at `sent`."""

    sent: Any
    offset: int


@dataclass(frozen=True, slots=True)
class SentRequests:
    """Several requests as one object in Ray's store, with references to the prompts' images.

    Example: for two requests with the same image, `pictures` has one entry: `SentRequests((first,
    second), {sha256: box})`.
    """

    requests: tuple[Any, ...]
    """The requests: `RolloutRequest`s with images without `data`, or `EnvironmentRequest`s."""
    pictures: Mapping[str, Any]
    """A Ray reference to the box with each image, by the image's sha256.

    A box is an object that maps sha256 to the bytes of images, as uint8 arrays.
    """

    @classmethod
    def chosen(cls, objects: Sequence[SentRequests], places: range | None) -> SentRequests:
        """Join several objects, and keep only the requests at `places` with their images.

        `places` are indices in the joined requests; None: keep all requests.
        """
        requests = tuple(request for part in objects for request in part.requests)
        if places is not None:
            requests = requests[places.start : places.stop]
        pictures: dict[str, Any] = {}
        for part in objects:
            pictures |= part.pictures
        shown = dict.fromkeys(image.sha256 for request in requests for image in _images(request))
        return cls(requests, {sha256: pictures[sha256] for sha256 in shown})

    def with_data(
        self, get: Callable[[list[Any]], list[Mapping[str, np.ndarray]]]
    ) -> list[RolloutRequest]:
        """Return the requests with the bytes of their images.

        `get` returns the boxes that a list of Ray references refers to.
        """
        if not self.pictures:
            return list(self.requests)
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
    """Return references to the objects that contain these successive requests.

    Also return the indices of the requests in the joined objects, as `SentRequests.chosen` needs.
    """
    first = refs[0].offset
    return list(dict.fromkeys(ref.sent for ref in refs)), range(first, first + len(refs))


class PictureShelf:
    """Sends requests to Ray's object store, and each of their images only once.

    It holds references to the sent images, up to a size limit: the least recently used images leave
    it. Requests in progress keep their images in the store. Thread-safe.
    """

    def __init__(self, put: Callable[[Any], Any], max_bytes: int = SHELF_BYTES) -> None:
        """Create an empty shelf; `put` stores a value in Ray's store and returns its reference."""
        self._put = put
        self._free = max_bytes
        self._boxes: OrderedDict[Any, dict[str, int]] = OrderedDict()
        """By box, the size in bytes of each image in it (by sha256). The boxes are in order of last
        use.
        """
        self._box_of: dict[str, Any] = {}
        self._lock = threading.Lock()

    def send(self, requests: Sequence[Any]) -> SentRequests:
        """Send images that were not sent before; return the requests with references to images.

        Raises RecordError if the file of an image is missing or has changed.
        """
        with self._lock:
            new: dict[str, np.ndarray] = {}
            sent = tuple(self._without_data(request, new) for request in requests)
            if new:
                # One box for all: an object costs a millisecond, whatever its size.
                box = self._put(new)
                self._boxes[box] = {sha256: len(data) for sha256, data in new.items()}
                self._box_of.update(dict.fromkeys(new, box))
                self._free -= sum(map(len, new.values()))
            shown = [image.sha256 for request in sent for image in _images(request)]
            pictures = {sha256: self._box_of[sha256] for sha256 in shown}
            for box in dict.fromkeys(pictures.values()):
                self._boxes.move_to_end(box)
            while self._free < 0:
                _, sizes = self._boxes.popitem(last=False)
                self._free += sum(sizes.values())
                for sha256 in sizes:
                    del self._box_of[sha256]
        return SentRequests(sent, pictures)

    def put_each(self, requests: Sequence[Any]) -> list[RequestRef]:
        """Send all requests to Ray's store; return a reference to each of them, in order."""
        refs = []
        for first in range(0, len(requests), REQUESTS_TOGETHER):
            some = requests[first : first + REQUESTS_TOGETHER]
            sent = self._put(self.send(some))
            refs += [RequestRef(sent, i) for i in range(len(some))]
        return refs

    def _without_data(self, request: Any, new: dict[str, np.ndarray]) -> Any:
        """Return the request without the bytes of its images; new images' bytes go into `new`."""
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
