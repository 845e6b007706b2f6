"""Which tokens of a target are learned by their advantage, and how much each counts (DESIGN 8, `policy_gradient`). Decided here, once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from shared.config.pipeline import PolicyGradientConfig
from shared.trajectory import TrainingExample


@dataclass(frozen=True, slots=True)
class Credit:
    """The sampled tokens of a target, a column per field. Shape legend: M of them."""

    positions: tuple[int, ...]
    """[M], relative to the target's first token, ascending."""
    engine_logprobs: tuple[float, ...]
    """[M], under the probabilities that the engine sampled from."""
    advantages: tuple[float, ...]
    """[M]"""
    weight: float
    """Of each token in the segment's loss."""

    def __post_init__(self) -> None:
        assert len(self.positions) == len(self.engine_logprobs) == len(self.advantages)
        assert all(a < b for a, b in pairwise(self.positions))


NO_CREDIT = Credit((), (), (), 0.0)


@dataclass(frozen=True, slots=True)
class CreditRule:
    """How the tokens of an example are credited with what became of it."""

    divided_by_std: bool
    """The advantage, by the standard deviation of its group's rewards."""
    constant: int | None
    """What a segment's sum over its sampled tokens is divided by; None: their number."""

    @classmethod
    def of(cls, config: PolicyGradientConfig, *, max_new_tokens: int) -> CreditRule:
        return cls(config.advantage_std, max_new_tokens if config.normalize == "constant" else None)

    def credit(self, example: TrainingExample, *, start: int) -> Credit:
        """Of the example's tokens from `start` on, which all of its sampled ones are.

        Raises ValueError where the example was not scored, or has numbers that nothing can be learned from.
        """
        positions = [place for place, is_learned in enumerate(example.mask) if is_learned]
        assert not positions or positions[0] >= start
        advantages, logprobs = example.advantages(divided_by_std=self.divided_by_std), example.logprobs
        _require_finite(example, "advantage", advantages, positions, "its reward functions must return finite numbers")
        _require_finite(example, "log-probability", logprobs, positions, "the endpoint must return finite ones")
        return Credit(
            tuple(place - start for place in positions),
            tuple(logprobs[place] for place in positions),
            tuple(advantages[place] for place in positions),
            1.0 / (self.constant or max(1, len(positions))),
        )


def _require_finite(example: TrainingExample, what: str, values: Sequence[float], positions: Sequence[int], remedy: str) -> None:
    wrong = next((place for place in positions if not math.isfinite(values[place])), None)
    if wrong is not None:
        raise ValueError(f"example {example.example_id!r}, rollout {example.rollout}: token {wrong} has the {what} {values[wrong]}; {remedy}")
