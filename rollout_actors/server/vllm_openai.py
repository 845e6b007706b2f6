"""vLLM's own code for the OpenAI API over one of our engines: its protocol, chat templates, tool
parsers, limits and errors, and none of it again here.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, cast

from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import ValidationError
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.tool_parsers import ToolParserManager
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.structured_output.utils import choice_as_grammar, grammar_is_likely_lark

from rollout_actors.engine.vllm_engine import VllmEngine
from rollout_actors.server.grammars import (
    MAX_CHARS,
    Grammar,
    GrammarKind,
    GrammarTrial,
    XgrammarSpec,
)
from rollout_actors.server.openai_routes import OpenAIAnswer, OpenAIRoute
from rollout_actors.server.service import RefusalError
from shared.errors import ConfigError
from shared.rollouts import REPETITION_PENALTIES

MAX_PROBLEMS = 10
"""Of one call, in its answer."""
OVERLONG, UNKNOWN_MODEL = "context_length_exceeded", "model_not_found"
"""OpenAI's codes, by which its callers tell what is wrong. Of other errors vLLM's code, the status,
remains.
"""
OPENAI_FIELDS = {
    OpenAIRoute.CHAT: frozenset(
        chat_create_params.CompletionCreateParamsNonStreaming.__annotations__
    ),
    OpenAIRoute.COMPLETIONS: frozenset(
        completion_create_params.CompletionCreateParamsNonStreaming.__annotations__
    ),
}
"""What every caller of OpenAI may send, whether vLLM heeds it or not."""
GRAMMAR_FIELDS = ("response_format", "structured_outputs")
"""Of a call: what its answer has to be like."""
FORMS = {OpenAIRoute.CHAT: ChatCompletionRequest, OpenAIRoute.COMPLETIONS: CompletionRequest}


_NO_TOOL_CALLS = (
    "tools: this server was not told how the model writes calls of tools; start it with"
    " tool_call_parser=NAME (vLLM's name of what reads them, hermes for Qwen's models), or send"
    " tool_choice: none"
)


def check_tool_parser(name: str | None) -> None:
    """Raises ConfigError for a name that vLLM does not know. It takes no model, and so comes before
    one is loaded.
    """
    known = ToolParserManager.list_registered()
    if name is not None and name not in known:
        raise ConfigError(
            f"tool_call_parser: {name} is none of vLLM's; choose one of {', '.join(sorted(known))}"
        )


class VllmOpenAI:
    """An `OpenAIServing` over vLLM's own. It belongs to the engine's event loop."""

    def __init__(
        self,
        models: OpenAIServingModels,
        chat: OpenAIServingChat,
        completion: OpenAIServingCompletion,
        grammars: GrammarTrial | None = None,
        *,
        reads_tool_calls: bool = False,
    ) -> None:
        """`grammars` tries those that calls bring; None: nobody does."""
        self._models, self._chat, self._completion, self._grammars = (
            models,
            chat,
            completion,
            grammars,
        )
        self._reads_tool_calls = reads_tool_calls

    @classmethod
    def over(
        cls, engine: VllmEngine, names: Sequence[str], *, tool_call_parser: str | None
    ) -> VllmOpenAI:
        """Of a started engine.

        Args:
            names: by which the model may be asked for; answers say the first.
            tool_call_parser: vLLM's name of what reads tool calls from the model's text; None: they
            stay text, and calls that bring tools are refused.

        Raises what vLLM raises where the model's tokenizer does not suit the parser.
        """
        client = cast("EngineClient", _Client(engine))
        models = OpenAIServingModels(
            client, [BaseModelPath(name=name, model_path=engine.model_path) for name in names]
        )
        tools: Any = {
            "enable_auto_tools": tool_call_parser is not None,
            "tool_parser": tool_call_parser,
        }
        template: Any = {
            "chat_template": None,
            "chat_template_content_format": "auto",
            "request_logger": None,
        }
        renderer = OnlineRenderer(client.model_config, client.renderer, **template, **tools)
        chat = OpenAIServingChat(
            client, models, "assistant", online_renderer=renderer, **template, **tools
        )
        completion = OpenAIServingCompletion(
            client, models, online_renderer=renderer, request_logger=None
        )
        grammars = GrammarTrial(
            XgrammarSpec(engine.model_path, client.model_config.get_vocab_size())
        )
        return cls(
            models, chat, completion, grammars, reads_tool_calls=tool_call_parser is not None
        )

    async def answer(self, route: OpenAIRoute, call: dict[str, Any]) -> OpenAIAnswer:
        """Raises RefusalError where a sync has begun, and EngineDeadError; everything else is an
        answer.
        """
        try:
            said = await self._said(route, call)
        except (RefusalError, EngineDeadError):
            raise
        except ValidationError as error:
            said = create_error_response(_problems(error))
        # vLLM's own routes do the same with all that its code raises: the kind of the error decides
        # the status
        except Exception as error:
            said = create_error_response(error)
        if isinstance(said, ErrorResponse):
            return OpenAIAnswer(
                said.error.code, {"error": said.error.model_dump() | {"code": _code(said, call)}}
            )
        return OpenAIAnswer(200, said if isinstance(said, AsyncGenerator) else said.model_dump())

    async def _said(self, route: OpenAIRoute, call: dict[str, Any]) -> Any:
        if unknown := _unknown_fields(route, call):
            # vLLM would leave out of account what has perhaps only been misspelled.
            return create_error_response(f"no such field: {', '.join(unknown)}")
        _require_small_grammars(call)
        match route:
            case OpenAIRoute.MODELS:
                return await self._models.show_available_models()
            case OpenAIRoute.CHAT:
                chat = ChatCompletionRequest.model_validate(call)
                if chat.tool_choice not in (None, "none") and not self._reads_tool_calls:
                    # vLLM would name arguments of its own server's.
                    return create_error_response(_NO_TOOL_CALLS)
                await self._require(chat)
                return await self._chat.create_chat_completion(chat)
            case OpenAIRoute.COMPLETIONS:
                completion = CompletionRequest.model_validate(call)
                await self._require(completion)
                return await self._completion.create_completion(completion)

    async def _require(self, request: ChatCompletionRequest | CompletionRequest) -> None:
        """Refuse what vLLM takes and the engine suffers from."""
        least, most = REPETITION_PENALTIES
        penalty = request.repetition_penalty
        # As /infer/ has it: vLLM takes whatever is above 0, and divides by it.
        if penalty is not None and not least <= penalty <= most:
            raise VLLMValidationError(
                f"repetition_penalty: is {penalty}; send a value from {least:g} to {most:g}"
            )
        if self._grammars is not None:
            await self._grammars.require(_grammars(request))


def _require_small_grammars(call: Mapping[str, Any]) -> None:
    fields = (
        GRAMMAR_FIELDS
        if call.get("tool_choice") in (None, "none", "auto")
        else (*GRAMMAR_FIELDS, "tools")
    )
    try:
        size = sum(len(json.dumps(call.get(name))) for name in fields)
    except RecursionError as error:
        raise VLLMValidationError(
            f"{', '.join(fields)}: is nested too deeply; send a simpler one"
        ) from error
    if size > MAX_CHARS:
        raise VLLMValidationError(
            f"{', '.join(fields)}: a grammar of {size} characters, a call may bring {MAX_CHARS};"
            " send a smaller one"
        )


def _grammars(request: ChatCompletionRequest | CompletionRequest) -> Iterator[Grammar]:
    """Those that the answer has to follow: its own, and where it has to call a tool, those of the
    tools' arguments.
    """
    own = request.extract_structured_outputs()
    if own is not None:
        if own.json is not None:
            yield Grammar(
                GrammarKind.JSON_SCHEMA,
                own.json if isinstance(own.json, str) else json.dumps(own.json),
            )
        if own.regex is not None:
            yield Grammar(GrammarKind.REGEX, own.regex)
        if own.grammar is not None:
            yield Grammar(
                GrammarKind.LARK if grammar_is_likely_lark(own.grammar) else GrammarKind.EBNF,
                own.grammar,
            )
        if own.choice:
            yield Grammar(GrammarKind.EBNF, choice_as_grammar(own.choice))
        if own.structural_tag is not None:
            yield Grammar(GrammarKind.STRUCTURAL_TAG, own.structural_tag)
    if isinstance(request, ChatCompletionRequest) and request.tool_choice not in (
        None,
        "none",
        "auto",
    ):
        for tool in request.tools or ():
            yield Grammar(GrammarKind.JSON_SCHEMA, json.dumps(tool.function.parameters))


def _problems(error: ValidationError) -> str:
    return "\n".join(
        f"{'.'.join(map(str, one['loc']))}: {one['msg']}"
        for one in error.errors(include_url=False)[:MAX_PROBLEMS]
    )


def _unknown_fields(route: OpenAIRoute, call: Mapping[str, Any]) -> list[str]:
    if route not in FORMS:
        return []
    known = OPENAI_FIELDS[route] | {
        name
        for field, info in FORMS[route].model_fields.items()
        for name in (field, info.alias)
        if name is not None
    }
    unknown = [name for name in call if name not in known]
    near = {name: get_close_matches(name, sorted(known), n=1) for name in unknown[:MAX_PROBLEMS]}
    return [
        name[:100] + (f" (did you mean {meant[0]}?)" if meant else "")
        for name, meant in near.items()
    ]


def _code(said: ErrorResponse, call: Mapping[str, Any]) -> str | int:
    error = said.error
    if error.code == 404 and error.param == "model":
        return UNKNOWN_MODEL
    # Of a prompt that leaves no room for a single token vLLM says only what number of new ones
    # remains; so it does of a call that asks for none.
    leaves_none = (
        error.param == "max_tokens"
        and "got 0" in error.message
        and 0 not in (call.get("max_tokens"), call.get("max_completion_tokens"))
    )
    if (
        error.param in ("input_tokens", "input_text")
        or "longer than the maximum model length" in error.message
        or leaves_none
    ):
        return OVERLONG
    return error.code


class _Client:
    """What vLLM's serving code asks of an `EngineClient`: the engine's, with the adapter that it
    serves, its door, and its count of tokens.
    """

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        llm = engine.llm
        self.vllm_config, self.model_config = llm.vllm_config, llm.model_config
        self.renderer, self.input_processor = llm.renderer, llm.input_processor
        # Those of one request beside another, see `VllmEngine._send_away`.
        self._dies_of_prompt_logprobs = (
            llm.vllm_config.lora_config is not None
            and llm.vllm_config.device_config.device_type == "cpu"
        )

    @property
    def errored(self) -> bool:
        return self._engine.llm.errored

    @property
    def dead_error(self) -> BaseException:
        return self._engine.llm.dead_error

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        self._engine.llm.check_admission(n, request_id)

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        # vLLM queues what comes while it is paused, and would begin with it when the canary does.
        if shut := self._engine.shut:
            raise RefusalError(
                409, f"{self._engine.name} serves no rollouts: {shut}; complete a sync"
            )
        if sampling_params.prompt_logprobs is not None and self._dies_of_prompt_logprobs:
            raise VLLMValidationError(
                "prompt_logprobs: a server with enable_lora has none on CPU; leave it out (and echo"
                " with logprobs)"
            )
        outputs = self._engine.llm.generate(
            prompt,
            sampling_params,
            request_id,
            **(options | {"lora_request": self._engine.adapter}),
        )
        num_tokens = 0
        try:
            # The whole answer at once, or what is new of it: never the same token twice.
            async for output in outputs:
                num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
                if any(completion.finish_reason == "abort" for completion in output.outputs):
                    raise RefusalError(
                        409,
                        f"{self._engine.name} was given other weights before it had begun with the"
                        " call; ask again",
                    )
                yield output
        finally:
            self._engine.count(num_tokens)
            await outputs.aclose()
