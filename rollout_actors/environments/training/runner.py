"""Plays an environment's rollouts for one training step, without Ray.

`EnvironmentRunner` takes the learner's `EnvironmentRequest`s, calls the run's own engines, and
returns the training data of each rollout. `training.actor` runs it in a process.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_actors.backends.http import all_answers
from rollout_actors.environments.chat.images import without_images
from rollout_actors.environments.chat.messages import sanitize_messages
from rollout_actors.environments.chat.responses import SENT_IMAGES, is_cut
from rollout_actors.environments.chat.template import ChatTemplate
from rollout_actors.environments.chat.tools import num_tool_calls, reader_of
from rollout_actors.environments.clients.conversation import ConversationSettings
from rollout_actors.environments.clients.engine import EngineClient, Engines
from rollout_actors.environments.clients.openai import merged
from rollout_actors.environments.datasets import Examples, PromptFormat
from rollout_actors.environments.environment import Environment
from rollout_actors.environments.generate import SCORED_TOGETHER, ScoredTogether
from rollout_actors.environments.group import EnvGroup
from rollout_actors.environments.loading import load_environment
from rollout_actors.environments.training.examples import merge_trajectories_for_training
from rollout_actors.environments.training.teacher import Teacher, TeacherSettings
from rollout_actors.environments.types import Arguments, Messages, RolloutInput, State
from shared.errors import RolloutError
from shared.trajectory import (
    EnvironmentRequest,
    EnvironmentRollout,
    ExampleCounts,
    ExampleGroup,
    TrainingExample,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SentRollouts = tuple[EnvironmentRollout, ...]
"""The rollouts of one request, as they are sent to the learner, in the order of positions."""


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """How a training run loads its environment and plays its rollouts."""

    env_id: str
    model_path: str
    """Checkpoint with the tokenizer and chat template of the engines."""
    max_model_len: int
    """Largest number of tokens of prompt and answer; a rollout that needs more is truncated."""
    max_under_way: int
    """Limit of concurrent requests of one process's environment to one engine."""
    env_args: Arguments = field(default_factory=dict)
    working_dir: str | None = None
    """Folder where the run was started; it becomes the working directory of the environment's
    process on every node that has it. Otherwise that would be Ray's own folder.
    """
    max_concurrent_scoring: int | None = None
    rollout_timeout_s: float | None = None
    scoring_timeout_s: float | None = None
    max_images: int = 0
    """The engines' limit of images in one prompt."""
    tool_parser: str | None = None
    chat_template_args: Arguments = field(default_factory=dict)
    """Further arguments of the chat template, such as `enable_thinking`."""
    system_prompt: str | None = None
    """System message for dataset rows without one; None: the environment's own."""
    keeps_messages: bool = True
    """Whether prompts and completions of training are sent to the learner, which logs them. In
    held-out reports they always are.
    """
    examples: ExampleCounts | None = None
    """The driver's counts of rows, which this process must find too; None: no comparison."""
    num_held_out: int | None = None
    """Number of held-out rows in an evaluation; None: all."""
    teacher: TeacherSettings | None = None
    """The teacher model whose log-probabilities the examples get; None: no teacher."""


