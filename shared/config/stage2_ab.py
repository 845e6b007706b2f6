"""`stage2_ab`: which channel a step of `stage2_two_channel` runs, and how a channel-B step is made (spec/channel-b-pipeline-spec.md).

Under `stage2_rollout_aligned` every step is channel B and takes the effective batch size: a schedule has no effect there, and a budget of
rollouts other than that size is refused (`shared.config.variant_checks`).
"""

from __future__ import annotations

from fractions import Fraction
from math import floor
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from shared.config.base import Fraction01, Section
from shared.config.pipeline import Channel


class ScheduleSection(Section):
    b_ratio: Fraction01 = 1.0
    """Share of the steps after the warm-up that are channel B."""

    warmup_steps: NonNegativeInt = 0
    """Channel-A steps before the ratio applies."""

    def channel(self, step: int) -> Channel:
        """The channel of a step (from 0): B where `floor((s + 1) b) > floor(s b)`, `s` counting steps after the warm-up."""
        since_warmup = step - self.warmup_steps
        if since_warmup < 0:
            return Channel.A
        return Channel.B if self._floor_b(since_warmup + 1) > self._floor_b(since_warmup) else Channel.A

    def num_b_steps(self, num_steps: int) -> int:
        """How many of the first `num_steps` steps are channel B."""
        return self._floor_b(max(0, num_steps - self.warmup_steps))

    def _floor_b(self, s: int) -> int:
        # Exact, for the ratio as it is written (in floats 100 * 0.29 is less than 29) or meant: the digits of 1 / 3 end, a third does not.
        return floor(s * Fraction(str(self.b_ratio)).limit_denominator(10**6))


class ChannelBSection(Section):
    mode: Literal["step"] = "step"
    """A step is budgeted in raw rollouts, learned to completion, and updates once. The only mode."""

    rollouts_per_step: PositiveInt | None = None
    """Raw rollouts per update over all learner ranks; null: the effective batch size, the only one that `stage2_rollout_aligned` takes. Under `trajectory_pg`
    a multiple of `environment.rollouts_per_example`."""

    enable_pipeline: bool = False
    """Generate round k + 1 while round k is learned. Needs rollouts on dedicated devices."""


class Stage2ABSection(Section):
    schedule: ScheduleSection = ScheduleSection()
    """Which steps are channel B. No effect but under `stage2_two_channel`: the other variants have one channel."""

    channel_b: ChannelBSection = ChannelBSection()
    """How a channel-B step is made."""
