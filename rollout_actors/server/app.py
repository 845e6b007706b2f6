"""The routes of a rollout server (spec: server mode), each with and without its last slash::

    GET  /health/                         200 when rollouts can be asked for, and how far the engine
    is with them; no token needed GET  /get_world_size/                 rollout devices GET
    /version/  /info/                weight version; what the server was started with POST /infer/
    `messages.InferCall` -> `messages.InferAnswer` POST /init_communicator/              phase
    rendezvous of a sync: `messages.SyncCall` -> `messages.SyncAnswer` POST /sync/{phase}/
    its other phases /v1/...                               `openai_routes`

Errors are `messages.ErrorAnswer`, and under /v1/ of OpenAI's form: 400 what was sent is wrong, 401
no token or another, 403 an image that may not be read, 404, 405, 408 a body that stalls, 409 not
now, 413 too large, 415 not JSON, 422 what the engine answered contradicts the call, and would
again, 499 the caller has gone (nobody reads it), 500 the engine failed, 503 it is not there yet or
no longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from http import HTTPStatus

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from rollout_actors.server import messages
from rollout_actors.server.calls import check_token, read_body, while_there
from rollout_actors.server.openai_routes import (
    PREFIX,
    OpenAIRoute,
    OpenAIRoutes,
    OpenAIServing,
    error_content,
)
from rollout_actors.server.service import RefusalError, RolloutService
from shared.errors import RolloutError, WeightSyncError
from shared.weight_sync.phases import SyncPhase

Route = Callable[[Request], Awaitable[messages.WireMessage | Response]]


def make_app(
    service: RolloutService,
    *,
    openai: OpenAIServing | None = None,
    token: str | None = None,
    only_from: tuple[str, ...] = ("*",),
) -> FastAPI:
    """
    Args:
        openai: what answers the routes of the OpenAI API; None: there are none.
        token: what every call but `/health/` has to bring; None: nothing.
        only_from: host names by which the server may be called. For a server without a token on
        this machine's own address, that address: or a page in
            this machine's browser could call it by a name of its own.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    routes = _Routes(service)
    ours: tuple[tuple[str, str, Route, bool], ...] = (
        ("GET", "/health", routes.health, True),
        ("GET", "/get_world_size", routes.world_size, False),
        ("GET", "/version", routes.version, False),
        ("GET", "/info", routes.info, False),
        ("POST", "/infer", routes.infer, False),
        ("POST", "/init_communicator", routes.rendezvous, False),
        ("POST", "/sync/{phase}", routes.sync, False),
    )
    for method, path, route, is_open in (
        *ours,
        *([] if openai is None else _openai_routes(service, openai)),
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


def _openai_routes(
    service: RolloutService, openai: OpenAIServing
) -> Iterator[tuple[str, str, Route, bool]]:
    routes = OpenAIRoutes(service, openai)
    yield "GET", OpenAIRoute.MODELS, routes.models, False
    yield "POST", OpenAIRoute.CHAT, routes.chat, False
    yield "POST", OpenAIRoute.COMPLETIONS, routes.completions, False


class _Routes:
    def __init__(self, service: RolloutService) -> None:
        self._service = service

    async def health(self, request: Request) -> messages.WireMessage:
        return self._service.health()

    async def world_size(self, request: Request) -> messages.WireMessage:
        return messages.WorldSize(world_size=self._service.world_size)

    async def version(self, request: Request) -> messages.WireMessage:
        assert self._service.world_size
        return messages.Version(version=self._service.version)

    async def info(self, request: Request) -> messages.WireMessage:
        return self._service.info()

    async def infer(self, request: Request) -> messages.WireMessage:
        call = await self._read(messages.InferCall, request)
        rollouts = await while_there(request, self._service.infer(call))
        return messages.InferAnswer(rollouts=tuple(rollouts))

    async def rendezvous(self, request: Request) -> messages.WireMessage:
        return await self._run_phase(SyncPhase.RENDEZVOUS, request)

    async def sync(self, request: Request) -> messages.WireMessage:
        name = request.path_params["phase"]
        phases = [phase for phase in SyncPhase if phase is not SyncPhase.RENDEZVOUS]
        if name not in phases:
            raise RefusalError(
                404,
                f"{name} is no phase; there are {', '.join(phases)}, and {SyncPhase.RENDEZVOUS} is"
                " /init_communicator/",
            )
        return await self._run_phase(SyncPhase(name), request)

    async def _run_phase(self, phase: SyncPhase, request: Request) -> messages.WireMessage:
        call = await self._read(messages.SyncCall, request)
        # Its caller may go: a phase has a limit of its own, and half of one is worse than all of
        # it.
        return messages.SyncAnswer(
            report=await asyncio.shield(self._service.run_sync_phase(phase, call))
        )

    async def _read(self, form: type[messages.M], request: Request) -> messages.M:
        body = await read_body(request, self._service.limits.max_request_bytes)
        try:
            return await asyncio.to_thread(messages.read, form, body)
        except ValueError as error:
            raise RefusalError(400, str(error)) from error


def _endpoint(route: Route, token: str | None) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        check_token(request, token)
        answer = await route(request)
        return answer if isinstance(answer, Response) else _json(200, answer)

    return endpoint


def _json(status: int, message: messages.WireMessage) -> Response:
    return Response(message.body(), status, media_type="application/json")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusalError)
    return _error(request, error.status, messages.ErrorKind.REFUSED, error.message)


async def _unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = {
        404: (
            "no such route; POST /infer/, GET /health/, /get_world_size/, /info/, /version/, and"
            " the OpenAI API's under /v1/"
        ),
        405: "POST /infer/ and the phases of a sync, GET the rest",
    }
    message = (
        said[error.status_code]
        if error.status_code in said
        else HTTPStatus(error.status_code).phrase
    )
    return _error(request, error.status_code, messages.ErrorKind.REFUSED, message)


async def _contradicted(request: Request, error: Exception) -> Response:
    """An image that cannot be decoded, other weights, no repeat guard: asked again, here or of
    another server, it would be covered up at best.
    """
    assert isinstance(error, RolloutError)
    return _json(422, messages.ErrorAnswer.of(error))


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, WeightSyncError)
    return _json(500, messages.ErrorAnswer.of(error))


async def _broken(request: Request, error: Exception) -> Response:
    """Whatever else: the caller learns what, the server's output has the traceback."""
    return _error(request, 500, messages.ErrorKind.FAILED, f"{type(error).__name__}: {error}")


def _error(request: Request, status: int, kind: messages.ErrorKind, message: str) -> Response:
    if request.url.path.startswith(PREFIX):
        answer: Response = JSONResponse(error_content(status, message), status)
    else:
        answer = _json(
            status, messages.ErrorAnswer(error=messages.ErrorDetail(kind=kind, message=message))
        )
    if status == HTTPStatus.REQUEST_TIMEOUT:
        # The rest of the body would be read as the next call.
        answer.headers["Connection"] = "close"
    return answer
