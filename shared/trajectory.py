"""Requests to an environment, the rollouts it answers, and the advantages within a group.

What the learner makes of these advantages is in `learner.algorithms.advantages`.

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
    """Numbers of rows of an environment's data."""

    train: int
    held_out: int
    digest: str = field(default="", compare=False)
    """Digest of some rows: every process that loads the environment must find the same."""
    scores_at_once: bool = False
    """A rubric has a `score_rollouts` of its own: a step's rollouts are one round, of one process.
    """
    mixture: Sequence[Sequence[int]] = ()
    """Numbers of rows to train on, and weights, of the parts that these lie in, one after the
    other; empty: training draws from all rows alike."""


class ExampleGroup(NamedTuple):
    """The rollouts of one example.

    Example: with 8 rollouts per example, row 41 as the second group of a step is
    `ExampleGroup(41, range(8, 16))`.
    """

    example: int
    """Index of the row in the environment's training or evaluation data."""
    positions: range
    """Positions of the rollouts in the step over all learner ranks."""


@dataclass(frozen=True, slots=True)
class EnvironmentRequest:
    """A request to an environment: one group in training, about as many rollouts when held out.

    Example: `EnvironmentRequest(step=0, groups=(ExampleGroup(41, range(8)),), decode=...,
    run_seed=17)` asks for 8 rollouts of row 41.
    """

    step: int
    groups: tuple[ExampleGroup, ...]
    """In the order of positions."""
    decode: DecodeSettings
    """Settings of every call of the model."""
    run_seed: int
    is_held_out: bool = False


@dataclass(frozen=True, slots=True)
class TrainingExample:
    """Tokens as an engine read and sampled them: one model call, or several merged ones.

    Calls are merged where the prompt of each goes on from the tokens of the one before.

    Example: a prompt of 2 tokens and an answer of 3 are `TrainingExample([9, 8, 5, 6, 7],
    logprobs=[0, 0, -0.5, -0.1, -0.2], mask=[0, 0, 1, 1, 1], reward=1.0, advantage=0.5)`.
    """

    token_ids: list[int]
    """[L]: the prompt's and then the sampled ones; in a merged example, turn after turn."""
    logprobs: list[float]
    """[L]: the engine's log-probabilities of sampled tokens; 0 elsewhere."""
    mask: list[int]
    """[L]: 1 where the token is learned. Where prompts are masked, exactly the sampled tokens."""
    reward: float
    """The step's own reward or, as always of a merged example, the rollout's; 0 where not
    scored."""
    advantage: float | None = None
    """Likewise, as the environment reports it: its own, or the reward less the group's mean. None
    where nothing was scored."""
    example_id: Any = 0
    """Id of the dataset's row, whose rollouts are a group."""
    weight_version: int | None = None
    """Version of the weights that sampled it, the oldest of several; None where unknown."""
    token_advantages: list[float] | None = None
    """[L], 0 outside the mask, where merged steps differ; None: `advantage` everywhere."""
    token_is_relative: list[int] | None = None
    """[L]: 1 where the learner computes the advantage, from the rewards of the group; 0 where the
    environment has given it. None: 1 everywhere if there are `group_rewards`."""
    rollout: int = 0
    """Index of its rollout among those that examples were made of."""
    steps: tuple[int, ...] = ()
    """Steps of the trajectory whose sampled tokens it holds, ascending."""
    step_ends: tuple[int, ...] = ()
    """[steps], ascending to L: the end of each step's tokens; may be empty for a single step."""
    group_rewards: tuple[float, ...] = ()
    """Rewards of all rollouts of the row, in order; empty where one was not scored."""
    images: tuple[ImageRef, ...] = ()
    """Images behind the placeholders of `token_ids`, in order, each with its data."""
    engine: str | None = field(default=None, compare=False)
    """The engine that sampled it; None where unknown, or several."""
    teacher_logprobs: list[float] | None = None
    """[L]: the teacher's log-probabilities of learned tokens; 0 elsewhere; None: no teacher."""

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
        # Without ends several steps would be learned as one call of the model.
        assert self.step_ends or len(self.steps) <= 1, "several steps have their ends"
        assert not self.step_ends or len(self.step_ends) == len(self.steps), "an end per step"
        assert not self.step_ends or self.step_ends[-1] == length, "the last step ends it"

    @property
    def num_learned(self) -> int:
        """Number of tokens under the mask."""
        return sum(self.mask)


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A call of the model, as an engine was asked it."""

    path: str
    """Empty; of a nested rollout, its path below the outer one."""
    turn: int
    """From 0 in its path."""
    seed: int
    """`request_seed(run_seed, step, position, turn, path)`"""
    engine: str | None = field(default=None, compare=False)
    """The engine that answered; None where none did."""


@dataclass(frozen=True, slots=True)
class EnvironmentRollout:
    """The outcome of one rollout of an environment.

    Example: a rollout of one turn that was right: `EnvironmentRollout(position=3, example=41,
    reward=1.0, metrics={"exact": 1.0}, error=None, num_turns=1, num_tokens=5, ...)`.
    """

    position: int
    """Position in its step, or of its example among the held-out ones."""
    example: int
    """Index of its row."""
    reward: float
    """0 where it failed."""
    metrics: Mapping[str, float]
    """Figures of the reward functions, by name."""
    error: str | None
    """Reason why it failed, so that nothing is learned of it; None: it did not."""
    is_truncated: bool
    """It was cut by length: an answer of it, or the conversation (`is_overlong`)."""
    num_turns: int
    """Calls of the model."""
    num_tokens: int
    """Tokens sampled in them."""
    num_length_limited: int
    """Calls whose answer the engine cut by length."""
    num_splits: int
    """Calls whose prompt did not go on from the tokens of the one before."""
    examples: tuple[TrainingExample, ...]
    """Examples to learn from, in order."""
    prompt: Any
    """Messages or text for the model; None where nobody reads it."""
    completion: Any
    """Messages or text after the prompt, likewise."""
    actor: str
    """The actor in whose process the environment ran."""
    started_s: float
    """Unix time."""
    generate_s: float
    """Seconds until its end, scoring included."""
    reward_errors: Mapping[str, str] = field(default_factory=dict)
    """Errors of reward functions by name; one with a weight fails the rollout."""
    given_up: tuple[str, ...] = ()
    """Plain tools and reward functions whose thread was given up at a limit of time."""
    num_tool_calls: int | None = None
    """Calls of tools by the model; None where it is offered none."""
    calls: tuple[ModelCall, ...] = ()
    """Calls that were made, answered or not, by path and turn."""
    is_overlong: bool = False
    """It ended because there was no room for its next prompt."""
    task: str | None = None
    """Name of its environment, where it is of a group."""


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Subtract the mean of a group, the rollouts of one example, from each reward.

    Exactly 0 everywhere where the rewards differ by rounding alone.

    Example:
        >>> group_advantages([1.0, 0.0])
        [0.5, -0.5]
    """
    if not has_signal(rewards):
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


def has_signal(rewards: Sequence[float]) -> bool:
    """Tell whether the rewards of a group differ by more than rounding."""
    # Smaller differences are those of float sums, and would be divided by their own deviation.
    rounding = 1e-9 * max((abs(reward) for reward in rewards), default=0.0)
    # Written so that NaN differs: it is refused further on.
    return any(not abs(reward - rewards[0]) <= rounding for reward in rewards)
