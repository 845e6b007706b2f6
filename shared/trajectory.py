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
    """Rows of an environment's data."""

    train: int
    held_out: int
    digest: str = field(default="", compare=False)
    """Of some of them: every process that loads the environment must find the same."""


class ExampleGroup(NamedTuple):
    """The rollouts of one example."""

    example: int
    """The row, in the environment's training data or its evaluation data."""
    positions: range
    """Of the rollouts, in the step over all learner ranks; or of the one rollout of a held-out
    example.
    """


@dataclass(frozen=True, slots=True)
class EnvironmentRequest:
    """What an environment is asked at a time: in training one group of rollouts, in a held-out
    report about as many rollouts, of as many examples.
    """

    step: int
    groups: tuple[ExampleGroup, ...]
    """In the order of positions."""
    decode: DecodeSettings
    """Of every call of the model."""
    run_seed: int
    is_held_out: bool = False


@dataclass(frozen=True, slots=True)
class TrainingExample:
    """Tokens as an engine read and sampled them: one call of the model, or several whose prompts
    extend each other.
    """

    token_ids: list[int]
    """[L]: the prompt's and then the sampled ones; in a merged example, turn after turn."""
    logprobs: list[float]
    """[L]: the engine's, of the tokens that it sampled; 0 elsewhere."""
    mask: list[int]
    """[L]: 1 where the token is learned. Where prompts are masked, exactly the sampled tokens."""
    reward: float
    """The step's where it has one, else the rollout's; of a merged example the rollout's. 0 where
    nothing was scored.
    """
    advantage: float | None = None
    """Likewise; None where nothing was scored."""
    example_id: Any = 0
    """Of the dataset's row. The rollouts of one row are a group."""
    weight_version: int | None = None
    """Of the weights that sampled it, the oldest where there were several; None where the endpoint
    does not say.
    """
    token_advantages: list[float] | None = None
    """[L], 0 outside the mask: of a merged example whose steps differ in their advantage; None:
    `advantage` at every token.
    """
    token_is_relative: list[int] | None = None
    """[L]: 1 where that is the group's, the reward less its mean; 0 where the step has one of its
    own. None: nobody has noted it.
    """
    rollout: int = 0
    """The place of its rollout among those that it was made of."""
    steps: tuple[int, ...] = ()
    """The steps of the rollout's trajectory whose sampled tokens it holds, ascending."""
    step_ends: tuple[int, ...] = ()
    """[steps], ascending to L: where the tokens of each step end. Empty: all are of one step,
    so it has to be there with several `steps`."""
    group_rewards: tuple[float, ...] = ()
    """The rewards of all rollouts of the row, in order; empty where one was not scored."""
    images: tuple[ImageRef, ...] = ()
    """That `token_ids` have the placeholders of, in order, each with its data."""
    engine: str | None = field(default=None, compare=False)
    """That sampled it; None where the endpoint does not say, and where there were several."""

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
        # Without ends several steps would be learned as one call of the model.
        assert self.step_ends or len(self.steps) <= 1, "several steps have their ends"
        assert not self.step_ends or len(self.step_ends) == len(self.steps), "an end per step"
        assert not self.step_ends or self.step_ends[-1] == length, "the last step ends it"

    @property
    def num_learned(self) -> int:
        """Tokens under the mask."""
        return sum(self.mask)


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A call of the model, as an engine was asked it."""

    path: str
    """Empty; of a call in a rollout that began inside this one, which of those it was."""
    turn: int
    """From 0, of its path."""
    seed: int
    """`request_seed(run_seed, step, position, turn, path)`"""
    engine: str | None = field(default=None, compare=False)
    """The engine that answered; None: none did."""


@dataclass(frozen=True, slots=True)
class EnvironmentRollout:
    """What became of one rollout of an environment."""

    position: int
    """In its step, or of its example among the held-out ones."""
    example: int
    """The row that it is of."""
    reward: float
    """0 where it failed."""
    metrics: Mapping[str, float]
    """Of the reward functions, by name."""
    error: str | None
    """Why it failed, and nothing is learned of it; None: it did not."""
    is_truncated: bool
    """It was ended for its length."""
    num_turns: int
    """Calls of the model."""
    num_tokens: int
    """Sampled in them."""
    num_length_limited: int
    """Calls whose answer ended at `max_new_tokens`."""
    num_splits: int
    """Calls whose prompt did not go on from the tokens of the one before."""
    examples: tuple[TrainingExample, ...]
    """What is learned of it, in order."""
    prompt: Any
    """As the model was told it, messages or text; None where nobody reads it."""
    completion: Any
    """All that came after it, likewise."""
    actor: str
    """In whose process the environment ran."""
    started_s: float
    """Unix time."""
    generate_s: float
    """Until its end, scoring included."""
    reward_errors: Mapping[str, str] = field(default_factory=dict)
    """What reward functions failed of, by name: `metrics` goes without their figures. Where one
    with a weight failed, so has the rollout."""
    given_up: tuple[str, ...] = ()
    """The plain tools and reward functions, by name, whose thread was given up at a limit of time.
    """
    num_tool_calls: int | None = None
    """Calls of tools by the model; None where it is offered none."""
    calls: tuple[ModelCall, ...] = ()
    """Those that were asked in it, by path and turn; also those without an answer."""


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
