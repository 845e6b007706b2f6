"""What a rollout is worth: reward functions with weights.

A reward function is called with the arguments that it names: any field of the state (`prompt`,
`completion`, `answer`, `info`, `task`, ...), `state` itself, `parser`, or whatever `class_objects`
holds; with `**kwargs`, all of them. One that names `states`, or another plural, is of a group: it
is called once with the rollouts of one example, and returns a reward for each. Plain functions run
in a thread, so that they do not hold up the others.

A function that raises, or returns no finite number, loses only its own figure: `state["metrics"]`
goes without it, and `state["reward_errors"]` says by name what was wrong. Where its weight is not 0
there is no reward either: `state["error"]` says so, and the rollout counts as one that failed.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from typing import Any, NamedTuple

from rollout_actors.environments.concurrency import ScoringSlot, bare, each, in_thread, within
from rollout_actors.environments.failures import FAILURES, raise_if_for_all, told
from rollout_actors.environments.lifecycle import awaited
from rollout_actors.environments.types import Message, Messages, State
from shared.trajectory import group_advantages

# From what a model said to what is scored.


class Parser:
    """The answer is the text itself, or what `extract_fn` makes of it."""

    def __init__(self, extract_fn: Callable[[str], Any] = str) -> None:
        self.extract_fn = extract_fn

    def parse(self, text: str) -> Any:
        return self.extract_fn(text)

    def parse_answer(self, completion: Messages) -> Any:
        """Of the last thing that the model said; None where it said nothing."""
        if isinstance(completion, str):
            return self.parse(completion)
        said = self.assistant_messages(completion)
        return self.parse(text_of(said[-1])) if said else None

    def assistant_messages(self, completion: Messages) -> list[Message]:
        return (
            []
            if isinstance(completion, str)
            else [message for message in completion if message["role"] == "assistant"]
        )

    def format_reward_func(self) -> Callable[..., float]:
        """A reward function: the share of the model's messages from which an answer can be read."""

        def format_reward(completion: Messages) -> float:
            texts = (
                [completion]
                if isinstance(completion, str)
                else [text_of(message) for message in self.assistant_messages(completion)]
            )
            return (
                sum(self.parse(text) is not None for text in texts) / len(texts) if texts else 0.0
            )

        return format_reward


class ThinkParser(Parser):
    """The answer stands behind `</think>`; there is none without it."""

    def parse(self, text: str) -> Any:
        _, end, answer = text.rpartition("</think>")
        return self.extract_fn(answer.strip()) if end else None


class XMLParser(Parser):
    """The answer stands between `<answer>` and `</answer>`, or another of `fields`."""

    def __init__(
        self,
        fields: Sequence[str] = ("think", "answer"),
        answer_field: str = "answer",
        extract_fn: Callable[[str], Any] = str,
    ) -> None:
        if answer_field not in fields:
            raise ValueError(
                f"answer_field: {answer_field!r} is none of the fields {', '.join(fields)}"
            )
        super().__init__(extract_fn)
        self.fields, self.answer_field = tuple(fields), answer_field

    def parse_fields(self, text: str) -> dict[str, str | None]:
        """What stands last in each field; None where the field is not there, or not closed."""
        found = {
            field: re.findall(rf"<{re.escape(field)}>(.*?)</{re.escape(field)}>", text, re.DOTALL)
            for field in self.fields
        }
        return {field: values[-1].strip() if values else None for field, values in found.items()}

    def parse(self, text: str) -> Any:
        answer = self.parse_fields(text)[self.answer_field]
        return None if answer is None else self.extract_fn(answer)


def text_of(message: Message) -> str:
    """What a message says, in its parts of text."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


RewardFunction = Callable[..., Any]
"""Returns a number, or a list of one for each rollout of a group; may be asynchronous."""

PLURALS = {
    "trajectories": "trajectory",
    **{
        f"{name}s": name
        for name in (
            "state",
            "prompt",
            "completion",
            "answer",
            "task",
            "info",
            "example_id",
            "id",
            "timing",
            "stop_condition",
            "input",
        )
    },
}
"""What a reward function of a group may name, and what each of its items is."""

_PARSER: ContextVar[Parser | None] = ContextVar("parser", default=None)
"""Of the environment whose rollouts are being scored."""


ScoreUnit = Callable[["Rubric", Sequence[State], asyncio.Semaphore | None], Awaitable[None]]
"""Scores a rollout by a rubric, or an example's where it compares them, in a turn of its own."""
_SCORE_UNIT: ContextVar[ScoreUnit | None] = ContextVar("score_unit", default=None)


