"""Routes of the OpenAI API over the engine of a rollout server::

    GET  /v1/models
    POST /v1/chat/completions
    POST /v1/completions

vLLM's code answers (`rollout_actors.server.vllm_openai`). Here its answers get the version of the
weights, and calls are refused as on the other routes (docs/serve.md).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import Any, Protocol

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from rollout_actors.engine.sampling import decode_image, open_image, png_of
from rollout_actors.server.calls import read_body, while_there
from rollout_actors.server.messages import CallLimits
from rollout_actors.server.service import RefusalError, RolloutService
from shared.prompts import PictureTooLargeError, orientation_of

PREFIX = "/v1/"
VERSION_HEADER = "X-Weight-Version"
URL_FIELDS = ("url", "image_url", "video_url", "audio_url")
"""Fields of a message's parts in which vLLM looks for an address."""
CLOSED_FIELDS = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "kv_transfer_params",
    "ec_transfer_params",
    "vllm_xargs",
)
"""Fields of vLLM's that change how images are read, or are for parts that this engine has not."""
MAX_KEYS = 10_000
"""Most keys of one object."""
DEEP_MODES = ("I", "F")
"""First letters of Pillow's modes of more than 8 bits. vLLM's code shows all above 255 as white."""
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""Half of a character's escape, or the whole of a rare one."""
LONG_NUMBER = re.compile(rb"\d{19}")


class OpenAIRoute(StrEnum):
    MODELS = "/v1/models"
    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


def error_content(status: int, message: str) -> dict[str, Any]:
    """Return an error as OpenAI's callers read it, and as vLLM writes it."""
    phrase = HTTPStatus(status).phrase if status in set(HTTPStatus) else "Error"
    return {"error": {"message": message, "type": phrase, "param": None, "code": status}}


@dataclass(frozen=True, slots=True)
class OpenAIAnswer:
    """An answer to send, with its HTTP status."""

    status: int
    content: dict[str, Any]


class OpenAIServing(Protocol):
    async def answer(self, route: OpenAIRoute, call: dict[str, Any]) -> OpenAIAnswer:
        """Answer a call, also one that is wrong. Cancelling it aborts its requests."""


class OpenAIRoutes:
    """The routes, behind the same door as the rollout server's own."""

    def __init__(self, service: RolloutService, serving: OpenAIServing) -> None:
        self._service = service
        self._serving = serving

    async def models(self, request: Request) -> Response:  # noqa: ARG002
        assert self._service.world_size
        answer = await self._serving.answer(OpenAIRoute.MODELS, {})
        return _response(answer, self._service.version)

    async def answer(self, route: OpenAIRoute, request: Request) -> Response:
        # Before the body is read: a caller who has to come again need not send all of it.
        admission = self._service.admit()
        limits = self._service.limits
        body = await read_body(request, self._service)
        call = await asyncio.to_thread(_read_call, body, limits)
        number = _num_sequences(call)
        if number > limits.max_requests:
            why = f"the call asks for {number} answers, one call may ask for {limits.max_requests}"
            raise RefusalError(400, f"{why}; split it, or start the server with max_requests=N")
        with self._service.running(1):
            answer = await while_there(request, self._serving.answer(route, call), admission.check)
        admission.check()
        return _response(answer, admission.version)


def _response(answer: OpenAIAnswer, version: int) -> Response:
    content = answer.content
    if answer.status == 200:
        content = content | {"weight_version": version}
    return JSONResponse(content, answer.status, headers={VERSION_HEADER: str(version)})


