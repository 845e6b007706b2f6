"""Rewards of rollouts: reward functions with weights.

A reward function is called with the arguments that it names: any field of the state (`prompt`,
`completion`, `answer`, `info`, `task`, ...), `state` itself, `parser`, or whatever `class_objects`
holds; with `**kwargs`, all of them. One that names `states`, or another plural, is of a group: it
is called once with the rollouts of one example, and returns a reward for each. Plain functions run
in threads.

A function that raises, or returns no finite number, loses only its own figure: `state["metrics"]`
goes without it, and `state["reward_errors"]` says by name what was wrong. If its weight is not 0
there is no reward either: `state["error"]` says so, and the rollout counts as one that failed.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from typing import Any, TypeVar

from rollout_actors.environments.answers.parsers import Parser
from rollout_actors.environments.concurrency import (
    FAILURES,
    GIVEN_UP,
    ScoringSlot,
    describe_error,
    gather_all,
    in_thread,
    reraise_cancellation,
    run_in_task,
    unwrap_partial,
    within,
)
from rollout_actors.environments.lifecycle import awaited
from rollout_actors.environments.types import State
from shared.trajectory import group_advantages

T = TypeVar("T")

# Settings of the scoring that is under way

_PARSER: ContextVar[Parser | None] = ContextVar("parser", default=None)
"""Parser of the environment whose rollouts are being scored."""
_TIME_LIMIT: ContextVar[tuple[float | None, str]] = ContextVar("time_limit", default=(None, ""))


@contextmanager
def _set(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def lent_parser(parser: Parser) -> AbstractContextManager[None]:
    """Lend an environment's parser to reward functions whose rubric has none."""
    return _set(_PARSER, parser)


def time_limit(limit_s: float | None, key: str) -> AbstractContextManager[None]:
    """Bound each call of a reward function (None: not at all); errors name the bound by `key`."""
    return _set(_TIME_LIMIT, (limit_s, key))


def scoring_limit(who: str) -> AbstractAsyncContextManager[None]:
    """Bound a block of scoring by the limit that is set. TimeoutError: `who` is late."""
    limit_s, key = _TIME_LIMIT.get()
    remedy = "check what it waits for, or allow more with scoring_timeout_s"
    return within(limit_s, f"{who} is not done after {key}", remedy)


# Rubrics


def _overrides(rubric: Rubric, name: str, base: type[Rubric]) -> bool:
    """Tell whether a subclass, or the rubric itself, has a method in place of the base's."""
    method = getattr(rubric, name)
    return getattr(method, "__func__", method) is not getattr(base, name)


RewardFunction = Callable[..., Any]
"""Returns a number, or a list of one for each rollout of a group; may be asynchronous."""


