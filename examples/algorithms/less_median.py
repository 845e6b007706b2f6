"""An advantage: the reward minus the median reward of the group."""

from collections.abc import Sequence
from statistics import median


def less_median(reward: float, rewards: Sequence[float]) -> float:
    """Return the advantage of a rollout with `reward`.

    One outlier among the group's `rewards` does not move the median.

    Example:
        >>> [less_median(reward, [0.0, 0.25, 1.0]) for reward in (0.0, 0.25, 1.0)]
        [-0.25, 0.0, 0.75]
    """
    return reward - median(rewards)
