"""What is wrong with a request that is well formed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollout_actors.engine_settings import EngineSettings
from shared.rollouts import DecodeMode, RolloutRequest


def request_problems(requests: Sequence[RolloutRequest], settings: EngineSettings) -> Iterator[str]:
    """What the types allow and the engine cannot do: one line each, `path: what is wrong; what to do`."""
    for index, request in enumerate(requests):
        path, decode = f"requests[{index}]", request.decode
        if not request.prompt_token_ids:
            yield f"{path}.prompt_token_ids: is empty; send at least one token"
        if len(request.prompt_token_ids) >= settings.max_model_len:
            yield (
                f"{path}.prompt_token_ids: has {len(request.prompt_token_ids)} tokens, and the server's max_model_len is {settings.max_model_len} with "
                "the response; send a shorter prompt, or start the server with a larger max_model_len"
            )
        if len(request.images) > settings.max_images_per_prompt:
            yield (
                f"{path}.images: has {len(request.images)} images, the server takes {settings.max_images_per_prompt}; "
                f"start it with max_images_per_prompt={len(request.images)}"
            )
        if decode.mode is DecodeMode.BEAM:
            yield f"{path}.decode.mode: 'beam' is not served; send greedy or sample, or decode beams with rollout_backend: hf or vllm.mode: colocate"
        bounds = {
            "temperature": (decode.temperature >= 0, decode.temperature, "at least 0"),
            "top_p": (0 < decode.top_p <= 1, decode.top_p, "within (0, 1]"),
            "top_k": (decode.top_k >= -1, decode.top_k, "-1 or 0 (no limit) or at least 1"),
            "repetition_penalty": (decode.repetition_penalty > 0, decode.repetition_penalty, "above 0"),
            "max_new_tokens": (decode.max_new_tokens >= 1, decode.max_new_tokens, "at least 1"),
        }
        yield from (f"{path}.decode.{key}: is {value}; send a value {wanted}" for key, (sound, value, wanted) in bounds.items() if not sound)