class Rubric:
    """Reward functions and their weights. A function of weight 0 is a metric alone.

    Example: functions `right` (weight 1.0) and `brief` (0.2) that return 1 and 0.5 give the reward
    1.1 and the metrics {"right": 1.0, "brief": 0.5}.
    """

    logger = logging.getLogger(__name__)

    def __init__(
        self,
        funcs: Sequence[RewardFunction] | None = None,
        weights: Sequence[float] | None = None,
        parser: Parser | None = None,
    ) -> None:
        functions = list(funcs or ())
        weights = [1.0] * len(functions) if weights is None else list(weights)
        if len(weights) != len(functions):
            raise ValueError(
                f"weights: {len(weights)} for {len(functions)} reward functions; give one to each"
            )
        self.parser = parser
        self.class_objects: dict[str, Any] = {} if parser is None else {"parser": parser}
        """Further arguments, by name."""
        self._default_parser: Parser | None = None
        self._rewards: list[_Reward] = []
        self._has_group_function = False
        for function, weight in zip(functions, weights, strict=True):
            self.add_reward_func(function, weight)

    def add_reward_func(self, func: RewardFunction, weight: float = 1.0) -> None:
        """Add a function; also as `@rubric.add_reward_func`.

        A function without a name of its own (a lambda, a partial) is numbered from the second of
        its kind.
        """
        reward = _Reward.from_function(func, weight)
        if reward.name == "<lambda>" or not hasattr(func, "__name__"):
            kind = reward.name
            names = (kind if number == 1 else f"{kind}_{number}" for number in count(1))
            reward.name = next(name for name in names if name not in self.reward_names)
        if reward.name in self.reward_names:
            raise ValueError(f"reward function {reward.name} is there already; rename one")
        self._rewards.append(reward)
        self._has_group_function |= reward.is_of_group

    def set_default_parser(self, parser: Parser) -> None:
        """Keep the first environment's parser for functions that ask for one by hand."""
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
        """The rubric's own parser, or else that of the environment that is scored."""
        return self.parser or _PARSER.get() or self._default_parser or Parser()

    def for_task(self, task: str) -> Rubric:  # noqa: ARG002
        """Return the rubric that scores rollouts of this task."""
        return self

    @property
    def compares_rollouts(self) -> bool:
        """True if all rollouts of an example are scored together."""
        return self._has_group_function or _overrides(self, "score_group", Rubric)

    @property
    def scores_all_at_once(self) -> bool:
        """True if `score_rollouts` is the rubric's own, and rewards are final only behind it."""
        return _overrides(self, "score_rollouts", Rubric)

    async def score_rollout(self, state: State) -> None:
        """Write the state's `reward` and `metrics`, and the reward of the steps that have none."""
        await self._score([state])

    async def score_group(self, states: Sequence[State]) -> None:
        """Score all rollouts of one example, and write their `advantage`.

        It is the reward without the mean of the group.
        """
        await self._score(states)
        set_advantages(states)

    async def score_rollouts(self, states: Sequence[State], max_concurrent: int = -1) -> None:
        """Score many rollouts, each by itself or together with those of its example.

        `Environment.generate` calls an override of this, whatever `interleave_scoring` is, once,
        when all its rollouts are generated; in training once for a step. Where there is none it
        calls `score_rollout` or `score_group`.

        Args:
            max_concurrent: most rollouts that are scored at a time; -1: all.
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
        _set_reward_errors(state, failed, fatal)
        give(state, "reward", reward if fatal is None else 0.0)


class RubricGroup(Rubric):
    """Several rubrics as one: rewards are added.

    A metric that two of them have is the sum, which needs both.
    """

    def __init__(self, rubrics: Sequence[Rubric]) -> None:
        if not rubrics:
            raise ValueError("rubrics: a group has at least one")
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
        """Add what the rubrics' own `score_rollouts` give, one rubric after the other.

        A rollout that a rubric leaves without a sound reward has failed, and the next rubrics are
        not asked for it.
        """
        if not any(rubric.scores_all_at_once for rubric in self.rubrics):
            await super().score_rollouts(states, max_concurrent)
            return
        await self._add_up(
            states, lambda rubric, sound: score_at_once(rubric, sound, max_concurrent)
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
                # What this rubric leaves out is missing, rather than what the last one gave.
                _set_reward_errors(state, {}, None)
                state.update(reward=None, metrics=None)
            sound = [state for state, _ in open_]
            await score(rubric, sound)
            settle(sound, rubric)
            for state, total in open_:
                total.add(state)
        for state, total in zip(states, sums, strict=True):
            if state.get("_given", {}).get("is_relative"):
                give(state, "advantage", None)  # a member has compared its own rewards
            if total.has_failed:
                state["metrics"] = {}
                state.pop("reward_errors", None)
                give(state, "reward", 0.0)
                continue
            state["metrics"] = {
                name: value for name, value in total.metrics.items() if name not in total.errors
            }
            _set_reward_errors(state, total.errors, total.fatal)
            give(state, "reward", total.reward if total.fatal is None else 0.0)


@dataclass(slots=True)
class _Sum:
    """The figures of one rollout, added over the rubrics of a group."""

    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    fatal: str | None = None
    """Error of a function with a weight."""
    has_failed: bool = False
    """A rubric failed as a whole: nobody knows what it had still to do."""

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


# Scores and advantages


async def score_unit(
    rubric: Rubric, states: Sequence[State], places: asyncio.Semaphore | None
) -> None:
    """Score a rollout, or those of an example if they are compared, in a slot and a task of its
    own. A rubric that raises fails these rollouts alone.
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
    if given_up:  # a function of a group is noted once
        states[0]["given_up"] = [*states[0].get("given_up", ()), *given_up]
    for state in states:
        if (timing := state.get("timing")) is not None:
            timing["scoring_ms"] += 1000 * slot.so_far_s()


