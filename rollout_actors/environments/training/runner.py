"""A step's examples as rollouts of an environment: the plain class in an environment actor
(`rollout_actors.environments.training.actor`).

It takes the learner's `EnvironmentRequest`s, asks the run's own engines, and answers with what is
learned of each rollout. No Ray here.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from rollout_actors.environments.chat.images import without_images
from rollout_actors.environments.chat.messages import sanitize_messages
from rollout_actors.environments.chat.template import ChatTemplate
from rollout_actors.environments.chat.tool_calls import num_tool_calls, reader_of
from rollout_actors.environments.clients.conversation import (
    SENT_IMAGES,
    CallArguments,
    require_own_prompt,
)
from rollout_actors.environments.clients.engine import EngineClient, Engines
from rollout_actors.environments.clients.openai import merged
from rollout_actors.environments.datasets import Examples, PromptFormat
from rollout_actors.environments.environment import Environment
from rollout_actors.environments.group import EnvGroup
from rollout_actors.environments.loading import load_environment
from rollout_actors.environments.training.examples import merge_trajectories_for_training
from rollout_actors.environments.types import RolloutInput, State, TrajectoryStep
from shared.errors import RolloutError, UnreachableError
from shared.records import ImageRef
from shared.rollouts import Rollout, RolloutRequest
from shared.trajectory import (
    EnvironmentRequest,
    EnvironmentRollout,
    ExampleCounts,
    ExampleGroup,
    ModelCall,
    TrainingExample,
)

# Engines whose failure ends all the rollouts that ask them.


class WatchedEngines:
    """The run's engines during one call. What one of them fails with ends the call: as a rollout's
    own error it would be data, and a dead engine would teach. So does what the learner could not
    learn from."""

    def __init__(self, engines: Engines, name: str, max_images: int) -> None:
        """`name` is that of the environment actor, `max_images` what one prompt may have."""
        self._engines, self._name, self._max_images = engines, name, max_images
        self._num_unreached: Counter[tuple[int, int]] = Counter()
        """Engines that could not be reached, by position and seed of what they were asked."""
        self.sent_images: dict[str, ImageRef] = {}
        """By their hashes (`sha256`), all that were in a prompt."""
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __len__(self) -> int:
        return len(self._engines)

    async def generate(self, engine: int, request: RolloutRequest) -> Rollout:
        if (number := len(request.images)) > self._max_images:
            told = (
                f"example {request.sample_id} shows {number} image{'s' * (number > 1)} in a prompt,"
                f" and environment.max_images_per_prompt is {self._max_images}"
            )
            raise self._noted(
                RolloutError(
                    f"{told}; set it to {number} or more", actor=self._name, phase="environment"
                )
            )
        self.sent_images.update((image.sha256, image) for image in request.images)
        try:
            rollout = await self._engines.generate(engine, request)
            require_own_prompt(rollout, request)
        except UnreachableError as error:
            # The client asks the next one, as long as there is one.
            key = (request.position, request.seed)
            self._num_unreached[key] += 1
            if self._num_unreached[key] >= len(self._engines):
                self._noted(error)
            raise
        except Exception as error:  # an engine that fails unforeseen has failed too
            self._noted(error)
            raise
        return rollout

    def _noted(self, error: Exception) -> Exception:
        if not self._failure.done():
            self._failure.set_exception(error)
        return error

    async def unless_one_fails(self, work: Any) -> Any:
        """What `work` comes to. Raises what an engine has failed with meanwhile, mostly a
        RolloutError, once all its rollouts have cleaned up.
        """
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._failure), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
                # For as long as they clean up; the driver's limit of the round bounds it.
                await asyncio.wait((task,))
        if self._failure.done():
            if task.done() and not task.cancelled():
                task.exception()  # looked at, so that asyncio does not complain
            self._failure.result()
        return task.result()


SentRollouts = tuple[EnvironmentRollout, ...]
"""To one request, in the order of positions."""


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """The same for every environment actor of a run, but for `max_under_way`."""

    env_id: str
    model_path: str
    """Whose tokenizer and chat template the engines have."""
    max_model_len: int
    """Most tokens of a prompt and its answer together; a rollout that needs more ends as truncated.
    """
    max_under_way: int
    """Most requests that one engine has at a time, of this runner."""
    env_args: dict[str, Any] = field(default_factory=dict)
    working_dir: str | None = None
    """Of the command that was given, where relative paths of the environment begin on every node
    that has it. (An actor's own is Ray's.)
    """
    max_concurrent_scoring: int | None = None
    rollout_timeout_s: float | None = None
    scoring_timeout_s: float | None = None
    max_images: int = 0
    """Most images of one prompt, as the engines were started for."""
    tool_parser: str | None = None
    chat_template_args: dict[str, Any] = field(default_factory=dict)
    """What the chat template asks for besides messages and tools, such as `enable_thinking`."""
    keeps_messages: bool = True
    """Prompts and completions of training travel to the learner, which writes them down. Those of
    held-out reports do in any case.
    """
    examples: ExampleCounts | None = None
    """What was found before the start, in another process; None: nobody has looked."""
    num_held_out: int | None = None
    """As `count_examples` takes it."""


class EnvironmentRunner:
    """An environment of this process, and the run's engines behind it."""

    def __init__(
        self, name: str, settings: RunnerSettings, engines: Engines, tokenizer: Any
    ) -> None:
        """Loads the environment, and imports vllm where a parser reads tool calls. Raises what
        loading raises, and ValueError where its rows are others than expected, it has tools and
        nothing reads calls, or vLLM has no such parser."""
        self._name, self._settings, self._engines = name, settings, engines
        self._tokens = ChatTemplate(tokenizer, template_args=settings.chat_template_args)
        self._environment = load_environment(settings.env_id, **settings.env_args)
        if settings.examples is not None:
            require_same(
                count_examples(self._environment, settings.num_held_out),
                settings.examples,
                settings.env_id,
            )
        self._tool_calls = reader_of(settings.tool_parser, tokenizer)
        if self._tool_calls is None:
            require_no_tools(self._environment)

    async def run(self, requests: Sequence[EnvironmentRequest]) -> list[SentRollouts]:
        """One answer per request, in the same order. The requests are of one step. A rollout that
        fails is data (`EnvironmentRollout.error`).

        Raises RolloutError where an engine fails (its requests are not asked again, and no rollout
        is blamed for it), and for what no rollout of the environment could do: sampling arguments
        that contradict the run, more images than engines take.
        """
        if not requests:
            return []
        first = requests[0]
        self._require_agreement(first)
        engines = WatchedEngines(self._engines, self._name, self._settings.max_images)
        client = EngineClient(
            engines,
            self._tokens,
            first.decode,
            first.run_seed,
            first.step,
            max_model_len=self._settings.max_model_len,
            max_under_way=self._settings.max_under_way,
            tool_calls=self._tool_calls,
        )
        dataset = (
            self._environment.get_eval_dataset()
            if first.is_held_out
            else self._environment.get_dataset()
        )
        done: dict[int, EnvironmentRollout] = {}
        for groups in _calls([group for request in requests for group in request.groups], dataset):
            for rollout in await engines.unless_one_fails(
                self._generate(_Placed(dataset, groups), client, first, engines.sent_images)
            ):
                done[rollout.position] = rollout
        return [
            tuple(done[position] for group in request.groups for position in group.positions)
            for request in requests
        ]

    async def aclose(self) -> None:
        await self._environment.aclose()

    def _require_agreement(self, request: EnvironmentRequest) -> None:
        """That its calls may ask for what it asks of all of them: or every rollout would fail at
        its first.
        """
        environment, arguments = (
            self._environment,
            CallArguments(request.decode, self._settings.chat_template_args),
        )
        for one in _members(environment):
            try:
                arguments.max_tokens(
                    merged(one.sampling_args, environment.sampling_args, _taken_back(request))
                )
            except ValueError as error:
                raise RolloutError(
                    f"sampling_args of {one.name}: {error}", actor=self._name, phase="environment"
                ) from error

    async def _generate(
        self,
        inputs: _Placed,
        client: EngineClient,
        request: EnvironmentRequest,
        images: Mapping[str, ImageRef],
    ) -> list[EnvironmentRollout]:
        """`images`: those that are sent meanwhile, by their hashes."""
        started_s, settings = time.time(), self._settings
        results = await self._environment.generate(
            inputs,
            client,
            settings.model_path,
            _taken_back(request),
            max_concurrent_scoring=settings.max_concurrent_scoring,
            use_tqdm=False,
            rollout_timeout_s=settings.rollout_timeout_s,
            scoring_timeout_s=settings.scoring_timeout_s,
        )
        states: list[State] = results["state"]
        learned: list[list[TrainingExample]] = [[] for _ in states]
        # Nothing is learned of a report.
        for made in (
            ()
            if request.is_held_out
            else merge_trajectories_for_training([_as_sent(state) for state in states]).examples
        ):
            # All that it shows is in the prompt of its last call, which goes on from those before.
            # One that was not sent here is missed by the learner.
            sent = _sent_images(states[made.rollout]["trajectory"][made.steps[-1]])
            shown = tuple(images[sha256] for sha256 in sent if sha256 in images)
            # By its place in the step, which does not depend on how the step is cut into calls.
            learned[made.rollout].append(
                replace(made, rollout=inputs.places[made.rollout].position, images=shown)
            )
        keeps = settings.keeps_messages or request.is_held_out
        return [
            self._rollout(
                state,
                place,
                examples,
                client.calls(place.position),
                started_s,
                keeps_messages=keeps,
            )
            for state, place, examples in zip(states, inputs.places, learned, strict=True)
        ]

    def _rollout(
        self,
        state: State,
        place: _Place,
        learned: list[TrainingExample],
        calls: tuple[ModelCall, ...],
        started_s: float,
        *,
        keeps_messages: bool,
    ) -> EnvironmentRollout:
        trajectory = state["trajectory"]
        tokens = [step["tokens"] for step in trajectory if step["tokens"] is not None]
        return EnvironmentRollout(
            position=place.position,
            example=place.row,
            reward=float(state["reward"] or 0.0),
            metrics=dict(state["metrics"] or {}),
            error=state["error"],
            is_truncated=bool(state["is_truncated"]),
            num_turns=len(trajectory),
            num_tokens=sum(len(of_step["completion_ids"]) for of_step in tokens),
            num_length_limited=sum(_is_cut(step) for step in trajectory),
            num_splits=int(state.get("num_splits") or 0),
            examples=tuple(learned),
            prompt=_written(state["prompt"]) if keeps_messages else None,
            completion=_written(state["completion"]) if keeps_messages else None,
            actor=self._name,
            started_s=started_s,
            generate_s=state["timing"]["total_ms"] / 1000,
            reward_errors=dict(state.get("reward_errors", {})),
            given_up=tuple(state.get("given_up", ())),
            num_tool_calls=num_tool_calls(state),
            calls=calls,
        )


