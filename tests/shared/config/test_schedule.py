"""A step's channel: B where `floor((s + 1) b) > floor(s b)`, `s` counting steps after the warm-up
(decision 39).
"""

from __future__ import annotations

import random
from fractions import Fraction
from math import floor

import pytest

from shared.config.algorithm import ScheduleSection
from shared.config.pipeline import Channel

_RANDOM = random.Random(0)
RATIOS = [
    *(Fraction(hundredths, 100) for hundredths in range(101)),
    *map(Fraction, ["1/3", "2/3", "1/7", "333/1000", "3/8", "1/20", "1/100000", "999999/1000000"]),
    *(Fraction(_RANDOM.randint(0, 1000), 1000) for _ in range(15)),
    *(
        Fraction(_RANDOM.randint(0, denominator), denominator)
        for denominator in _RANDOM.choices(range(1, 1_000_000), k=15)
    ),
]
NUM_STEPS = 120
BY_HAND = {
    0.5: "ABABABABABABABABABAB",
    0.7: "ABBABBABBBABBABBABBB",
    0.25: "AAABAAABAAABAAABAAAB",
    0.3333333333333333: "AABAABAABAABAABAABAA",
    0.6666666666666666: "ABBABBABBABBABBABBAB",
}
"""The first steps of common ratios."""


def slow_channels(b: Fraction, num_steps: int) -> list[Channel]:
    """Step by step, in whole numbers: B where the multiples of the numerator pass a multiple of the
    denominator.
    """
    channels = []
    rest = 0
    for _ in range(num_steps):
        rest += b.numerator
        channels.append(Channel.B if rest >= b.denominator else Channel.A)
        rest %= b.denominator
    return channels


@pytest.mark.parametrize(("b_ratio", "expected"), BY_HAND.items())
def test_the_first_steps_of_common_ratios_are_those_of_the_rule(b_ratio, expected):
    schedule = ScheduleSection(b_ratio=b_ratio)
    assert "".join(schedule.channel(step) for step in range(20)) == expected
    counts = [schedule.num_b_steps(n) for n in range(21)]
    assert counts == [expected[:n].count("B") for n in range(21)]
    # In floats too, as long as the numbers are small.
    in_floats = [floor((s + 1) * b_ratio) > floor(s * b_ratio) for s in range(80)]
    assert [schedule.channel(s) is Channel.B for s in range(80)] == in_floats


@pytest.mark.slow
@pytest.mark.parametrize("warmup_steps", [0, 7])
def test_the_channel_of_a_step_is_the_exact_rule_for_the_ratio_that_is_meant(warmup_steps):
    for ratio in RATIOS:
        schedule = ScheduleSection(b_ratio=float(ratio), warmup_steps=warmup_steps)
        expected = [Channel.A] * warmup_steps + slow_channels(ratio, NUM_STEPS - warmup_steps)
        # In whatever order they are asked for.
        backwards = [schedule.channel(step) for step in reversed(range(NUM_STEPS))]
        assert backwards[::-1] == expected, ratio
        for n in (0, 1, 8, 100, NUM_STEPS):
            assert schedule.num_b_steps(n) == expected[:n].count(Channel.B), ratio


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (0.1 + 0.2, Fraction(3, 10)),
        (0.33333333, Fraction(1, 3)),
        (1 - 2**-53, Fraction(1)),
        (1e-300, Fraction(0)),
    ],
)
def test_the_ratio_that_is_meant_has_a_denominator_of_a_million_at_most(written, meant):
    schedule = ScheduleSection(b_ratio=written)
    assert [schedule.channel(step) for step in range(NUM_STEPS)] == slow_channels(meant, NUM_STEPS)


@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_ratio_0_is_channel_a_alone_and_ratio_1_channel_b_after_the_warm_up(warmup_steps):
    never = ScheduleSection(b_ratio=0.0, warmup_steps=warmup_steps)
    always = ScheduleSection(warmup_steps=warmup_steps)
    assert {never.channel(step) for step in range(50)} == {Channel.A}
    expected = [Channel.A] * warmup_steps + [Channel.B] * (50 - warmup_steps)
    assert [always.channel(step) for step in range(50)] == expected


def test_floats_alone_would_move_a_step_to_the_other_channel():
    """The ratio is read as it is written: 100 x 0.29 is 28.999999999999996 in floats."""
    assert floor(100 * 0.29) == floor(99 * 0.29)
    assert ScheduleSection(b_ratio=0.29).channel(99) is Channel.B