async def score_at_once(rubric: Rubric, states: Sequence[State], max_concurrent: int) -> None:
    """Call `score_rollouts`, whose override may take the states alone."""
    arguments: tuple[Any, ...] = (states, max_concurrent)
    try:
        inspect.signature(rubric.score_rollouts).bind(*arguments)
    except TypeError:
        arguments = (states,)
    await awaited(rubric.score_rollouts(*arguments))


def note_failed_rubric(states: Iterable[State], error: BaseException) -> None:
    """Fail rollouts whose rubric raised: nobody knows what it had still to do, so nothing stays."""
    for state in states:
        state["error"] = describe_error(error)
        state["metrics"] = {}
        state.pop("reward_errors", None)


def settle(states: Sequence[State], rubric: Rubric) -> None:
    """Check the figures that a rubric left, and pass on to the steps what it changed itself.

    A rollout has failed where the reward, a metric or an advantage is no finite number, or so large
    that figures of many would overflow.
    """
    who = type(rubric).__name__
    for state in states:
        if state.get("error") is not None:
            continue
        figures = {"the reward": state.get("reward")}
        metrics = (state.get("metrics") or {}).items()
        figures |= {f"the metric {name} =": value for name, value in metrics}
        figures |= _own_figures(state)
        wrong = [name for name, value in figures.items() if not _is_sound(value)]
        if wrong:
            value = figures[wrong[0]]
            remedy = f"give {_remedy(value)}"
            remedy += "" if wrong[0] == "the reward" else ", or leave it out"
            problem = f"{who} gave {wrong[0]} {value!r}; {remedy}"
            note_failed_rubric([state], ValueError(problem))
            continue
        for name in ("reward", "advantage"):
            if state.get(name) != state.get("_given", {}).get(name, (None,))[0]:
                give(state, name, state[name])


def _own_figures(state: State) -> dict[str, Any]:
    """Return the advantages, and the rewards of steps, that are not the rollout's reward."""
    figures = {"the advantage": state.get("advantage")}
    for number, step in enumerate(state.get("trajectory") or ()):
        for name in ("reward", "advantage"):
            if name in step and step[name] is not state.get(name):
                figures[f"the {name} of step {number}"] = step[name]
    return {name: value for name, value in figures.items() if value is not None}


def set_advantages(states: Sequence[State]) -> None:
    """Write the rewards of one example's rollouts without their mean, and None of failed ones.

    The reward 0 of a rollout that failed is no judgement: it is not in the mean of the others.
    Example: rewards 1, 0 and 0.5 give the advantages 0.5, -0.5 and 0.
    """
    sound = [state for state in states if state.get("error") is None]
    advantages = group_advantages([state["reward"] for state in sound])
    for state in states:
        if state.get("error") is not None:
            give(state, "advantage", None)
    for state, advantage in zip(sound, advantages, strict=True):
        give(state, "advantage", advantage, is_relative=True)


def compare_rollouts(states: Sequence[State]) -> None:
    """Write the advantages of one example's rollouts, when all rewards are final.

    An advantage that a rubric has set itself stays.
    """
    explicit = {
        id(state): state["advantage"]
        for state in states
        if state.get("advantage") is not None and not state.get("_given", {}).get("is_relative")
    }
    set_advantages(states)
    for state in states:
        if id(state) in explicit and state.get("error") is None:
            give(state, "advantage", explicit[id(state)])


