"""The in-step queue between generation and learning: a bounded queue of one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Queue = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]
"""`one_ahead` or `one_at_a_time`."""


def one_ahead(submit: Callable[[Any], Any], rounds: Iterable[Any]) -> Iterator[Any]:
    """Yield each round's result while the next round is already being produced.

    `submit(round)` starts a round and returns a handle whose `result()` waits (with a timeout of
    its own) and returns the value, or, for Ray, references to it. Bound: one round is in
    production, one is with the consumer. A round is submitted only when the one before it is
    complete, so no engine ever holds two; what unblocks the producer is the consumer asking for the
    next round.
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
    """Yield each round's result before the next round is submitted: generation and learning
    alternate.
    """
    for round_ in rounds:
        yield submit(round_).result()


class RoundStream:
    """The finished rounds of some steps in a row, which go through one queue.

    With several steps and `one_ahead`, a step's last round is handed out while the first of the
    next is being produced. So the consumer must be able to name the next step's rounds before it
    has ended a step, and a round may be older than the step that takes it.

    Of steps 7 and 8 with two rounds each the order is then: submit 7.1, 7.2; hand out 7.1; submit
    8.1; hand out 7.2, which ends step 7; submit 8.2; hand out 8.1; and so on. While 7.2 is with the
    consumer, `_left` is [0, 2]: none left of step 7, two of step 8.
    """

    def __init__(
        self,
        queue: Queue,
        submit: Callable[[Any], Any],
        rounds_of: Callable[[Any], list[Any]],
        steps: Iterable[Any],
    ) -> None:
        """`rounds_of(step)` is called once for each step, in order, when its first round can be
        submitted.
        """
        self._rounds_of, self._steps = rounds_of, iter(steps)
        self._left: list[int] = []
        """Rounds not yet handed out, of every step that has been begun and not ended."""
        self._results = queue(submit, self._rounds())
        self._waited_s = 0.0

    def of_next_step(self) -> Iterator[Any]:
        """Every result of the next step, in order. To be used up before the step after it is asked
        for.
        """
        while not self._left or self._left[0]:
            started = time.perf_counter()
            try:
                done = next(self._results)
            except StopIteration:  # the last of the steps, and it has no rounds
                break
            self._waited_s += time.perf_counter() - started
            assert self._left[0], "of several steps in a row, every one has rounds"
            self._left[0] -= 1
            yield done
        del self._left[0]

    def pop_wait_s(self) -> float:
        """Seconds for which the consumer has waited for rounds since this was asked last."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def _rounds(self) -> Iterator[Any]:
        for step in self._steps:
            rounds = self._rounds_of(step)
            self._left.append(len(rounds))
            yield from rounds
