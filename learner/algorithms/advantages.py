"""The advantage of each sampled token, and its weight in the loss.

    advantage = (reward - baseline(group)) / (std(group) + epsilon)   division: if `advantage_std`

Environments send rewards, and this module computes the advantages. `advantage_baseline` may name a
function of the user's own module (`Baseline`). Advantages that an environment sets itself are
marked (`token_is_relative` 0) and used unchanged.

With a teacher (`environment.teacher`) a sampled token's advantage is

    reward_weight * advantage + weight * (log p_teacher - log p_learner)

The log ratio is minus the one-token estimate of KL(learner || teacher) at this position: on-policy
distillation (Agarwal et al. 2023, GKD). The objective adds it (`policy_gradient.advantages`) and
uses the learner's current log-probability, detached. With the engine's log-probability, several
updates on one batch would overshoot the teacher.

The loss of a step is the weighted sum over its sampled tokens, divided at the step's end by the
number of its rollouts. This number includes failed and empty rollouts, so it is known before the
first rollout arrives (decision 6). `normalize` sets the weight of a token in that sum:

    step      1 / sampled tokens of its model call: each call weighs 1
    rollout   1 / sampled tokens of its rollout: each rollout weighs 1
    constant  1 / `rollout_matching.max_new_tokens`: each token weighs the same
    batch     1, and the sum is divided by the step's sampled tokens over all ranks, which are known
              at its end (Yu et al. 2025, DAPO): each token weighs the same

So with `step` a rollout of k calls weighs k times as much as a rollout of one call. The weights do
not depend on which calls share an example.

Example: a rollout with calls of 1 and 3 sampled tokens. `step`: 1, 1/3, 1/3, 1/3, whether the calls
were merged or not. `rollout`: 1/4 each. `constant` with `max_new_tokens` 8: 1/8 each. `batch`: 1
each, and if the step's only other rollout has 6 tokens, the divisor is 10.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from numbers import Real
from statistics import fmean

from shared.config.algorithm import TeacherSection
from shared.config.pipeline import AdvantageConfig, imported
from shared.errors import ConfigError
from shared.trajectory import TrainingExample, has_signal

Baseline = Callable[[float, Sequence[float]], float]
"""A function of a rollout's reward and all rewards of its group, in the order of the rollouts. It
returns the rollout's advantage: the reward minus a baseline. It is not called for a group with
equal rewards, whose advantages are 0."""


def less_mean(reward: float, rewards: Sequence[float]) -> float:
    """Return a rollout's reward minus the mean reward of its group."""
    return reward - fmean(rewards)


def less_mean_of_others(reward: float, rewards: Sequence[float]) -> float:
    """Return a rollout's reward minus the mean reward of the group's other rollouts.

    Source: Ahmadian et al. 2024, RLOO.

    The result is `n / (n - 1) * (reward - mean of all n rewards)`.
    """
    return less_mean(reward, rewards) / ((len(rewards) - 1) / len(rewards))


BASELINES: dict[str, Baseline] = {"mean": less_mean, "leave_one_out": less_mean_of_others}
"""The baseline function for each built-in value of the key `advantage_baseline`."""


def find_baseline(name: str, path: str) -> Baseline:
    """Return the function that the key `advantage_baseline` names, built in or `module:function`.

    `path`: the key's path, for messages.

    Raises ConfigError if the module or function is not found, or the function does not take a
    reward and the group's rewards. The returned function raises it too, if its result is not a
    finite number.
    """
    if name in BASELINES:
        return BASELINES[name]
    function = imported(name, path)
    remedy = "define `def less_median(reward: float, rewards: Sequence[float]) -> float`"
    if not callable(function):
        raise ConfigError(f"{path}: {name} is not a function; {remedy}")
    try:
        inspect.signature(function).bind(0.0, (0.0, 1.0))
    except (TypeError, ValueError) as error:  # ValueError: a builtin without a signature
        raise ConfigError(
            f"{path}: {name} cannot be called with a reward and its group's rewards ({error});"
            f" {remedy}"
        ) from error

    def checked(reward: float, rewards: Sequence[float]) -> float:
        advantage = function(reward, rewards)
        if not isinstance(advantage, Real) or not math.isfinite(advantage):
            raise ConfigError(
                f"{path}: {name} returned {advantage!r} for the reward {reward!r} of a group with"
                f" the rewards {list(rewards)}; it must return a finite number"
            )
        return float(advantage)

    return checked