def relative_steps(state: State) -> list[int] | None:
    """List the steps whose advantage is the rollout's among those of its example.

    The advantage of the others was set by a rubric or an environment. None: the rollout has not
    been given any advantage.
    """
    given = state.get("_given", {})
    if "advantage" not in given:
        return None
    is_group_s = given["is_relative"] and state["advantage"] == given["advantage"][0]
    return _steps_as_given(state, "advantage") if is_group_s else []


def give(state: State, name: str, value: float | None, *, is_relative: bool = False) -> None:
    """Set a rollout's reward or advantage, and that of its steps without one of their own."""
    inheriting = _steps_as_given(state, name)
    steps = state.get("trajectory") or ()
    for number, step in enumerate(steps):
        if step.get(name) is None and number not in inheriting:
            inheriting.append(number)
    for number in inheriting:
        steps[number][name] = value
    state[name] = value
    state["_given"] = {**state.get("_given", {}), name: (value, inheriting)}
    if name == "advantage":
        state["_given"]["is_relative"] = is_relative


def _steps_as_given(state: State, name: str) -> list[int]:
    """List the steps that hold what they got with the rollout, and nothing set since."""
    value, numbers = state.get("_given", {}).get(name, (None, ()))
    steps = state.get("trajectory") or ()
    return [n for n in numbers if n < len(steps) and steps[n].get(name) == value]


def _set_reward_errors(state: State, failed: Mapping[str, str], fatal: str | None) -> None:
    """Write which functions failed, by name, and as the rollout's error that of one that counts."""
    former = state.pop("reward_errors", None)
    if former and state.get("error") in former.values():
        state["error"] = None  # it was of an earlier scoring
    if failed:
        state["reward_errors"] = dict(failed)
    if fatal is not None:
        state["error"] = fatal


