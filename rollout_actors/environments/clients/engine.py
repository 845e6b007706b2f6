"""The client that asks a run's own engines, tokens in and tokens out: `Environment.generate(...,
client=EngineClient(...))`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from itertools import count
from typing import Any, NoReturn, Protocol
from weakref import WeakKeyDictionary

from rollout_actors.environments.chat.template import ChatTemplate
from rollout_actors.environments.chat.tool_calls import ToolCallReader
from rollout_actors.environments.clients.conversation import (
    CallArguments,
    Conversation,
    ConversationSettings,
    RolloutKey,
)
from rollout_actors.environments.concurrency import waiting
from rollout_actors.environments.types import State
from shared.errors import UnreachableError
from shared.rollouts import DecodeMode, DecodeSettings, Rollout, RolloutRequest
from shared.trajectory import ModelCall

_LOGGER = logging.getLogger(__name__)


class Engines(Protocol):
    """The run's engines, in order. `rollout_actors.environments.training.actor` has those that are
    Ray actors.
    """

    def __len__(self) -> int: ...

    async def generate(self, engine: int, request: RolloutRequest) -> Rollout:
        """By the engine of this number; where it is cancelled, the engine stops with the request.
        Ends within a time limit of its own.

        Raises RolloutError, and UnreachableError where the request may be asked of another engine.
        """
        ...


class EngineClient:
    """Knows the rollouts of one step: all calls of one go to the same engine, where its earlier
    turns are still in the prefix cache.

    A step is one call of `generate`: another call with the same client samples with the same seeds.
    It belongs to no event loop, and may be used on several.
    """

    def __init__(
        self,
        engines: Engines,
        tokens: ChatTemplate,
        decode: DecodeSettings,
        run_seed: int,
        step: int,
        *,
        max_model_len: int,
        max_under_way: int = 64,
        tool_calls: ToolCallReader | None = None,
    ) -> None:
        """
        Args:
            tokens: the checkpoint's tokenizer and chat template.
            decode: of every call. Sampling arguments of environments and callers may ask for fewer
            tokens, and for nothing else.
            max_model_len: most tokens of a prompt and its answer together, as the engines have it.
            max_under_way: most requests that one engine has at a time, of one event loop. The
            others wait here, each until one of those has ended, which the
                engines' time limit sees to.
            tool_calls: reads the model's tool calls (`tool_calls.reader_of` makes one); None: they
            stay text.
        """
        if decode.mode is DecodeMode.BEAM:
            raise ValueError(
                "decode.mode: beam search answers with no tokens that were sampled; rollouts of"
                " environments use greedy or sample"
            )
        if max_under_way < 1 or not len(engines):
            raise ValueError(
                f"max_under_way, engines: at least one of each, got {max_under_way} and"
                f" {len(engines)}"
            )
        arguments = CallArguments(decode, tokens.template_args)
        self._reading = ConversationSettings(tokens, arguments, tool_calls, decode, max_model_len)
        self._engines, self._run_seed, self._step, self._max_under_way = (
            engines,
            run_seed,
            step,
            max_under_way,
        )
        self._begun = count()
        self._calls: dict[int, dict[tuple[str, int], ModelCall]] = {}
        # A semaphore belongs to the event loop that first waits for it, and callers may run one
        # after another.
        self._free: WeakKeyDictionary[asyncio.AbstractEventLoop, list[asyncio.Semaphore]] = (
            WeakKeyDictionary()
        )

    def conversation(
        self, state: State, *, of: Mapping[str, Any] | None = None, path: str = ""
    ) -> Conversation:
        """A client for the calls of this rollout, which notes `num_splits` in its state.

        Its place in the step is `state["input"]["position"]`, which `generate` gives to every
        rollout. Rollouts that are begun without it (`rollout`, of a row that has none) are numbered
        as they begin, and only then do their seeds depend on the order in which they do. One that
        is begun inside another has the place of that one, whose input is `of`, and seeds of its own
        by its `path` there.
        """
        numbered = next(self._begun)
        given = (state.get("input", {}) if of is None else of).get("position")
        position = numbered if given is None else int(given)
        place = RolloutKey(
            self._run_seed, self._step, position, str(state.get("example_id", position)), path
        )
        noted = self._calls.setdefault(position, {})
        return Conversation(place, self._reading, self._generate, state, noted)

    def calls(self, position: int) -> tuple[ModelCall, ...]:
        """Return what was asked so far in the rollout of this position, by path and turn."""
        noted = self._calls.get(position, {})
        return tuple(noted[key] for key in sorted(noted))

    @property
    def chat(self) -> NoReturn:
        raise AttributeError(
            "EngineClient has to know of which rollout a call is; call"
            " `self.get_model_response(client, model, messages, ...)` instead"
        )

    completions = chat

    async def _generate(self, request: RolloutRequest) -> Rollout:
        """By the rollout's own engine, and where that cannot be reached, by the next ones, with the
        same seed. Raises the last one's UnreachableError.
        """
        number = len(self._engines)
        *first, last = [(request.position + tried) % number for tried in range(number)]
        for engine in first:
            try:
                return await self._by(engine, request)
            except UnreachableError as error:
                _LOGGER.warning(
                    "%s; the next engine is asked for sample %s", error, request.sample_id
                )
        return await self._by(last, request)

    async def _by(self, engine: int, request: RolloutRequest) -> Rollout:
        place = self._semaphores()[engine]
        with waiting():
            await place.acquire()
        try:
            return await self._engines.generate(engine, request)
        finally:
            place.release()

    def _semaphores(self) -> list[asyncio.Semaphore]:
        loop = asyncio.get_running_loop()
        if loop not in self._free:
            self._free[loop] = [
                asyncio.Semaphore(self._max_under_way) for _ in range(len(self._engines))
            ]
        return self._free[loop]
