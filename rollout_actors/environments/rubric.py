"""Rubrics: weighted reward functions, which score rollouts one by one or all of a row together.

A function that raises, or returns no finite number, has no value: it is missing in
`state["metrics"]`, and `state["reward_errors"]` has its error by name. If its weight is not 0, the
rollout has no reward either: it counts as failed, and `state["error"]` has the error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count

from rollout_actors.environments.answers.parsers import Parser
from rollout_actors.environments.concurrency import (
    FAILURES,
    ScoringSlot,
    gather_all,
    reraise_cancellation,
    run_in_task,
)
from rollout_actors.environments.lifecycle import awaited
from rollout_actors.environments.rewards import (
    Failed,
    Figure,
    Reward,
    RewardFunction,
    check_figures,
    compare_rollouts,
    group_indices,
    is_of_group,
    note_failed_rubric,
    set_advantages,
    set_reward_errors,
    settle,
)
from rollout_actors.environments.types import State
from rollout_actors.threads import GIVEN_UP

_PARSER: ContextVar[Parser | None] = ContextVar("parser", default=None)
"""Parser of answers of the environment whose rollouts are being scored."""


@contextmanager
def lent_parser(parser: Parser) -> Iterator[None]:
    """Lend this answer parser to rubrics without their own, in the `with` block."""
    token = _PARSER.set(parser)
    try:
        yield
    finally:
        _PARSER.reset(token)


def _overrides(rubric: Rubric, name: str, base: type[Rubric]) -> bool:
    """Return whether the rubric's class overrides the method `name` of `base`."""
    return getattr(type(rubric), name) is not getattr(base, name)