def score_by(score_unit: ScoreUnit | None, parser: Parser) -> None:
    """Have `Rubric.score_rollouts` score each unit by this in this task, which has a context of its
    own, and lend the parser there (`lent`).

    Args:
        score_unit: None: by the rubric alone.
    """
    if _SCORE_UNIT.get() is not score_unit:
        _SCORE_UNIT.set(score_unit)
    _PARSER.set(parser)


@contextmanager
def lent(parser: Parser) -> Iterator[None]:
    """What rubrics score meanwhile is of an environment with this parser, which functions get that
    ask for one where their rubric has none.
    """
    token = _PARSER.set(parser)
    try:
        yield
    finally:
        _PARSER.reset(token)


_LIMIT: ContextVar[tuple[float | None, str]] = ContextVar("limit", default=(None, ""))


@contextmanager
def limited(limit_s: float | None, key: str) -> Iterator[None]:
    """Bound each call of a reward function meanwhile, without its wait for a thread; None: no
    bound. `key` is what the bound is called.
    """
    token = _LIMIT.set((limit_s, key))
    try:
        yield
    finally:
        _LIMIT.reset(token)


class Rubric:
    """Reward functions and their weights; one with the weight 0 is measured alone."""

    def __init__(
        self,
        funcs: Sequence[RewardFunction] | None = None,
        weights: Sequence[float] | None = None,
        parser: Parser | None = None,
    ) -> None:
        functions = list(funcs or ())
        given = [1.0] * len(functions) if weights is None else list(weights)
        if len(given) != len(functions):
            raise ValueError(
                f"weights: {len(given)} for {len(functions)} reward functions; give one to each"
            )
        self.parser = parser
        self.class_objects: dict[str, Any] = {} if parser is None else {"parser": parser}
        """Further arguments, by name."""
        self._lent: dict[str, Any] = {}
        self._rewards: list[_Reward] = []
        self._has_group_function = False
        for function, weight in zip(functions, given, strict=True):
            self.add_reward_func(function, weight)

    def add_reward_func(self, func: RewardFunction, weight: float = 1.0) -> None:
        """Also as `@rubric.add_reward_func`. What has no name of its own (a lambda, a partial) is
        numbered from the second of its kind.
        """
        reward = _Reward.of(func, weight)
        if reward.is_nameless:
            names = (
                reward.name if number == 1 else f"{reward.name}_{number}" for number in count(1)
            )
            reward = replace(
                reward, name=next(name for name in names if name not in self.reward_names)
            )
        if reward.name in self.reward_names:
            raise ValueError(
                f"reward function {reward.name} is there already; metrics go by the functions'"
                " names"
            )
        self._rewards.append(reward)
        self._has_group_function = self._has_group_function or reward.is_of_group

    def lend_parser(self, parser: Parser) -> None:
        """The first environment's, for functions that ask for one where the rubric has none. While
        an environment scores its rollouts, it is that one's own.
        """
        self._lent.setdefault("parser", parser)

    @property
    def reward_names(self) -> list[str]:
        """Of the metrics that `score_rollout` and `score_group` write."""
        return [reward.name for reward in self._rewards]

    def for_task(self, task: str) -> Rubric:  # noqa: ARG002
        """The one that scores rollouts of this task."""
        return self

    @property
    def compares_rollouts(self) -> bool:
        """Whether a function needs all rollouts of an example, or the subclass has a `score_group`
        of its own.
        """
        return self._needs_group or type(self).score_group is not Rubric.score_group

    @property
    def _needs_group(self) -> bool:
        return self._has_group_function

    @property
    def scores_all_at_once(self) -> bool:
        """Whether `score_rollouts` is a subclass's own, and rewards are final only behind it."""
        return type(self).score_rollouts is not Rubric.score_rollouts

    async def score_rollout(self, state: State) -> None:
        """Write the state's `reward` and `metrics`, and the reward of the steps that have none."""
        if self._needs_group:
            # Without an advantage: there is nothing to compare with, and a subclass's `score_group`
            # that calls this compares them itself.
            await self._score([state])
        else:
            await self._score_alone(state)

    async def _score_alone(self, state: State) -> None:
        objects = self._objects()
        # (A comprehension would be one more coroutine for each rollout.)
        figures = []
        for reward in self._rewards:
            figures.append(await reward.of_rollout(state, objects))
        self._credit(state, figures)

    async def score_rollouts(self, states: Sequence[State], max_concurrent: int = -1) -> None:
        """Score many rollouts: each by itself, or where they are compared, those of an example.

        `Environment.generate` calls this with `interleave_scoring=False`, when all rollouts are
        generated: a subclass that scores all of them at once overrides it. Interleaved, `generate`
        calls `score_rollout`, or where rollouts are compared, `score_group`, and never this.

        Args:
            max_concurrent: most rollouts that are scored at a time; -1: all.
        """
        units = _examples_of(states) if self.compares_rollouts else [[state] for state in states]
        places = asyncio.Semaphore(max_concurrent) if max_concurrent > 0 else None
        score_unit = _SCORE_UNIT.get()

        async def scored(unit: Sequence[State]) -> None:
            if score_unit is not None:
                await score_unit(self, unit, places)
                return
            async with ScoringSlot(places):
                if self.compares_rollouts:
                    await awaited(self.score_group(unit))
                else:
                    await awaited(self.score_rollout(unit[0]))
            settle(unit, self)

        await each([scored(unit) for unit in units])

    async def score_group(self, states: Sequence[State]) -> None:
        """Score all rollouts of one example, and write their `advantage`: see `give_advantages`."""
        await self._score(states)
        give_advantages(states)

    async def _score(self, states: Sequence[State]) -> None:
        objects = self._objects()
        columns = [await reward.of_group(states, objects) for reward in self._rewards]
        for place, state in enumerate(states):
            self._credit(state, [column[place] for column in columns])

    def _objects(self) -> dict[str, Any]:
        parser = _PARSER.get()
        return {
            **self._lent,
            **({} if parser is None else {"parser": parser}),
            **self.class_objects,
        }

    def _credit(self, state: State, figures: Sequence[Figure]) -> None:
        reward, metrics, failed, error = 0.0, {}, {}, None
        for function, figure in zip(self._rewards, figures, strict=True):
            if isinstance(figure, Failed):
                failed[function.name] = figure.told
                if function.weight and error is None:
                    error = figure.told
            else:
                metrics[function.name] = figure
                reward += function.weight * figure
        state["metrics"] = metrics
        _note_reward_errors(state, failed, error)
        credit(state, reward if error is None else 0.0)


