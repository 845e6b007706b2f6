"""The in-step queue between generation and learning: a bounded queue of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


def one_ahead(submit: Callable[[Any], Any], rounds: Iterable[Any]) -> Iterator[Any]:
    """Yield each round's result while the next round is already being produced.

    `submit(round)` starts a round and returns a handle whose `result()` waits (with a timeout of its own) and returns the value, or,
    for Ray, references to it. Bound: one round is in production, one is with the consumer. A round is submitted only when the one
    before it is complete, so no engine ever holds two; what unblocks the producer is the consumer asking for the next round.
    """
    pending = None
    for round_ in rounds:
        done = None if pending is None else (pending.result(),)
        pending = submit(round_)
        if done is not None:
            yield done[0]
    if pending is not None:
        yield pending.result()


def one_at_a_time(submit: Callable[[Any], Any], rounds: Iterable[Any]) -> Iterator[Any]:
    """Yield each round's result before the next round is submitted: generation and learning alternate."""
    for round_ in rounds:
        yield submit(round_).result()
