"""Several environments in one run: each rollout is played and scored by one of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import NoReturn

from rollout_actors.environments.datasets import Examples, PromptFormat
from rollout_actors.environments.environment import Environment, full_name
from rollout_actors.environments.lifecycle import awaited, call_all
from rollout_actors.environments.rewards import RewardFunction
from rollout_actors.environments.rubric import Rubric, lent_parser
from rollout_actors.environments.types import Client, Fields, RolloutInput, SamplingArgs, State
from shared.dataset import even_order


class EnvGroup(Environment):
    """Combines several environments into one, whose dataset has the rows of all of them.

    A row's `task` names its environment, and its `example_id` is its index among all rows. A row's
    own `id` is kept. Example: two environments with 2 and 3 rows have the example ids 0 to 4. The
    first n rows, as `get_eval_dataset(n)` and held-out reports take them, contain each environment
    in proportion to its number of rows.
    """

    def __init__(
        self,
        envs: Sequence[Environment],
        env_names: Sequence[str] | None = None,
        weights: Sequence[int] | None = None,
        *,
        env_id: str | None = None,
        env_args: Fields | None = None,
        sampling_args: SamplingArgs | None = None,
    ) -> None:
        """
        Args:
            envs: environments of one `message_type`. They keep their prompts, rubrics, sampling
                arguments and limits, and are closed with the group.
            env_names: one for each environment, the `task` of its rows; None: the environment's
                `env_id`, or else `env_0`, `env_1`, ...
            weights: numbers of examples. Of every sum(weights) consecutive training examples,
                exactly so many are from each environment; None: rows are drawn without weights.
            sampling_args: take precedence over the environments' own arguments.

        Raises:
            TypeError: an item of `envs` is not an Environment of this package, or a subclass of
                EnvGroup has methods marked with `@stop` or `@cleanup`.
            ValueError: the list is empty or contains a group, names or weights are invalid, or the
                environments have different message types.
        """
        if foreign := [full_name(env) for env in envs if not isinstance(env, Environment)]:
            raise TypeError(
                f"envs: must be environments of rollout_actors.environments, got"
                f" {', '.join(foreign)}"
            )
        self.env_map = dict(zip(_names(envs, env_names), envs, strict=True))
        self.envs = list(envs)
        self.env_names = list(self.env_map)
        self.weights = None if weights is None else _checked(weights, self.env_map)
        # Code that reads only the group's limit must allow for the longest of its members.
        self.cleanup_timeout_s = max(
            type(self).cleanup_timeout_s, *(env.cleanup_timeout_s for env in envs)
        )
        message_types = sorted({env.message_type for env in envs})
        if len(message_types) > 1:
            raise ValueError(
                f"envs: message_type is {' of some and '.join(message_types)} of other"
                " environments, but must be the same for all environments of an EnvGroup; make an"
                " EnvGroup and a run for each message_type"
            )
        super().__init__(
            message_type=message_types[0],
            rubric=_RoutedRubric(self.env_map),
            env_id=env_id,
            env_args=env_args,
            sampling_args=sampling_args,
        )
        self._join()

    def _join(self) -> None:
        """Join the prompt formats and rows of all environments."""
        forms = {name: env.prompt_format for name, env in self.env_map.items()}
        self.prompt_format = _RoutedFormat(self.message_type, forms=forms)
        self.dataset = _joined({name: env.dataset for name, env in self.env_map.items()})
        self.eval_dataset = _joined(
            {
                name: env.dataset if env.eval_dataset is None else env.eval_dataset
                for name, env in self.env_map.items()
            }
        )

    def add_system_prompt(self, text: str) -> None:
        for env in self.envs:
            # Members format their own rows; the group only joins them again.
            env.add_system_prompt(text)
        self._join()

    @property
    def mixture(self) -> tuple[tuple[int, int], ...]:
        if self.weights is None:
            return ()
        sizes = [len(env.dataset) for env in self.envs if env.dataset is not None]
        return tuple(zip(sizes, self.weights, strict=True))

    def __post_init__(self) -> None:
        super().__post_init__()
        handlers = (*self._stop_conditions, *self._cleanups)
        if handlers:
            names = ", ".join(handler.__name__ for handler in handlers)
            raise TypeError(
                f"{names}: an EnvGroup cannot have its own @stop or @cleanup, because its"
                " environments play the rollouts; mark methods of the environments instead"
            )

    async def init_state(self, input: RolloutInput, *args: object, **kwargs: object) -> State:
        return await self.member(input.get("task")).init_state(input, *args, **kwargs)

    async def rollout(
        self,
        input: RolloutInput,
        client: Client,
        model: str,
        sampling_args: SamplingArgs | None = None,
    ) -> State:
        """Play one rollout of a dataset row in the environment that the row's `task` names."""
        member = self.member(input.get("task"))
        return await member.rollout(input, client, model, sampling_args)

    def member(self, task: str | None) -> Environment:
        """Return the environment that a row's `task` names. Raises ValueError if there is none."""
        if task is None or task not in self.env_map:
            _refuse_task(task, self.env_map)
        return self.env_map[task]

    get_env_for_task = member

    async def _render_completion(self, state: State) -> None:
        await self.member(state["task"])._render_completion(state)

    async def aclose(self) -> None:
        """Close the group and each of its environments, each within its own time limit.

        All are closed, even if others raise or this call is cancelled.
        """
        await call_all([super().aclose, *(env.aclose for env in self.envs)])