class RubricGroup(Rubric):
    """Several rubrics as one: rewards are added.

    Where two have a metric of the same name, it is their sum, which needs both.
    """

    def __init__(self, rubrics: Sequence[Rubric]) -> None:
        if not rubrics:
            raise ValueError("rubrics: a group has at least one")
        super().__init__(
            parser=next((rubric.parser for rubric in rubrics if rubric.parser is not None), None)
        )
        self.rubrics = tuple(rubrics)

    def add_reward_func(self, func: RewardFunction, weight: float = 1.0) -> None:
        """To the first of the rubrics."""
        self.rubrics[0].add_reward_func(func, weight)

    def lend_parser(self, parser: Parser) -> None:
        for rubric in self.rubrics:
            rubric.lend_parser(parser)

    @property
    def reward_names(self) -> list[str]:
        return list(dict.fromkeys(name for rubric in self.rubrics for name in rubric.reward_names))

    @property
    def _needs_group(self) -> bool:
        return any(rubric.compares_rollouts for rubric in self.rubrics)

    async def _score_alone(self, state: State) -> None:
        await self._score([state])

    async def score_rollout(self, state: State) -> None:
        await super().score_rollout(state)
        if _given(state, "advantage").compared and _is_as_given(state, "advantage"):
            # A member has compared it with itself.
            _give(state, "advantage", None)

    @property
    def scores_all_at_once(self) -> bool:
        own = type(self).score_rollouts is not RubricGroup.score_rollouts
        return own or any(rubric.scores_all_at_once for rubric in self.rubrics)

    async def score_rollouts(self, states: Sequence[State], max_concurrent: int = -1) -> None:
        """Add what the rubrics' own `score_rollouts` give, one rubric after the other.

        Where none of them has one, rollouts or examples are scored one by one, as in any rubric.
        A rollout that a rubric leaves unsound has failed (`state["error"]`), and the next ones are
        not asked for it; what a `score_rollouts` raises is raised.
        """
        if not any(rubric.scores_all_at_once for rubric in self.rubrics):
            await super().score_rollouts(states, max_concurrent)
            return

        async def score(rubric: Rubric, sound: Sequence[State]) -> None:
            await awaited(rubric.score_rollouts(sound, max_concurrent))
            examples = _examples_of(sound)
            for unit in examples if rubric.compares_rollouts else [[state] for state in sound]:
                together = [state for state in unit if state.get("error") is None]
                try:
                    settle(together, rubric)
                except FAILURES as error:
                    raise_if_for_all(error)
                    for state in together:
                        state["error"] = told(error)

        await self._add_up(states, score)
        if self.compares_rollouts:
            for example in _examples_of(states):
                give_advantages(example)

    async def _score(self, states: Sequence[State]) -> None:
        async def score(rubric: Rubric, sound: Sequence[State]) -> None:
            if rubric.compares_rollouts:
                await awaited(rubric.score_group(sound))
            else:
                await each([awaited(rubric.score_rollout(state)) for state in sound])
            settle(sound, rubric)

        await self._add_up(states, score)

    async def _add_up(
        self, states: Sequence[State], score: Callable[[Rubric, Sequence[State]], Awaitable[None]]
    ) -> None:
        """Write the sums of what each rubric gives when it is asked by `score`."""
        totals = [0.0] * len(states)
        metrics: list[dict[str, float]] = [{} for _ in states]
        failed: list[dict[str, str]] = [{} for _ in states]
        errors: list[str | None] = [None] * len(states)
        sound = list(range(len(states)))
        for rubric in self.rubrics:
            for place in sound:
                # What this one leaves out is not there, rather than what the one before it gave.
                _note_reward_errors(states[place], {}, None)
                states[place].update(reward=None, metrics=None)
            former = [state.get("error") for state in states]
            await score(rubric, [states[place] for place in sound])
            for place in list(sound):
                state = states[place]
                own, error = state.get("reward_errors", {}), state.get("error")
                if error != former[place] and error not in own.values():
                    sound.remove(place)  # it has failed as a whole
                    continue
                totals[place] += state["reward"]
                for name, value in (state.get("metrics") or {}).items():
                    metrics[place][name] = metrics[place].get(name, 0.0) + value
                failed[place] |= own
                if error in own.values():
                    errors[place] = errors[place] or error
        for place, state in enumerate(states):
            if place not in sound:
                state["metrics"] = {}
                state.pop("reward_errors", None)
                credit(state, 0.0)
                continue
            there = [name for name in metrics[place] if name not in failed[place]]
            state["metrics"] = {name: metrics[place][name] for name in there}
            _note_reward_errors(state, failed[place], errors[place])
            credit(state, totals[place] if errors[place] is None else 0.0)


