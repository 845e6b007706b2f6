"""An endpoint of the OpenAI API as tests ask it, and what it should say."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import openai
import torch
from engine_support import SmallLearner

from rollout_actors.environments.chat.responses import RETURNS_TOKENS, parse_response_tokens
from rollout_actors.environments.types import TrajectoryStepTokens

T = TypeVar("T")

TEMPERATURE = 0.7
QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "Detect every object in the image."}]
SAMPLED: dict[str, Any] = {"temperature": TEMPERATURE, "seed": 11, "max_tokens": 24}
WITH_TOKENS: dict[str, Any] = SAMPLED | RETURNS_TOKENS
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12} | RETURNS_TOKENS


@dataclass(frozen=True)
class Endpoint:
    url: str
    model: str
    token: str = "none"

    def ask(self, work: Callable[[openai.AsyncOpenAI], Awaitable[T]], **options: Any) -> T:
        """On a loop of its own."""

        async def asked() -> T:
            http = openai.DefaultAsyncHttpxClient(trust_env=False)
            async with openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.token, http_client=http, **{"max_retries": 0} | options) as client:
                return await work(client)

        return asyncio.run(asked())

    def chat(self, messages: Any = QUESTION, **arguments: Any) -> Any:
        return self.ask(lambda client: client.chat.completions.create(model=self.model, messages=messages, **arguments))

    def tokens(self, response: Any, message_type: str = "chat") -> TrajectoryStepTokens:
        tokens = asyncio.run(parse_response_tokens(response, message_type))
        assert tokens is not None
        return tokens


def greedy(learner: SmallLearner, prompt_ids: list[int], num_tokens: int) -> list[int]:
    """What its policy says to a prompt of text, with the end token where that is the last."""
    ids = list(prompt_ids)
    for _ in range(num_tokens):
        with torch.no_grad():
            ids.append(int(learner.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] == learner.stop:
            break
    return ids[len(prompt_ids) :]


def asked_throughout(endpoint: Endpoint, work: Callable[[], None], *, callers: int = 3) -> list[Any]:
    """What `callers` who ask `GREEDY` again and again are answered while `work` is done, and once after it; a text is what a refusal said."""
    is_done = threading.Event()

    def asks() -> list[Any]:
        said: list[Any] = []
        is_last = False
        while not is_last:
            is_last = is_done.is_set()
            try:
                said.append(endpoint.chat(**GREEDY))
            except openai.ConflictError as error:
                said.append(str(error))
        return said

    with ThreadPoolExecutor(callers) as threads:
        asking = [threads.submit(asks) for _ in range(callers)]
        try:
            work()
        finally:
            is_done.set()
        return [one for said in asking for one in said.result()]
