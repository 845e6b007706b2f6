"""What is wrong with a request that is well formed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollout_actors.engine_settings import EngineSettings
from shared.rollouts import MAX_TEMPERATURE, REPETITION_PENALTIES, DecodeMode, RolloutRequest

MAX_INT = 2**31 - 1
"""Of token ids and counts, as vLLM's processes have them."""
MAX_SEED = 2**63 - 1
"""Of vLLM's seeds. It takes -1 for none at all."""


def request_problems(requests: Sequence[RolloutRequest], settings: EngineSettings, image_token_id: int | None = None) -> Iterator[str]:
    """What the types allow and the engine cannot do: one line each, `path: what is wrong; what to do`. `image_token_id` is the model's placeholder of an image,
    one of which stands for each; None: it has none, or it is not known."""
    least, most = REPETITION_PENALTIES
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
        if image_token_id is not None and (number := request.prompt_token_ids.count(image_token_id)) < len(request.images):
            yield (
                f"{path}.images: has {len(request.images)} images, and prompt_token_ids has {number} of the placeholder {image_token_id} that stands for one; "
                "send one placeholder for each image"
            )
        for key, token_ids in (
            ("prompt_token_ids", request.prompt_token_ids),
            ("decode.stop_token_ids", decode.stop_token_ids),
            ("decode.banned_token_ids", decode.banned_token_ids),
        ):
            if wrong := [token_id for token_id in token_ids if not 0 <= token_id <= MAX_INT]:
                yield f"{path}.{key}: has {wrong[0]}, which is no token; send ids of the model's tokenizer"
        if decode.mode is DecodeMode.BEAM:
            yield f"{path}.decode.mode: 'beam' is not served; send greedy or sample, or decode beams with rollout_backend: hf or vllm.mode: colocate"
        bounds = {
            "temperature": (0 <= decode.temperature <= MAX_TEMPERATURE, decode.temperature, f"from 0 to {MAX_TEMPERATURE:g}"),
            "top_p": (0 < decode.top_p <= 1, decode.top_p, "within (0, 1]"),
            "top_k": (-1 <= decode.top_k <= MAX_INT, decode.top_k, f"-1 or 0 (no limit) or from 1 to {MAX_INT}"),
            "repetition_penalty": (least <= decode.repetition_penalty <= most, decode.repetition_penalty, f"from {least:g} to {most:g}"),
            "max_new_tokens": (1 <= decode.max_new_tokens <= MAX_INT, decode.max_new_tokens, f"from 1 to {MAX_INT}"),
        }
        if not 0 <= request.seed <= MAX_SEED:
            yield f"{path}.seed: is {request.seed}; send a value from 0 to {MAX_SEED}"
        yield from (f"{path}.decode.{key}: is {value}; send a value {wanted}" for key, (sound, value, wanted) in bounds.items() if not sound)