def _examples_of(states: Sequence[State]) -> list[list[State]]:
    examples = groups_of((state.get("task"), state.get("example_id")) for state in states)
    return [[states[place] for place in example] for example in examples]


def groups_of(names: Iterable[Any]) -> list[list[int]]:
    """The places of each name among them. An example's name is its task and its id: two
    environments may number their rows alike.
    """
    groups: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        groups.setdefault(repr(name), []).append(place)  # an id may be of any type
    return list(groups.values())


def settle(states: Sequence[State], rubric: Rubric) -> None:
    """The end of scoring: what a rubric, which may be of a class of the user's, has changed since
    it was given is that of the steps too, and where it has changed rewards since they were
    compared, they are compared again; advantages that it has set itself stay.

    Raises:
        ValueError: it has left a rollout without a reward that can be compared, or with a metric
        that is no number.
    """
    who = type(rubric).__name__
    for state in states:
        if not _is_finite(reward := state.get("reward")):
            raise ValueError(f"{who} gave the reward {reward!r}; give a finite number")
        for name, value in (state.get("metrics") or {}).items():
            if not _is_finite(value):
                raise ValueError(
                    f"{who} gave the metric {name} = {value!r}; give a finite number, or leave"
                    " it out"
                )
    _compare_again(states)
    for state in states:
        for field in ("reward", "advantage"):
            if state.get(field) is not None and not _is_as_given(state, field):
                _give(state, field, state[field])


def credit(state: State, reward: float) -> None:
    """The rollout's reward, which is that of its steps too, where they have none of their own."""
    _give(state, "reward", reward)


def give_advantages(states: Sequence[State]) -> None:
    """Give the rollouts of one example their reward minus the mean, and so their steps without one.

    The reward 0 of a rollout that failed is no judgement of what the model did: it is not in the
    mean of the others, and its own advantage is None.
    """
    sound = [state for state in states if state.get("error") is None]
    rewards = [state["reward"] for state in sound]
    for state, advantage in zip(sound, group_advantages(rewards), strict=True):
        _give(state, "advantage", advantage, rewards)
    for state in states:
        if state.get("error") is not None:
            _give(state, "advantage", None)


