"""Calls of reward functions, and the rewards, metrics and advantages that they give to rollouts.

The parameters of a reward function select its arguments: any field of the state (`prompt`,
`completion`, `answer`, `info`, `task`, ...), `state` itself, `parser`, or an entry of the rubric's
`class_objects`; with `**kwargs`, all of them. A function with the parameter `states`, or another
plural, is a group function: it is called once with all rollouts of one dataset row, and returns a
reward for each. Plain (not asynchronous) functions run in threads.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractAsyncContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from rollout_actors.environments.concurrency import (
    FAILURES,
    describe_error,
    gather_all,
    in_thread,
    reraise_cancellation,
    unwrap_partial,
)
from rollout_actors.environments.lifecycle import awaited
from rollout_actors.environments.types import Arguments, Fields, State
from rollout_actors.threads import within
from shared.trajectory import group_advantages

RewardFunction = Callable[..., Any]
"""A reward function: returns a number for a rollout, or a list of numbers for several rollouts.
It may be asynchronous."""

# The time limit of reward functions

# In a context variable, because users' rubrics call functions without passing a limit.
_TIME_LIMIT: ContextVar[tuple[float | None, str]] = ContextVar("time_limit", default=(None, ""))


@contextmanager
def time_limit(limit_s: float | None, key: str) -> Iterator[None]:
    """Limit the seconds of each reward function call in the `with` block; None: no limit.

    The error at the limit names it by `key`.
    """
    token = _TIME_LIMIT.set((limit_s, key))
    try:
        yield
    finally:
        _TIME_LIMIT.reset(token)


def scoring_limit(who: str) -> AbstractAsyncContextManager[None]:
    """Apply the time limit of reward functions to the `async with` block.

    It raises TimeoutError that names `who`.
    """
    limit_s, key = _TIME_LIMIT.get()
    remedy = "check what it waits for, or raise scoring_timeout_s"
    return within(limit_s, f"{who} is not done after {key}", remedy)


# How a reward function is called

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
"""Maps each plural parameter of a reward function to the state's field that it lists."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The result of a reward function that failed for a rollout, in place of a number."""

    text: str
    """Description of the error."""

    @classmethod
    def from_error(cls, error: BaseException) -> Failed:
        """Make the result from an error. Raise cancellations and process exits again."""
        reraise_cancellation(error)
        return cls(describe_error(error))


Figure = float | Failed


