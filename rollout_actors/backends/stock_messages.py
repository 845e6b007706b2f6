"""JSON messages of `vllm serve` (vLLM 0.32): its route for token ids, and `/server_info`."""

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
"""Value that vLLM sends for a log-probability that is NaN, minus infinity or missing."""


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
    """Spans of the answer, each with the label of the weights that sampled it."""


class PromptToken(BaseModel):
    logprob: float


class Generated(BaseModel):
    """A server's answer to one request, with only those of vLLM's fields that a rollout needs."""

    prompt_token_ids: list[int]
    """The prompt, with expanded image placeholders."""
    prompt_logprobs: list[dict[int, PromptToken] | None] | None = None
    choices: tuple[Choice]


def _setting(*path: str, **default: Any) -> Any:
    return Field(validation_alias=AliasPath("vllm_config", *path), **default)


class StockInfo(BaseModel):
    """The settings of a `vllm serve` server that a run depends on, from its `/server_info`."""

    dtype: str = _setting("model_config", "dtype")
    """Number type of the model's weights, for example `torch.float32`."""
    overrides: dict[str, object] = _setting("model_config", "hf_overrides", default={})
    """Settings that replace those of the checkpoint's config.json."""
    max_model_len: int = _setting("model_config", "max_model_len")
    logprobs_mode: str = _setting("model_config", "logprobs_mode")
    multimodal: dict[str, object] | None = _setting("model_config", "multimodal_config")
    """vLLM's settings for images and other media; None: the model takes no images."""
    max_images_per_prompt: int | None = _setting(
        "model_config", "multimodal_config", "limit_per_prompt", "image", "count", default=None
    )
    """Limit of images in one prompt; None: no limit."""
    processor_arguments: dict[str, object] | None = _setting(
        "model_config", "multimodal_config", "mm_processor_kwargs", default=None
    )
    """Settings of the image processor that replace the checkpoint's."""
    max_num_seqs: int = _setting("scheduler_config", "max_num_seqs")
    data_parallel_size: int = _setting("parallel_config", "data_parallel_size")
    pipeline_parallel_size: int = _setting("parallel_config", "pipeline_parallel_size")
    worker_extension: str = _setting("parallel_config", "worker_extension_cls")
    weight_transfer: dict[str, object] | None = _setting("weight_transfer_config")
    transport: str | None = _setting("weight_transfer_config", "backend", default=None)
    """How the server receives weights, for example `nccl`; None: it does not accept weights."""


def rollout_body(request: RolloutRequest, actor: str) -> bytes:
    """Return the JSON body that requests this rollout from `vllm serve`.

    Raises RolloutError if an image cannot be decoded.
    """
    fields = sampling_fields(request.decode, request.seed)
    return _body(request.prompt_token_ids, request.images, request.sample_id, actor, fields)


def probe_body(probe: CanaryProbe, actor: str) -> bytes:
    """Return the JSON body that requests the log-probabilities of a canary prompt's tokens."""
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
        # Unexpanded, as for our own engines: the server expands the placeholder of each image.
        "token_ids": list(token_ids),
        "content_parts": parts or None,
        "sampling_params": params,
        "return_token_ids": True,
    }
    return json.dumps(body).encode()


def _data_url(ref: ImageRef, sample_id: str, actor: str) -> str:
    """Return an image as a data URL: its file, or else a PNG of the pixels that the learner reads.

    The file is sent if the server surely decodes it to the same pixels. The server rotates an image
    by its EXIF orientation, as the learner does, but only if it can rewrite the EXIF block.
    Therefore images with an EXIF rotation are sent as PNG.
    """
    assert ref.data is not None, f"an image of {sample_id} was sent without its bytes"
    data = ref.data
    kind = _plain_format(data)
    if kind is None:
        (pixels,) = decode_images([ref], sample_id, actor=actor)
        data = png_of(pixels)
        kind = "png"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _plain_format(data: bytes) -> str | None:
    """Return the format of an upright RGB file, from its header only; None for any other file."""
    try:
        image = open_picture(data)
        is_upright = image.getexif().get(EXIF_ORIENTATION, 1) == 1
    # Damaged files and EXIF data raise many types of errors. Then the pixels are sent, if any.
    except Exception:
        return None
    if is_upright and image.mode == "RGB" and image.format in ("PNG", "JPEG", "WEBP"):
        return image.format.lower()
    return None


def read_probe(answer: Generated) -> tuple[list[int], list[float]]:
    """Return the canary prompt's token ids, and the log-probability of each except the first.

    The token ids have expanded image placeholders. Raises ValueError if log-probabilities are
    missing.
    """
    token_ids = answer.prompt_token_ids
    entries = answer.prompt_logprobs
    if entries is None or len(entries) != len(token_ids):
        raise ValueError(
            "the server returned no log-probabilities for the canary's tokens; start a stock"
            " `vllm serve` of the version that this package pins"
        )
    logprobs = []
    for entry, token_id in zip(entries[1:], token_ids[1:], strict=True):
        logprobs.append(NO_LOGPROB if entry is None else entry[token_id].logprob)
    return token_ids, logprobs


def read_answer(
    answer: Generated, request: RolloutRequest, *, actor: str, label: str
) -> Completion:
    """Convert a server's answer to a `Completion`.

    Raises RolloutError about `actor` if the answer is incomplete, or was sampled by weights with
    another label than `label`.
    """

    def refuse(message: str) -> RolloutError:
        return RolloutError(f"sample {request.sample_id} {message}", actor=actor, phase="generate")

    (choice,) = answer.choices
    reason = finish_reason(choice.finish_reason, request, actor)
    seen = {span.version for span in choice.weight_versions or ()}
    # An answer without tokens has no spans: no weights sampled it.
    if choice.token_ids and seen != {label}:
        raise refuse(
            f"was sampled by weights labelled {sorted(seen)}; expected only {label}: was the"
            " server restarted, or does another run send it weights?"
        )
    # Checked here, because a short list would shift the log-probabilities of all later tokens.
    scored = choice.logprobs
    logprobs = None if scored is None else [token.logprob for token in scored.content]
    num_expected = len(choice.token_ids) if request.decode.return_logprobs else None
    if (None if logprobs is None else len(logprobs)) != num_expected:
        raise refuse(
            "does not have one log-probability for each of its tokens; start the server with vLLM"
            " 0.32"
        )
    if logprobs is not None and NO_LOGPROB in logprobs:
        raise refuse(
            f"has the log-probability NaN or minus infinity at token {logprobs.index(NO_LOGPROB)}:"
            " the server's weights or its number type are broken; read the server's log"
        )
    return Completion(tuple(answer.prompt_token_ids), choice.token_ids, logprobs, reason)