def compare_rollouts(states: Sequence[State]) -> None:
    """`give_advantages`, unless a rubric of its own kind has given all sound rollouts theirs."""
    if any(state["advantage"] is None for state in states if state["error"] is None):
        give_advantages(states)
    for state in states:
        if state["error"] is not None:
            _give(state, "advantage", None)


def _note_reward_errors(state: State, failed: Mapping[str, str], error: str | None) -> None:
    """Write which functions failed, by name, and where one with a weight did, the rollout's
    error."""
    former = state.pop("reward_errors", None)
    if former and state.get("error") in former.values():
        state["error"] = None  # it was of an earlier scoring
    if failed:
        state["reward_errors"] = dict(failed)
    if error is not None:
        state["error"] = error


def relative_steps(state: State) -> list[int] | None:
    """List the steps whose advantage is the rollout's among those of its example.

    The advantage of the others was set by a rubric, or by somebody else. None: the rollout has not
    been given any advantage.
    """
    if "advantage" not in state.get("_inherited", {}):
        return None
    return _inheriting(state, "advantage") if _given(state, "advantage").compared else []


def _compare_again(states: Sequence[State]) -> None:
    if all("advantage" not in state.get("_inherited", ()) for state in states):
        return
    for places in groups_of(id(_given(state, "advantage").compared) for state in states):
        group = [states[place] for place in places]
        rewards, compared = (
            [state["reward"] for state in group],
            _given(group[0], "advantage").compared,
        )
        if len(compared) != len(group) or compared == rewards:
            continue  # never compared, or not with these alone; or still true
        for state, advantage in zip(group, group_advantages(rewards), strict=True):
            if _is_as_given(state, "advantage"):
                _give(state, "advantage", advantage, rewards)


class _Given(NamedTuple):
    """What a rollout was given, noted in `state["_inherited"]` by field."""

    value: float | None = None
    steps: Sequence[int] = ()
    """Those that were given it too."""
    compared: Sequence[float] = ()
    """The rewards that an advantage was computed from, in one list for all of the group; empty
    where it is of another kind.
    """


_NOTHING_GIVEN = _Given()


def _given(state: State, field: str) -> _Given:
    given = state.get("_inherited", {}).get(field)
    return _NOTHING_GIVEN if given is None else _Given(*given)


def _is_as_given(state: State, field: str) -> bool:
    return _is_same(state[field], _given(state, field).value)


def _inheriting(state: State, field: str) -> list[int]:
    """Steps that hold what they were given, and nothing that somebody has set since."""
    given, steps = _given(state, field), state.get("trajectory") or ()
    return [
        number
        for number in given.steps
        if number < len(steps) and _is_same(steps[number].get(field), given.value)
    ]


def _give(state: State, field: str, value: float | None, compared: Sequence[float] = ()) -> None:
    """To a rollout, and to those of its steps that have nothing, or what they were given before.
    States and steps may be of users, who leave out what is not known yet."""
    inherited = state.get("_inherited")
    if inherited is None:
        inherited = state["_inherited"] = {}
    former = _inheriting(state, field) if field in inherited else ()
    steps = state.get("trajectory") or ()
    now = []
    state[field] = value
    for number, step in enumerate(steps):
        if step.get(field) is None or number in former:
            step[field] = value
            now.append(number)
    # Mostly it is all of them, and a range is nothing for Python's collector to look at.
    inherited[field] = _Given(value, range(len(now)) if len(now) == len(steps) else now, compared)


def _is_same(one: Any, other: Any) -> bool:
    """NaN is the same as NaN here."""
    return bool(one == other or (one != one and other != other))


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, OverflowError):  # no number, or an integer that no float can hold
        return False


class Failed(NamedTuple):
    """The end of a reward function that has no figure for a rollout."""

    told: str
    """The error that it raised, and where."""

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        """Keep what is the function's failure; raise again what is not."""
        raise_if_for_all(error)
        return cls(told(error))


Figure = float | Failed


