"""vLLM's own code for the OpenAI API over one of our engines: all of the protocol is vLLM's.

Grammars that an answer has to follow, and streams, are refused (docs/decisions.md).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, cast

from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import BaseModel, ValidationError
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

from rollout_actors.engine.vllm_engine import VllmEngine
from rollout_actors.server.messages import MAX_PROBLEMS, brief_validator, shortened
from rollout_actors.server.openai_routes import OpenAIAnswer, OpenAIRoute
from rollout_actors.server.service import RefusalError
from shared.errors import ConfigError
from shared.rollouts import REPETITION_PENALTIES

OVERLONG = "context_length_exceeded"
UNKNOWN_MODEL = "model_not_found"
"""OpenAI's codes, by which its callers tell what is wrong. Other errors keep vLLM's, the status."""
FORMS: dict[OpenAIRoute, type[ChatCompletionRequest | CompletionRequest]] = {
    OpenAIRoute.CHAT: ChatCompletionRequest,
    OpenAIRoute.COMPLETIONS: CompletionRequest,
}
OPENAI_FORMS = {
    OpenAIRoute.CHAT: chat_create_params.CompletionCreateParamsNonStreaming,
    OpenAIRoute.COMPLETIONS: completion_create_params.CompletionCreateParamsNonStreaming,
}
"""Fields that every caller of OpenAI may send, whether vLLM heeds them or not."""
STOCK_FIELDS = ("stream", "structured_outputs", "response_format")
"""Fields that only a stock server takes."""
NEUTRAL = (None, False, {"type": "text"})
"""Values of these fields that ask for nothing."""

NO_TOOL_CALLS = (
    "tools: this server was not told how the model writes calls of tools; start it with"
    " tool_call_parser=NAME (vLLM's name of what reads them, hermes for Qwen's models), or send"
    " tool_choice: none"
)


def check_tool_parser(name: str | None) -> None:
    """Raise ConfigError for a name that vLLM does not know; needs no model."""
    known = ToolParserManager.list_registered()
    if name is not None and name not in known:
        remedy = f"choose one of {', '.join(sorted(known))}"
        raise ConfigError(f"tool_call_parser: {name} is none of vLLM's; {remedy}")


@dataclass(slots=True)
class VllmOpenAI:
    """An `OpenAIServing` over vLLM's own. It belongs to the engine's event loop."""

    models: OpenAIServingModels
    chat: OpenAIServingChat
    completion: OpenAIServingCompletion
    stock_command: str
    reads_tool_calls: bool = False

    @classmethod
    def from_engine(
        cls,
        engine: VllmEngine,
        names: Sequence[str],
        *,
        tool_call_parser: str | None,
        stock_command: str,
    ) -> VllmOpenAI:
        """Make vLLM's parts over a started engine; answers say the first of the model's names.

        Args:
            tool_call_parser: vLLM's name of what reads tool calls from the model's text; None: they
                stay text, and calls that bring tools are refused.
            stock_command: starts the server that takes what this one refuses.
        """
        client = cast("EngineClient", GuardedClient(engine, stock_command))
        paths = [BaseModelPath(name=name, model_path=engine.model_path) for name in names]
        models = OpenAIServingModels(client, paths)
        reads_tool_calls = tool_call_parser is not None
        options: Any = {
            "chat_template": None,
            "chat_template_content_format": "auto",
            "request_logger": None,
            "enable_auto_tools": reads_tool_calls,
            "tool_parser": tool_call_parser,
        }
        renderer = OnlineRenderer(client.model_config, client.renderer, **options)
        chat = OpenAIServingChat(client, models, "assistant", online_renderer=renderer, **options)
        completion = OpenAIServingCompletion(
            client, models, online_renderer=renderer, request_logger=None
        )
        return cls(models, chat, completion, stock_command, reads_tool_calls=reads_tool_calls)

    async def answer(self, route: OpenAIRoute, call: dict[str, Any]) -> OpenAIAnswer:
        """Answer a call, also one that is wrong. Raises RefusalError and EngineDeadError."""
        try:
            answer = await self._answer(route, call)
        except (RefusalError, EngineDeadError):
            raise
        except ValidationError as error:
            problems = error.errors(include_url=False, include_input=False)[:MAX_PROBLEMS]
            lines = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in problems]
            answer = create_error_response("\n".join(lines))
        except Exception as error:  # vLLM turns each kind into a status, as on its own routes
            answer = create_error_response(error)
        if isinstance(answer, ErrorResponse):
            error_fields = answer.error.model_dump() | {
                "code": _error_code(answer, call),
                "message": shortened(answer.error.message),
            }
            return OpenAIAnswer(answer.error.code, {"error": error_fields})
        return OpenAIAnswer(200, answer.model_dump())

    async def _answer(self, route: OpenAIRoute, call: dict[str, Any]) -> Any:
        if route is OpenAIRoute.MODELS:
            return await self.models.show_available_models()
        if unknown := _unknown_fields(route, call):
            # vLLM would leave out of account a field that has perhaps only been misspelled.
            return create_error_response(f"no such field: {', '.join(unknown)}")
        if refused := [name for name in STOCK_FIELDS if call.get(name) not in NEUTRAL]:
            raise _not_served(", ".join(refused), self.stock_command)
        form: type[BaseModel] = FORMS[route]
        try:
            request = brief_validator(form).validate_python(call)
        # vLLM's checks take some fields for mappings before their kinds are known.
        except (AttributeError, KeyError, TypeError) as error:
            why = f"a field is of another kind than the API's: {error}"
            raise VLLMValidationError(why) from error
        is_chat = isinstance(request, ChatCompletionRequest)
        if is_chat and request.tool_choice not in (None, "none") and not self.reads_tool_calls:
            # vLLM would name arguments of its own server's.
            return create_error_response(NO_TOOL_CALLS)
        least, most = REPETITION_PENALTIES
        penalty = request.repetition_penalty
        # As on /infer/: vLLM takes any value above 0, and divides by it.
        if penalty is not None and not least <= penalty <= most:
            wanted = f"a value from {least:g} to {most:g}"
            raise VLLMValidationError(f"repetition_penalty: is {penalty}; send {wanted}")
        if isinstance(request, ChatCompletionRequest):
            return await self.chat.create_chat_completion(request)
        return await self.completion.create_completion(request)


def _not_served(what: str, stock_command: str) -> RefusalError:
    # No error of vLLM's: that would have no paths in its message.
    instead = f"start in this server's place: {stock_command}"
    return RefusalError(400, f"{what}: not served here; leave it out, or {instead}")


def _unknown_fields(route: OpenAIRoute, call: Mapping[str, Any]) -> list[str]:
    """Return fields that neither vLLM nor OpenAI knows, each with the one that may be meant."""
    known = set(OPENAI_FORMS[route].__annotations__)
    for field, info in FORMS[route].model_fields.items():
        known.add(field)
        if info.alias is not None:
            known.add(info.alias)
    unknown = []
    for name in [name[:100] for name in call if name not in known][:MAX_PROBLEMS]:
        near = get_close_matches(name, sorted(known), n=1)
        unknown.append(name + (f" (did you mean {near[0]}?)" if near else ""))
    return unknown


def _error_code(answer: ErrorResponse, call: Mapping[str, Any]) -> str | int:
    """Return OpenAI's code where it has one for this error, else vLLM's, which is the status."""
    error = answer.error
    if error.code == 404 and error.param == "model":
        return UNKNOWN_MODEL
    # Of a prompt that leaves no room for a single token vLLM only says how many new ones remain,
    # as it does of a call that asks for none.
    leaves_none = (
        error.param == "max_tokens"
        and "got 0" in error.message
        and 0 not in (call.get("max_tokens"), call.get("max_completion_tokens"))
    )
    is_long = "longer than the maximum model length" in error.message
    if error.param in ("input_tokens", "input_text") or is_long or leaves_none:
        return OVERLONG
    return error.code


class GuardedClient:
    """An `EngineClient`, as far as vLLM's serving code needs one, that refuses calls and counts."""

    def __init__(self, engine: VllmEngine, stock_command: str) -> None:
        self._engine = engine
        self._stock_command = stock_command
        llm = engine.llm
        self.vllm_config = llm.vllm_config
        self.model_config = llm.model_config
        self.renderer = llm.renderer
        self.input_processor = llm.input_processor
        # Of one request beside another, see `VllmEngine.run_sync_phase`.
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
        name = self._engine.name
        # vLLM queues what comes while it is paused, and would begin with it when the canary does.
        if shut := self._engine.shut:
            raise RefusalError(409, f"{name} serves no rollouts: {shut}; complete a sync")
        # Some grammars compile for minutes, in threads that all callers share. vLLM makes them of
        # tools too, which the fields of a call do not show.
        if sampling_params.structured_outputs is not None:
            what = "a grammar for tool calls (tool_choice, strict, parallel_tool_calls)"
            raise _not_served(what, self._stock_command)
        if sampling_params.prompt_logprobs is not None and self._dies_of_prompt_logprobs:
            why = "a server with enable_lora has none on CPU; leave it out (and echo with logprobs)"
            raise VLLMValidationError(f"prompt_logprobs: {why}")
        options["lora_request"] = self._engine.adapter
        outputs = self._engine.llm.generate(prompt, sampling_params, request_id, **options)
        num_tokens = 0
        try:
            # The whole answer at once, or its new part: never the same token twice.
            async for output in outputs:
                num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
                if any(completion.finish_reason == "abort" for completion in output.outputs):
                    why = "was given other weights before it had begun with the call; ask again"
                    raise RefusalError(409, f"{name} {why}")
                yield output
        finally:
            self._engine.count(num_tokens)
            await outputs.aclose()