@dataclass(frozen=True, slots=True)
class TokenAdvantages:
    """The M sampled tokens that a policy-gradient target learns, one column per field.

    Example:
        Tokens 0 and 1 of a target were sampled in one call, token 2 came from a tool, token 3 was
        sampled in the next call: positions (0, 1, 3), engine_logprobs (-0.1, -2.3, -0.7),
        advantages (0.5, 0.5, 0.5), with `normalize: step` weights (0.5, 0.5, 1.0), calls (0, 0, 1).
    """

    positions: tuple[int, ...]
    """[M]: positions of the tokens, counted from the target's first token, ascending."""
    engine_logprobs: tuple[float, ...]
    """[M]: each token's log-probability in the distribution that the engine sampled from."""
    advantages: tuple[float, ...]
    """[M]: each token's advantage from the rewards, without the teacher's part."""
    weights: tuple[float, ...]
    """[M]: the weight of each token in the step's loss, which is a sum over tokens."""
    calls: tuple[int, ...]
    """[M]: number of the model call that sampled the token, from 0, ascending. Calls without a
    learned token are not counted."""
    teacher_logprobs: tuple[float, ...] | None = None
    """[M]: the teacher model's log-probability of each token; None without a teacher."""
    teacher_weight: float = 0.0
    """Factor of `log p_teacher - log p_learner` in the advantage (see the module docstring)."""

    def __post_init__(self) -> None:
        columns = (self.engine_logprobs, self.advantages, self.weights, self.calls)
        assert self.teacher_logprobs is None or len(self.teacher_logprobs) == len(self.positions)
        assert all(len(column) == len(self.positions) for column in columns)
        assert all(a < b for a, b in pairwise(self.positions))


@dataclass(frozen=True)
class AdvantageEstimator:
    """Computes advantage and weight of each sampled token, as the policy gradient is configured."""

    config: AdvantageConfig
    max_new_tokens: int
    """Longest answer in tokens: with `normalize: constant` each token weighs 1 / this number."""
    teacher: TeacherSection | None = None
    """The section with the weights of teacher and reward; None without a teacher model."""
    path: str = ""
    """Path of `config` in the configuration, for messages."""

    @cached_property
    def baseline(self) -> Baseline:
        """The function that `advantage_baseline` names."""
        return find_baseline(self.config.advantage_baseline, f"{self.path}.advantage_baseline")

    def estimate(
        self, example: TrainingExample, *, start: int, num_of_rollout: int
    ) -> TokenAdvantages:
        """Return the advantages and weights of the sampled tokens that the example learns.

        Args:
            start: index of the target's first token in the example. No learned token precedes it.
            num_of_rollout: number of learned tokens in all examples of the same rollout.

        Raises:
            ValueError: the example's rollouts were not scored, or an advantage or log-probability
                of a learned token is not finite.
            ConfigError: an imported baseline returned something other than a finite number.
        """
        positions = [index for index, is_learned in enumerate(example.mask) if is_learned]
        assert not positions or positions[0] >= start
        config = self.config
        std_epsilon = config.advantage_epsilon if config.advantage_std else None
        advantages = token_advantages(example, std_epsilon=std_epsilon, baseline=self.baseline)
        teacher_logprobs = None
        if self.teacher is not None:
            advantages = [self.teacher.reward_weight * advantage for advantage in advantages]
            teacher_logprobs = require_teacher(example)
        # Only learned tokens are checked: the numbers of other tokens are never read.
        for index in positions:
            advantage = advantages[index]
            logprob = example.logprobs[index]
            problem = None
            if not math.isfinite(advantage):
                problem = f"advantage {advantage}; reward functions must return finite numbers"
            elif not math.isfinite(logprob):
                problem = f"log-probability {logprob}; the endpoint must return finite ones"
            elif teacher_logprobs is not None and not math.isfinite(teacher_logprobs[index]):
                problem = (
                    f"teacher's log-probability {teacher_logprobs[index]}; the teacher must return"
                    " finite ones"
                )
            if problem is not None:
                raise ValueError(
                    f"example {example.example_id!r}, rollout {example.rollout}: token {index} has"
                    f" the {problem}"
                )
        calls = [of_call for of_call in learned_by_call(example) if of_call]
        match config.normalize:
            case "step":
                weights = [1.0 / len(of_call) for of_call in calls for _ in of_call]
            case "rollout":
                weights = [1.0 / num_of_rollout] * len(positions)
            case "constant":
                weights = [1.0 / self.max_new_tokens] * len(positions)
            case "batch":
                weights = [1.0] * len(positions)
        return TokenAdvantages(
            tuple(index - start for index in positions),
            tuple(example.logprobs[index] for index in positions),
            tuple(advantages[index] for index in positions),
            tuple(weights),
            tuple(number for number, of_call in enumerate(calls) for _ in of_call),
            None if teacher_logprobs is None else tuple(teacher_logprobs[i] for i in positions),
            0.0 if self.teacher is None else self.teacher.weight,
        )


