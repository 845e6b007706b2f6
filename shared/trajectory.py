"""What is asked of an environment in a step, what is learned of its rollouts, and what those of one example are worth beside each other (DESIGN 8,
`policy_gradient`).

Shape legend: L tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from shared.rollouts import DecodeSettings


class ExampleCounts(NamedTuple):
    """Rows of an environment's data."""

    train: int
    held_out: int


class ExampleGroup(NamedTuple):
    """The rollouts of one example."""

    example: int
    """The row, in the environment's training data or its evaluation data."""
    positions: range
    """Of the rollouts, in the step over all learner ranks; or of the one rollout of a held-out example."""


@dataclass(frozen=True, slots=True)
class EnvironmentRequest:
    """What an environment is asked at a time: in training one group of rollouts, in a held-out report about as many rollouts, of as many examples."""

    step: int
    groups: tuple[ExampleGroup, ...]
    """In the order of positions."""
    decode: DecodeSettings
    """Of every call of the model."""
    run_seed: int
    is_held_out: bool = False


@dataclass(frozen=True, slots=True)
class TrainingExample:
    """Tokens as an engine read and sampled them: one call of the model, or several whose prompts extend each other."""

    token_ids: list[int]
    """[L]: the prompt's and then the sampled ones; in a merged example, turn after turn."""
    logprobs: list[float]
    """[L]: the engine's, of the tokens that it sampled; 0 elsewhere."""
    mask: list[int]
    """[L]: 1 where the token is learned. Where prompts are masked, exactly the sampled tokens."""
    reward: float
    """The step's where it has one, else the rollout's; of a merged example the rollout's. 0 where nothing was scored."""
    advantage: float | None = None
    """Likewise; None where nothing was scored."""
    example_id: Any = 0
    """Of the dataset's row. The rollouts of one row are a group."""
    weight_version: int | None = None
    """Of the weights that sampled it, the oldest where there were several; None where the endpoint does not say."""
    token_advantages: list[float] | None = None
    """[L], 0 outside the mask: of a merged example whose steps differ in their advantage; None: `advantage` at every token."""
    rollout: int = 0
    """The place of its rollout among those that it was made of."""
    steps: tuple[int, ...] = ()
    """The steps of the rollout's trajectory whose sampled tokens it holds, ascending."""
    group_rewards: tuple[float, ...] = ()
    """The rewards of all rollouts of the row, in order; empty where one was not scored."""

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        assert len(self.logprobs) == length, "a log-probability per token"
        assert len(self.mask) == length, "a mask per token"
        assert self.token_advantages is None or len(self.token_advantages) == length, "an advantage per token"

    @property
    def num_learned(self) -> int:
        """Tokens under the mask."""
        return sum(self.mask)

    def advantages(self, *, divided_by_std: bool) -> list[float]:
        """[L]: what each token is credited with, 0 outside the mask.

        Args:
            divided_by_std: by the standard deviation of the group's rewards, where they are not all equal.

        Raises:
            ValueError: nothing was scored.
        """
        if self.advantage is None:
            raise ValueError(
                f'example {self.example_id!r}: has no advantage, because its rollouts were not scored; generate with score_rollouts, or set state["advantage"]'
            )
        given = [self.advantage] * len(self.token_ids) if self.token_advantages is None else self.token_advantages
        divisor = pstdev(self.group_rewards) if divided_by_std and has_signal(self.group_rewards) else 1.0
        return [value / divisor if is_learned else 0.0 for value, is_learned in zip(given, self.mask, strict=True)]


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


class SignalCount(NamedTuple):
    """How many groups say that one rollout is better than another."""

    num_groups: int
    num_without_signal: int
    """Those whose rewards are all equal."""


class Kept(NamedTuple):
    examples: list[TrainingExample]
    num_dropped: int


def group_advantages(rewards: Sequence[float], *, divided_by_std: bool = False) -> list[float]:
    """Of the rollouts of one example: the reward without the group's mean, and where told, over their standard deviation (of these rewards: they
    are no sample of more).

    Exactly 0 where all rewards are equal: what rounding leaves of the mean would be divided by what it leaves of the deviation.
    """
    if not has_signal(rewards):
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    divisor = pstdev(rewards) if divided_by_std else 1.0
    return [(reward - mean) / divisor for reward in rewards]


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether the rewards of a group differ at all."""
    return any(reward != rewards[0] for reward in rewards)


def count_signal(groups: Iterable[Sequence[float]]) -> SignalCount:
    """Of groups by their rewards."""
    flat = [not has_signal(rewards) for rewards in groups]
    return SignalCount(len(flat), sum(flat))


def without_flat_groups(examples: Sequence[TrainingExample]) -> Kept:
    """The examples of groups whose rewards differ, in order, and how many were left out. Those of groups that were not scored stay."""
    kept = [example for example in examples if not example.group_rewards or has_signal(example.group_rewards)]
    return Kept(kept, len(examples) - len(kept))
