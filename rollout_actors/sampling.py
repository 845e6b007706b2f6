"""How `DecodeSettings` are said to vLLM, and how vLLM says that a response has ended: the same for its engines and for a stock server's JSON, without vllm."""

from __future__ import annotations

from typing import Any

from shared.errors import RolloutError
from shared.rollouts import DecodeMode, DecodeSettings, FinishReason, RolloutRequest

FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "repetition": FinishReason.REPETITION}
BAN = -100.0
"""Added to the logit of a banned id: the lowest bias that vLLM accepts; `exp(-100)` is nothing in fp32."""
PROBE_FIELDS = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0, "ignore_eos": True, "detokenize": False}
"""Of the `SamplingParams` that score a prompt; what is sampled after it is of no interest."""


def sampling_fields(decode: DecodeSettings, seed: int) -> dict[str, Any]:
    """Of the `SamplingParams` of a request; every field is there that a server's defaults could fill."""
    assert decode.mode is not DecodeMode.BEAM, "beams are another call of vLLM, and the configuration refuses them where there is none"
    return {
        "temperature": decode.temperature,
        "top_p": decode.top_p,
        "top_k": decode.top_k,
        "repetition_penalty": decode.repetition_penalty,
        "max_tokens": decode.max_new_tokens,
        "seed": seed,
        "stop_token_ids": list(decode.stop_token_ids),
        "ignore_eos": True,  # the request names its stop tokens; the tokenizer's do not add to them
        "logit_bias": dict.fromkeys(decode.banned_token_ids, BAN) or None,
        "logprobs": 0 if decode.return_logprobs else None,  # 0: of the sampled token alone
        "detokenize": False,
    }


def finish_reason(said: str | None, request: RolloutRequest, actor: str) -> FinishReason:
    """Raises RolloutError where vLLM gave the request up (`abort`, `error`)."""
    if said not in FINISH_REASONS:
        message = f"sample {request.sample_id} was ended with {said!r}, and half an answer is none; see the engine's log"
        raise RolloutError(message, actor=actor, phase="generate")
    return FINISH_REASONS[said]