class _RoutedRubric(Rubric):
    """A rubric that scores each rollout by the rubric of its environment."""

    def __init__(self, envs: Mapping[str, Environment]) -> None:
        super().__init__()
        self._envs = envs

    def add_reward_func(self, func: RewardFunction, weight: float = 1.0) -> NoReturn:  # noqa: ARG002
        raise ValueError(
            "an EnvGroup has no reward functions; add them to the rubrics of its environments"
        )

    @property
    def reward_names(self) -> list[str]:
        return list(
            dict.fromkeys(name for env in self._envs.values() for name in env.rubric.reward_names)
        )

    def for_task(self, task: str) -> Rubric:
        return self._envs[task].rubric if task in self._envs else self

    @property
    def compares_rollouts(self) -> bool:
        return any(env.rubric.compares_rollouts for env in self._envs.values())

    async def score_rollout(self, state: State) -> None:
        env = self._envs[state["task"]]
        with lent_parser(env.parser):
            await awaited(env.rubric.score_rollout(state))

    async def score_group(self, states: Sequence[State]) -> None:
        for task in dict.fromkeys(state["task"] for state in states):
            env = self._envs[task]
            of_task = [state for state in states if state["task"] == task]
            with lent_parser(env.parser):
                await awaited(env.rubric.score_group(of_task))


@dataclass(frozen=True, slots=True)
class _RoutedFormat(PromptFormat):
    """A prompt format that uses the format of each row's environment."""

    forms: Mapping[str, PromptFormat] | None = None

    def input(self, row: Fields, index: int) -> RolloutInput:
        forms = self.forms or {}
        task = row.get("task")
        if task is None or task not in forms:
            _refuse_task(task, forms, f"row {index}: ")
        return forms[task].input(row, index)


@dataclass(frozen=True, slots=True)
class _Finished(PromptFormat):
    """A prompt format for rows that are rollout inputs already."""

    def input(self, row: Fields, index: int) -> RolloutInput:
        # Two environments may use the same ids for different rows.
        return {**row, "example_id": index}  # type: ignore[typeddict-item]


class _GroupRows:
    """Several datasets joined to one, with the names of their environments as tasks."""

    def __init__(self, datasets: Mapping[str, Examples]) -> None:
        self._datasets = tuple(datasets.items())
        self.sizes = [len(dataset) for dataset in datasets.values()]
        self._ends = list(accumulate(self.sizes))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Fields:
        number = bisect_right(self._ends, index)
        name, dataset = self._datasets[number]
        return {**dataset[index - self._ends[number] + len(dataset)], "task": name}


class _GroupExamples(Examples):
    """The rows of a group. The first n rows contain each environment in proportion."""

    def __init__(self, rows: _GroupRows) -> None:
        super().__init__(rows, _Finished())
        self._sizes = rows.sizes

    def first(self, n: int) -> Examples:
        starts = [0, *accumulate(self._sizes)]
        chosen = []
        for number in islice(even_order(self._sizes), max(n, 0)):
            chosen.append(starts[number])
            starts[number] += 1
        return self.select(chosen)


def _joined(datasets: Mapping[str, Examples | None]) -> Examples | None:
    present = {name: dataset for name, dataset in datasets.items() if dataset is not None}
    return _GroupExamples(_GroupRows(present)) if present else None


def _checked(weights: Sequence[int], envs: Mapping[str, Environment]) -> tuple[int, ...]:
    """Return the weights. ValueError: their number or a value is wrong, or there are no rows."""
    if len(weights) != len(envs):
        raise ValueError(f"weights: {len(weights)} for {len(envs)} environments; give one to each")
    for name, weight in zip(envs, weights, strict=True):
        if isinstance(weight, bool) or not isinstance(weight, int) or weight < 1:
            raise ValueError(f"weights: must be whole numbers from 1, got {weight!r} for {name}")
        if not envs[name].dataset:
            raise ValueError(f"weights: {name} has no rows to train on; leave it out of envs")
    return tuple(weights)


def _names(envs: Sequence[Environment], env_names: Sequence[str] | None) -> list[str]:
    if not envs:
        raise ValueError("envs: is empty; give at least one environment")
    if env_names is None:
        names = [env.env_id or f"env_{index}" for index, env in enumerate(envs)]
    else:
        names = list(env_names)
    if len(names) != len(envs):
        raise ValueError(f"env_names: {len(names)} for {len(envs)} environments; give one to each")
    if len(set(names)) != len(names):
        raise ValueError(f"env_names: must be distinct, got {', '.join(names)}")
    for name, env in zip(names, envs, strict=True):
        # A row has one task, which cannot name an environment of an inner group too.
        if isinstance(env, EnvGroup):
            raise ValueError(f"envs: {name} is an EnvGroup; list its environments in envs instead")
    return names


def _refuse_task(task: object, names: Collection[str], where: str = "") -> NoReturn:
    raise ValueError(
        f"{where}task {task!r} names no environment of the EnvGroup; it has {', '.join(names)}"
    )
