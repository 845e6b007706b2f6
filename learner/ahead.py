"""Preparation of the next rows while the device computes the present one, and while engines
generate.

Pictures and prompts are encoded, responses parsed, matched and completed: none of it needs the
weights, and what comes of it does not depend on when it is done. What is counted and written down
stays with the learner's own thread, in the order of positions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")

NUM_AHEAD = 16
"""Items that are prepared before they are asked for: two windows of rows
(`training.packing_window`). A prompt with a picture of one megapixel takes 25 MB.
"""


class Ahead:
    """One thread beside the learner's, which prepares in order what it is given."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prepare-rows")

    def map(self, prepare: Callable[[S], T], items: Iterable[S]) -> Iterator[T]:
        """`map(prepare, items)`, of which the first are prepared from now on. What `prepare` raises
        comes in its item's place.

        Example:
            `prompts = ahead.map(encoder.encode, samples)` encodes 16 prompts; `next(prompts)` gives
            the first and has the 17th encoded.
        """
        waiting = iter(items)
        begun = deque(self._thread.submit(prepare, item) for item in islice(waiting, NUM_AHEAD))
        return self._in_order(prepare, begun, waiting)

    def close(self) -> None:
        """Stop: nothing further is prepared."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _in_order(
        self, prepare: Callable[[S], T], begun: deque[Future[T]], waiting: Iterator[S]
    ) -> Iterator[T]:
        try:
            while begun:
                result = begun.popleft().result()
                begun.extend(self._thread.submit(prepare, item) for item in islice(waiting, 1))
                yield result
        finally:  # a step that is left
            for future in begun:
                future.cancel()