@dataclass(slots=True)
class Reward:
    """A reward function of a rubric, with its weight and how it is called."""

    function: RewardFunction
    name: str
    weight: float
    arguments: tuple[str, ...]
    """Names of the function's parameters."""
    required: tuple[str, ...]
    """Names of the function's parameters without a default."""
    takes_all: bool
    """Whether the function has `**kwargs`, and gets every object."""
    bound: frozenset[str]
    """Parameters bound by a `functools.partial`. They keep their values, with `**kwargs` too."""
    is_of_group: bool
    """Whether one call gets all rollouts of a dataset row."""
    is_asynchronous: bool
    """Whether the function is an `async def`. Other functions run in threads."""

    @classmethod
    def from_function(cls, function: RewardFunction, weight: float) -> Reward:
        called = unwrap_partial(function)
        name = getattr(function, "__name__", type(function).__name__)
        bound = frozenset(called.keywords if isinstance(called, partial) else ())
        if not _is_finite(weight):
            raise ValueError(
                f"weights: {weight!r} for reward function {name}; give a finite number"
            )
        parameters = list(inspect.signature(called).parameters.values())
        for one in parameters:
            if one.kind is one.POSITIONAL_ONLY and one.default is one.empty:
                raise ValueError(
                    f"reward function {name}: parameter {one.name} is positional-only, but"
                    " arguments are given by name; remove the slash"
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
            is_asynchronous=inspect.iscoroutinefunction(function),
        )

    async def of_group(self, states: Sequence[State], objects: Fields) -> list[Figure]:
        """Call the function for these rollouts of one dataset row. Return one value for each.

        `objects` are further arguments (the rubric's `class_objects`).
        """
        if not self.is_of_group:
            return await gather_all([self._of_rollout(state, objects) for state in states])
        try:
            values = await self._of_all(states, objects)
        except FAILURES as error:
            # One call makes all values, so all rollouts lose theirs.
            return [Failed.from_error(error)] * len(states)
        return [self._figure(value) for value in values]

    async def _of_rollout(self, state: State, objects: Fields) -> Figure:
        # The rubric's own objects come first, and defaults of optional fields last.
        sources = objects, {"state": state}, state, {"answer": "", "info": {}}
        try:
            value = await self._call(*sources)
        except FAILURES as error:
            return Failed.from_error(error)
        return self._figure(value)

    async def _of_all(self, states: Sequence[State], objects: Fields) -> list[object]:
        rows = [{"answer": "", "info": {}, **state} for state in states]
        columns = {plural: [row.get(name) for row in rows] for plural, name in PLURALS.items()}
        values = await self._call({**columns, "states": states, **objects})
        # Iterating over others gives keys, characters, names of columns, or no fixed order.
        is_list = (
            isinstance(values, Collection)
            and not isinstance(values, Mapping | Set | str | bytes | bytearray)
            and getattr(values, "ndim", 1) == 1  # of arrays, tensors, Series and DataFrames
        )
        if not is_list or len(values) != len(states):
            returned = f"{len(values)} rewards" if is_list else f"{values!r:.200}"
            raise ValueError(
                f"reward function {self.name} returned {returned} for a group of {len(states)}"
                " rollouts; return a list with one reward for each"
            )
        return list(values)

    async def _call(self, *sources: Fields) -> Any:
        arguments = self._arguments(*sources)
        async with scoring_limit(f"reward function {self.name}"):
            if self.is_asynchronous:
                return await self.function(**arguments)
            # An object with an asynchronous `__call__` is recognised only by its result.
            return await awaited(await in_thread(self.function, **arguments))

    def _arguments(self, *sources: Fields) -> Arguments:
        """Look up each argument of the function in the first source that has it."""
        names = dict.fromkeys(chain(*reversed(sources))) if self.takes_all else self.arguments
        arguments = {}
        for name in names:
            for source in () if name in self.bound else sources:
                if name in source:
                    arguments[name] = source[name]
                    break
        if missing := [name for name in self.required if name not in arguments]:
            known = ", ".join(sorted(set().union(*sources)))
            raise TypeError(
                f"reward function {self.name} has unknown parameters: {', '.join(missing)}; known"
                f" are {known}; put a row's own columns into its info (info[...] in the function),"
                " and add others to the rubric's class_objects"
            )
        return arguments

    def _figure(self, value: Any) -> Figure:
        """Return a finite number; any other value is a failure of this rollout only."""
        try:
            # `float` reads texts too, such as "1_0" as 10.
            number = math.nan if isinstance(value, str | bytes | bytearray) else float(value)
        except Exception:  # a user's type may raise anything
            number = math.nan
        if is_sound(number):
            return number
        # It would distort the group's mean, and so the training on all its rollouts.
        problem = f"reward function {self.name} returned {value!r:.200}; return {remedy_for(value)}"
        return Failed(f"ValueError: {problem}")


# Figures of rollouts

LARGEST = 1e30
"""Largest permitted size of rewards, metrics and advantages, so that their squares stay finite."""


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, OverflowError):  # not a number, or an integer too large for a float
        return False


def is_sound(value: Any) -> bool:
    return _is_finite(value) and bool(abs(value) <= LARGEST)


def remedy_for(value: object) -> str:
    return f"a number of at most {LARGEST:g} in size" if _is_finite(value) else "a finite number"


def note_failed_rubric(states: Iterable[State], error: BaseException) -> None:
    """Mark rollouts as failed because the rubric raised, and discard the rubric's results."""
    for state in states:
        state["error"] = describe_error(error)
        state["metrics"] = {}
        state.pop("reward_errors", None)


def settle(states: Sequence[State], rubric: object) -> None:
    """Finish the scoring of rollouts after their rubric has written rewards.

    Check the values, and copy them to the model calls of the trajectory that have none.
    """
    check_figures(states, rubric)
    for state in states:
        if state.get("error") is None:
            give_to_steps(state)


def check_figures(states: Sequence[State], rubric: object) -> None:
    """Mark rollouts as failed if their reward, metric or advantage is not finite, or too large.

    Values of many rollouts are added and squared, which must not overflow. `rubric` gave them.
    """
    for state in states:
        if state.get("error") is not None:
            continue
        for value, *words in _figures_of(state):
            if not is_sound(value):
                remedy = f"give {remedy_for(value)}"
                remedy += "" if words == ["the reward"] else ", or leave it out"
                name = " ".join(map(str, words))
                problem = f"{type(rubric).__name__} gave {name} {value!r}; {remedy}"
                note_failed_rubric([state], ValueError(problem))
                break


