"""A round as the engines are asked for it: who is asked what, when, and who instead (DESIGN 5, decisions 14 and 15). No Ray here."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shared.chunking import round_parts


@dataclass(frozen=True, slots=True)
class Piece:
    """What one engine is asked for one learner rank."""

    engine: int
    rank: int
    requests: range
    """Places among the rank's requests of the round; never empty."""
    num_failed: int = 0
    """Engines that failed to answer it before this one."""


class RoundQueue:
    """What each engine has to do in a round. None is asked for more than `decode_batch_size` per device at a time: what it takes over from one that
    failed waits for its own."""

    def __init__(self, sizes: Sequence[int], devices: Sequence[int], *, decode_batch_size: int) -> None:
        """`sizes` are the requests of each learner rank; together at most `decode_batch_size` for each device."""
        self._bounds = [decode_batch_size * count for count in devices]
        self._waiting: list[deque[Piece]] = [deque() for _ in devices]
        self._num_asked = [0] * len(devices)
        for part in round_parts(sizes, devices):
            self._waiting[part.engine].append(Piece(part.engine, part.rank, part.requests))
        own = [sum(len(piece.requests) for piece in waiting) for waiting in self._waiting]
        assert all(count <= bound for count, bound in zip(own, self._bounds, strict=True)), f"a round of {own} over engines that take {self._bounds}"

    def take(self) -> list[Piece]:
        """Everything that can be asked for now. Each piece has to be given back by `answered` or `failed`."""
        taken = []
        for engine, waiting in enumerate(self._waiting):
            while waiting and self._num_asked[engine] + len(waiting[0].requests) <= self._bounds[engine]:
                taken.append(waiting.popleft())
                self._num_asked[engine] += len(taken[-1].requests)
        return taken

    def answered(self, piece: Piece) -> None:
        self._num_asked[piece.engine] -= len(piece.requests)

    def failed(self, piece: Piece) -> int | None:
        """Puts it behind what the next engine has to do, and says which that is; None: every engine has failed at it."""
        self.answered(piece)
        num_failed, engine = piece.num_failed + 1, (piece.engine + 1) % len(self._waiting)
        if num_failed == len(self._waiting):
            return None
        # An engine of fewer devices takes it in several.
        size = self._bounds[engine]
        parts = [piece.requests[first : first + size] for first in range(0, len(piece.requests), size)]
        self._waiting[engine].extend(Piece(engine, piece.rank, part, num_failed) for part in parts)
        return engine