class Rubric:
    """Scores rollouts: the reward is the weighted sum of the values of reward functions.

    Every value is also a metric; a function of weight 0 is only a metric. Example: functions
    `right` (weight 1.0) and `brief` (0.2) that return 1 and 0.5 give the reward 1.1 and the metrics
    {"right": 1.0, "brief": 0.5}.
    """

    logger = logging.getLogger(__name__)

    def __init__(
        self,
        funcs: Sequence[RewardFunction] | None = None,
        weights: Sequence[float] | None = None,
        parser: Parser | None = None,
    ) -> None:
        if callable(funcs):
            raise TypeError(f"funcs: is {type(funcs).__name__}; give a list of reward functions")
        functions = list(funcs or ())
        weights = [1.0] * len(functions) if weights is None else list(weights)
        if len(weights) != len(functions):
            raise ValueError(
                f"weights: {len(weights)} for {len(functions)} reward functions; give one to each"
            )
        self.parser = parser
        self.class_objects: dict[str, object] = {} if parser is None else {"parser": parser}
        """Further arguments of reward functions, by name."""
        self._default_parser: Parser | None = None
        self._rewards: list[Reward] = []
        self._has_group_function = False
        for function, weight in zip(functions, weights, strict=True):
            self.add_reward_func(function, weight)

    def add_reward_func(self, func: RewardFunction, weight: float = 1.0) -> None:
        """Add a reward function. Raises ValueError if another one has the same name.

        It returns None, so a function decorated with `@rubric.add_reward_func` becomes None in its
        module. Lambdas are called `<lambda>`, `<lambda>_2` and so on; partials likewise.
        """
        reward = Reward.from_function(func, weight)
        if reward.name == "<lambda>" or not hasattr(func, "__name__"):
            kind = reward.name
            names = (kind if number == 1 else f"{kind}_{number}" for number in count(1))
            reward.name = next(name for name in names if name not in self.reward_names)
        if reward.name in self.reward_names:
            raise ValueError(f"reward function {reward.name} exists already; rename one of the two")
        self._rewards.append(reward)
        self._has_group_function |= reward.is_of_group

    def set_default_parser(self, parser: Parser) -> None:
        """Use this answer parser if the rubric has none and scores outside of `generate`.

        The parser of the first environment that uses the rubric is kept.
        """
        self._default_parser = self._default_parser or parser

    @property
    def reward_names(self) -> list[str]:
        return [reward.name for reward in self._rewards]

    @property
    def funcs(self) -> tuple[RewardFunction, ...]:
        return tuple(reward.function for reward in self._rewards)

    @property
    def weights(self) -> tuple[float, ...]:
        return tuple(reward.weight for reward in self._rewards)

    @property
    def current_parser(self) -> Parser:
        """The answer parser for reward functions: the rubric's own, or else the environment's."""
        return self.parser or _PARSER.get() or self._default_parser or Parser()

    def for_task(self, task: str) -> Rubric:  # noqa: ARG002
        """Return the rubric that scores rollouts of this task: itself, or a group member's."""
        return self

    @property
    def compares_rollouts(self) -> bool:
        """True if all rollouts of one dataset row must be scored together."""
        return self._has_group_function or _overrides(self, "score_group", Rubric)

    @property
    def scores_all_at_once(self) -> bool:
        """True if `score_rollouts` is overridden, so that one call of it scores all rollouts."""
        return _overrides(self, "score_rollouts", Rubric)

    async def score_rollout(self, state: State) -> None:
        """Score one rollout: write `reward` and `metrics` to its state.

        Model calls of the trajectory without a reward get the rollout's reward afterwards.
        """
        await self._score([state])

    async def score_group(self, states: Sequence[State]) -> None:
        """Score all rollouts of one dataset row, and write `advantage` to their states too.

        An advantage is the rollout's reward minus the mean reward of these rollouts.
        """
        await self._score(states)
        set_advantages(states)

    async def score_rollouts(self, states: Sequence[State], max_concurrent: int = -1) -> None:
        """Score many rollouts, one by one or together with the other rollouts of their dataset row.

        `Environment.generate` calls an override of this method once, after all its rollouts are
        generated, whatever `interleave_scoring` is. Training calls it once per step. Without an
        override, `generate` calls `score_rollout` or `score_group`.

        Args:
            max_concurrent: limit of rollouts that are scored at a time; -1: no limit.
        """
        units = _by_example(states) if self.compares_rollouts else [[state] for state in states]
        places = asyncio.Semaphore(max_concurrent) if max_concurrent > 0 else None
        await gather_all([score_unit(self, unit, places) for unit in units])

    async def _score(self, states: Sequence[State]) -> None:
        parser = _PARSER.get() or self._default_parser
        objects = {**({} if parser is None else {"parser": parser}), **self.class_objects}
        rows: list[list[Figure]] = [[] for _ in states]
        for reward in self._rewards:
            for row, figure in zip(rows, await reward.of_group(states, objects), strict=True):
                row.append(figure)
        for state, row in zip(states, rows, strict=True):
            self._write(state, row)

    def _write(self, state: State, figures: Sequence[Figure]) -> None:
        reward = 0.0
        metrics: dict[str, float] = {}
        failed: dict[str, str] = {}
        fatal: str | None = None
        for function, figure in zip(self._rewards, figures, strict=True):
            if isinstance(figure, Failed):
                failed[function.name] = figure.text
                if function.weight:
                    fatal = fatal or figure.text
            else:
                metrics[function.name] = figure
                reward += function.weight * figure
        state["metrics"] = metrics
        set_reward_errors(state, failed, fatal)
        state["reward"] = reward if fatal is None else 0.0