@dataclass(frozen=True, slots=True)
class _Reward:
    """A reward function and how it is called."""

    function: RewardFunction
    name: str
    weight: float
    arguments: tuple[str, ...]
    """The names that it asks for."""
    required: tuple[str, ...]
    """Those without a default."""
    takes_all: bool
    bound: frozenset[str]
    """The names that a partial has given a value: with `**kwargs` too they keep it."""
    is_of_group: bool
    is_asynchronous: bool
    is_nameless: bool
    """`name` is that of its kind."""

    @classmethod
    def of(cls, function: RewardFunction, weight: float) -> _Reward:
        called = bare(function)
        parameters = inspect.signature(called).parameters.values()
        # What a partial has bound is given already.
        bound = called.keywords if isinstance(called, partial) else {}
        given = [
            one
            for one in parameters
            if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) and one.name not in bound
        ]
        named, required = (
            tuple(one.name for one in given),
            tuple(one.name for one in given if one.default is one.empty),
        )
        takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
        name = getattr(function, "__name__", type(function).__name__)
        if unnamed := [
            one.name
            for one in parameters
            if one.kind is one.POSITIONAL_ONLY and one.default is one.empty
        ]:
            raise ValueError(
                f"reward function {name}: {', '.join(unnamed)} can only be given by position;"
                " arguments are given by name, so leave out the slash"
            )
        is_nameless = name == "<lambda>" or not hasattr(function, "__name__")
        is_of_group = any(argument in PLURALS for argument in named)
        is_asynchronous = inspect.iscoroutinefunction(function)
        return cls(
            function,
            name,
            float(weight),
            named,
            required,
            takes_all,
            frozenset(bound),
            is_of_group,
            is_asynchronous,
            is_nameless,
        )

    async def of_rollout(self, state: State, objects: dict[str, Any]) -> Figure:
        try:
            return _number(
                await self._called(objects, {"state": state}, state, {"answer": "", "info": {}}),
                self.name,
            )
        except FAILURES as error:
            return Failed.of(error)

    async def of_group(self, states: Sequence[State], objects: dict[str, Any]) -> list[Figure]:
        if not self.is_of_group:
            return await each([self.of_rollout(state, objects) for state in states])
        try:
            values = await self._of_all(states, objects)
        except FAILURES as error:
            return [Failed.of(error)] * len(states)
        return [self._figure(value) for value in values]

    def _figure(self, value: Any) -> Figure:
        """Return a rollout's figure; what is no finite number is that rollout's failure alone."""
        try:
            return _number(value, self.name)
        except FAILURES as error:
            return Failed.of(error)

    async def _of_all(self, states: Sequence[State], objects: Mapping[str, Any]) -> list[Any]:
        rows = [_fields(state) for state in states]
        columns = {plural: [row.get(name) for row in rows] for plural, name in PLURALS.items()}
        values = await self._called({**columns, "states": states, **objects})
        if not hasattr(values, "__len__"):
            raise ValueError(
                f"reward function {self.name} returned {values!r} for a group of {len(states)}"
                " rollouts; return a list with one reward for each"
            )
        if len(values) != len(states):
            raise ValueError(
                f"reward function {self.name} returned {len(values)} rewards for a group of"
                f" {len(states)} rollouts; return one for each"
            )
        return list(values)

    def _arguments(self, *there: Mapping[str, Any]) -> dict[str, Any]:
        """Look up each name that the function asks for: the first mapping that has it counts."""
        arguments = {}
        for name in dict.fromkeys(chain(*reversed(there))) if self.takes_all else self.arguments:
            for one in there:
                if name in one:
                    arguments[name] = one[name]
                    break
        if missing := [name for name in self.required if name not in arguments]:
            known = ", ".join(sorted(set().union(*there)))
            raise TypeError(
                f"reward function {self.name} asks for {', '.join(missing)}; there are {known}; add"
                " others to the rubric's class_objects"
            )
        for name in self.bound:
            arguments.pop(name, None)
        return arguments

    async def _called(self, *there: Mapping[str, Any]) -> Any:
        arguments = self._arguments(*there)
        limit_s, key = _LIMIT.get()
        async with within(
            limit_s,
            f"reward function {self.name} is not done after {key}",
            "check what it waits for, or allow more with scoring_timeout_s",
        ):
            if self.is_asynchronous:
                return await self.function(**arguments)
            return await awaited(await in_thread(self.function, **arguments))


def _fields(state: State) -> dict[str, Any]:
    """What the rollout has of its own, and of a row without answer or info, empty ones."""
    return {"answer": "", "info": {}, **state}


def _number(value: Any, name: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"reward function {name} returned {value!r}; return a number") from error
    if not math.isfinite(number):
        # It would spoil its group's mean, and what is learned of all the others.
        raise ValueError(f"reward function {name} returned {number}; return a finite number")
    return number
