"""Which step is on which channel: `floor((s + 1) b) > floor(s b)`, `s` counting steps after the warm-up (DESIGN section 10)."""

from __future__ import annotations

import random
from fractions import Fraction
from math import floor

import pytest

from shared.config.pipeline import Channel
from shared.config.stage2_ab import ScheduleSection

_RANDOM = random.Random(0)
RATIOS = [
    *(hundredths / 100 for hundredths in range(101)),
    *(0.333, 0.3333333333333333, 1 / 3, 2 / 3, 1 / 7, 0.1 + 0.2, 0.05, 1e-5, 1e-300, 0.999999, 1 - 2**-53, 0.375),
    *(_RANDOM.random() for _ in range(30)),
    *(round(_RANDOM.random(), 3) for _ in range(30)),
]
NUM_STEPS = 200


def exact_channels(b_ratio: float, num_steps: int) -> list[Channel]:
    """The rule, step by step, in fractions of the ratio as it is written."""
    b = Fraction(repr(b_ratio))
    return [Channel.B if floor((s + 1) * b) > floor(s * b) else Channel.A for s in range(num_steps)]


@pytest.mark.parametrize("warmup_steps", [0, 7])
def test_the_channel_of_a_step_is_the_exact_rule_for_the_ratio_as_written(warmup_steps):
    for b_ratio in RATIOS:
        schedule = ScheduleSection(b_ratio=b_ratio, warmup_steps=warmup_steps)
        expected = [Channel.A] * warmup_steps + exact_channels(b_ratio, NUM_STEPS - warmup_steps)
        assert [schedule.channel(step) for step in range(NUM_STEPS)] == expected, b_ratio
        assert [schedule.num_b_steps(n) for n in (0, 1, 8, 100, NUM_STEPS)] == [expected[:n].count(Channel.B) for n in (0, 1, 8, 100, NUM_STEPS)], b_ratio


def test_floats_alone_would_move_a_step_to_the_other_channel():
    """Why the ratio is read as it is written: 100 x 0.29 is 28.999999999999996 in floats."""
    in_floats = [Channel.B if floor((s + 1) * 0.29) > floor(s * 0.29) else Channel.A for s in range(NUM_STEPS)]
    assert in_floats[99] is Channel.A
    assert ScheduleSection(b_ratio=0.29).channel(99) is Channel.B


@pytest.mark.parametrize("hundredths", [0, 1, 29, 33, 50, 100])
def test_every_hundred_steps_hold_as_many_of_channel_b_as_the_ratio_has_hundredths(hundredths):
    schedule = ScheduleSection(b_ratio=hundredths / 100)
    for first in (0, 100, 300, 10_000):
        assert sum(schedule.channel(step) is Channel.B for step in range(first, first + 100)) == hundredths


@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_ratio_0_is_channel_a_alone_and_ratio_1_channel_b_after_the_warm_up(warmup_steps):
    never, always = ScheduleSection(b_ratio=0.0, warmup_steps=warmup_steps), ScheduleSection(b_ratio=1.0, warmup_steps=warmup_steps)
    assert {never.channel(step) for step in range(50)} == {Channel.A}
    assert [always.channel(step) for step in range(50)] == [Channel.A] * warmup_steps + [Channel.B] * (50 - warmup_steps)


def test_a_step_has_the_same_channel_whenever_it_is_asked():
    schedule = ScheduleSection(b_ratio=0.29, warmup_steps=5)
    assert [schedule.channel(step) for step in range(300)] == [schedule.channel(step) for step in reversed(range(300))][::-1]


def test_without_a_schedule_every_step_is_channel_b():
    schedule = ScheduleSection()
    assert (schedule.b_ratio, schedule.warmup_steps, schedule.channel(0), schedule.num_b_steps(9)) == (1.0, 0, Channel.B, 9)