def group_indices(keys: Iterable[Any]) -> list[list[int]]:
    """Return the indices of each key: `["a", "b", "a"]` gives `[[0, 2], [1]]`.

    The key of an example is its task and its id: two environments may number their rows alike.
    """
    groups: dict[str, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(repr(key), []).append(index)  # an id may be of any type
    return list(groups.values())


def _by_example(states: Sequence[State]) -> list[list[State]]:
    groups = group_indices((state.get("task"), state.get("example_id")) for state in states)
    return [[states[index] for index in group] for group in groups]


# Reward functions

PLURALS = {
    "states": "state",
    "prompts": "prompt",
    "completions": "completion",
    "answers": "answer",
    "tasks": "task",
    "infos": "info",
    "example_ids": "example_id",
    "ids": "id",
    "timings": "timing",
    "stop_conditions": "stop_condition",
    "inputs": "input",
    "trajectories": "trajectory",
}
"""Arguments of a group's reward function, and the field of each rollout that they list."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The outcome of a reward function that has no figure for a rollout."""

    text: str
    """Its error."""

    @classmethod
    def from_error(cls, error: BaseException) -> Failed:
        """Keep what is the function's failure; raise again what is not."""
        reraise_cancellation(error)
        return cls(describe_error(error))


Figure = float | Failed


@dataclass(slots=True)
class _Reward:
    """A reward function and how it is called."""

    function: RewardFunction
    name: str
    weight: float
    arguments: tuple[str, ...]
    """Names that it asks for."""
    required: tuple[str, ...]
    """Those without a default."""
    takes_all: bool
    bound: frozenset[str]
    """Names that a partial has given a value. They keep it, with `**kwargs` too."""
    is_of_group: bool

    @classmethod
    def from_function(cls, function: RewardFunction, weight: float) -> _Reward:
        called = unwrap_partial(function)
        name = getattr(function, "__name__", type(function).__name__)
        bound = frozenset(called.keywords if isinstance(called, partial) else ())
        parameters = list(inspect.signature(called).parameters.values())
        for one in parameters:
            if one.kind is one.POSITIONAL_ONLY and one.default is one.empty:
                raise ValueError(
                    f"reward function {name}: {one.name} can only be given by position; arguments"
                    " are given by name, so leave out the slash"
                )
        named = [
            one
            for one in parameters
            if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) and one.name not in bound
        ]
        return cls(
            function,
            name,
            float(weight),
            arguments=tuple(one.name for one in named),
            required=tuple(one.name for one in named if one.default is one.empty),
            takes_all=any(one.kind is one.VAR_KEYWORD for one in parameters),
            bound=bound,
            is_of_group=any(one.name in PLURALS for one in named),
        )

    async def of_group(self, states: Sequence[State], objects: dict[str, Any]) -> list[Figure]:
        """Return a figure for each of these rollouts."""
        if not self.is_of_group:
            return await gather_all([self._of_rollout(state, objects) for state in states])
        try:
            values = await self._of_all(states, objects)
        except FAILURES as error:
            return [Failed.from_error(error)] * len(states)
        return [self._figure(value) for value in values]

    async def _of_rollout(self, state: State, objects: dict[str, Any]) -> Figure:
        sources = objects, {"state": state}, state, {"answer": "", "info": {}}
        try:
            value = await self._call(*sources)
        except FAILURES as error:
            return Failed.from_error(error)
        return self._figure(value)

    async def _of_all(self, states: Sequence[State], objects: Mapping[str, Any]) -> list[Any]:
        rows = [{"answer": "", "info": {}, **state} for state in states]
        columns = {plural: [row.get(name) for row in rows] for plural, name in PLURALS.items()}
        values = await self._call({**columns, "states": states, **objects})
        has_length = hasattr(values, "__len__")
        if not has_length or len(values) != len(states):
            returned = f"{len(values)} rewards" if has_length else repr(values)
            raise ValueError(
                f"reward function {self.name} returned {returned} for a group of {len(states)}"
                " rollouts; return a list with one reward for each"
            )
        return list(values)

    async def _call(self, *sources: Mapping[str, Any]) -> Any:
        arguments = self._arguments(*sources)
        async with scoring_limit(f"reward function {self.name}"):
            if inspect.iscoroutinefunction(self.function):
                return await self.function(**arguments)
            return await awaited(await in_thread(self.function, **arguments))

    def _arguments(self, *sources: Mapping[str, Any]) -> dict[str, Any]:
        """Look up each name that the function asks for; the first source that has it counts."""
        names = dict.fromkeys(chain(*reversed(sources))) if self.takes_all else self.arguments
        arguments = {}
        for name in names:
            source = next((source for source in sources if name in source), None)
            if source is not None and name not in self.bound:
                arguments[name] = source[name]
        if missing := [name for name in self.required if name not in arguments]:
            known = ", ".join(sorted(set().union(*sources)))
            raise TypeError(
                f"reward function {self.name} asks for {', '.join(missing)}; there are {known}; add"
                " others to the rubric's class_objects"
            )
        return arguments

    def _figure(self, value: Any) -> Figure:
        """Return a finite number; anything else is this rollout's failure alone."""
        try:
            number = float(value)
        except Exception:  # whatever somebody's type raises
            number = math.nan
        if _is_sound(number):
            return number
        # It would spoil its group's mean, and what is learned of all the others.
        problem = f"reward function {self.name} returned {value!r}; return {_remedy(value)}"
        return Failed(f"ValueError: {problem}")


LARGEST = 1e30
"""Of rewards, metrics and advantages. Sums and squares of many such numbers are still floats."""


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, OverflowError):  # no number, or an integer that no float can hold
        return False


def _is_sound(value: Any) -> bool:
    return _is_finite(value) and bool(abs(value) <= LARGEST)


def _remedy(value: Any) -> str:
    return f"a number of at most {LARGEST:g} in size" if _is_finite(value) else "a finite number"
