"""The base class of environments, which play and score rollouts of one or several model calls."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import update_wrapper
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from rollout_actors.environments.answers.parsers import Parser
from rollout_actors.environments.chat.messages import (
    cleanup_messages,
    cleanup_tools,
    concat_messages,
    copied,
    require_roles,
)
from rollout_actors.environments.chat.tools import UncalledTools
from rollout_actors.environments.clients.openai import ask, merged, require_asynchronous
from rollout_actors.environments.datasets import (
    Examples,
    GenerateOutputs,
    Inputs,
    PromptFormat,
    Rows,
    build_dataset_from_outputs,
    check_state_columns,
    has_field,
    make_folder,
    push_dataset,
    to_rows,
)
from rollout_actors.environments.generate import Concurrency, GenerateCall, generate
from rollout_actors.environments.lifecycle import (
    Event,
    Handler,
    awaited,
    call_all,
    close_at_exit,
    forget,
    handlers,
)
from rollout_actors.environments.rubric import Rubric
from rollout_actors.environments.scope import bind_client, current_scope, in_scope, new_state
from rollout_actors.environments.types import (
    Client,
    Fields,
    JsonObject,
    Messages,
    ModelResponse,
    RolloutInput,
    SamplingArgs,
    State,
)

if TYPE_CHECKING:
    from datasets import Dataset

_LOGGER = logging.getLogger(__name__)

_NO_CHAT = "not allowed with message_type='completion', which sends only the row's text"


def _require_no_loop(method: str) -> None:
    # Not `get_running_loop`, which raises without a loop.
    if asyncio._get_running_loop() is not None:
        raise RuntimeError(
            f"{method}_sync: an event loop is already running, as in a notebook; write"
            f" `await environment.{method}(...)`"
        )


class Environment(ABC):
    """A task for a model: a dataset, how a rollout of one row is played, and how it is scored.

    Subclasses implement `rollout`. Many rollouts run at once, so data of one rollout belongs in its
    state, never in attributes of the environment.
    """

    logger = _LOGGER
    client: Client | None = None
    model: str | None = None

    cleanup_timeout_s = 300.0
    """Time limit of all `@cleanup` methods of a rollout together, and of each `@teardown`."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        # An override that never calls `super().rollout` is wrapped too: its seeds and its cleanup
        # depend on the scope.
        if "rollout" in cls.__dict__:
            cls.rollout = in_scope(cls.__dict__["rollout"])  # type: ignore[method-assign]

    def __init__(
        self,
        dataset: Rows | None = None,
        eval_dataset: Rows | None = None,
        system_prompt: str | None = None,
        few_shot: list[Fields] | None = None,
        parser: Parser | None = None,
        rubric: Rubric | None = None,
        sampling_args: SamplingArgs | None = None,
        message_type: str = "chat",
        oai_tools: list[JsonObject] | None = None,
        max_seq_len: int | None = None,
        env_id: str | None = None,
        env_args: Fields | None = None,
        *,
        client: Client | None = None,
        model: str | None = None,
    ) -> None:
        """
        Args:
            dataset: rows with `prompt` (messages or text) or `question`, and optionally `answer`,
                `info`, `task`, `id` and `example_id`: a Hugging Face `Dataset`, or a sequence of
                mappings.
            eval_dataset: rows for `evaluate`, in the same form; None: `dataset` is used.
            sampling_args: for every model call. Arguments of a `generate` call take precedence.
            message_type: `chat`, or `completion` if prompts are plain text.
            max_seq_len: limit of a call's prompt and answer together, in tokens. Further tokens
                are cut off (`is_truncated`), and the rollout ends.
            client: kept, with `model`, as attribute for the environment's own requests. Rollouts
                use the client that `generate` receives.

        Raises:
            ValueError: an argument has a wrong value, or is not allowed with `completion`.
            TypeError: the rubric is a class of another library, or a dataset has another form.
        """
        if message_type not in ("chat", "completion"):
            raise ValueError(f"message_type: must be chat or completion, got {message_type!r}")
        chat_only = {"system_prompt": system_prompt, "few_shot": few_shot, "oai_tools": oai_tools}
        for name, value in chat_only.items():
            if value and message_type == "completion":
                raise ValueError(
                    f"{name}: {_NO_CHAT}; write its text into the prompts, or leave message_type"
                    " out"
                )
        require_roles(few_shot or (), "few_shot")
        if rubric is not None and not isinstance(rubric, Rubric):
            raise TypeError(
                f"rubric: is {full_name(rubric)}; give a Rubric of rollout_actors.environments"
            )
        for name, given in (("client", client), ("model", model)):
            if given is not None:  # a subclass may have set its own already
                setattr(self, name, given)
        self.env_id = env_id
        self.env_args = dict(env_args or {})
        self.message_type = message_type
        self.max_seq_len = max_seq_len
        self.sampling_args = merged(sampling_args)
        # A copy, because several environments may be made from the same list.
        self.oai_tools = deepcopy(list(oai_tools or []))
        self.parser = parser or (rubric and rubric.parser) or Parser()
        self.rubric = rubric or Rubric(parser=self.parser)
        self.rubric.set_default_parser(self.parser)
        self.prompt_format = PromptFormat(
            message_type, system_prompt, tuple(few_shot or ()), env_id or "default"
        )
        self.dataset = None if dataset is None else Examples(dataset, self.prompt_format)
        self.eval_dataset = (
            None if eval_dataset is None else Examples(eval_dataset, self.prompt_format)
        )
        self.__post_init__()

    def __post_init__(self) -> None:
        """Collect the methods that are marked with `@stop`, `@cleanup` and `@teardown`."""
        self._stop_conditions: tuple[Handler, ...] = handlers(self, Event.STOP)
        self._cleanups: tuple[Handler, ...] = handlers(self, Event.CLEANUP)
        self._teardowns: tuple[Handler, ...] = handlers(self, Event.TEARDOWN)
        overrides_cleanup = type(self)._cleanup is not Environment._cleanup
        self._has_cleanup = bool(self._cleanups) or overrides_cleanup
        self._uncalled_tools = UncalledTools()
        self._is_closed = False
        if self._teardowns:
            close_at_exit(self)

    @property
    def name(self) -> str:
        return self.env_id or type(self).__name__

    @property
    def mixture(self) -> tuple[tuple[int, int], ...]:
        """How often training draws rows from each part of the dataset: (number of rows, weight).

        Empty if rows are drawn without weights. Only a group of environments has several parts.
        """
        return ()

    def member(self, task: str | None) -> Environment:  # noqa: ARG002
        """Return the environment that plays rollouts of this task: itself, or a group's member."""
        return self

    # Data

    def add_system_prompt(self, text: str) -> None:
        """Prepend a system message to the prompt of every row that has no system message.

        Raises ValueError if the environment or its first row has a system message, or its prompts
        are plain text.
        """
        found = ""
        datasets = [data for data in (self.dataset, self.eval_dataset) if data is not None]
        if self.message_type == "completion":
            found = "has plain-text prompts"
        elif self.prompt_format.system_prompt is not None:
            found = f"already has the system prompt {self.prompt_format.system_prompt!r}"
        # Only the first row is checked: rows are made on access, and making all could take long.
        elif any(_begins_with_system(data[0]) for data in datasets if len(data)):
            found = "already has a system message in its first row"
        if found:
            raise ValueError(
                f"{self.name} {found}; leave environment.system_prompt out, or change the"
                " environment's own prompt (by environment.args if load_environment takes it)"
            )
        self.prompt_format = replace(self.prompt_format, system_prompt=text)
        if self.dataset is not None:
            self.dataset = self.dataset.formed(self.prompt_format)
        if self.eval_dataset is not None:
            self.eval_dataset = self.eval_dataset.formed(self.prompt_format)

    def get_dataset(self, n: int = -1, seed: int | None = None) -> Examples:
        """Return `n` rows of the training dataset (-1: all), shuffled if there is a seed.

        Raises ValueError if the environment has no dataset.
        """
        if self.dataset is None:
            raise ValueError(f"{self.name} has no dataset; give it one, or pass rows to generate")
        return _chosen(self.dataset, n, seed)

    def get_eval_dataset(self, n: int = -1, seed: int | None = None) -> Examples:
        """Return `n` rows of the held-out dataset (-1: all), shuffled if there is a seed.

        Without a held-out dataset, return training rows.
        """
        if self.eval_dataset is None:
            return self.get_dataset(n, seed)
        return _chosen(self.eval_dataset, n, seed)

    # One rollout

    async def init_state(self, input: RolloutInput, *args: object, **kwargs: object) -> State:  # noqa: ARG002
        """Return the initial state of a rollout of this dataset row. The row is not changed.

        Raises ValueError if the row's messages, `info` or tools are invalid.
        """
        row: JsonObject = copied(dict(input))
        prompt = row.get("prompt")
        if self.message_type == "chat" and isinstance(prompt, str):
            row["prompt"] = self.prompt_format.prompt(row)
        elif self.message_type == "chat" and prompt is not None:
            require_roles(prompt, "prompt")
            row["prompt"] = cleanup_messages(prompt)  # tables fill missing fields with nulls
        if row.get("info") == "":
            del row["info"]
        elif row.get("info") is not None:
            row["info"] = _read_info(row["info"])
        row.setdefault("task", self.env_id or "default")
        if row.get("example_id") is None:
            row["example_id"] = row.get("id", 0)
        tools = (row.get("info") or {}).get("oai_tools")
        tools = copied(self.oai_tools) if tools is None else cleanup_tools(deepcopy(tools))
        if tools and self.message_type == "completion":
            raise ValueError(
                f"oai_tools: {_NO_CHAT}; remove them from the row's info, or leave message_type out"
            )
        state = new_state(row)
        state["oai_tools"] = tools
        scope = current_scope()
        if scope is not None and scope.environment is self and scope.state is None:
            scope.state = state
        return state

    async def setup_state(self, state: State) -> State:
        """Add an environment's own fields to a rollout's state, before the first model call.

        Override it; the default returns the state unchanged.
        """
        return state

    @abstractmethod
    async def rollout(
        self,
        input: RolloutInput,
        client: Client,
        model: str,
        sampling_args: SamplingArgs | None = None,
    ) -> State:
        """Play one rollout of a dataset row and return its final state.

        Errors are raised; `generate` records them.
        """

    async def get_model_response(
        self,
        client: Client,
        model: str,
        prompt: Messages,
        oai_tools: list[JsonObject] | None = None,
        sampling_args: SamplingArgs | None = None,
        message_type: str | None = None,
    ) -> ModelResponse:
        """Call the model once and return its `ChatCompletion` or `Completion`.

        The response's id is `overlong-prompt` if the prompt does not fit. `oai_tools` are the
        tools' schemas. `message_type` is `chat` or `completion`; None: the environment's.
        """
        return await ask(
            # A user's own `rollout` passes the client that it received, without a conversation.
            bind_client(client),
            model,
            prompt,
            message_type=message_type or self.message_type,
            tools=oai_tools,
            sampling_args=merged(self.sampling_args, sampling_args),
        )

    async def is_completed(self, state: State, **kwargs: object) -> bool:  # noqa: ARG002
        """Return whether one of the `@stop` methods ends the rollout, and record which.

        An override should also call this method of the base class.
        """
        # The first condition that holds ends the rollout; the others are not evaluated.
        for condition in self._stop_conditions:
            if await awaited(condition(state)):
                state["stop_condition"] = condition.__name__
                await self._complete(state)
                return True
        return False

    async def _complete(self, state: State) -> None:
        state["is_completed"] = True
        timing = state["timing"]
        timing["generation_ms"] = 1000 * (time.time() - timing["start_time"])
        timing["total_ms"] = timing["generation_ms"] + timing["scoring_ms"]
        await self._render_completion(state)

    async def _render_completion(self, state: State) -> None:
        """Write the messages after the prompt to `state["completion"]`.

        Override it if the last call's prompt does not begin with the rollout's prompt.
        """
        if not state["trajectory"]:
            state["completion"] = "" if self.message_type == "completion" else []
            return
        last = state["trajectory"][-1]
        parts = [last["prompt"], last["completion"]]
        if state.get("final_env_response") is not None:
            parts.append(state["final_env_response"])
        state["completion"] = concat_messages(parts)[len(state["prompt"]) :]

    async def _cleanup(self, state: State) -> None:
        """Call every `@cleanup` method, even if others raise. Raise the first error at the end."""
        await call_all(self._cleanups, state)

    async def aclose(self) -> None:
        """Close the environment: call every `@teardown` method, once.

        The end of an `async with environment` block does this too. An error, or a cancellation, is
        raised after the other methods were called.
        """
        if self._is_closed:
            return
        self._is_closed = True
        forget(self)
        # In the caller's task, because a context must be exited in the task that entered it.
        await call_all(self._teardowns, limit_s=self.cleanup_timeout_s, what="the teardown")

    async def __aenter__(self) -> Environment:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    # Many rollouts

    async def generate(
        self,
        inputs: Inputs,
        client: Client,
        model: str,
        sampling_args: SamplingArgs | None = None,
        score_rollouts: bool = True,
        max_concurrent: int = -1,
        max_concurrent_generation: int | None = None,
        max_concurrent_scoring: int | None = None,
        interleave_scoring: bool = True,
        state_columns: Sequence[str] | None = None,
        save_path: Path | None = None,
        use_tqdm: bool = True,
        on_rollout: Callable[[int, State], None] | None = None,
        rollout_timeout_s: float | None = None,
        scoring_timeout_s: float | None = None,
    ) -> GenerateOutputs:
        """Play and score one rollout for each dataset row in `inputs`: a dataset, rows, or columns.

        Results are in the order of the inputs. A rollout that fails raises nothing:
        `state["error"]` has the reason, and its reward is 0.

        Args:
            max_concurrent: limit of rollouts generated at a time, and of rollouts scored at a time;
                -1: no limit.
            max_concurrent_generation: limit for generation only; None: `max_concurrent`.
            max_concurrent_scoring: limit for scoring only; None: `max_concurrent`.
            interleave_scoring: score a rollout as soon as it is finished (or all rollouts of a row,
                if the rubric compares them). False: score after all are generated. A rubric that
                overrides `score_rollouts` always scores after all are generated.
            state_columns: fields of the state to save too, such as `timing.total_ms`. A field that
                no rollout has is left out, with a warning.
            save_path: folder for the results, created before the first rollout.
            use_tqdm: show a progress bar.
            on_rollout: called with the index and the state of each rollout when it is done.
            rollout_timeout_s: seconds after which a rollout is cancelled, cleaned up and failed;
                None: no limit. Waiting for the model counts; scoring and waiting for a thread do
                not. Results then depend on the machine's load.
            scoring_timeout_s: limit for each call of a reward function, which has no value after it
                (`state["reward_errors"]`); None: `rollout_timeout_s`.

        Raises:
            StorageError: `save_path` cannot be written.
            TypeError: the client is not asynchronous, or `inputs` have the wrong form.
            ValueError: an input has no prompt, or ids or positions contradict each other.
        """
        # Checked before the first rollout: with a synchronous client every rollout would fail.
        require_asynchronous(client)
        if save_path is not None:
            make_folder(save_path)  # fails now rather than after all rollouts
        columns = check_state_columns(state_columns)
        if not isinstance(inputs, Examples):
            inputs = Examples(to_rows(inputs), self.prompt_format)
        call = GenerateCall(
            client,
            model,
            merged(self.sampling_args, sampling_args),
            Concurrency.from_limits(
                max_concurrent, max_concurrent_generation, max_concurrent_scoring
            ),
            scores=score_rollouts,
            interleaves=interleave_scoring,
            shows_progress=use_tqdm,
            on_rollout=on_rollout,
            rollout_timeout_s=rollout_timeout_s,
            scoring_timeout_s=scoring_timeout_s,
        )
        results = await generate(self, inputs, call)
        results.metadata.state_columns = columns
        if save_path is not None:
            self._save(results, save_path)
        return results

    def _save(self, results: GenerateOutputs, folder: Path) -> None:
        wanted = results.metadata.state_columns
        columns = [path for path in wanted if has_field(path, results.state)]
        if absent := [path for path in wanted if path not in columns]:
            _LOGGER.warning(
                "state_columns: no rollout's state has %s; the dataset in %s is saved without these"
                " columns",
                ", ".join(absent),
                folder,
            )
        results.save(folder, self.make_dataset(results, state_columns=columns))

    async def a_generate(self, *args: Any, **kwargs: Any) -> GenerateOutputs:
        return await self.generate(*args, **kwargs)

    async def evaluate(
        self,
        client: Client,
        model: str,
        sampling_args: SamplingArgs | None = None,
        num_examples: int = -1,
        rollouts_per_example: int = 1,
        **generate_kwargs: Any,
    ) -> GenerateOutputs:
        """Play and score `rollouts_per_example` rollouts of each held-out row.

        Result i belongs to row i // rollouts_per_example. Further arguments are as in `generate`.
        """
        if rollouts_per_example < 1:
            raise ValueError(f"rollouts_per_example: must be 1 or more, got {rollouts_per_example}")
        # Saved here and not by `generate`, because only now the metadata is complete.
        save_path = generate_kwargs.pop("save_path", None)
        if save_path is not None:
            make_folder(save_path)
        examples = self.get_eval_dataset(num_examples)
        repeated = examples.select(
            [i for i in range(len(examples)) for _ in range(rollouts_per_example)]
        )
        results = await self.generate(repeated, client, model, sampling_args, **generate_kwargs)
        results.metadata.num_examples = len(examples)
        results.metadata.rollouts_per_example = rollouts_per_example
        if save_path is not None:
            self._save(results, save_path)
        return results

    # Raise RuntimeError if an event loop is already running.
    def generate_sync(self, *args: Any, **kwargs: Any) -> GenerateOutputs:
        _require_no_loop("generate")
        return asyncio.run(self.generate(*args, **kwargs))

    def evaluate_sync(self, *args: Any, **kwargs: Any) -> GenerateOutputs:
        _require_no_loop("evaluate")
        return asyncio.run(self.evaluate(*args, **kwargs))

    # They get the signatures and docstrings of the methods that they call.
    update_wrapper(a_generate, generate)
    update_wrapper(generate_sync, generate)
    update_wrapper(evaluate_sync, evaluate)

    def make_dataset(
        self,
        results: GenerateOutputs,
        *,
        include_ids: bool = True,
        state_columns: Sequence[str] | None = None,
        push_to_hf_hub: bool = False,
        hub_name: str | None = None,
    ) -> Dataset:
        """Return the results of `generate` as a Hugging Face `Dataset`, one row per rollout.

        `hub_name`: OWNER/NAME or NAME for `push_to_hf_hub`; None: the environment's name with
        `-results`. Raises the errors of `build_dataset_from_outputs`, and StorageError.
        """
        dataset = build_dataset_from_outputs(
            results, include_ids=include_ids, state_columns=state_columns
        )
        if push_to_hf_hub:
            push_dataset(dataset, hub_name or f"{self.name}-results")
        return dataset