def token_advantages(
    example: TrainingExample, *, std_epsilon: float | None, baseline: Baseline = less_mean
) -> list[float]:
    """Return the advantage of each token of an example: [L], 0 for tokens that are not learned.

    `std_epsilon`, `baseline`: as in `group_advantage`. They do not change an advantage that an
    environment set itself, because its unit is not the unit of the rewards.

    Raises ValueError if the example's rollouts were not scored.
    """
    own, is_relative = own_advantages(example)
    if example.advantage is None and not all(is_relative):
        raise ValueError(
            f"example {example.example_id!r}: has no advantage, because its rollouts were not"
            ' scored; generate with score_rollouts, or set state["advantage"]'
        )
    of_group = group_advantage(
        example.reward, example.group_rewards, std_epsilon=std_epsilon, baseline=baseline
    )
    columns = zip(own, is_relative, example.mask, strict=True)
    return [
        0.0 if not is_learned else of_group if of_the_group else one
        for one, of_the_group, is_learned in columns
    ]


def own_advantages(example: TrainingExample) -> tuple[list[float], Sequence[bool | int]]:
    """Return the advantages that the environment set, and which tokens do not use them: both [L].

    A token that does not use them has the advantage of its rollout in the group of rollouts
    (`group_advantage`).
    """
    length = len(example.token_ids)
    own = example.token_advantages or [example.advantage or 0.0] * length
    return own, example.token_is_relative or [bool(example.group_rewards)] * length


def group_advantage(
    reward: float,
    rewards: Sequence[float],
    *,
    std_epsilon: float | None,
    baseline: Baseline = less_mean,
) -> float:
    """Return the advantage of a rollout with `reward`, compared with all `rewards` of its group.

    Args:
        std_epsilon: divide by (standard deviation of the rewards + `std_epsilon`). None: do not
            divide.
        baseline: computes the advantage before this division.

    Example:
        >>> group_advantage(1.0, [1.0, 0.0], std_epsilon=None)
        0.5
    """
    # If the rewards differ only by rounding, every advantage is exactly 0.
    if not has_signal(rewards):
        return 0.0
    advantage = baseline(reward, rewards)
    return advantage if std_epsilon is None else advantage / (_deviation(rewards) + std_epsilon)


def teacher_log_ratios(example: TrainingExample) -> list[float]:
    """Return `log p_teacher - log p_engine` of each token: [L], in nats; 0 for tokens not learned.

    Raises ValueError if no teacher has scored the example.
    """
    columns = zip(require_teacher(example), example.logprobs, example.mask, strict=True)
    return [teacher - engine if is_learned else 0.0 for teacher, engine, is_learned in columns]


def require_teacher(example: TrainingExample) -> list[float]:
    """Return the teacher model's log-probabilities of the example's tokens: [L].

    Raises ValueError if no teacher has scored the example.
    """
    if example.teacher_logprobs is None:
        raise ValueError(
            f"example {example.example_id!r}, rollout {example.rollout}: no teacher has scored it,"
            " although environment.teacher is set; this is a bug: report it with error.txt"
        )
    return example.teacher_logprobs


def _deviation(rewards: Sequence[float]) -> float:
    """Return the sample standard deviation of at least two rewards."""
    # The same formula as in verl, TRL, OpenRLHF and SkyRL. `statistics.stdev` computes in fractions
    # and takes a hundred times as long.
    mean = fmean(rewards)
    return math.hypot(*(reward - mean for reward in rewards)) / math.sqrt(len(rewards) - 1)


def learned_by_call(example: TrainingExample) -> list[list[int]]:
    """Return the positions of an example's learned tokens, one list per model call.

    Example:
        Two calls with `step_ends=(3, 6)` and the mask `[0, 1, 1, 0, 0, 1]`: `[[1, 2], [5]]`.
    """
    ends = example.step_ends or (len(example.token_ids),)
    return [
        [index for index in range(start, end) if example.mask[index]]
        for start, end in pairwise((0, *ends))
    ]
