"""Requests to environments, their rollouts, and the advantages within a group.

`learner.algorithms.advantages` computes the advantages that the learner trains with.

Shape legend: L tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

from shared.records import ImageRef
from shared.rollouts import DecodeSettings


@dataclass(frozen=True, slots=True)
class ExampleCounts:
    """The numbers of rows in an environment's data."""

    train: int
    held_out: int
    digest: str = field(default="", compare=False)
    """Digest of some rows. All processes that load the environment must compute the same."""
    scores_at_once: bool = False
    """Whether a rubric scores all rollouts of a step in one call (`score_rollouts`). Then they are
    one round, in one process."""
    mixture: Sequence[Sequence[int]] = ()
    """Numbers of training rows, and weights, of successive parts of the data; empty: training draws
    uniformly from all rows."""


class ExampleGroup(NamedTuple):
    """A group: the rollouts of one example.

    Example: with 8 rollouts per example, row 41 as the second group of a step is `ExampleGroup(41,
    range(8, 16))`.
    """

    example: int
    """Index of the row in the environment's training or evaluation data."""
    positions: range
    """Positions of the rollouts in the step over all learner ranks."""


@dataclass(frozen=True, slots=True)
class EnvironmentRequest:
    """A request for rollouts of an environment.

    In training it has one group. In evaluation it has one rollout of each of several examples, at
    most as many rollouts as a group in training.

    Example: `EnvironmentRequest(step=0, groups=(ExampleGroup(41, range(8)),), decode=...,
    run_seed=17)` requests 8 rollouts of row 41.
    """

    step: int
    groups: tuple[ExampleGroup, ...]
    """In order of position."""
    decode: DecodeSettings
    """Settings of every model call."""
    run_seed: int
    is_held_out: bool = False


