"""Preparation of the next rows while the device computes and the engines generate.

Pictures and prompts are encoded, responses parsed, matched and completed: none of it needs the
weights, and the results do not depend on when they are made.
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
    """One thread beside the learner's, which prepares items in order."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prepare-rows")

    def map(self, prepare: Callable[[S], T], items: Iterable[S]) -> Iterator[T]:
        """Return `map(prepare, items)`, and begin with the first items now.

        An exception of `prepare` is raised in its item's place.

        Example:
            `prompts = ahead.map(encoder.encode, samples)` encodes 16 prompts; `next(prompts)` gives
            the first and has the 17th encoded.
        """
        waiting = iter(items)
        pending = deque(self._thread.submit(prepare, item) for item in islice(waiting, NUM_AHEAD))
        return self._in_order(prepare, pending, waiting)

    def _in_order(
        self, prepare: Callable[[S], T], pending: deque[Future[T]], waiting: Iterator[S]
    ) -> Iterator[T]:
        # A generator of its own: `map` has to begin before the first `next`.
        try:
            while pending:
                result = pending.popleft().result()
                pending.extend(self._thread.submit(prepare, item) for item in islice(waiting, 1))
                yield result
        finally:  # also of a step that is left
            for future in pending:
                future.cancel()

    def close(self) -> None:
        """Stop: nothing further is prepared."""
        self._thread.shutdown(wait=False, cancel_futures=True)
