"""The plans of a run's steps: channel, number of samples, weight syncs and evaluations.

They are computed from the configuration only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.config.pipeline import Channel
from shared.seeds import request_seed

if TYPE_CHECKING:
    from shared.config import RunConfig


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of one optimizer step: its channel, its samples, and what happens around it.

    Example: the step after 20 warm-up steps with 32 rollouts per step is `StepPlan(step=20,
    channel=Channel.B, num_samples=32, ...)`, whose `number` is 21.
    """

    step: int
    """From 0, as in seeds."""
    channel: Channel
    num_samples: int
    """Samples over all learner ranks, counted once per rollout.

    The step's loss is divided by this number (decision 6).
    """
    rollout_seed_base: int
    """`request_seed(run_seed, step, 0)`, which is logged with the plan."""
    evaluate_before: bool
    """Whether the held-out set is evaluated with the weights at the start of this step."""
    sync_after: bool
    """Whether the weights are sent to the engines after this step.

    They are sent if the next step or an evaluation generates rollouts with them.
    """

    @property
    def number(self) -> int:
        """The step's number in files and messages, from 1. The tenth step saves `step_000010`."""
        return self.step + 1


class RunSchedule:
    """Computes the plan of each step of a run from its configuration."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.max_steps = config.training.num_steps
        self.refill_rounds = 0
        """Maximum number of times per step that groups with equal rewards are replaced."""
        if config.environment is not None:
            self.refill_rounds = config.environment.refill_rounds
        self.num_b_steps = config.num_b_steps
        self._warmup_steps = config.warmup_steps
        self._num_samples = {
            Channel.A: config.effective_batch_size,
            Channel.B: config.raw_rollouts_per_step,
        }
        per_sample = config.stage2_ab.channel_b.rollouts_per_sample
        self.num_drawn = self._num_samples | {Channel.B: self._num_samples[Channel.B] // per_sample}
        """Number of samples that a step of each channel draws from the data.

        A row of an environment's data counts once for each of its rollouts.
        """

    def plans(self) -> Iterator[StepPlan]:
        """Return the plans of all steps of the run, in order."""
        return (self.plan(step) for step in range(self.max_steps))

    def windows(self, first_step: int = 0) -> Iterator[list[StepPlan]]:
        """Yield the plans from `first_step` on in windows of successive steps.

        Within a window, rollouts of the next step are generated while a step is learned. With
        `max_staleness`, successive channel-B steps are one window. Other windows have one step.

        Example: steps of channels A B B A B are the windows A, BB, A, B with `max_staleness: 1`.
        """
        window: list[StepPlan] = []
        for plan in itertools.islice(self.plans(), first_step, None):
            runs_on = self._config.rollout_matching.max_staleness > 0 and plan.channel is Channel.B
            if window and not (runs_on and window[-1].channel is Channel.B):
                yield window
                window = []
            window.append(plan)
        if window:
            yield window

    def num_samples_before(self, step: int) -> int:
        """Return the number of samples that all steps before this step draw from the data."""
        return sum(self.num_drawn[self.plan(earlier).channel] for earlier in range(step))

    def version_before(self, step: int) -> int:
        """Return the weight version that the engines have when this step begins."""
        return 1 + sum(self.plan(earlier).sync_after for earlier in range(step))

    def plan(self, step: int) -> StepPlan:
        """Return the plan of the step, which counts from 0."""
        channel = self._config.channel(step)
        generates_next = step + 1 < self.max_steps and self._config.channel(step + 1) is Channel.B
        return StepPlan(
            step=step,
            channel=channel,
            num_samples=self._num_samples[channel],
            rollout_seed_base=request_seed(self._config.training.seed, step, 0),
            evaluate_before=self.evaluates_before(step),
            sync_after=generates_next or self.evaluates_before(step + 1),
        )

    def evaluates_before(self, step: int) -> bool:
        """Return whether the held-out set is evaluated with the weights at the start of the step.

        It is evaluated after the warm-up (without a warm-up: before the first step) unless
        `training.eval_on_start` is false, after every `training.eval_steps` steps, and at the end
        of the run.
        """
        training = self._config.training
        starts = training.eval_on_start and step == self._warmup_steps
        every = training.eval_steps
        due = every is not None and step > 0 and step % every == 0
        return self._config.has_held_out and (starts or due or step == self.max_steps)
