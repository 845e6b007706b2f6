"""A step's examples as rollouts of an environment: the plain class in an environment actor (`rollout_actors.environments.environment_actor`).

It takes the learner's `EnvironmentRequest`s, asks the run's own engines, and answers with what is learned of each rollout. No Ray here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout_actors.environments.engine_client import EngineClient, Engines
from rollout_actors.environments.environment import Environment
from rollout_actors.environments.inputs import Examples, PromptFormat
from rollout_actors.environments.loading import load_environment
from rollout_actors.environments.messages import sanitize_messages
from rollout_actors.environments.training_examples import merge_trajectories_for_training
from rollout_actors.environments.types import State
from shared.errors import RolloutError
from shared.rollouts import Rollout, RolloutRequest
from shared.trajectory import EnvironmentRequest, EnvironmentRollout, ExampleCounts, ExampleGroup, TrainingExample

Answer = tuple[EnvironmentRollout, ...]
"""To one request, in the order of positions."""


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """The same for every environment actor of a run."""

    env_id: str
    model_path: str
    """Whose tokenizer and chat template the engines have."""
    max_model_len: int
    """Most tokens of a prompt and its answer together; a rollout that needs more ends as truncated."""
    max_under_way: int
    """Most requests that one engine has at a time, of this runner."""
    env_args: dict[str, Any] = field(default_factory=dict)
    max_concurrent_scoring: int | None = None
    tool_parser: str | None = None
    keeps_messages: bool = True
    """Prompts and completions travel to the learner, which writes them down."""


class EnvironmentRunner:
    """An environment of this process, and the run's engines behind it."""

    def __init__(self, name: str, settings: RunnerSettings, engines: Engines, tokenizer: Any) -> None:
        """Loads the environment; raises what that raises."""
        self._name, self._settings, self._engines, self._tokenizer = name, settings, engines, tokenizer
        self._environment = load_environment(settings.env_id, **settings.env_args)

    async def run(self, requests: Sequence[EnvironmentRequest]) -> list[Answer]:
        """One answer per request, in the same order. The requests are of one step. A rollout that fails is data (`EnvironmentRollout.error`).

        Raises RolloutError where an engine fails: its requests are not asked again, and no rollout is blamed for it.
        """
        if not requests:
            return []
        first = requests[0]
        engines = _WatchedEngines(self._engines)
        client = EngineClient(
            engines,
            self._tokenizer,
            first.decode,
            first.run_seed,
            first.step,
            max_model_len=self._settings.max_model_len,
            max_under_way=self._settings.max_under_way,
            tool_parser=self._settings.tool_parser,
        )
        dataset = self._environment.get_eval_dataset() if first.is_held_out else self._environment.get_dataset()
        done: dict[int, EnvironmentRollout] = {}
        for groups in _calls([group for request in requests for group in request.groups], dataset):
            for rollout in await engines.unless_one_fails(self._generate(groups, dataset, client)):
                done[rollout.position] = rollout
        return [tuple(done[position] for group in request.groups for position in group.positions) for request in requests]

    async def aclose(self) -> None:
        await self._environment.aclose()

    async def _generate(self, groups: Sequence[ExampleGroup], dataset: Examples, client: EngineClient) -> list[EnvironmentRollout]:
        started_s = time.time()
        places = [(group.example, position) for group in groups for position in group.positions]
        inputs = _Placed(dataset, places)
        scoring = self._settings.max_concurrent_scoring
        results = await self._environment.generate(inputs, client, self._settings.model_path, max_concurrent_scoring=scoring, use_tqdm=False)
        states: list[State] = results["state"]
        learned: list[list[TrainingExample]] = [[] for _ in states]
        for example in merge_trajectories_for_training(states).examples:
            learned[example.rollout].append(example)
        return [
            self._rollout(state, example, position, of_rollout, started_s)
            for state, (example, position), of_rollout in zip(states, places, learned, strict=True)
        ]

    def _rollout(self, state: State, example: int, position: int, learned: list[TrainingExample], started_s: float) -> EnvironmentRollout:
        trajectory = state["trajectory"]
        tokens = [step["tokens"] for step in trajectory if step["tokens"] is not None]
        keeps = self._settings.keeps_messages
        return EnvironmentRollout(
            position=position,
            example=example,
            reward=float(state["reward"] or 0.0),
            metrics=dict(state["metrics"] or {}),
            error=state["error"],
            is_truncated=bool(state["is_truncated"]),
            num_turns=len(trajectory),
            num_tokens=sum(len(of_step["completion_ids"]) for of_step in tokens),
            num_splits=int(state.get("num_splits") or 0),
            examples=() if state["error"] is not None else tuple(learned),
            prompt=sanitize_messages(state["prompt"]) if keeps else None,
            completion=sanitize_messages(state["completion"]) if keeps else None,
            actor=self._name,
            started_s=started_s,
            generate_s=state["timing"]["total_ms"] / 1000,
        )


def count_examples(environment: Environment, num_held_out: int | None) -> ExampleCounts:
    """Rows of its data: to train on, and of those to evaluate on the first `num_held_out` (None: all). ValueError where there is nothing to train on."""
    train = len(environment.get_dataset())
    if not train:
        raise ValueError(f"{environment.name} has a dataset without rows; give it some")
    held_out = len(environment.get_eval_dataset())
    return ExampleCounts(train, held_out if num_held_out is None else min(num_held_out, held_out))


def load_tokenizer(model_path: str) -> Any:
    """Of a checkpoint. Offline: a run never downloads."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(Path(model_path), local_files_only=True)


class _WatchedEngines:
    """The run's engines during one call. What one of them fails with ends the call: as a rollout's own error it would be data, and a
    dead engine would teach."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __len__(self) -> int:
        return len(self._engines)

    async def generate(self, engine: int, request: RolloutRequest) -> Rollout:
        try:
            return await self._engines.generate(engine, request)
        except RolloutError as error:
            if not self._failure.done():
                self._failure.set_exception(error)
            raise

    async def unless_one_fails(self, work: Any) -> Any:
        """What `work` comes to. RolloutError, once all its rollouts have cleaned up, where an engine has failed meanwhile."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._failure), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))
        if self._failure.done():
            if task.done() and not task.cancelled():
                task.exception()  # looked at, so that asyncio does not complain
            self._failure.result()
        return task.result()


class _Placed(Examples):
    """Rows of a dataset as inputs with positions of their own."""

    def __init__(self, dataset: Examples, places: Sequence[tuple[int, int]]) -> None:
        """`places`: row and position of each."""
        super().__init__(places, PromptFormat())
        self._dataset, self._places = dataset, places

    def __getitem__(self, index: Any) -> Any:
        row, position = self._places[index]
        return {**self._dataset[row], "position": position}


def _calls(groups: Sequence[ExampleGroup], dataset: Examples) -> list[list[ExampleGroup]]:
    """The groups in as many calls as it takes for no call to have an example twice: its rollouts would be compared as one group, or not, as the rounds are
    cut."""
    seen: dict[str, int] = {}
    calls: list[list[ExampleGroup]] = []
    for group in groups:
        row = dataset[group.example]
        key = repr((row["task"], row["example_id"]))
        number = seen.get(key, 0)
        seen[key] = number + 1
        if number == len(calls):
            calls.append([])
        calls[number].append(group)
    return calls
