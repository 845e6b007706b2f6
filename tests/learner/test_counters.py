"""How rollouts ended is counted by who ended them."""

from __future__ import annotations

from dataclasses import replace

from learner.counters import StepTally
from learner.targets import Reading
from shared.grounding.matching import MatchResult
from shared.grounding.objects import ParsedRollout
from shared.rollouts import FinishReason, Rollout

ROLLOUT = Rollout(0, 0, "scene", (), (1, 2), 9, None, None, FinishReason.STOP, (), 0, "actor", 0, 1, 0.1)
READING = Reading(ParsedRollout((), "{", (), (), None, truncated=True, fallback=True), MatchResult((), (), (), 0), (), (), (), "")


def test_what_the_guard_ended_is_counted_apart_from_what_reached_its_limit() -> None:
    tally = StepTally(0, capacity=8, min_fill_ratio=0.5)
    for reason, number in ((FinishReason.REPETITION, 3), (FinishReason.LENGTH, 2), (FinishReason.STOP, 5)):
        for _ in range(number):
            tally.add_rollout(replace(ROLLOUT, finish_reason=reason), READING, num_ground_truth=0, staleness=0)
    counted = tally.totals.as_dict()
    assert (counted["rollout/num"], counted["rollout/num_repeat_terminated"], counted["rollout/num_length_limited"]) == (10, 3, 2)
