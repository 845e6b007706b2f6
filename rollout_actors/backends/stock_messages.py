"""What goes over the token-in/token-out route of a stock `vllm serve` (`/inference/v1/generate` of
vLLM 0.32), and what is read from it.

The same sampling as an engine of this machine is asked for (`rollout_actors.engine.sampling`), so
that the same rollout comes back.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from typing import Any

from PIL import Image
from pydantic import BaseModel

from rollout_actors.engine.completion import Completion
from rollout_actors.engine.sampling import (
    PROBE_FIELDS,
    decode_images,
    finish_reason,
    sampling_fields,
)
from shared.errors import RolloutError
from shared.records import ImageRef
from shared.rollouts import RolloutRequest
from shared.weight_sync.canary import CanaryProbe

NO_LOGPROB = -9999.0
"""What the route writes for a log-probability that is NaN, minus infinity or not there."""
_ORIENTATION = 0x0112
"""EXIF's tag."""


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
    """vLLM's labels of the weights that sampled these tokens, in order."""


class PromptToken(BaseModel):
    logprob: float


class Generated(BaseModel):
    """One answer. vLLM sends more fields, which say nothing about a rollout."""

    prompt_token_ids: list[int]
    """Expanded."""
    prompt_logprobs: list[dict[int, PromptToken] | None] | None = None
    choices: tuple[Choice]


def rollout_body(request: RolloutRequest, actor: str) -> bytes:
    """Raises RolloutError naming the sample whose image cannot be decoded."""
    return _body(
        request.prompt_token_ids,
        request.images,
        request.sample_id,
        actor,
        sampling_fields(request.decode, request.seed),
    )


def probe_body(probe: CanaryProbe, actor: str) -> bytes:
    return _body(probe.token_ids, probe.images, "canary", actor, PROBE_FIELDS)


def read_probe(answer: Generated) -> tuple[list[int], list[float]]:
    """The canary's expanded tokens, and the log-probability of each but the first. Raises
    ValueError where the server scored no prompt.
    """
    if answer.prompt_logprobs is None or len(answer.prompt_logprobs) != len(
        answer.prompt_token_ids
    ):
        raise ValueError("the server gave no log-probabilities of the canary's tokens")
    scored = zip(answer.prompt_logprobs[1:], answer.prompt_token_ids[1:], strict=True)
    return answer.prompt_token_ids, [
        NO_LOGPROB if entry is None else entry[token_id].logprob for entry, token_id in scored
    ]


def read_answer(
    answer: Generated, request: RolloutRequest, *, actor: str, label: str
) -> Completion:
    """A finished request. `label` is the server's name of the weights that it is to be of.

    Raises RolloutError where the server did not finish it, sampled any token of it by other
    weights, or has no log-probability of a token.
    """

    def refuse(message: str) -> RolloutError:
        return RolloutError(f"sample {request.sample_id} {message}", actor=actor, phase="generate")

    (choice,) = answer.choices
    reason = finish_reason(choice.finish_reason, request, actor)
    seen = {span.version for span in choice.weight_versions or ()}
    if choice.token_ids and seen != {label}:
        raise refuse(
            f"was sampled by weights labelled {sorted(seen)}, not {label} alone: was the server"
            " started again, or does another run send it weights?"
        )
    logprobs = (
        None if choice.logprobs is None else [token.logprob for token in choice.logprobs.content]
    )
    if (logprobs is None) == request.decode.return_logprobs or (
        logprobs is not None and len(logprobs) != len(choice.token_ids)
    ):
        raise refuse("came without one log-probability for each of its tokens")
    if logprobs is not None and NO_LOGPROB in logprobs:
        raise refuse(
            f"has no log-probability at token {logprobs.index(NO_LOGPROB)}: NaN, or minus infinity"
        )
    return Completion(tuple(answer.prompt_token_ids), choice.token_ids, logprobs, reason)


def _body(
    token_ids: Sequence[int],
    images: Sequence[ImageRef],
    sample_id: str,
    actor: str,
    params: dict[str, Any],
) -> bytes:
    parts = [{"type": "image_url", "url": _data_url(image, sample_id, actor)} for image in images]
    body = {
        "token_ids": list(token_ids),
        "content_parts": parts or None,
        "sampling_params": params,
        "return_token_ids": True,
    }
    return json.dumps(body).encode()


def _data_url(ref: ImageRef, sample_id: str, actor: str) -> str:
    """The file as it is where the server reads the same pixels in it as the learner does; else
    those pixels.

    The server turns an image by its EXIF orientation; the learner and our own engines do not.
    """
    assert ref.data is not None, f"an image of {sample_id} travels without its bytes"
    data, kind = ref.data, _plain_format(ref.data)
    if kind is None:
        (pixels,) = decode_images([ref], sample_id, actor=actor)
        buffer = io.BytesIO()
        pixels.save(buffer, "PNG")
        data, kind = buffer.getvalue(), "png"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _plain_format(data: bytes) -> str | None:
    """The format of a file that has nothing to be turned or converted, by its header alone; None
    for any other.
    """
    try:
        image = Image.open(io.BytesIO(data))
        is_upright = image.getexif().get(_ORIENTATION, 1) == 1
    # whatever Pillow's reading of a damaged file, or of damaged EXIF data, runs into: its pixels
    # are sent, if it has any
    except Exception:
        return None
    is_plain = is_upright and image.mode == "RGB" and image.format in ("PNG", "JPEG", "WEBP")
    return image.format.lower() if is_plain and image.format else None
