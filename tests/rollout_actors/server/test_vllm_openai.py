"""vLLM's OpenAI code over an engine of ours: what is asked of vLLM, and what is not. (With a real
engine: `environments/test_endpoints.py`.)
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from rollout_actors.server.openai_routes import OpenAIRoute
from rollout_actors.server.service import RefusalError
from shared.errors import ConfigError

pytestmark = pytest.mark.engine

PARAMS = SimpleNamespace(prompt_logprobs=None, structured_outputs=None)
STOCK = "vllm serve M"
OVERLONG = "context_length_exceeded"
NO_ROOM = "max_tokens must be at least 1, got 0."
TOO_MANY = "max_tokens=9 cannot be greater than max_model_len=8"
LONG_PROMPT = "The decoder prompt (length 9) is longer than the maximum model length of 8."


class TellingEngine:
    """As much of a `VllmEngine` as is asked, with an `llm` that gives one token and then two, and
    ends for this reason.
    """

    name, shut, adapter = "server-0", "", "the adapter that is served"

    def __init__(self, ends="stop", *, lora=False, device="cpu"):
        self.ends = ends
        self.counted = 0
        self.asked = []
        self.num_closed = 0
        config = SimpleNamespace(
            lora_config="some" if lora else None, device_config=SimpleNamespace(device_type=device)
        )
        parts = dict.fromkeys(("model_config", "renderer", "input_processor"))
        self.llm = SimpleNamespace(vllm_config=config, generate=self._generate, **parts)

    def count(self, num_tokens):
        self.counted += num_tokens

    async def _generate(self, prompt, params, request_id, **options):
        self.asked.append({"prompt": prompt, "params": params, "request_id": request_id} | options)
        try:
            for token_ids, reason in (([1], None), ([2, 3], self.ends)):
                output = SimpleNamespace(token_ids=token_ids, finish_reason=reason)
                yield SimpleNamespace(outputs=[output])
        finally:
            self.num_closed += 1


def ask(engine, params=PARAMS, *, most=9, **options):
    """Ask for at most so many outputs; returns their number."""
    from rollout_actors.server.vllm_openai import GuardedClient

    async def number():
        outputs = GuardedClient(engine, STOCK).generate("prompt", params, "1", **options)
        taken = 0
        async for _ in outputs:
            taken += 1
            if taken == most:
                await outputs.aclose()
                break
        return taken

    return asyncio.run(number())


def test_every_request_is_of_the_adapter_that_is_served_and_counted():
    engine = TellingEngine()
    assert ask(engine, lora_request=None, priority=0) == 2
    request = {"prompt": "prompt", "params": PARAMS, "request_id": "1", "priority": 0}
    assert engine.asked == [request | {"lora_request": engine.adapter}]
    assert (engine.counted, engine.num_closed) == (3, 1)


def test_a_request_that_is_given_up_is_ended_and_counted_as_far_as_it_went():
    engine = TellingEngine()
    assert ask(engine, most=1) == 1
    assert (engine.counted, engine.num_closed) == (1, 1)


def test_nothing_is_given_to_an_engine_that_takes_weights():
    engine = TellingEngine()
    engine.shut = "its sync to version 3 is under way, or was not completed"
    with pytest.raises(RefusalError, match=f"server-0 serves no rollouts: {engine.shut}") as caught:
        ask(engine)
    assert (caught.value.status, engine.asked) == (409, [])


def test_a_request_that_was_sent_away_is_no_answer():
    engine = TellingEngine("abort")
    sent_away = "server-0 was given other weights before it had begun with the call; ask again"
    with pytest.raises(RefusalError, match=sent_away) as caught:
        ask(engine)
    assert (caught.value.status, engine.counted, engine.num_closed) == (409, 3, 1)


@pytest.mark.parametrize(
    ("lora", "device", "refused"),
    [(True, "cpu", True), (False, "cpu", False), (True, "cuda", False)],
)
def test_log_probabilities_of_prompts_are_refused_where_vllm_would_die_of_them(
    lora, device, refused
):
    from vllm.exceptions import VLLMValidationError

    engine = TellingEngine(lora=lora, device=device)
    params = SimpleNamespace(prompt_logprobs=1, structured_outputs=None)
    if not refused:
        assert ask(engine, params) == 2
        return
    none = "prompt_logprobs: a server with enable_lora has none on CPU"
    with pytest.raises(VLLMValidationError, match=none):
        ask(engine, params)
    assert engine.asked == []


class SayingServing:
    """As much of vLLM's `OpenAIServingChat` and `OpenAIServingCompletion` as is asked: raises or
    returns what it is told.
    """

    def __init__(self, said):
        self.said = said

    async def create_chat_completion(self, request):
        if isinstance(self.said, Exception):
            raise self.said
        return self.said

    create_completion = create_chat_completion


def answered(said, route=OpenAIRoute.CHAT, **call):
    from rollout_actors.server.vllm_openai import VllmOpenAI

    one = VllmOpenAI(None, SayingServing(said), SayingServing(said), STOCK)
    prompt = {"prompt": "a"}
    if route is OpenAIRoute.CHAT:
        prompt = {"messages": [{"role": "user", "content": "a"}]}
    return asyncio.run(one.answer(route, {"model": "m"} | prompt | call))


def refusal(answer):
    """The error of an answer that refuses the call."""
    assert (answer.status, set(answer.content)) == (400, {"error"})
    return answer.content["error"]


@pytest.mark.parametrize(
    ("parameter", "text", "asked", "code"),
    [
        ("input_tokens", "This model's maximum context length is 8 tokens", {}, OVERLONG),
        ("input_text", "This model's maximum context length is 8 tokens", {}, OVERLONG),
        (None, LONG_PROMPT, {}, OVERLONG),
        ("max_tokens", NO_ROOM, {}, OVERLONG),
        ("max_tokens", NO_ROOM, {"max_tokens": 4}, OVERLONG),
        ("max_tokens", NO_ROOM, {"max_tokens": 0}, 400),
        ("max_tokens", NO_ROOM, {"max_completion_tokens": 0}, 400),
        ("max_tokens", TOO_MANY, {"max_tokens": 9}, 400),
        ("temperature", "temperature must be non-negative", {}, 400),
    ],
)
def test_a_prompt_that_is_too_long_has_openais_code_and_nothing_else_has(
    parameter, text, asked, code
):
    from vllm.exceptions import VLLMValidationError

    error = refusal(answered(VLLMValidationError(text, parameter=parameter), **asked))
    assert error["code"] == code
    assert error["message"].startswith(text)


@pytest.mark.parametrize("route", [OpenAIRoute.CHAT, OpenAIRoute.COMPLETIONS])
def test_a_field_that_nobody_knows_is_refused_with_the_one_that_is_meant(route):
    error = refusal(answered(None, route, temprature=0.5, guided_regex="a", top_k=3))
    unknown = "no such field: temprature (did you mean temperature?), guided_regex"
    assert error["message"].startswith(unknown)


@pytest.mark.parametrize("route", [OpenAIRoute.CHAT, OpenAIRoute.COMPLETIONS])
@pytest.mark.parametrize("penalty", [1e-320, "1e-320", 1e300])
def test_a_repetition_penalty_that_leaves_no_numbers_is_refused(route, penalty):
    error = refusal(answered(None, route, repetition_penalty=penalty))
    wanted = "send a value from 0.01 to 100"
    assert error["message"] == f"repetition_penalty: is {float(penalty)}; {wanted}"


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [[]] * 1000},
        {"tools": [{"type": "function", "function": {"name": 5}}] * 1000},
        {"logit_bias": dict.fromkeys(map(str, range(5000)), "x")},
        {"m" * 50_000 + str(number): 0 for number in range(25)},
    ],
)
def test_odd_fields_are_refused_in_a_few_words(fields):
    message = refusal(answered(None, **fields))["message"]
    assert (0 < len(message.splitlines()) <= 20, len(message) < 5000) == (True, True)


@pytest.mark.parametrize("route", [OpenAIRoute.CHAT, OpenAIRoute.COMPLETIONS])
@pytest.mark.parametrize(
    "field",
    [
        {"stream": True},
        {"structured_outputs": {"regex": "a+"}},
        {"structured_outputs": True},
        {"response_format": {"type": "json_object"}},
    ],
)
def test_a_stream_and_a_grammar_are_refused_with_the_command_of_a_server_that_takes_them(
    route, field
):
    (name,) = field
    with pytest.raises(RefusalError, match=f"^{name}: not served here; .*: {STOCK}$") as caught:
        answered(None, route, **field)
    assert caught.value.status == 400


def test_no_grammar_reaches_the_engine_wherever_vllm_took_it_from():
    """As of tools that a call has to use, or of strict ones."""
    engine = TellingEngine()
    params = SimpleNamespace(prompt_logprobs=None, structured_outputs="any")
    with pytest.raises(RefusalError, match=f"a grammar for tool calls.*{STOCK}"):
        ask(engine, params)
    assert engine.asked == []


def test_fields_of_openai_and_of_vllm_are_taken():
    class Said:
        def model_dump(self):
            return {"id": "an answer"}

    fields = {
        "store": True,
        "metadata": {"a": "b"},
        "prompt_cache_key": "a",
        "top_k": 3,
        "return_token_ids": True,
        "stream": False,
        "response_format": {"type": "text"},
    }
    assert answered(Said(), **fields).content == {"id": "an answer"}


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}, {"tool_choice": "required"}])
def test_tools_that_nobody_reads_calls_of_are_refused_with_the_server_s_own_argument(choice):
    """vLLM names arguments of `vllm serve`, which `rollmatch serve` does not have."""
    from rollout_actors.server.vllm_openai import NO_TOOL_CALLS

    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert refusal(answered(None, tools=tools, **choice))["message"] == NO_TOOL_CALLS
    assert "start it with tool_call_parser=NAME" in NO_TOOL_CALLS


def test_a_tool_parser_that_vllm_does_not_know_is_refused_before_a_model_is_loaded():
    from rollout_actors.server.vllm_openai import check_tool_parser

    check_tool_parser(None)
    check_tool_parser("hermes")
    unknown = "tool_call_parser: hermess is none of vLLM's; choose one of .*hermes"
    with pytest.raises(ConfigError, match=unknown):
        check_tool_parser("hermess")