def count_examples(environment: Environment, num_held_out: int | None) -> ExampleCounts:
    """Rows of its data: to train on, and of those to evaluate on the first `num_held_out` (None:
    all). ValueError where there is nothing to train on.
    """
    rows = environment.get_dataset()
    if not len(rows):
        raise ValueError(f"{environment.name} has a dataset without rows; give it some")
    # Without rows of its own to evaluate on, an environment would give those that it is trained on.
    held_out: Sequence[RolloutInput] = (
        [] if environment.eval_dataset is None else environment.get_eval_dataset()
    )
    count = len(held_out) if num_held_out is None else min(num_held_out, len(held_out))
    return ExampleCounts(len(rows), count, _digest(rows, held_out))


def require_no_tools(environment: Environment) -> None:
    """ValueError where the environment has tools, though nothing reads the model's calls: each
    would stay text, and none would be answered.
    """
    for one in _members(environment):
        if one.oai_tools:
            told = (
                f"environment.tool_call_parser: {one.name} has tools, and neither this key nor the"
                " checkpoint's tokenizer says how the model's calls are read"
            )
            raise ValueError(f"{told}; set it to vLLM's name of the model's parser, such as hermes")


def has_tools(environment: Environment) -> bool:
    """Whether its rollouts are offered tools, those of rows that bring their own not counted."""
    return any(one.oai_tools for one in _members(environment))