class EnvironmentRunner:
    """Plays an environment's rollouts with the run's engines, and makes training examples."""

    def __init__(
        self,
        name: str,
        settings: RunnerSettings,
        engines: Engines,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        """Load the environment, and vLLM's parser if the model's tool calls must be parsed.

        Raises:
            ValueError: the environment has other rows than expected, it has tools and there is no
                parser of tool calls, or vLLM has no such parser.
        """
        self._name = name
        self._settings = settings
        self._engines = engines
        self._tokenizer = tokenizer
        self._teacher: Teacher | None = None
        if settings.teacher is not None:
            self._teacher = Teacher(settings.teacher, max_under_way=settings.max_under_way)
        self._template = ChatTemplate(tokenizer, template_args=settings.chat_template_args)
        self._environment = load_environment(settings.env_id, **settings.env_args)
        if settings.system_prompt is not None:
            self._environment.add_system_prompt(settings.system_prompt)
        if settings.examples is not None:
            found = count_examples(self._environment, settings.num_held_out)
            require_same(found, settings.examples, settings.env_id)
        self._tool_calls = reader_of(settings.tool_parser, tokenizer)
        if self._tool_calls is None:
            require_no_tools(self._environment)

    async def require_teacher(self) -> None:
        """Wait until the teacher model's server is ready and suitable, if there is a teacher.

        Raises as `Teacher.require_suitable` does.
        """
        if self._teacher is not None:
            await self._teacher.require_suitable(self._tokenizer, self._settings.max_model_len)

    async def run(self, requests: Sequence[EnvironmentRequest]) -> list[SentRollouts]:
        """Play and score the rollouts of one step. Return the rollouts of each request, in order.

        A rollout that fails is returned too (`EnvironmentRollout.error`).

        Raises:
            RolloutError: an engine failed; its requests are not repeated, and no rollout counts as
                failed because of it. Or every rollout would fail, because sampling arguments
                contradict the run or prompts have too many images. Or the teacher does not score
                the rollouts.
        """
        if not requests:
            return []
        first = requests[0]
        conversation = ConversationSettings(
            self._template, first.decode, self._settings.max_model_len, self._tool_calls
        )
        self._check_sampling(first, conversation)
        client = EngineClient(
            self._engines,
            conversation,
            first.run_seed,
            first.step,
            max_under_way=self._settings.max_under_way,
            max_images=self._settings.max_images,
            name=self._name,
        )
        environment = self._environment
        dataset = environment.get_dataset()
        if first.is_held_out:
            num_held_out = self._settings.num_held_out
            dataset = environment.get_eval_dataset(-1 if num_held_out is None else num_held_out)
        groups = [group for request in requests for group in request.groups]
        calls = [
            _PositionedRows(dataset, apart) for apart in _with_each_example_once(groups, dataset)
        ]
        done: dict[int, EnvironmentRollout] = {}
        if scores_at_once(environment):
            together = ScoredTogether(len(calls))
            rollouts = all_answers(
                [self._generate(rows, client, first, together) for rows in calls]
            )
            for of_call in await client.unless_an_engine_fails(rollouts):
                done |= {rollout.position: rollout for rollout in of_call}
        else:
            for rows in calls:
                of_call = await client.unless_an_engine_fails(self._generate(rows, client, first))
                done |= {rollout.position: rollout for rollout in of_call}
        return [
            tuple(done[position] for group in request.groups for position in group.positions)
            for request in requests
        ]

    async def aclose(self) -> None:
        await self._environment.aclose()

    def _check_sampling(
        self, request: EnvironmentRequest, conversation: ConversationSettings
    ) -> None:
        # If they contradict the run, every rollout would fail at its first call.
        for member in _members(self._environment):
            arguments = merged(
                member.sampling_args, self._environment.sampling_args, _force_greedy(request)
            )
            try:
                conversation.max_tokens(arguments)
            except ValueError as error:
                message = f"sampling_args of {member.name}: {error}"
                raise RolloutError(message, actor=self._name, phase="environment") from error

    async def _generate(
        self,
        rows: _PositionedRows,
        client: EngineClient,
        request: EnvironmentRequest,
        together: ScoredTogether | None = None,
    ) -> list[EnvironmentRollout]:
        started_s = time.time()
        settings = self._settings
        SCORED_TOGETHER.set(together)
        results = await self._environment.generate(
            rows,
            client,
            settings.model_path,
            _force_greedy(request),
            max_concurrent_scoring=settings.max_concurrent_scoring,
            use_tqdm=False,
            rollout_timeout_s=settings.rollout_timeout_s,
            scoring_timeout_s=settings.scoring_timeout_s,
        )
        states: list[State] = results["state"]
        learned: list[list[TrainingExample]] = [[] for _ in states]
        if not request.is_held_out:  # a report is not trained on
            examples = merge_trajectories_for_training(states).examples
            if self._teacher is not None:
                examples = await self._teacher.score(examples)
            for example in examples:
                index = example.rollout
                # The prompt of its last call continues the earlier calls, so it shows all images.
                # The learner notices an image that is missing here.
                last = states[index]["trajectory"][example.steps[-1]]
                hashes = getattr(last["response"], SENT_IMAGES, ())
                sent = client.sent_images
                images = tuple(sent[sha256] for sha256 in hashes if sha256 in sent)
                # Named by its position in the step, which does not depend on how the step is
                # divided into calls.
                position = rows.positions[index]
                learned[index].append(replace(example, rollout=position, images=images))
        keeps_messages = settings.keeps_messages or request.is_held_out
        rollouts = []
        for index, state in enumerate(states):
            trajectory = state["trajectory"]
            tokens = [step["tokens"] for step in trajectory if step["tokens"] is not None]
            rollouts.append(
                EnvironmentRollout(
                    position=rows.positions[index],
                    example=rows.examples[index],
                    reward=float(state["reward"] or 0.0),
                    metrics=dict(state["metrics"] or {}),
                    error=state["error"],
                    is_truncated=bool(state["is_truncated"]),
                    num_turns=len(trajectory),
                    num_tokens=sum(len(one["completion_ids"]) for one in tokens),
                    num_length_limited=sum(is_cut(step["response"]) for step in trajectory),
                    task=state["task"] if isinstance(self._environment, EnvGroup) else None,
                    is_overlong=bool(state.get("prompt_too_long")),
                    num_splits=int(state.get("num_splits") or 0),
                    examples=tuple(learned[index]),
                    prompt=_loggable(state["prompt"]) if keeps_messages else None,
                    completion=_loggable(state["completion"]) if keeps_messages else None,
                    actor=self._name,
                    started_s=started_s,
                    generate_s=state["timing"]["total_ms"] / 1000,
                    reward_errors=dict(state.get("reward_errors", {})),
                    given_up=tuple(state.get("given_up", ())),
                    num_tool_calls=num_tool_calls(state),
                    calls=client.calls(rows.positions[index]),
                )
            )
        return rollouts


def count_examples(environment: Environment, num_held_out: int | None) -> ExampleCounts:
    """Count an environment's training rows, and at most `num_held_out` (None: all) held-out rows.

    Raises:
        ValueError: there are no training rows.
    """
    rows = environment.get_dataset()
    if not len(rows):
        raise ValueError(f"{environment.name} has a dataset without rows; give it some")
    # Without held-out rows, an environment would return its training rows.
    held_out: Sequence[RolloutInput] = (
        [] if environment.eval_dataset is None else environment.get_eval_dataset()
    )
    count = len(held_out) if num_held_out is None else min(num_held_out, len(held_out))
    return ExampleCounts(
        len(rows),
        count,
        _digest(rows, held_out),
        scores_at_once=scores_at_once(environment),
        mixture=environment.mixture,
    )


def scores_at_once(environment: Environment) -> bool:
    """Return whether a rubric of the environment scores all rollouts of a step in one call."""
    return any(member.rubric.scores_all_at_once for member in _members(environment))


def require_no_tools(environment: Environment) -> None:
    """Raise ValueError if the environment has tools, because there is no parser of tool calls.

    Without a parser the model's tool calls would stay text, and would not be answered.
    """
    for member in _members(environment):
        if member.oai_tools:
            raise ValueError(
                f"environment.tool_call_parser: {member.name} has tools, but neither this key nor"
                " the checkpoint's tokenizer names a parser for the model's calls; set it to vLLM's"
                " name of the model's parser, such as hermes"
            )


def has_tools(environment: Environment) -> bool:
    """Return whether an environment offers tools to the model in all rows.

    Tools of single rows (`info["oai_tools"]`) do not count.
    """
    return any(member.oai_tools for member in _members(environment))


def asks_by_chat(environment: Environment) -> bool:
    """Return whether the prompts of an environment are messages, which need a chat template.

    For a group, return whether one of its environments has such prompts.
    """
    return any(member.message_type == "chat" for member in _members(environment))


def require_same(examples: ExampleCounts, expected: ExampleCounts, name: str) -> None:
    """Raise ValueError if the environment `name` has other rows here than in the driver.

    `examples` are counts and a digest of the rows here, and `expected` are the driver's.
    """
    if (examples, examples.digest) == (expected, expected.digest):
        return
    found, wanted = (
        f"{one.train} rows to train on and {one.held_out} held out" for one in (examples, expected)
    )
    difference = "other rows than the driver"
    if found != wanted:
        difference = f"{found}, and the driver {wanted}"
    raise ValueError(
        f"environment {name}: this process found {difference}; make the rows the same in every"
        " process: seed random draws, sort what comes from a set or a folder, make temporary paths"
        " in setup_state instead of info, and give every node the same files"
    )


def _digest(*datasets: Sequence[RolloutInput]) -> str:
    # Up to 64 rows of each dataset, spread over it, as far as JSON can write them. Without `info`
    # the digest is as in earlier versions, whose runs can be resumed.
    digest = hashlib.sha256()
    for rows in datasets:
        indices = [len(rows) * number // 64 for number in range(64)] if len(rows) else []
        for index in dict.fromkeys(indices):
            row = rows[index]
            fields = [row.get(key) for key in ("prompt", "answer", "task", "example_id")]
            fields += [row["info"]] if "info" in row else []
            text = json.dumps(fields, default=lambda value: type(value).__name__, skipkeys=True)
            digest.update(text.encode())
    return digest.hexdigest()


def load_tokenizer(model_path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint folder, without a download."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(Path(model_path), local_files_only=True)


class _PositionedRows(Examples):
    """Rows of a dataset as inputs, each with its position in the step."""

    def __init__(self, dataset: Examples, groups: Sequence[ExampleGroup]) -> None:
        self.examples = [group.example for group in groups for _ in group.positions]
        self.positions = [position for group in groups for position in group.positions]
        super().__init__(self.positions, PromptFormat())
        self._dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        return {**self._dataset[self.examples[index]], "position": self.positions[index]}

    def names_group(self, index: int) -> bool:
        return self._dataset.names_group(self.examples[index])


def _members(environment: Environment) -> Sequence[Environment]:
    return environment.envs if isinstance(environment, EnvGroup) else [environment]


def _force_greedy(request: EnvironmentRequest) -> Arguments:
    # None removes the environment's temperature, because a report is greedy.
    return {"temperature": None} if request.is_held_out else {}


def _loggable(messages: Messages | None) -> Any:
    if messages is None:  # the rollout ended before it had any
        return None
    # An environment may have put any value into them, NaN too.
    text = json.dumps(sanitize_messages(without_images(messages)), default=str)
    return json.loads(text, parse_constant=lambda _: None)


def _with_each_example_once(
    groups: Sequence[ExampleGroup], dataset: Examples
) -> list[list[ExampleGroup]]:
    # If an example occurred twice in one call, its rollouts would be compared as one group, and
    # results would depend on how the rounds are cut.
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
