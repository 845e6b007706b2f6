"""vLLM's OpenAI code over an engine of ours: what is asked of vLLM, and what is not. (With a real engine: `environments/test_endpoints.py`.)"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollout_actors.server.door import RefusalError
from shared.errors import ConfigError

pytestmark = pytest.mark.engine


class TellingEngine:
    """As much of a `VllmEngine` as is asked, with an `llm` that gives one token and then two."""

    name, shut, adapter = "server-0", "", "the adapter that is served"

    def __init__(self) -> None:
        self.counted = 0
        self.asked: list[dict[str, Any]] = []
        self.num_closed = 0
        self.llm = SimpleNamespace(vllm_config=None, model_config=None, renderer=None, input_processor=None, errored=False, generate=self._generate)

    def count(self, num_tokens: int) -> None:
        self.counted += num_tokens

    async def _generate(self, prompt: Any, params: Any, request_id: str, **options: Any) -> AsyncGenerator[Any, None]:
        self.asked.append({"prompt": prompt, "params": params, "request_id": request_id} | options)
        try:
            for token_ids in ([1], [2, 3]):
                yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=token_ids)])
        finally:
            self.num_closed += 1


def client_of(engine: TellingEngine) -> Any:
    from rollout_actors.server.vllm_openai import _Client

    return _Client(cast("Any", engine))


def test_every_request_is_of_the_adapter_that_is_served_and_counted() -> None:
    engine = TellingEngine()

    async def asked() -> int:
        return len([output async for output in client_of(engine).generate("prompt", "params", "1", lora_request=None, priority=0)])

    assert asyncio.run(asked()) == 2
    assert engine.asked == [{"prompt": "prompt", "params": "params", "request_id": "1", "lora_request": engine.adapter, "priority": 0}]
    assert (engine.counted, engine.num_closed) == (3, 1)


def test_a_request_that_is_given_up_is_ended_and_counted_as_far_as_it_went() -> None:
    engine = TellingEngine()

    async def given_up() -> None:
        outputs = client_of(engine).generate("prompt", "params", "1")
        await anext(outputs)
        await outputs.aclose()

    asyncio.run(given_up())
    assert (engine.counted, engine.num_closed) == (1, 1)


def test_nothing_is_given_to_an_engine_that_takes_weights() -> None:
    engine = TellingEngine()
    engine.shut = "its sync to version 3 is under way, or was not completed"

    async def asked() -> None:
        await anext(client_of(engine).generate("prompt", "params", "1"))

    with pytest.raises(RefusalError, match="server-0 serves no rollouts: its sync to version 3 is under way") as caught:
        asyncio.run(asked())
    assert (caught.value.status, engine.asked) == (409, [])


def test_a_tool_parser_that_vllm_does_not_know_is_refused_before_a_model_is_loaded() -> None:
    from rollout_actors.server.vllm_openai import check_tool_parser

    check_tool_parser(None)
    check_tool_parser("hermes")
    with pytest.raises(ConfigError, match=r"tool_call_parser: hermess is none of vLLM's; choose one of .*hermes"):
        check_tool_parser("hermess")