@dataclass(frozen=True, slots=True)
class TrainingExample:
    """The tokens of one model call, or of several merged calls, as an engine read and sampled them.

    Calls are merged if each prompt continues the tokens of the call before.

    Example: a prompt of 2 tokens and an answer of 3 are `TrainingExample([9, 8, 5, 6, 7],
    logprobs=[0, 0, -0.5, -0.1, -0.2], mask=[0, 0, 1, 1, 1], reward=1.0, advantage=0.5)`.
    """

    token_ids: list[int]
    """[L]: prompt, then sampled tokens; in a merged example turn by turn."""
    logprobs: list[float]
    """[L]: the engine's log-probabilities of sampled tokens; 0 elsewhere."""
    mask: list[int]
    """[L]: 1 for learned tokens. If prompts are masked, these are exactly the sampled tokens."""
    reward: float
    """The step's own reward, or the rollout's (always for a merged example); 0 if not scored."""
    advantage: float | None = None
    """The corresponding advantage from the environment: its own, or the reward minus the group's
    mean. None if nothing was scored."""
    example_id: Any = 0
    """Id of the row in the dataset; the row's rollouts are a group."""
    weight_version: int | None = None
    """Version of the weights that sampled it, the oldest if there are several; None if unknown."""
    token_advantages: list[float] | None = None
    """[L], 0 outside the mask, if merged steps have different ones; None: all are `advantage`."""
    token_is_relative: list[int] | None = None
    """[L]: 1 if the learner computes the advantage from the group's rewards, 0 if the environment
    has given it. None: 1 everywhere if there are `group_rewards`."""
    rollout: int = 0
    """Index of its rollout among the rollouts that were converted together."""
    steps: tuple[int, ...] = ()
    """Steps of the trajectory whose sampled tokens it contains, ascending."""
    step_ends: tuple[int, ...] = ()
    """[steps], ascending to L: where each step's tokens end; may be empty for a single step."""
    group_rewards: tuple[float, ...] = ()
    """Rewards of all rollouts of the row, in order; empty if one was not scored."""
    images: tuple[ImageRef, ...] = ()
    """Images of the placeholders in `token_ids`, in order, with their data."""
    engine: str | None = field(default=None, compare=False)
    """The engine that sampled it; None if unknown, or if there were several."""
    teacher_logprobs: list[float] | None = None
    """[L]: the teacher's log-probabilities of learned tokens, 0 elsewhere; None: no teacher."""

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        assert len(self.logprobs) == length, "a log-probability per token"
        assert len(self.mask) == length, "a mask per token"
        assert self.token_advantages is None or len(self.token_advantages) == length, (
            "an advantage per token"
        )
        assert self.token_is_relative is None or len(self.token_is_relative) == length, (
            "a flag per token"
        )
        assert self.teacher_logprobs is None or len(self.teacher_logprobs) == length, (
            "a teacher's log-probability per token"
        )
        # Without their ends several steps would be learned as one model call.
        assert self.step_ends or len(self.steps) <= 1, "several steps need their ends"
        assert not self.step_ends or len(self.step_ends) == len(self.steps), "an end per step"
        assert not self.step_ends or self.step_ends[-1] == length, "the last step ends it"

    @property
    def num_learned(self) -> int:
        """Number of learned tokens."""
        return sum(self.mask)


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One model call of a rollout."""

    path: str
    """Empty; for a nested rollout, its path below the outer one."""
    turn: int
    """From 0 within its path."""
    seed: int
    """`request_seed(run_seed, step, position, turn, path)`"""
    engine: str | None = field(default=None, compare=False)
    """The engine that answered; None if no engine answered."""


@dataclass(frozen=True, slots=True)
class EnvironmentRollout:
    """The result of one rollout of an environment.

    Example: a correct rollout with one turn: `EnvironmentRollout(position=3, example=41,
    reward=1.0, metrics={"exact": 1.0}, error=None, num_turns=1, num_tokens=5, ...)`.
    """

    position: int
    """Its position in the step; in evaluation, the position of its example."""
    example: int
    """Index of its row."""
    reward: float
    """0 if it failed."""
    metrics: Mapping[str, float]
    """Results of the reward functions, by name."""
    error: str | None
    """Why it failed; a failed rollout is not learned. None: it did not fail."""
    is_truncated: bool
    """It was cut by length: one of its answers, or the conversation (`is_overlong`)."""
    num_turns: int
    """Number of model calls."""
    num_tokens: int
    """Number of tokens sampled in them."""
    num_length_limited: int
    """Number of model calls whose answer the engine cut by length."""
    num_splits: int
    """Number of model calls whose prompt does not continue the tokens of the call before."""
    examples: tuple[TrainingExample, ...]
    """Its training examples, in order."""
    prompt: Any
    """Messages or text for the model; None if no reader needs them."""
    completion: Any
    """Messages or text after the prompt; None if no reader needs them."""
    actor: str
    """The actor whose process ran the environment."""
    started_s: float
    """Unix time."""
    generate_s: float
    """Seconds until its end, including scoring."""
    reward_errors: Mapping[str, str] = field(default_factory=dict)
    """Errors of reward functions by name. An error of one with a weight fails the rollout."""
    given_up: tuple[str, ...] = ()
    """Plain tools and reward functions whose thread was abandoned at a time limit."""
    num_tool_calls: int | None = None
    """Number of tool calls by the model; None if it has no tools."""
    calls: tuple[ModelCall, ...] = ()
    """All model calls, answered or not, by path and turn."""
    is_overlong: bool = False
    """It ended because its next prompt did not fit."""
    task: str | None = None
    """Name of its environment, if that is part of a group."""


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Subtract the mean reward of a group (the rollouts of one example) from each reward.

    All are exactly 0 if the rewards differ only by rounding.

    Example:
        >>> group_advantages([1.0, 0.0])
        [0.5, -0.5]
    """
    if not has_signal(rewards):
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


def has_signal(rewards: Sequence[float]) -> bool:
    """Return whether the rewards of a group differ by more than rounding."""
    # Smaller differences come from float sums; divided by their deviation they would become large.
    rounding = 1e-9 * max((abs(reward) for reward in rewards), default=0.0)
    # Written so that NaN counts as different: it is rejected later.
    return any(not abs(reward - rewards[0]) <= rounding for reward in rewards)