def _figures_of(state: State) -> list[tuple[Any, ...]]:
    """Return each figure of a rollout, followed by the words that name it in a message.

    Example: `(0.5, "the metric", "brief", "=")`.
    """
    reward, advantage = state.get("reward"), state.get("advantage")
    figures: list[tuple[Any, ...]] = [(reward, "the reward")]
    for name, value in (state.get("metrics") or {}).items():
        figures.append((value, "the metric", name, "="))
    if advantage is not None:
        figures.append((advantage, "the advantage"))
    for number, step in enumerate(state.get("trajectory") or ()):
        for name, of_rollout in (("reward", reward), ("advantage", advantage)):
            own = step.get(name)
            if own is not None and own is not of_rollout:
                figures.append((own, "the", name, "of step", number))
    return figures


def set_advantages(states: Sequence[State]) -> None:
    """Write `advantage` to the rollouts of one dataset row: reward minus mean reward.

    A failed rollout gets None, and its reward is excluded from the mean.
    Example: rewards 1, 0 and 0.5 give the advantages 0.5, -0.5 and 0.
    """
    sound = [state for state in states if state.get("error") is None]
    advantages = group_advantages([state["reward"] for state in sound])
    for state in states:
        state["advantage"] = None
    for state, advantage in zip(sound, advantages, strict=True):
        state["advantage"] = state["_group_advantage"] = advantage


def is_of_group(state: State) -> bool:
    """Return whether the rollout's advantage is relative to the other rollouts of its dataset row.

    Otherwise a rubric or an environment has set it.
    """
    advantage = state.get("advantage")
    return advantage is not None and advantage == state.get("_group_advantage")


def compare_rollouts(states: Sequence[State]) -> None:
    """Write `advantage` to the rollouts of one dataset row, when all their rewards are final.

    An advantage that a rubric has set itself is kept.
    """
    explicit = [
        (state, state["advantage"])
        for state in states
        if state.get("advantage") is not None and not is_of_group(state)
    ]
    set_advantages(states)
    for state, advantage in explicit:
        if state.get("error") is None:
            state["advantage"] = advantage
            # Even if it equals the group's advantage, the learner must not compute it anew.
            state.pop("_group_advantage")
    for state in states:
        give_to_steps(state)


def relative_steps(state: State) -> list[int]:
    """Return the indices of the model calls that have the rollout's own advantage.

    A rubric or an environment has set the advantages of the other model calls.
    """
    if not is_of_group(state):
        return []
    numbers = state.get("_inheriting", {}).get("advantage", ())
    relative = []
    for number, step in enumerate(state.get("trajectory") or ()):
        advantage = step.get("advantage")
        is_given = number in numbers and advantage == state["advantage"]
        if advantage is None or is_given:
            relative.append(number)
    return relative


def give_to_steps(state: State) -> None:
    """Copy a rollout's reward and advantage to its model calls that have none.

    Values that a rubric or an environment has set for single model calls are kept. If the rollout's
    values change later, call this function again: it replaces the earlier copies.
    """
    # Not `setdefault`, which calls four methods of the state (test_turn_cost.py).
    inheriting = state.get("_inheriting")
    if inheriting is None:
        inheriting = state["_inheriting"] = {"reward": [], "advantage": []}
    trajectory = state.get("trajectory") or ()
    for name, numbers in inheriting.items():
        value = state.get(name)
        for number, step in enumerate(trajectory):
            if number in numbers:
                step[name] = value
            elif step.get(name) is None:
                numbers.append(number)
                step[name] = value


def set_reward_errors(state: State, failed: Mapping[str, str], fatal: str | None) -> None:
    """Write the errors of a rollout's reward functions to its state, by function name.

    `failed` has an error for each function that failed. `fatal` is the error that fails the
    rollout; None: there is none.
    """
    former = state.pop("reward_errors", None)
    if former and state.get("error") in former.values():
        state["error"] = None  # it is from an earlier scoring
    if failed:
        state["reward_errors"] = dict(failed)
    if fatal is not None:
        state["error"] = fatal


def group_indices(keys: Iterable[object]) -> list[list[int]]:
    """Return the indices of equal keys together: `["a", "b", "a"]` gives `[[0, 2], [1]]`.

    Rollouts are grouped by dataset row in this way. A rollout's key is the task and id of the row.
    """
    groups: dict[str, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(repr(key), []).append(index)  # an id may be of any type
    return list(groups.values())