class RubricGroup(Rubric):
    """Scores rollouts by several rubrics, and adds the rewards.

    A metric that two of them have is the sum, and is missing if one of them fails.
    """

    def __init__(self, rubrics: Sequence[Rubric]) -> None:
        if not rubrics:
            raise ValueError("rubrics: is empty; give at least one rubric")
        parsers = [rubric.parser for rubric in rubrics if rubric.parser is not None]
        super().__init__(parser=parsers[0] if parsers else None)
        self.rubrics = list(rubrics)

    def add_reward_func(self, func: RewardFunction, weight: float = 1.0) -> None:
        self.rubrics[0].add_reward_func(func, weight)

    def set_default_parser(self, parser: Parser) -> None:
        for rubric in self.rubrics:
            rubric.set_default_parser(parser)

    @property
    def reward_names(self) -> list[str]:
        return list(dict.fromkeys(name for rubric in self.rubrics for name in rubric.reward_names))

    @property
    def funcs(self) -> tuple[RewardFunction, ...]:
        return tuple(function for rubric in self.rubrics for function in rubric.funcs)

    @property
    def weights(self) -> tuple[float, ...]:
        return tuple(weight for rubric in self.rubrics for weight in rubric.weights)

    @property
    def compares_rollouts(self) -> bool:
        return super().compares_rollouts or any(one.compares_rollouts for one in self.rubrics)

    @property
    def scores_all_at_once(self) -> bool:
        own = _overrides(self, "score_rollouts", RubricGroup)
        return own or any(rubric.scores_all_at_once for rubric in self.rubrics)

    async def score_rollouts(self, states: Sequence[State], max_concurrent: int = -1) -> None:
        """Score the rollouts by each rubric's `score_rollouts` in turn, and add the results.

        If a rubric raises or writes an invalid value for a rollout, the rollout has failed, and the
        next rubrics do not score it.
        """
        if not any(rubric.scores_all_at_once for rubric in self.rubrics):
            await super().score_rollouts(states, max_concurrent)
            return
        await self._add_up(
            states, lambda rubric, sound: awaited(rubric.score_rollouts(sound, max_concurrent))
        )
        if self.compares_rollouts:
            for example in _by_example(states):
                set_advantages(example)

    async def _score(self, states: Sequence[State]) -> None:
        async def score(rubric: Rubric, sound: Sequence[State]) -> None:
            if rubric.compares_rollouts:
                await awaited(rubric.score_group(sound))
            else:
                await gather_all([awaited(rubric.score_rollout(state)) for state in sound])

        await self._add_up(states, score)

    async def _add_up(
        self, states: Sequence[State], score: Callable[[Rubric, Sequence[State]], Awaitable[None]]
    ) -> None:
        sums = [_Sum() for _ in states]
        for rubric in self.rubrics:
            open_ = [pair for pair in zip(states, sums, strict=True) if not pair[1].has_failed]
            for state, _ in open_:
                # A value that this rubric leaves out is missing, not the previous rubric's value.
                state.pop("reward_errors", None)
                state.update(reward=None, metrics=None, error=None)
            sound = [state for state, _ in open_]
            await score(rubric, sound)
            check_figures(sound, rubric)
            for state, total in open_:
                total.add(state)
        for state, total in zip(states, sums, strict=True):
            if is_of_group(state):
                state["advantage"] = None  # a member computed it from its own rewards
            if total.has_failed:
                state["metrics"] = {}
                state.pop("reward_errors", None)
                state["reward"] = 0.0
                continue
            state["metrics"] = {
                name: value for name, value in total.metrics.items() if name not in total.errors
            }
            set_reward_errors(state, total.errors, total.fatal)
            state["reward"] = total.reward if total.fatal is None else 0.0


@dataclass(slots=True)
class _Sum:
    """The values of one rollout, added over the rubrics of a group."""

    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    fatal: str | None = None
    """Error of a function with a weight other than 0."""
    has_failed: bool = False
    """Whether the rollout failed in a rubric, whose values then do not count."""

    def add(self, state: State) -> None:
        errors = state.get("reward_errors", {})
        error = state.get("error")
        if error is not None and error not in errors.values():
            self.has_failed = True
            return
        self.reward += state["reward"]
        for name, value in (state.get("metrics") or {}).items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value
        self.errors |= errors
        self.fatal = self.fatal or error


async def score_unit(
    rubric: Rubric, states: Sequence[State], places: asyncio.Semaphore | None
) -> None:
    """Score one rollout, or all rollouts of a dataset row, in a separate task.

    `places` limits how many are scored at a time; None: no limit. If the rubric raises, only these
    rollouts fail.
    """
    given_up: list[str] = []

    async def score() -> None:
        GIVEN_UP.set(given_up)
        if rubric.compares_rollouts:
            await awaited(rubric.score_group(states))
        else:
            await awaited(rubric.score_rollout(states[0]))

    async with ScoringSlot(places) as slot:
        try:
            await run_in_task(score())
        except FAILURES as error:
            reraise_cancellation(error)
            note_failed_rubric(states, error)
    settle(states, rubric)
    if rubric.compares_rollouts:
        compare_rollouts(states)
    if given_up:  # a function of a group is recorded once
        states[0]["given_up"] = [*states[0].get("given_up", ()), *given_up]
    for state in states:
        if (timing := state.get("timing")) is not None:
            timing["scoring_ms"] += 1000 * slot.so_far_s()


def _by_example(states: Sequence[State]) -> list[list[State]]:
    groups = group_indices((state.get("task"), state.get("example_id")) for state in states)
    return [[states[index] for index in group] for group in groups]
