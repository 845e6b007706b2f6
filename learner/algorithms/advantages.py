"""Which tokens are learned by their advantage, and how much each counts (DESIGN 8).

A step's loss is the weighted sum over its sampled tokens, divided at the step's end by the number
of its rollouts. That number is known before the first of them arrives (DESIGN 5, decision 6), and
failed or empty rollouts count in it. What `normalize` decides is the weight of a token in that
sum:

    step      1 / sampled tokens of its call of the model: each call weighs 1
    rollout   1 / sampled tokens of its rollout: each rollout weighs 1
    constant  1 / `rollout_matching.max_new_tokens`: each token weighs the same

So with `step` a rollout of k calls weighs k times as much as one of a single call, and the scale of
the loss grows with the mean number of calls. None of them depends on which calls share an example.

Example: a rollout with calls of 1 and 3 sampled tokens. `step`: 1, 1/3, 1/3, 1/3, whether the calls
were merged or not. `rollout`: 1/4 each. `constant` with `max_new_tokens` 8: 1/8 each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from shared.config.pipeline import PolicyGradientConfig
from shared.trajectory import TrainingExample


@dataclass(frozen=True, slots=True)
class TokenAdvantages:
    """The sampled tokens of a target, a column per field. Shape legend: M of them."""

    positions: tuple[int, ...]
    """[M], relative to the target's first token, ascending."""
    engine_logprobs: tuple[float, ...]
    """[M], under the probabilities that the engine sampled from."""
    advantages: tuple[float, ...]
    """[M]"""
    weights: tuple[float, ...]
    """[M], of each token in the step's sum."""

    def __post_init__(self) -> None:
        columns = (self.engine_logprobs, self.advantages, self.weights)
        assert all(len(column) == len(self.positions) for column in columns)
        assert all(a < b for a, b in pairwise(self.positions))


NO_CREDIT = TokenAdvantages((), (), (), ())


@dataclass(frozen=True, slots=True)
class AdvantageEstimator:
    """How the tokens of an example are credited with what became of it."""

    normalize: Literal["step", "rollout", "constant"]
    max_new_tokens: int
    """The divisor of `constant`."""
    std_epsilon: float | None
    """Added to the standard deviation that advantages are divided by; None: not divided."""

    @classmethod
    def of(cls, config: PolicyGradientConfig, *, max_new_tokens: int) -> AdvantageEstimator:
        std_epsilon = config.advantage_epsilon if config.advantage_std else None
        return cls(config.normalize, max_new_tokens, std_epsilon)

    def credit(
        self, example: TrainingExample, *, start: int, num_of_rollout: int
    ) -> TokenAdvantages:
        """TokenAdvantages the example's learned tokens, all of which are at `start` or later.

        Args:
            num_of_rollout: learned tokens of its rollout, in all of the rollout's examples.

        Raises:
            ValueError: the example was not scored, or has numbers that nothing can be learned from.
        """
        positions = [place for place, is_learned in enumerate(example.mask) if is_learned]
        assert not positions or positions[0] >= start
        advantages, logprobs = example.advantages(std_epsilon=self.std_epsilon), example.logprobs
        _require_finite(
            example,
            "advantage",
            advantages,
            positions,
            "its reward functions must return finite numbers",
        )
        _require_finite(
            example, "log-probability", logprobs, positions, "the endpoint must return finite ones"
        )
        return TokenAdvantages(
            tuple(place - start for place in positions),
            tuple(logprobs[place] for place in positions),
            tuple(advantages[place] for place in positions),
            tuple(self._weights(example, num_of_rollout)),
        )

    def _weights(self, example: TrainingExample, num_of_rollout: int) -> list[float]:
        """One per learned token."""
        match self.normalize:
            case "step":
                return [
                    1.0 / len(of_step) for of_step in example.learned_by_step() for _ in of_step
                ]
            case "rollout":
                return [1.0 / num_of_rollout] * example.num_learned
            case "constant":
                return [1.0 / self.max_new_tokens] * example.num_learned


def _require_finite(
    example: TrainingExample,
    what: str,
    values: Sequence[float],
    positions: Sequence[int],
    remedy: str,
) -> None:
    wrong = next((place for place in positions if not math.isfinite(values[place])), None)
    if wrong is not None:
        raise ValueError(
            f"example {example.example_id!r}, rollout {example.rollout}: token {wrong} has the"
            f" {what} {values[wrong]}; {remedy}"
        )
