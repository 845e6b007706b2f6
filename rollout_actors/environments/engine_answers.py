"""Rollouts of the engines as answers of the OpenAI API, with the fields that vLLM's server adds: nobody needs to know where one comes from."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionTokenLogprob
from openai.types.chat.chat_completion import ChoiceLogprobs

from rollout_actors.environments.responses import TOKEN_ID
from rollout_actors.environments.tool_calls import Said
from shared.rollouts import Rollout


@dataclass(frozen=True, slots=True)
class Sampled:
    """What an engine has sampled in one call, token by token."""

    token_ids: tuple[int, ...]
    """With the stop token, unless the repeat guard has forced it: that one was not sampled."""
    logprobs: tuple[float, ...] | None
    """One each; None: the run's decoding returns none."""
    stop_token_id: int | None
    """The last one, where it is a stop token."""

    @classmethod
    def of(cls, rollout: Rollout) -> Sampled:
        is_forced = len(rollout.response_token_ids) in rollout.forced_positions
        stop = None if is_forced else rollout.stop_token_id
        ending = () if stop is None else (stop,)
        logprobs = rollout.logprobs
        if logprobs is not None and stop is not None:
            assert rollout.stop_token_logprob is not None, "it was sampled, and the others have theirs"
            logprobs = (*logprobs, rollout.stop_token_logprob)
        return cls((*rollout.response_token_ids, *ending), logprobs, stop)


class EngineLogprobs(ChoiceLogprobs):
    """Log-probabilities as plain lists, `token_ids` and `token_logprobs`, since an object for each token takes longer than all else about an answer. `content`
    has those objects as soon as somebody asks for it; until then nothing that writes the answer out has them."""

    token_ids: tuple[int, ...]
    token_logprobs: tuple[float, ...]

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "content" and value is None:
            both = zip(self.token_ids, self.token_logprobs, strict=True)
            value = [ChatCompletionTokenLogprob(token=f"{TOKEN_ID}{token_id}", logprob=logprob, top_logprobs=[]) for token_id, logprob in both]
            self.content = value
        return value


def chat_answer(answer_id: str, model: str, rollout: Rollout, sampled: Sampled, said: Said) -> ChatCompletion:
    """`weight_version` is the one of the weights that sampled it, `engine` the actor."""
    logprobs = None
    if sampled.logprobs is not None:
        # What it is made of needs no check.
        logprobs = EngineLogprobs.model_construct(None, content=None, token_ids=sampled.token_ids, token_logprobs=sampled.logprobs)
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": said.content, "tool_calls": list(said.tool_calls) or None},
        "logprobs": logprobs,
        "token_ids": list(sampled.token_ids),
    }
    answer = ChatCompletion.model_validate(
        {
            "id": answer_id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "choices": [choice],
            "usage": _usage(rollout, sampled),
            "prompt_token_ids": list(rollout.prompt_token_ids),
            "weight_version": rollout.weight_version,
            "engine": rollout.actor,
        }
    )
    reason: Any = "tool_calls" if said.tool_calls else rollout.finish_reason.value
    # Afterwards: vLLM has more reasons than OpenAI's type.
    answer.choices[0].finish_reason = reason
    return answer


def text_answer(answer_id: str, model: str, rollout: Rollout, sampled: Sampled, text: str) -> Completion:
    """The same of plain text."""
    tokens = [f"{TOKEN_ID}{token_id}" for token_id in sampled.token_ids]
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "text": text,
        "logprobs": None if sampled.logprobs is None else {"tokens": tokens, "token_logprobs": sampled.logprobs},
        "token_ids": list(sampled.token_ids),
        "prompt_token_ids": list(rollout.prompt_token_ids),
    }
    answer = Completion.model_validate(
        {
            "id": answer_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "choices": [choice],
            "usage": _usage(rollout, sampled),
            "weight_version": rollout.weight_version,
            "engine": rollout.actor,
        }
    )
    reason: Any = rollout.finish_reason.value
    answer.choices[0].finish_reason = reason
    return answer


def _usage(rollout: Rollout, sampled: Sampled) -> dict[str, int]:
    prompt, completion = len(rollout.prompt_token_ids), len(sampled.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
