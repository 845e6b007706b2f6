"""The in-step queue (spec channel-b-pipeline: bounded producer/consumer queue of size 1)."""

import pytest

from launch.pipeline import one_ahead, one_at_a_time


class Round:
    """A round that is done when it is asked for its result."""

    def __init__(self, name, events):
        self._name = name
        self._events = events
        events.append(("submit", name))

    def result(self):
        self._events.append(("generated", self._name))
        return f"rollouts of {self._name}"


@pytest.mark.parametrize(
    ("queue", "order"),
    [
        # Round k + 1 is submitted before round k is learned, and never two are in production.
        (one_ahead, "sa ga sb la gb sc lb gc lc"),
        (one_at_a_time, "sa ga la sb gb lb sc gc lc"),
    ],
)
def test_a_round_is_generated_while_the_one_before_it_is_learned_or_they_alternate(queue, order):
    events = []
    for name, rollouts in zip("abc", queue(lambda name: Round(name, events), "abc"), strict=True):
        assert rollouts == f"rollouts of {name}"
        events.append(("learn", name))
    assert " ".join(f"{what[0]}{name}" for what, name in events) == order


@pytest.mark.parametrize("queue", [one_ahead, one_at_a_time])
def test_without_rounds_nobody_is_called(queue):
    assert list(queue(lambda round_: 1 / 0, [])) == []
