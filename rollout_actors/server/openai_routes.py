"""The same engine as an endpoint of the OpenAI API, beside the routes of
`rollout_actors.server.app` and behind the same door::

    GET  /v1/models
    POST /v1/chat/completions
    POST /v1/completions

What they take and say is vLLM's (`rollout_actors.server.vllm_openai`), with `X-Weight-Version` in
the header and `weight_version` in the body of an answer. What is refused here says it in OpenAI's
form, `error_content`: 409 while a weight sync is under way or was not completed, and for what had
not been answered when new weights began to arrive.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import Any, Protocol

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from PIL import Image

from rollout_actors.engine.sampling import decode_image, open_image
from rollout_actors.server.calls import read_body, while_there
from rollout_actors.server.service import Admission, RefusalError, RolloutService

PREFIX = "/v1/"
VERSION_HEADER = "X-Weight-Version"
VERSION_FIELD = "weight_version"
URL_FIELDS = ("url", "image_url", "video_url", "audio_url")
"""Of the parts of a message: where vLLM looks for an address."""
DEEP_MODES = ("I", "F")
"""How Pillow's modes of more than 8 bits begin. vLLM's code shows all that is above 255 as white.
"""


class OpenAIRoute(StrEnum):
    MODELS = "/v1/models"
    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


def error_content(status: int, message: str) -> dict[str, Any]:
    """As OpenAI's callers read an error, and as vLLM writes it."""
    return {
        "error": {
            "message": message,
            "type": HTTPStatus(status).phrase if status in set(HTTPStatus) else "Error",
            "param": None,
            "code": status,
        }
    }


@dataclass(frozen=True, slots=True)
class OpenAIAnswer:
    """What to send: one object of JSON, or the events of a stream as they are sent."""

    status: int
    content: dict[str, Any] | AsyncGenerator[str, None]


class OpenAIServing(Protocol):
    async def answer(self, route: OpenAIRoute, call: dict[str, Any]) -> OpenAIAnswer:
        """Whatever is wrong with the call is an answer. Cancelling it aborts its requests."""
        ...


class OpenAIRoutes:
    """A `Route` of `rollout_actors.server.app` for each `OpenAIRoute`."""

    def __init__(self, service: RolloutService, serving: OpenAIServing) -> None:
        self._service, self._serving = service, serving

    async def models(self, request: Request) -> Response:  # noqa: ARG002
        assert self._service.world_size
        return self._response(
            await self._serving.answer(OpenAIRoute.MODELS, {}), self._service.version
        )

    async def chat(self, request: Request) -> Response:
        return await self._answer(OpenAIRoute.CHAT, request)

    async def completions(self, request: Request) -> Response:
        return await self._answer(OpenAIRoute.COMPLETIONS, request)

    async def _answer(self, route: OpenAIRoute, request: Request) -> Response:
        # Before the body is read: a caller who has to come again need not send all of it.
        admission = self._service.admit()
        body = await read_body(request, self._service.limits.max_request_bytes)
        call = await asyncio.to_thread(_read, body, self._service.limits.max_image_pixels)
        self._check_size(call)
        with self._service.running(1):
            answer = await while_there(request, self._serving.answer(route, call), admission.check)
        if not isinstance(answer.content, dict):
            return StreamingResponse(
                self._stream(answer.content, admission),
                media_type="text/event-stream",
                headers=_headers(admission.version),
            )
        admission.check()
        return self._response(answer, admission.version)

    def _response(self, answer: OpenAIAnswer, version: int) -> Response:
        assert isinstance(answer.content, dict)
        content = (
            answer.content | {VERSION_FIELD: version} if answer.status == 200 else answer.content
        )
        return JSONResponse(content, answer.status, headers=_headers(version))

    async def _stream(
        self, events: AsyncGenerator[str, None], admission: Admission
    ) -> AsyncGenerator[str, None]:
        try:
            with self._service.running(1):
                async for event in events:
                    admission.check()
                    yield event
        except RefusalError as error:  # its status has been sent
            yield f"data: {json.dumps(error_content(error.status, error.message))}\n\n"
        finally:
            await events.aclose()

    def _check_size(self, call: Mapping[str, Any]) -> None:
        number, limit = _num_sequences(call), self._service.limits.max_requests
        if number > limit:
            raise RefusalError(
                400,
                f"the call asks for {number} answers, one call may ask for {limit}; split it, or"
                " start the server with max_requests=N",
            )


def _headers(version: int) -> dict[str, str]:
    return {VERSION_HEADER: str(version)}


def _read(body: bytes, max_image_pixels: int) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        # Of a temperature it would end the engine.
        raise ValueError(f"{constant} is no JSON")

    try:
        call = json.loads(body, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise RefusalError(
            400, f"the body cannot be read as JSON: {error}; send the JSON of the OpenAI API"
        ) from error
    if not isinstance(call, dict):
        raise RefusalError(
            400,
            f"the body is a JSON {type(call).__name__}; send an object, as the OpenAI API has it",
        )
    for holder, name in _addresses(call.get("messages")):
        url = holder[name]
        # As /infer/ has it. vLLM itself would fetch it from wherever it is, in this server's name.
        if not url[:5].lower() == "data:":
            raise RefusalError(
                403,
                f"messages: name {url[:100]!r}, and this server fetches nothing; send images as"
                " data:image/png;base64,...",
            )
        holder[name] = _as_shown(url, max_image_pixels)
    return call


def _as_shown(url: str, max_image_pixels: int) -> str:
    """Return the address of a picture of which vLLM's code reads the pixels that ours does, which
    is the same but for pixels of more than 8 bits.

    What is no picture is left to vLLM. Raises RefusalError for one that is too large, by its header
    alone, or that cannot be shown.
    """
    head, _, body = url.partition(",")
    try:
        data = base64.b64decode(body) if head.lower().endswith(";base64") else b""
        image = open_image(data)
    except binascii.Error:
        return url
    except ValueError as error:
        if isinstance(error.__cause__, Image.DecompressionBombError):
            raise RefusalError(
                400, f"messages: an image is too large ({error}); send a smaller one"
            ) from error
        return url
    width, height = image.size
    if width * height > max_image_pixels:
        raise RefusalError(
            400,
            f"messages: an image has {width} x {height} pixels, one may have {max_image_pixels};"
            f" send a smaller one, or start the server with max_image_pixels={width * height}",
        )
    if image.mode[0] not in DEEP_MODES:
        return url
    try:
        pixels = decode_image(data)
    except ValueError as error:
        raise RefusalError(400, f"messages: an image cannot be shown: {error}") from error
    file = io.BytesIO()
    pixels.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _addresses(conversation: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Where the parts of all messages hold one: the mapping and its key. What has another form has
    none, and is vLLM's to refuse.
    """
    for message in conversation if isinstance(conversation, list) else ():
        parts = message.get("content") if isinstance(message, dict) else None
        for part in parts if isinstance(parts, list) else ():
            for holder in (part, *part.values()) if isinstance(part, dict) else ():
                if isinstance(holder, dict):
                    yield from (
                        (holder, name) for name in URL_FIELDS if isinstance(holder.get(name), str)
                    )


def _num_sequences(call: Mapping[str, Any]) -> int:
    prompt, number = call.get("prompt"), call.get("n")
    if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
        # vLLM would read "3" and 3.0 as numbers.
        raise RefusalError(400, f"n: must be a whole number, got {number!r}")
    # Text, or the token ids of one prompt, or several of either.
    prompts = (
        len(prompt)
        if isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt)
        else 1
    )
    return prompts * (1 if number is None else number)
