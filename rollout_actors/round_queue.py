"""A round as the engines are asked for it: who is asked what, when, and who instead (DESIGN 5, decisions 14 and 15). No Ray here."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from shared.chunking import RoundPart, round_parts


class RoundQueue:
    """What each engine has to do in a round. None is asked for more than `decode_batch_size` per device at a time: what it takes over from one that
    failed waits for its own."""

    def __init__(self, sizes: Sequence[int], devices: Sequence[int], *, decode_batch_size: int) -> None:
        """`sizes` are the requests of each learner rank; together at most `decode_batch_size` for each device."""
        self._bounds = [decode_batch_size * count for count in devices]
        self._waiting: list[deque[RoundPart]] = [deque() for _ in devices]
        self._num_asked = [0] * len(devices)
        for part in round_parts(sizes, devices):
            self._waiting[part.engine].append(part)
        own = [sum(len(part.requests) for part in waiting) for waiting in self._waiting]
        assert all(count <= bound for count, bound in zip(own, self._bounds, strict=True)), f"a round of {own} over engines that take {self._bounds}"

    def take(self) -> list[RoundPart]:
        """Everything that can be asked for now. Each part has to be given back by `answered` or `failed`."""
        taken = []
        for engine, waiting in enumerate(self._waiting):
            while waiting and self._num_asked[engine] + len(waiting[0].requests) <= self._bounds[engine]:
                taken.append(waiting.popleft())
                self._num_asked[engine] += len(taken[-1].requests)
        return taken

    def answered(self, part: RoundPart) -> None:
        self._num_asked[part.engine] -= len(part.requests)

    def failed(self, part: RoundPart) -> int | None:
        """Puts it behind what the next engine has to do, and says which that is; None: every engine has failed at it."""
        self.answered(part)
        num_failed, engine = part.num_failed + 1, (part.engine + 1) % len(self._waiting)
        if num_failed == len(self._waiting):
            return None
        # An engine of fewer devices takes it in several.
        size = self._bounds[engine]
        ranges = [part.requests[first : first + size] for first in range(0, len(part.requests), size)]
        self._waiting[engine].extend(RoundPart(engine, part.rank, requests, num_failed) for requests in ranges)
        return engine
