"""Environments with several turns of model and environment, and with a single turn."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from numbers import Integral
from typing import Any

from rollout_actors.environments.chat.messages import checked_messages, concat_messages, copied
from rollout_actors.environments.chat.responses import (
    is_cut,
    parse_response_messages,
    parse_response_tokens,
)
from rollout_actors.environments.clients.openai import OVERLONG
from rollout_actors.environments.environment import Environment
from rollout_actors.environments.lifecycle import awaited, stop
from rollout_actors.environments.scope import bind_client, current_scope, require_state
from rollout_actors.environments.types import (
    Client,
    Messages,
    ModelResponse,
    RolloutInput,
    SamplingArgs,
    State,
    TrajectoryStep,
    TrajectoryStepTokens,
)


class MultiTurnEnv(Environment):
    """An environment in which model and environment take turns.

    A subclass implements the environment's turn (`env_response`), and marks conditions that end a
    rollout with `@stop`. Example: in two turns the model is called with prompt and writes a, then
    with prompt + a + e and writes b. The result of `env_response` is e, the completion a + e + b.
    """

    def __init__(self, max_turns: int = -1, **kwargs: Any) -> None:
        """`max_turns`: maximum number of model calls in a rollout; -1: no limit.

        Raises ValueError if it is another number under 1, or no whole number.
        """
        is_number = isinstance(max_turns, Integral) and not isinstance(max_turns, bool)
        if not is_number or not (max_turns > 0 or max_turns == -1):
            raise ValueError(
                f"max_turns: must be a whole number from 1, or -1 for no limit, got {max_turns!r}"
            )
        super().__init__(**kwargs)
        self.max_turns = max_turns

    @abstractmethod
    async def env_response(self, messages: Messages, state: State, **kwargs: object) -> Messages:
        """Return the environment's messages in response to the model's last message.

        It may write to the state. If it writes messages to `state["final_env_response"]`, they are
        the rollout's last messages and end it.
        """

    @stop
    async def max_turns_reached(self, state: State) -> bool:
        return len(state["trajectory"]) >= self.max_turns > 0

    @stop
    async def prompt_too_long(self, state: State) -> bool:
        return bool(state.get("prompt_too_long"))

    @stop
    async def max_seq_len_reached(self, state: State) -> bool:
        return bool(state.get("max_seq_len_reached"))

    @stop
    async def environment_has_ended_it(self, state: State) -> bool:
        return state.get("final_env_response") is not None

    async def get_prompt_messages(self, state: State) -> Messages:
        """Return the next model call's prompt: the conversation and the environment's response."""
        trajectory = state["trajectory"]
        if not trajectory:
            return concat_messages([state["prompt"]])
        last = trajectory[-1]
        # A copy: the environment's changes go into the next call, not into the recorded step.
        messages = copied(concat_messages([last["prompt"], last["completion"]]))
        answer = checked_messages(
            await awaited(self.env_response(messages, state)), "env_response", self
        )
        if state.get("final_env_response") is not None:
            state["final_env_response"] = checked_messages(
                state["final_env_response"], "final_env_response", self
            )
        return concat_messages([messages, answer])

    async def add_model_response(
        self, state: State, prompt_messages: Messages, response: ModelResponse
    ) -> None:
        """Append a model call to `state["trajectory"]`, unless its prompt was too long."""
        if response is not None and response.id == OVERLONG:
            state["prompt_too_long"] = True
            state["is_truncated"] = True
            return
        if is_cut(response):
            state["is_truncated"] = True
        completion = await parse_response_messages(response, self.message_type)
        tokens = await parse_response_tokens(response, self.message_type)
        if self.max_seq_len is not None:
            tokens = self._within_max_seq_len(self.max_seq_len, tokens, response, state)
        step: TrajectoryStep = {
            "prompt": copied(prompt_messages),
            "completion": completion,
            "response": response,
            "tokens": tokens,
            "reward": None,
            "advantage": None,
            "extras": {},
        }
        state["trajectory"].append(step)

    async def rollout(
        self,
        input: RolloutInput,
        client: Client,
        model: str,
        sampling_args: SamplingArgs | None = None,
    ) -> State:
        """Let model and environment take turns until a `@stop` method ends the rollout."""
        scope = current_scope()
        assert scope is not None, "Environment opens a scope around every rollout"
        scope.state = require_state(await awaited(self.init_state(input)), "init_state", self)
        # Set before and after the setup: if the setup fails, cleanup needs a state; and the setup
        # may return a new state.
        state = require_state(await awaited(self.setup_state(scope.state)), "setup_state", self)
        scope.state = state
        client = bind_client(client)
        while not await awaited(self.is_completed(state)):
            prompt = await awaited(self.get_prompt_messages(state))
            if state.get("final_env_response") is not None:
                await awaited(self.is_completed(state))
                break
            response = await self.get_model_response(
                client,
                model,
                prompt,
                oai_tools=state["oai_tools"],
                sampling_args=sampling_args,
                message_type=self.message_type,
            )
            await awaited(self.add_model_response(state, prompt, response))
        if not state["is_completed"] or state.get("completion") is None:
            # An override of `is_completed` has ended the rollout without recording it.
            await self._complete(state)
        return state

    def _within_max_seq_len(
        self,
        max_seq_len: int,
        tokens: TrajectoryStepTokens | None,
        response: ModelResponse,
        state: State,
    ) -> TrajectoryStepTokens | None:
        """Return the step's tokens up to the limit; None if no sampled token is known or left.

        Without tokens, the endpoint's token counts decide whether the rollout is over.
        """
        if tokens is not None:
            length = len(tokens["prompt_ids"]) + len(tokens["completion_ids"])
        elif response.usage is not None:
            length = response.usage.prompt_tokens + response.usage.completion_tokens
        else:
            return None
        # An answer that ends by itself exactly at the limit is complete.
        if length <= max_seq_len - (response.choices[0].finish_reason == "length"):
            return tokens
        state["max_seq_len_reached"] = True
        state["is_truncated"] = True
        if tokens is None or (room := max_seq_len - len(tokens["prompt_ids"])) <= 0:
            return None
        return {
            "prompt_ids": tokens["prompt_ids"],
            "prompt_mask": tokens["prompt_mask"],
            "completion_ids": tokens["completion_ids"][:room],
            "completion_mask": tokens["completion_mask"][:room],
            "completion_logprobs": tokens["completion_logprobs"][:room],
        }


class SingleTurnEnv(MultiTurnEnv):
    """An environment with one question and one answer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept the arguments of `Environment`, by position or by name."""
        # MultiTurnEnv takes them only by name.
        positional = inspect.signature(Environment).bind(*args).arguments
        super().__init__(max_turns=1, **positional, **kwargs)

    async def env_response(self, messages: Messages, state: State, **kwargs: object) -> Messages:  # noqa: ARG002
        raise AssertionError("a single-turn rollout ends before env_response is called")