def full_name(value: object) -> str:
    """Return the name of a value's class with its module, for example `my_env.MyRubric`."""
    kind = type(value)
    prefix = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return prefix + kind.__qualname__


def _begins_with_system(row: RolloutInput) -> bool:
    first: Any = next(iter(row["prompt"]), None)
    return first is not None and first["role"] == "system"


def _read_info(info: object) -> Fields:
    """Return a row's info, parsed if it is JSON text. ValueError unless it is a mapping."""
    try:
        # Python's own JSON may contain NaN and infinity; they become None.
        parsed = json.loads(info, parse_constant=lambda _: None) if isinstance(info, str) else info
    except json.JSONDecodeError as error:
        text = f"info: invalid JSON ({error}): {str(info)[:60]!r}; give a mapping, or its JSON"
        raise ValueError(text) from error
    if not isinstance(parsed, Mapping):
        got = f"{type(parsed).__name__}: {str(info)[:60]!r}"
        raise ValueError(f"info: must be a mapping, or the JSON of one, got {got}")
    return parsed


def _chosen(examples: Examples, n: int, seed: int | None) -> Examples:
    if seed is None:
        return examples if n < 0 else examples.first(n)
    order = list(range(len(examples)))
    Random(seed).shuffle(order)
    return examples.select(order if n < 0 else order[:n])