def _read_call(body: bytes, limits: CallLimits) -> dict[str, Any]:
    """Read a call, with its images as the learner sees them. Raises RefusalError."""

    def refuse(constant: str) -> None:
        # NaN as a temperature would end the engine.
        raise ValueError(f"{constant} is no JSON")

    def finite(text: str) -> float:
        if not math.isfinite(number := float(text)):
            raise ValueError(f"{text[:100]} is too large a number")
        return number

    def whole(text: str) -> int:
        if not -(2**63) <= (number := int(text)) < 2**63:
            raise ValueError(f"{text[:100]} is too large a number")
        return number

    def small(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(pairs) > MAX_KEYS:
            raise ValueError(f"an object has {len(pairs)} keys, it may have {MAX_KEYS}")
        return dict(pairs)

    try:
        call = json.loads(
            body.decode(),
            parse_constant=refuse,
            parse_float=finite,
            # Millions of token ids are read without it.
            parse_int=whole if LONG_NUMBER.search(body) else None,
            object_pairs_hook=small,
        )
        if SURROGATE.search(body):
            # Half of a pair has no bytes, so no answer could repeat it.
            json.dumps(call, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        why = f"the body cannot be read as JSON: {error}; send the JSON of the OpenAI API"
        raise RefusalError(400, why) from error
    if not isinstance(call, dict):
        raise RefusalError(400, f"the body is a JSON {type(call).__name__}; send an object")
    if closed := [name for name in CLOSED_FIELDS if call.get(name) is not None]:
        raise RefusalError(400, f"{', '.join(closed)}: not served here; leave it out")
    for part in _parts(call.get("messages")):
        # vLLM would take it for the picture's key in its caches, which all callers share.
        if part.get("uuid") is not None:
            raise RefusalError(400, "messages: a part has a uuid; leave it out and send its data")
        for holder in (part, *part.values()):
            if isinstance(holder, dict):
                _require_sent(holder, limits)
    return call


def _require_sent(holder: dict[str, Any], limits: CallLimits) -> None:
    """Make images of a part, or of a mapping in it, what the learner sees. Raises RefusalError."""
    for name in URL_FIELDS:
        url = holder.get(name)
        if not isinstance(url, str):
            continue
        # As on /infer/. vLLM itself would fetch it from anywhere, in this server's name.
        if url[:5].lower() != "data:":
            why = f"messages: name {url[:100]!r}, and this server fetches nothing"
            raise RefusalError(403, f"{why}; send images as data:image/png;base64,...")
        if not url.partition(",")[0].lower().endswith(";base64"):
            why = f"messages: {url[:100]!r} is not base64"
            raise RefusalError(400, f"{why}; send images as data:image/png;base64,...")
        holder[name] = _as_learner_sees(url, limits)


def _parts(conversation: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of all messages: texts, images and so on."""
    # Messages of another form are vLLM's to refuse.
    for message in conversation if isinstance(conversation, list) else ():
        parts = message.get("content") if isinstance(message, dict) else None
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict):
                yield part


def _as_learner_sees(url: str, limits: CallLimits) -> str:
    """Return the address of a picture whose pixels are the same to vLLM and to the learner.

    Raises RefusalError for one that is too large, by its header alone, or cannot be shown.
    """
    # Only pictures of more than 8 bits and turned ones change; what is no picture is left to vLLM.
    try:
        data = base64.b64decode(url.partition(",")[2])
        image = open_image(data)
    except binascii.Error:
        return url
    except ValueError as error:
        if isinstance(error.__cause__, PictureTooLargeError):
            why = f"messages: an image is too large ({error}); send a smaller one"
            raise RefusalError(400, why) from error
        return url
    if problem := limits.pixel_problem(*image.size):
        raise RefusalError(400, f"messages: an image has {problem}")
    # vLLM does not turn a picture whose EXIF block it cannot rewrite. (To look for the block of a
    # PNG decodes it: that one is left to vLLM.)
    is_upright = image.format == "PNG" or orientation_of(image) == 1
    if image.mode[0] not in DEEP_MODES and is_upright:
        return url
    try:
        pixels = decode_image(data)
    except ValueError as error:
        raise RefusalError(400, f"messages: an image cannot be shown: {error}") from error
    return f"data:image/png;base64,{base64.b64encode(png_of(pixels)).decode()}"


def _num_sequences(call: Mapping[str, Any]) -> int:
    """Count the answers that a call asks for: its prompts times `n`."""
    prompt = call.get("prompt")
    number = 1 if call.get("n") is None else call["n"]
    if not isinstance(number, int) or isinstance(number, bool):
        # vLLM would read "3" and 3.0 as numbers.
        raise RefusalError(400, f"n: must be a whole number, got {number!r:.100}")
    # Text, or the token ids of one prompt, or several of either.
    if isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt):
        return len(prompt) * number
    return number
