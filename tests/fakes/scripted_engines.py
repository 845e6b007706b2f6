"""Engines that answer by a script, for the client that asks a run's own: `Engines` of
`rollout_actors.environments.clients.engine`, without vllm and Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollout_support import make_rollout

from rollout_actors.environments.chat.template import ChatTemplate
from rollout_actors.environments.clients.conversation import Conversation, ConversationSettings
from rollout_actors.environments.clients.engine import EngineClient
from rollout_actors.environments.types import State
from shared.prompts import DEFAULT_USER_PROMPT
from shared.rollouts import DecodeMode, DecodeSettings, FinishReason, Rollout, RolloutRequest
from shared.trajectory import EnvironmentRequest, ExampleGroup

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\nTools: ' + (tools | tojson) + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def demo_tokenizer(template: str = CHATML) -> Any:
    """The demo's: byte-level, so that it writes any text."""
    from launch.tools.demo.model import make_tokenizer

    tokenizer = make_tokenizer(DEFAULT_USER_PROMPT)
    tokenizer.chat_template = template
    return tokenizer


def decode_settings(tokenizer: Any, **changes: Any) -> DecodeSettings:
    settings = DecodeSettings(
        mode=DecodeMode.SAMPLE,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        repetition_penalty=1.0,
        max_new_tokens=64,
        num_beams=1,
        stop_token_ids=(tokenizer.convert_tokens_to_ids("<|im_end|>"),),
        banned_token_ids=(),
        return_logprobs=True,
    )
    return replace(settings, **changes)


@dataclass(frozen=True, slots=True)
class Says:
    """One response. `token_ids` come without the stop token."""

    token_ids: Sequence[int]
    finish_reason: FinishReason = FinishReason.STOP
    delay_s: float = 0.0
    version: int = 0


def says(tokenizer: Any, text: str, **fields: Any) -> Says:
    """Make a response with the tokens of this text."""
    return Says(tuple(tokenizer.encode(text, add_special_tokens=False)), **fields)


class ScriptedEngines:
    """Each of `script` answers one request, in their order, or it is a function of the request. An
    exception is raised. A response that is longer than the request allows is cut and ends with
    `length`."""

    def __init__(
        self,
        script: Sequence[Says | BaseException] | Callable[[RolloutRequest], Says | BaseException],
        *,
        number: int = 1,
    ) -> None:
        self._script = script
        self._number = number
        self.requests: list[tuple[int, RolloutRequest]] = []
        """With the engine of each."""
        self.num_under_way = [0] * number
        self.most_under_way = [0] * number
        self.num_cancelled = 0

    def __len__(self) -> int:
        return self._number

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        return [request.prompt_token_ids for _, request in self.requests]

    async def generate(self, engine: int, request: RolloutRequest) -> Rollout:
        self.requests.append((engine, request))
        self.num_under_way[engine] += 1
        self.most_under_way[engine] = max(self.most_under_way[engine], self.num_under_way[engine])
        try:
            script = self._script
            says = script(request) if callable(script) else script[len(self.requests) - 1]
            if isinstance(says, BaseException):
                raise says
            await asyncio.sleep(says.delay_s)
            return rollout_of(request, says, engine)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_under_way[engine] -= 1


def group_requests(
    *examples: int, size: int = 2, first: int = 0, **decode: Any
) -> list[EnvironmentRequest]:
    """Ask for a group of `size` rollouts of each example in step 3, from the group `first` on."""
    settings = decode_settings(demo_tokenizer(), **{"max_new_tokens": 16} | decode)
    groups = [
        ExampleGroup(example, range(size * number, size * (number + 1)))
        for number, example in enumerate(examples, first)
    ]
    return [EnvironmentRequest(3, (group,), settings, 7) for group in groups]


def rollout_of(request: RolloutRequest, says: Says, engine: int = 0) -> Rollout:
    """Answer a request. The log-probability of token i is -(i + 1) / 8."""
    decode = request.decode
    kept = tuple(says.token_ids)
    reason = says.finish_reason
    if len(kept) + (reason is not FinishReason.LENGTH) > decode.max_new_tokens:
        kept = kept[: decode.max_new_tokens]
        reason = FinishReason.LENGTH
    is_forced = reason is FinishReason.REPETITION
    logprobs = tuple(-(i + 1) / 8 for i in range(len(kept) + 1))
    stops = reason is not FinishReason.LENGTH
    has_stop_logprob = stops and decode.return_logprobs and not is_forced
    return make_rollout(
        kept,
        step=request.step,
        position=request.position,
        sample_id=request.sample_id,
        prompt_token_ids=request.prompt_token_ids,
        stop_token_id=decode.stop_token_ids[0] if stops else None,
        logprobs=logprobs[:-1] if decode.return_logprobs else None,
        stop_token_logprob=logprobs[-1] if has_stop_logprob else None,
        finish_reason=reason,
        forced_positions=(len(kept),) if is_forced else (),
        weight_version=says.version,
        actor=f"actor-{engine}",
        seed=request.seed,
    )


def state_at(position: int | None = 0) -> State:
    """Make a rollout's state as it begins; None: it does not know its position."""
    row = {"prompt": [], "example_id": 40, "task": "default"}
    return State(input=row if position is None else row | {"position": position})


def client_over(
    engines: Any,
    tokenizer: Any,
    *,
    decode: DecodeSettings | None = None,
    max_model_len: int = 4096,
    tool_calls: Any = None,
    **changes: Any,
) -> EngineClient:
    """Make a client of run seed 7 and step 3."""
    template = ChatTemplate(tokenizer)
    decode = decode or decode_settings(tokenizer)
    settings = ConversationSettings(template, decode, max_model_len, tool_calls)
    return EngineClient(engines, settings, 7, 3, **changes)


def conversation_over(engines: Any, tokenizer: Any, **changes: Any) -> Conversation:
    """The client's conversation of the rollout of position 0."""
    return client_over(engines, tokenizer, **changes).conversation(state_at())


def ask(conversation: Any, messages: list[Any], **arguments: Any) -> Any:
    """Make one call, in an event loop of its own."""
    create = conversation.chat.completions.create
    return asyncio.run(create(model="m", messages=messages, **arguments))