def require_same(examples: ExampleCounts, expected: ExampleCounts, name: str) -> None:
    """ValueError where this process has other rows than the one that checked the data: row 7 would
    be another one in each.
    """
    if (examples, examples.digest) != (expected, expected.digest):
        found, wanted = (
            f"{one.train} rows to train on and {one.held_out} held out"
            for one in (examples, expected)
        )
        told = (
            f"found {found}, and before the start {wanted}"
            if found != wanted
            else "found other rows than before the start"
        )
        remedy = (
            "seed what is random, sort what comes from a set or a folder, and give every node the"
            " same files"
        )
        raise ValueError(
            f"environment {name}: {told}; make them the same in every process: {remedy}"
        )


def _digest(*datasets: Sequence[RolloutInput]) -> str:
    """Of up to 64 rows of each, from all over it; of what JSON can write of them."""
    digest = hashlib.sha256()
    for rows in datasets:
        for place in (
            dict.fromkeys(len(rows) * number // 64 for number in range(64)) if len(rows) else ()
        ):
            row = rows[place]
            told = [row.get(key) for key in ("prompt", "answer", "task", "example_id")]
            digest.update(json.dumps(told, default=lambda value: type(value).__name__).encode())
    return digest.hexdigest()


def load_tokenizer(model_path: str) -> Any:
    """Of a checkpoint. Offline: a run never downloads."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(Path(model_path), local_files_only=True)


class _Place(NamedTuple):
    """Of a rollout."""

    row: int
    position: int


class _Placed(Examples):
    """Rows of a dataset as inputs with positions of their own."""

    def __init__(self, dataset: Examples, groups: Sequence[ExampleGroup]) -> None:
        self.places = [
            _Place(group.example, position) for group in groups for position in group.positions
        ]
        super().__init__(self.places, PromptFormat())
        self._dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        row, position = self.places[index]
        return {**self._dataset[row], "position": position}

    def names_group(self, index: int) -> bool:
        return self._dataset.names_group(self.places[index].row)


def _members(environment: Environment) -> Sequence[Environment]:
    """Those of a group, or the one that it is."""
    return list(environment.envs.values()) if isinstance(environment, EnvGroup) else [environment]


def _taken_back(request: EnvironmentRequest) -> dict[str, Any]:
    """Of the environment's sampling arguments: a report is greedy, whatever it asks of training."""
    return {"temperature": None} if request.is_held_out else {}


def _written(messages: Any) -> Any:
    """As they travel and are written down, whatever an environment has put into them; None of a
    rollout that ended before it had any.
    """
    return (
        None
        if messages is None
        else json.loads(json.dumps(sanitize_messages(without_images(messages)), default=str))
    )


def _as_sent(state: State) -> State:
    """With the images that its calls were sent in place of their prompts: an environment may have
    changed those since, or named the images in them.
    """
    made = state.copy()
    made["trajectory"] = [
        {
            **step,
            "prompt": [
                {"role": "user", "content": [{"image": sha256} for sha256 in _sent_images(step)]}
            ],
        }
        for step in state["trajectory"]
    ]
    return made


def _sent_images(step: TrajectoryStep) -> Sequence[str]:
    """Hashes, as the client noted them with the answer; none where another one gave it."""
    sent: Sequence[str] = getattr(step["response"], SENT_IMAGES, ())
    return sent


def _calls(groups: Sequence[ExampleGroup], dataset: Examples) -> list[list[ExampleGroup]]:
    """The groups in as many calls as it takes for no call to have an example twice: its rollouts
    would be compared as one group, or not, as the rounds are cut."""
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


def _is_cut(step: TrajectoryStep) -> bool:
    """Its answer ended at the length limit."""
    return any(choice.finish_reason == "length" for choice in step["response"].choices)
