"""The routes of a rollout server (spec: server mode), each with and without its last slash::

    GET  /health/                         200 when rollouts can be asked for, and how far the engine is with them; no token needed
    GET  /get_world_size/                 rollout devices
    GET  /version/  /info/                weight version; what the server was started with
    POST /infer/                          `messages.InferCall` -> `messages.InferAnswer`
    POST /init_communicator/              phase rendezvous of a sync: `messages.SyncCall` -> `messages.SyncAnswer`
    POST /sync/{phase}/                   its other phases

Errors are `messages.ErrorAnswer`: 400 what was sent is wrong, 401 no token or another, 403 an image that may not be read, 404, 405, 409 not now, 413 too large,
415 not JSON, 422 what the engine answered contradicts the call, and would again, 499 the caller has gone (nobody reads it), 500 the engine failed, 503 it is
not there yet or no longer.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TypeVar

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from rollout_actors.server import messages
from rollout_actors.server.service import RefusalError, RolloutService
from shared.errors import RolloutError, WeightSyncError
from shared.weight_sync import SyncPhase

T = TypeVar("T")
Route = Callable[[Request], Awaitable[messages.Message]]

GONE_S = 1.0
"""How often a working call looks whether its caller is still there."""


def make_app(service: RolloutService, *, token: str | None = None, only_from: tuple[str, ...] = ("*",)) -> FastAPI:
    """
    Args:
        token: what every call but `/health/` has to bring; None: nothing.
        only_from: host names by which the server may be called. For a server without a token on this machine's own address, that address: or a page in
            this machine's browser could call it by a name of its own.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    routes = _Routes(service)
    for method, path, route, is_open in (
        ("GET", "/health", routes.health, True),
        ("GET", "/get_world_size", routes.world_size, False),
        ("GET", "/version", routes.version, False),
        ("GET", "/info", routes.info, False),
        ("POST", "/infer", routes.infer, False),
        ("POST", "/init_communicator", routes.rendezvous, False),
        ("POST", "/sync/{phase}", routes.sync, False),
    ):
        endpoint = _endpoint(route, None if is_open else token)
        for form in (path, f"{path}/"):
            app.add_api_route(form, endpoint, methods=[method])
    app.add_exception_handler(RefusalError, _refused)
    app.add_exception_handler(HTTPException, _unknown)
    app.add_exception_handler(RolloutError, _contradicted)
    app.add_exception_handler(WeightSyncError, _failed)
    app.add_exception_handler(Exception, _broken)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(only_from))
    return app


class _Routes:
    def __init__(self, service: RolloutService) -> None:
        self._service = service

    async def health(self, request: Request) -> messages.Message:
        return self._service.health()

    async def world_size(self, request: Request) -> messages.Message:
        return messages.WorldSize(world_size=self._service.world_size)

    async def version(self, request: Request) -> messages.Message:
        assert self._service.world_size
        return messages.Version(version=self._service.version)

    async def info(self, request: Request) -> messages.Message:
        return self._service.info()

    async def infer(self, request: Request) -> messages.Message:
        call = await self._read(messages.InferCall, request)
        rollouts = await _while_there(request, self._service.infer(call))
        return messages.InferAnswer(rollouts=tuple(rollouts))

    async def rendezvous(self, request: Request) -> messages.Message:
        return await self._run_phase(SyncPhase.RENDEZVOUS, request)

    async def sync(self, request: Request) -> messages.Message:
        name = request.path_params["phase"]
        phases = [phase for phase in SyncPhase if phase is not SyncPhase.RENDEZVOUS]
        if name not in phases:
            raise RefusalError(404, f"{name} is no phase; there are {', '.join(phases)}, and {SyncPhase.RENDEZVOUS} is /init_communicator/")
        return await self._run_phase(SyncPhase(name), request)

    async def _run_phase(self, phase: SyncPhase, request: Request) -> messages.Message:
        call = await self._read(messages.SyncCall, request)
        # Its caller may go: a phase has a limit of its own, and half of one is worse than all of it.
        return messages.SyncAnswer(report=await asyncio.shield(self._service.run_sync_phase(phase, call)))

    async def _read(self, form: type[messages.M], request: Request) -> messages.M:
        body = await _body(request, self._service.limits.max_request_bytes)
        try:
            return await asyncio.to_thread(messages.read, form, body)
        except ValueError as error:
            raise RefusalError(400, str(error)) from error


def _endpoint(route: Route, token: str | None) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        if token is not None and not _brings(request, token):
            raise RefusalError(
                401, "this server asks for its bearer token; send it as `Authorization: Bearer ...` (a run: rollout_matching.vllm.server.token_env)"
            )
        return _json(200, await route(request))

    return endpoint


def _brings(request: Request, token: str) -> bool:
    # compare_digest: the time it takes does not tell how much of a guess was right.
    return hmac.compare_digest(request.headers.get("authorization", "").encode(), f"Bearer {token}".encode())


async def _body(request: Request, limit: int) -> bytes:
    # Asked for by name, because a page in a browser may send any other type to any address without asking.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RefusalError(415, f"the body's type is {kind or 'not said'}; send JSON with `Content-Type: application/json`")
    too_large = RefusalError(413, f"the body is larger than max_request_bytes = {limit}; send less at a time, or start the server with a larger one")
    if int(request.headers.get("content-length", "0")) > limit:
        raise too_large
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise too_large
        parts.append(part)
    return b"".join(parts)


async def _while_there(request: Request, work: Awaitable[T]) -> T:
    """`work`, cancelled when the caller has gone: nobody waits for what an engine would go on to decode."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait((task,), timeout=GONE_S)
            if not task.done() and await request.is_disconnected():
                raise RefusalError(499, "the caller has gone")
        return task.result()
    finally:
        task.cancel()


def _json(status: int, message: messages.Message) -> Response:
    return Response(message.body(), status, media_type="application/json")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusalError)
    return _json(error.status, messages.ErrorAnswer(error=messages.ErrorDetail(kind=messages.ErrorKind.REFUSED, message=error.message)))


async def _unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = {404: "no such route; POST /infer/, GET /health/, /get_world_size/, /info/, /version/", 405: "POST /infer/ and the phases of a sync, GET the rest"}
    message = said[error.status_code] if error.status_code in said else HTTPStatus(error.status_code).phrase
    return _json(error.status_code, messages.ErrorAnswer(error=messages.ErrorDetail(kind=messages.ErrorKind.REFUSED, message=message)))


async def _contradicted(request: Request, error: Exception) -> Response:
    """An image that cannot be decoded, other weights, no repeat guard: asked again, here or of another server, it would be covered up at best."""
    assert isinstance(error, RolloutError)
    return _json(422, messages.ErrorAnswer.of(error))


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, WeightSyncError)
    return _json(500, messages.ErrorAnswer.of(error))


async def _broken(request: Request, error: Exception) -> Response:
    """Whatever else: the caller learns what, the server's output has the traceback."""
    return _json(500, messages.ErrorAnswer(error=messages.ErrorDetail(kind=messages.ErrorKind.FAILED, message=f"{type(error).__name__}: {error}")))
