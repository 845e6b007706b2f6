"""JSON of a stock `vllm serve` (vLLM 0.32): its token-in/token-out route and `/server_info`."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import AliasPath, BaseModel, Field

from rollout_actors.engine.completion import Completion
from rollout_actors.engine.sampling import (
    PROBE_FIELDS,
    decode_images,
    finish_reason,
    png_of,
    sampling_fields,
)
from shared.errors import RolloutError
from shared.prompts import EXIF_ORIENTATION, open_picture
from shared.records import ImageRef
from shared.rollouts import RolloutRequest
from shared.weight_sync.canary import CanaryProbe

NO_LOGPROB = -9999.0
"""The route's number for a log-probability that is NaN, minus infinity or absent."""


class TokenSpan(BaseModel):
    version: str


class Token(BaseModel):
    token_id: int
    logprob: float


class Logprobs(BaseModel):
    content: list[Token]


class Choice(BaseModel):
    finish_reason: str
    token_ids: list[int]
    logprobs: Logprobs | None = None
    weight_versions: list[TokenSpan] | None = None
    """Labels of the weights that sampled these tokens, in order."""


class PromptToken(BaseModel):
    logprob: float


class Generated(BaseModel):
    """One answer, without vLLM's fields that say nothing about a rollout."""

    prompt_token_ids: list[int]
    """Expanded."""
    prompt_logprobs: list[dict[int, PromptToken] | None] | None = None
    choices: tuple[Choice]


def _setting(*path: str, **default: Any) -> Any:
    return Field(validation_alias=AliasPath("vllm_config", *path), **default)


class StockInfo(BaseModel):
    """Settings in `/server_info` that a run depends on."""

    dtype: str = _setting("model_config", "dtype")
    """`torch.float32`, ..."""
    max_model_len: int = _setting("model_config", "max_model_len")
    logprobs_mode: str = _setting("model_config", "logprobs_mode")
    multimodal: dict[str, object] | None = _setting("model_config", "multimodal_config")
    """None: the model takes no images."""
    max_images_per_prompt: int | None = _setting(
        "model_config", "multimodal_config", "limit_per_prompt", "image", "count", default=None
    )
    """None: no limit."""
    max_num_seqs: int = _setting("scheduler_config", "max_num_seqs")
    data_parallel_size: int = _setting("parallel_config", "data_parallel_size")
    pipeline_parallel_size: int = _setting("parallel_config", "pipeline_parallel_size")
    worker_extension: str = _setting("parallel_config", "worker_extension_cls")
    weight_transfer: dict[str, object] | None = _setting("weight_transfer_config")
    transport: str | None = _setting("weight_transfer_config", "backend", default=None)
    """None: it takes no weights."""


def rollout_body(request: RolloutRequest, actor: str) -> bytes:
    """Write a request. Raises RolloutError for an image that cannot be decoded."""
    fields = sampling_fields(request.decode, request.seed)
    return _body(request.prompt_token_ids, request.images, request.sample_id, actor, fields)


def probe_body(probe: CanaryProbe, actor: str) -> bytes:
    """Write the request that scores a canary."""
    return _body(probe.token_ids, probe.images, "canary", actor, PROBE_FIELDS)


def _body(
    token_ids: Sequence[int],
    images: Sequence[ImageRef],
    sample_id: str,
    actor: str,
    params: Mapping[str, object],
) -> bytes:
    parts = [{"type": "image_url", "url": _data_url(image, sample_id, actor)} for image in images]
    body = {
        # Unexpanded, as to our own engines: the server puts each image in its placeholder's place.
        "token_ids": list(token_ids),
        "content_parts": parts or None,
        "sampling_params": params,
        "return_token_ids": True,
    }
    return json.dumps(body).encode()


def _data_url(ref: ImageRef, sample_id: str, actor: str) -> str:
    """Send the file itself where the server reads the learner's pixels in it, else those pixels.

    The server turns an image by its EXIF orientation, as the learner and our own engines do, but
    leaves it as it is stored if it cannot rewrite the EXIF block. So a turned one goes as pixels.
    """
    assert ref.data is not None, f"an image of {sample_id} travels without its bytes"
    data = ref.data
    kind = _plain_format(data)
    if kind is None:
        (pixels,) = decode_images([ref], sample_id, actor=actor)
        data = png_of(pixels)
        kind = "png"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _plain_format(data: bytes) -> str | None:
    """Return the format of an upright RGB file, by its header alone; None for any other file."""
    try:
        image = open_picture(data)
        is_upright = image.getexif().get(EXIF_ORIENTATION, 1) == 1
    # Damaged files and EXIF data raise anything; such a file's pixels are sent, if it has any.
    except Exception:
        return None
    if is_upright and image.mode == "RGB" and image.format in ("PNG", "JPEG", "WEBP"):
        return image.format.lower()
    return None


def read_probe(answer: Generated) -> tuple[list[int], list[float]]:
    """Return the canary's expanded tokens, and the log-probability of each but the first.

    Raises ValueError where the server scored no prompt.
    """
    token_ids = answer.prompt_token_ids
    entries = answer.prompt_logprobs
    if entries is None or len(entries) != len(token_ids):
        raise ValueError("the server gave no log-probabilities of the canary's tokens")
    logprobs = []
    for entry, token_id in zip(entries[1:], token_ids[1:], strict=True):
        logprobs.append(NO_LOGPROB if entry is None else entry[token_id].logprob)
    return token_ids, logprobs


def read_answer(
    answer: Generated, request: RolloutRequest, *, actor: str, label: str
) -> Completion:
    """Read a finished request, all of it by weights of this label. Raises RolloutError."""

    def refuse(message: str) -> RolloutError:
        return RolloutError(f"sample {request.sample_id} {message}", actor=actor, phase="generate")

    (choice,) = answer.choices
    reason = finish_reason(choice.finish_reason, request, actor)
    seen = {span.version for span in choice.weight_versions or ()}
    # An answer without tokens has no spans, and was sampled by nobody.
    if choice.token_ids and seen != {label}:
        raise refuse(
            f"was sampled by weights labelled {sorted(seen)}, not {label} alone: was the server"
            " started again, or does another run send it weights?"
        )
    # Checked here: a list that is too short would shift every later token's log-probability.
    scored = choice.logprobs
    logprobs = None if scored is None else [token.logprob for token in scored.content]
    num_expected = len(choice.token_ids) if request.decode.return_logprobs else None
    if (None if logprobs is None else len(logprobs)) != num_expected:
        raise refuse("came without one log-probability for each of its tokens")
    if logprobs is not None and NO_LOGPROB in logprobs:
        raise refuse(
            f"has no log-probability at token {logprobs.index(NO_LOGPROB)}: NaN, or minus infinity"
        )
    return Completion(tuple(answer.prompt_token_ids), choice.token_ids, logprobs, reason)
