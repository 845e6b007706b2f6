"""What every environment has: data, a rubric, and one state per rollout (spec: trajectories and
rollout orchestration).
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

from rollout_actors.environments.chat.messages import (
    cleanup_messages,
    cleanup_tools,
    concat_messages,
    deeply_copied,
    require_roles,
)
from rollout_actors.environments.chat.tools import UncalledTools
from rollout_actors.environments.clients.openai import (
    ask,
    knows_rollouts,
    merged,
    require_asynchronous,
)
from rollout_actors.environments.datasets import (
    Examples,
    GenerateOutputs,
    PromptFormat,
    build_dataset_from_outputs,
    column_names,
    made_folder,
    present,
    push_dataset,
    rows_of,
)
from rollout_actors.environments.generate import Concurrency, GenerateCall, generate
from rollout_actors.environments.lifecycle import (
    Event,
    Handler,
    all_of,
    awaited,
    close_at_exit,
    forget,
    handlers,
    to_the_end,
)
from rollout_actors.environments.rubric import Parser, Rubric
from rollout_actors.environments.scope import client_under_way, new_state, note_begun, note_cleaned
from rollout_actors.environments.types import Messages, RolloutInput, SamplingArgs, State

_LOGGER = logging.getLogger(__name__)

_NO_CHAT = (
    "with message_type='completion' the model is sent the row's text alone, and nothing of this"
)


class Environment(ABC):
    """Data, what a rollout on one row of it is, and what it is worth. Subclasses say what a rollout
    is.
    """

    cleanup_timeout_s = 300.0
    """Longest time for all that is marked with `@cleanup` after one rollout, and with `@teardown`,
    where those behind one that is late have as long again. A subclass may allow more."""

    def __init__(
        self,
        dataset: Any = None,
        eval_dataset: Any = None,
        system_prompt: str | None = None,
        few_shot: list[Mapping[str, Any]] | None = None,
        parser: Parser | None = None,
        rubric: Rubric | None = None,
        sampling_args: SamplingArgs | None = None,
        message_type: str = "chat",
        oai_tools: list[dict[str, Any]] | None = None,
        max_seq_len: int | None = None,
        env_id: str | None = None,
        env_args: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            dataset: rows with `prompt` (messages, or text) or `question`, and where there are any,
            `answer`, `info`, `task` and `example_id`: a Hugging Face
                `Dataset`, or a sequence of mappings.
            eval_dataset: the same for `evaluate`; None: `dataset`.
            sampling_args: of every call; those of a call of `generate` win.
            message_type: `chat`, or `completion` where prompts are plain text.
            max_seq_len: a rollout ends, as `is_truncated`, where a call's prompt and answer
            together have so many tokens.
        """
        if message_type not in ("chat", "completion"):
            raise ValueError(f"message_type: must be chat or completion, got {message_type!r}")
        if message_type == "completion":
            for name, value in (
                ("system_prompt", system_prompt),
                ("few_shot", few_shot),
                ("oai_tools", oai_tools),
            ):
                if value:
                    raise ValueError(
                        f"{name}: {_NO_CHAT}; write it into the prompts, or leave message_type out"
                    )
        require_roles(few_shot or (), "few_shot")
        if rubric is not None and not isinstance(rubric, Rubric):
            raise TypeError(
                f"rubric: is {full_name(rubric)}; give a Rubric of rollout_actors.environments"
            )
        self.env_id, self.env_args = env_id, dict(env_args or {})
        self.message_type, self.max_seq_len = message_type, max_seq_len
        self.sampling_args = merged(sampling_args)
        self.oai_tools = deepcopy(list(oai_tools or []))
        self.parser = parser or (
            rubric.parser if rubric is not None and rubric.parser is not None else Parser()
        )
        self.rubric = rubric or Rubric(parser=self.parser)
        self.rubric.lend_parser(self.parser)
        self.prompt_format = PromptFormat(
            message_type, system_prompt, tuple(few_shot or ()), env_id or "default"
        )
        self.dataset = None if dataset is None else Examples(dataset, self.prompt_format)
        self.eval_dataset = (
            None if eval_dataset is None else Examples(eval_dataset, self.prompt_format)
        )
        self.__post_init__()

    def __post_init__(self) -> None:
        """Find what is marked with `@stop`, `@cleanup` and `@teardown`."""
        self._stop_conditions: tuple[Handler, ...] = handlers(self, Event.STOP)
        self._cleanups: tuple[Handler, ...] = handlers(self, Event.CLEANUP)
        self._teardowns: tuple[Handler, ...] = handlers(self, Event.TEARDOWN)
        self._uncalled_tools = UncalledTools()
        self._is_closed = False
        if self._teardowns:
            close_at_exit(self)

    def member(self, task: str | None) -> Environment:  # noqa: ARG002
        """The one that rollouts of this task are of: of a group, one of its environments."""
        return self

    # Data

    def get_dataset(self, n: int = -1, seed: int | None = None) -> Examples:
        """The first `n` rows to train on (-1: all), in an order of `seed`'s, or in their own."""
        if self.dataset is None:
            raise ValueError(f"{self.name} has no dataset; give it one, or rows to generate")
        return _chosen(self.dataset, n, seed)

    def get_eval_dataset(self, n: int = -1, seed: int | None = None) -> Examples:
        """The same of those to evaluate on; where there are none, of those to train on."""
        return (
            self.get_dataset(n, seed)
            if self.eval_dataset is None
            else _chosen(self.eval_dataset, n, seed)
        )

    @property
    def name(self) -> str:
        return self.env_id or type(self).__name__

    # One rollout

    async def init_state(self, input: RolloutInput, **kwargs: Any) -> State:  # noqa: ARG002
        """What every rollout begins with, whatever the environment. `input` stays as it is."""
        own: dict[str, Any] = deeply_copied(dict(input))
        if self.message_type == "chat" and isinstance(own.get("prompt"), str):
            own["prompt"] = self.prompt_format.prompt(own)
        elif own.get("prompt") is not None and self.message_type == "chat":
            require_roles(own["prompt"], "prompt")
            # a dataset's own row has its table's nulls
            own["prompt"] = cleanup_messages(own["prompt"])
        if own.get("info") == "":
            del own["info"]
        elif own.get("info") is not None:
            own["info"] = _info(own["info"])
        own.setdefault("task", self.env_id or "default")
        state = self._new_state(own)
        tools = (own.get("info") or {}).get("oai_tools")
        state["oai_tools"] = (
            deeply_copied(self.oai_tools) if tools is None else cleanup_tools(deepcopy(list(tools)))
        )
        if state["oai_tools"] and self.message_type == "completion":
            raise ValueError(
                f"oai_tools: {_NO_CHAT}; take them out of the row's info, or leave message_type out"
            )
        note_begun(self, state)
        return state

    def _new_state(self, own: dict[str, Any]) -> State:
        if own.get("example_id") is None:
            own["example_id"] = own.get("id", 0)
        return new_state(own)

    async def setup_state(self, state: State) -> State:
        """What this environment adds, before the first call of the model."""
        return state

    @abstractmethod
    async def rollout(
        self,
        input: RolloutInput,
        client: Any,
        model: str,
        sampling_args: SamplingArgs | None = None,
    ) -> State:
        """From a row to a finished state. Raises whatever goes wrong; `generate` makes data of
        it."""

    async def get_model_response(
        self,
        client: Any,
        model: str,
        prompt: Messages,
        oai_tools: list[dict[str, Any]] | None = None,
        sampling_args: SamplingArgs | None = None,
        message_type: str | None = None,
    ) -> Any:
        """One call of the model: its `ChatCompletion` or `Completion`. Its id is `overlong-prompt`
        where there is no room for the prompt.
        """
        arguments = merged(self.sampling_args, sampling_args)
        if knows_rollouts(client):
            client = client_under_way(self, client)
        return await ask(
            client,
            model,
            prompt,
            message_type=message_type or self.message_type,
            tools=oai_tools,
            sampling_args=arguments,
        )

    async def is_completed(self, state: State, **kwargs: Any) -> bool:  # noqa: ARG002
        """Whether a stop condition holds; the first one that does is noted. An override asks this
        one too.
        """
        for condition in self._stop_conditions:
            if await awaited(condition(state)):
                state["is_completed"], state["stop_condition"] = True, condition.__name__
                await self._render_timing(state)
                await self._render_completion(state)
                return True
        return False

    async def _render_timing(self, state: State) -> None:
        timing = state["timing"]
        timing["generation_ms"] = 1000 * (time.time() - timing["start_time"])
        timing["total_ms"] = timing["generation_ms"] + timing["scoring_ms"]

    async def _render_completion(self, state: State) -> None:
        """All that came after the prompt. To be overridden where the last call's prompt does not
        begin with the rollout's.
        """
        if not state["trajectory"]:
            state["completion"] = "" if self.message_type == "completion" else []
            return
        last = state["trajectory"][-1]
        final = state.get("final_env_response")
        said = concat_messages(
            [last["prompt"], last["completion"], *([] if final is None else [final])]
        )
        state["completion"] = said[len(state["prompt"]) :]

    async def _cleanup(self, state: State) -> None:
        """Every `@cleanup`, whatever the others raise; the first error is raised at the end.
        `generate` calls it where `rollout` has not.
        """
        note_cleaned(self, state)
        await all_of(self._cleanups, state)

    async def aclose(self) -> None:
        """Every `@teardown`, once. Also the end of `async with environment`. Where this is
        cancelled, so is the one under way; the others are called.
        """
        if self._is_closed:
            return
        self._is_closed = True
        forget(self)
        left, limit_s = list(self._teardowns), self.cleanup_timeout_s
        try:
            # In the caller's task: what it has entered, a handler may leave there alone.
            async with asyncio.timeout(limit_s) as timeout:
                # Those behind one that has kept the end of its time to itself have no limit here.
                await all_of(left.pop(0) for _ in self._teardowns if not timeout.expired())
        except TimeoutError:
            if not timeout.expired():
                raise
        finally:
            if left:
                await to_the_end(all_of(left), limit_s)
        if timeout.expired():
            raise TimeoutError(
                f"the teardown is not done after {limit_s:g} s; check what it waits for, or allow"
                " more (cleanup_timeout_s)"
            )

    async def __aenter__(self) -> Environment:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    # Many rollouts

    async def generate(
        self,
        inputs: Any,
        client: Any,
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
        """A rollout for each of `inputs` (a dataset, rows, or columns), and its reward; results in
        the order of the inputs.

        A rollout that fails is data: `state["error"]` says why, and its reward is 0.

        Args:
            max_concurrent: most rollouts that are generated, and that are scored, at a time; -1:
            all.
            max_concurrent_generation: the same of generating alone; None: `max_concurrent`.
            max_concurrent_scoring: the same of scoring alone; None: `max_concurrent`.
            interleave_scoring: a rollout (or where the rubric compares them, an example's group) is
            scored as soon as it is there; False: when all are.
            state_columns: fields of the state that are saved too, `timing.total_ms` for one inside
            another. What no rollout has is left out, with a warning.
            save_path: a folder for the results, which is made before the first rollout.
            StorageError where it cannot be written.
            on_rollout: called with the place and the state of each rollout that is done, in the
            order in which they are.
            rollout_timeout_s: a rollout that is not done so many seconds after its begin, waits for
            the model counted and scoring not, is cancelled, cleans up,
                and has failed; None: none is. Results depend on the machine's load then. Waits for
                a thread do not count: a tool that hangs costs its own
                rollout alone.
            scoring_timeout_s: the same of each call of a reward function, which has no figure then
            (`state["reward_errors"]`); None: `rollout_timeout_s`.
        """
        require_asynchronous(client)
        if save_path is not None:
            made_folder(save_path)  # better known now than when all is done
        columns = column_names(state_columns)
        examples = (
            inputs
            if isinstance(inputs, Examples)
            else Examples(rows_of(inputs), self.prompt_format)
        )
        call = GenerateCall(
            client,
            model,
            merged(self.sampling_args, sampling_args),
            Concurrency.of(max_concurrent, max_concurrent_generation, max_concurrent_scoring),
            scores=score_rollouts,
            interleaves=interleave_scoring,
            shows_progress=use_tqdm,
            on_rollout=on_rollout,
            rollout_timeout_s=rollout_timeout_s,
            scoring_timeout_s=scoring_timeout_s,
        )
        results = await generate(self, examples, call)
        results.metadata.state_columns = columns
        if save_path is not None:
            self._save(results, save_path)
        return results

    def _save(self, results: GenerateOutputs, folder: Path) -> None:
        wanted = results.metadata.state_columns
        columns = [path for path in wanted if present(path, results.state)]
        if absent := [path for path in wanted if path not in columns]:
            _LOGGER.warning("no rollout has %s, which %s goes without", ", ".join(absent), folder)
        results.save(folder, self.make_dataset(results, state_columns=columns))

    async def a_generate(self, *args: Any, **kwargs: Any) -> GenerateOutputs:
        """`generate` by its other name."""
        return await self.generate(*args, **kwargs)

    async def evaluate(
        self,
        client: Any,
        model: str,
        sampling_args: SamplingArgs | None = None,
        num_examples: int = -1,
        rollouts_per_example: int = 1,
        **generate_kwargs: Any,
    ) -> GenerateOutputs:
        """`generate` on the held-out rows, each `rollouts_per_example` times: row i is of example i
        // rollouts_per_example.
        """
        if rollouts_per_example < 1:
            raise ValueError(f"rollouts_per_example: must be 1 or more, got {rollouts_per_example}")
        # Saved here, when all is known that is saved.
        save_path = generate_kwargs.pop("save_path", None)
        if save_path is not None:
            made_folder(save_path)
        examples = self.get_eval_dataset(num_examples)
        repeated = examples.select(
            [i for i in range(len(examples)) for _ in range(rollouts_per_example)]
        )
        results = await self.generate(repeated, client, model, sampling_args, **generate_kwargs)
        results.metadata.num_examples, results.metadata.rollouts_per_example = (
            len(examples),
            rollouts_per_example,
        )
        if save_path is not None:
            self._save(results, save_path)
        return results

    def generate_sync(self, *args: Any, **kwargs: Any) -> GenerateOutputs:
        """`generate` where no event loop runs. RuntimeError where one does, as in a notebook."""
        return _run(self.generate, args, kwargs)

    def evaluate_sync(self, *args: Any, **kwargs: Any) -> GenerateOutputs:
        """`evaluate` where no event loop runs. RuntimeError where one does, as in a notebook."""
        return _run(self.evaluate, args, kwargs)

    def make_dataset(
        self,
        results: GenerateOutputs,
        *,
        include_ids: bool = True,
        state_columns: Sequence[str] | None = None,
        push_to_hf_hub: bool = False,
        hub_name: str | None = None,
    ) -> Any:
        """The results as a Hugging Face `Dataset`, a row for each rollout."""
        made = build_dataset_from_outputs(
            results, include_ids=include_ids, state_columns=state_columns
        )
        if push_to_hf_hub:
            push_dataset(made, hub_name or f"{self.name}-results")
        return made


def full_name(value: object) -> str:
    """The class of a value, with its module: a class of another library may have the name of one
    here.
    """
    kind = type(value)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def _run(
    method: Callable[..., Coroutine[Any, Any, GenerateOutputs]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> GenerateOutputs:
    if asyncio._get_running_loop() is not None:
        name = method.__name__
        raise RuntimeError(
            f"{name}_sync: an event loop runs here, as in a notebook; write `await"
            f" environment.{name}(...)`"
        )
    return asyncio.run(method(*args, **kwargs))


def _info(given: Any) -> Mapping[str, Any]:
    """A row's, or what its JSON says. ValueError where that is no mapping."""
    try:
        info = json.loads(given) if isinstance(given, str) else given
    except json.JSONDecodeError as error:
        raise ValueError(
            f"info: is not JSON ({error}): {given[:60]!r}; give a mapping, or its JSON"
        ) from error
    if not isinstance(info, Mapping):
        raise ValueError(
            f"info: must be a mapping, or the JSON of one, got {type(info).__name__}:"
            f" {str(given)[:60]!r}"
        )
    return info


def _chosen(examples: Examples, n: int, seed: int | None) -> Examples:
    order = list(range(len(examples)))
    if seed is not None:
        Random(seed).shuffle(order)
    return examples.select(order if n < 0 else order[:n])
