"""The routes of a rollout server (spec: server mode), each with and without its last slash::

    GET  /health/             200 and progress while the engine runs; needs no token
    GET  /get_world_size/     number of rollout devices
    GET  /version/  /info/    weight version; settings of the server
    POST /infer/              `messages.InferCall` -> `messages.InferAnswer`
    POST /init_communicator/  phase rendezvous of a sync: `SyncCall` -> `SyncAnswer`
    POST /sync/{phase}/       the other phases of a sync
    POST /end_lease/          the run of the header `X-Rollmatch-Run` has ended -> ServerInfo
    /v1/...                   404, with the command of a `vllm serve` that has these routes

Errors are `messages.ErrorAnswer`. 400: the call is invalid; 401: no token, or a wrong one; 403: an
image that may not be read; 404, 405: no such route or method; 408: a body that stalls; 409: not
possible now; 413: too large; 415: not JSON; 422: the engine cannot answer the call, and could not
after a retry; 499: the caller has disconnected and reads no answer; 500: the engine failed; 503:
the engine is loading or has died.

Connections have limits too (`PromptProtocol`): idle time, size of the HTTP headers, open files.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import resource
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from functools import partial
from http import HTTPStatus
from typing import TypeVar

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rollout_actors.backends.stock_server import stock_command
from rollout_actors.server import messages
from rollout_actors.server.lease import RUN_HEADER, decoded
from rollout_actors.server.service import RefusalError, RolloutService
from shared.errors import RolloutError, WeightSyncError
from shared.weight_sync.phases import SyncPhase

T = TypeVar("T")
Route = Callable[[Request], Awaitable[messages.WireMessage | Response]]

_LOGGER = logging.getLogger(__name__)

HEAD_S = 10.0
"""Longest wait for the HTTP headers of a call, on a new connection and after an answer."""
MAX_HEAD_BYTES = 1 << 16
STALL_S = 30.0
"""Longest wait for the next part of a call's body, in seconds."""
GONE_S = 1.0
"""Seconds between two checks whether the caller is still connected."""
UNKNOWN = {
    404: "no such route; POST /infer/, GET /health/, /get_world_size/, /info/, /version/",
    405: "POST /infer/ and the phases of a sync, GET the rest",
}


def make_app(
    service: RolloutService,
    *,
    token: str | None = None,
    only_from: tuple[str, ...] = ("*",),
) -> FastAPI:
    """Build the HTTP application of a rollout server (`rollmatch serve`).

    Args:
        token: bearer token required in every call except `/health/`; None: not required.
        only_from: host names by which callers may address the server. A server without a token on a
            loopback address accepts only that address. Otherwise a web page in this machine's
            browser could call it under another host name.
    """
    # No redirects, because a client would have to send its body, with all images, again.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)

    def add(method: str, path: str, route: Route, *, is_open: bool = False) -> None:
        async def endpoint(request: Request) -> Response:
            has_token = check_token(request, token, is_needed=not is_open)
            with service.lease.call(run_of(request)) if has_token else nullcontext():
                answer = await route(request)
            return answer if isinstance(answer, Response) else _json(200, answer)

        for form in (path, f"{path}/"):
            app.add_api_route(form, endpoint, methods=[method])

    def add_get(path: str, make: Callable[[], messages.WireMessage]) -> None:
        async def route(request: Request) -> messages.WireMessage:
            return make()

        add("GET", path, route, is_open=path == "/health")

    add_get("/health", service.health)
    add_get("/get_world_size", lambda: messages.WorldSize(world_size=service.world_size))
    add_get("/version", lambda: messages.Version(version=service.info().version))

    async def info(request: Request) -> messages.WireMessage:
        return service.info(run_of(request))

    async def end_lease(request: Request) -> messages.WireMessage:
        service.lease.end(run_of(request))
        return service.info()

    add("GET", "/info", info)
    add("POST", "/end_lease", end_lease)
    routes = _PostRoutes(service)
    add("POST", "/infer", routes.infer)
    add("POST", "/init_communicator", partial(routes.run_phase, SyncPhase.RENDEZVOUS))
    add("POST", "/sync/{phase}", routes.sync)

    async def refuse_openai(request: Request) -> Response:
        command = stock_command(service.settings, service.name)
        why = f"{request.url.path}: this server has no routes of the OpenAI API"
        raise RefusalError(404, f"{why}; start this server instead: {command}")

    for method in ("GET", "POST"):
        add(method, "/v1/{path:path}", refuse_openai)
    for kind in (RefusalError, HTTPException, RolloutError, WeightSyncError, Exception):
        app.add_exception_handler(kind, _error_answer)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(only_from))
    return app


class _PostRoutes:
    def __init__(self, service: RolloutService) -> None:
        self._service = service

    async def infer(self, request: Request) -> messages.WireMessage:
        call = await self._read(messages.InferCall, request)
        rollouts = await while_there(request, self._service.infer(call))
        return messages.InferAnswer(rollouts=tuple(rollouts))

    async def sync(self, request: Request) -> messages.WireMessage:
        name = request.path_params["phase"]
        phases = [phase for phase in SyncPhase if phase is not SyncPhase.RENDEZVOUS]
        if name not in phases:
            known = f"{', '.join(phases)}, and {SyncPhase.RENDEZVOUS} is /init_communicator/"
            raise RefusalError(
                404, f"{name} is not a phase of a weight sync; the phases are {known}"
            )
        return await self.run_phase(SyncPhase(name), request)

    async def run_phase(self, phase: SyncPhase, request: Request) -> messages.WireMessage:
        call = await self._read(messages.SyncCall, request)
        # Shielded: if the caller disconnects, the phase must still complete. It has a time limit.
        work = self._service.run_sync_phase(phase, call, run_of(request))
        report = await asyncio.shield(work)
        return messages.SyncAnswer(report=report)

    async def _read(self, form: type[messages.M], request: Request) -> messages.M:
        body = await read_body(request, self._service)
        try:
            return await asyncio.to_thread(messages.read, form, body)
        except ValueError as error:
            raise RefusalError(400, str(error)) from error


def _json(status: int, message: messages.WireMessage) -> Response:
    return Response(message.body(), status, media_type="application/json")


async def _error_answer(request: Request, error: Exception) -> Response:
    match error:
        # An image that cannot be decoded, other weights, or no repeat guard: a retry, here or on
        # another server, would at best hide the error.
        case RolloutError():
            return _json(422, messages.ErrorAnswer.of(error))
        case WeightSyncError():
            return _json(500, messages.ErrorAnswer.of(error))
        case RefusalError(status=status, message=message):
            kind = messages.ErrorKind.REFUSED
        case HTTPException(status_code=status):
            kind = messages.ErrorKind.REFUSED
            message = UNKNOWN.get(status) or HTTPStatus(status).phrase
        case _:  # the server's output has the traceback
            status = 500
            kind = messages.ErrorKind.FAILED
            message = f"{type(error).__name__}: {error}"
    detail = messages.ErrorDetail(kind=kind, message=messages.shortened(message))
    answer = _json(status, messages.ErrorAnswer(error=detail))
    if status == HTTPStatus.REQUEST_TIMEOUT:
        # Otherwise the rest of the body would be read as the next call.
        answer.headers["Connection"] = "close"
    return answer


class PromptProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits for the time and the size of a call's headers.

    uvicorn would wait for missing headers without limit, and accept headers of any size. The body
    has its own limit (`read_body`).
    """

    _timer: asyncio.TimerHandle | None = None
    _num_head_bytes: int | None = None
    """Bytes of the headers that are arriving; None: none have begun, or they are complete."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        had_begun = self._num_head_bytes is not None
        super().data_received(data)
        # The part that contains the start of a head may also contain the end of a body.
        if had_begun and self._num_head_bytes is not None:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self.transport.close()

    def on_message_begin(self) -> None:
        self._num_head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._num_head_bytes = None
        self._stop_waiting()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # If a call arrived before the answer was complete, the server now works on it.
        if self.cycle.response_complete:
            self._wait_for_head()

    def _wait_for_head(self) -> None:
        self._stop_waiting()
        # Not `abort`: a slow peer may still be reading its last answer.
        self._timer = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def open_many_files() -> None:
    """Raise this process's limit of open files, and so of connections, to the system's maximum."""
    # Each connection is a file, and the usual limit of 1,024 is soon reached.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def check_token(request: Request, token: str | None, *, is_needed: bool = True) -> bool:
    """Return whether an HTTP call has the server's bearer token; `token` None: always True.

    If `is_needed`, raises RefusalError for a missing or wrong token.
    """
    sent = request.headers.get("authorization", "").encode()
    # compare_digest: its duration does not reveal how much of a guess was right.
    if token is None or hmac.compare_digest(sent, f"Bearer {token}".encode()):
        return True
    if is_needed:
        raise RefusalError(
            401,
            "this server requires its bearer token; send it as `Authorization: Bearer ...` (runs of"
            " its user on its machine find it in its token file, others in the variable that"
            " rollout_matching.vllm.server.token_env names)",
        )
    return False


def run_of(request: Request) -> str:
    """Return the name of the training run that sent an HTTP call; empty: the call names no run."""
    return decoded(request.headers.get(RUN_HEADER))


async def read_body(request: Request, service: RolloutService) -> bytes:
    """Return the JSON body of an HTTP call.

    Raises RefusalError if the body is too large, too slow, incomplete, or not declared as JSON.
    """
    limit = service.limits.max_request_bytes
    # Required, because a web page can send other types to any address without asking first.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        why = f"the body's type is {kind or 'missing'}"
        raise RefusalError(415, f"{why}; send JSON with `Content-Type: application/json`")
    remedy = "send less at a time, or start the server with a larger limit"
    too_large = RefusalError(413, f"the body is larger than max_request_bytes = {limit}; {remedy}")
    # Refused before the body is read.
    if int(request.headers.get("content-length", "0")) > limit:
        raise too_large
    body = bytearray()
    path = request.url.path
    try:
        async with asyncio.timeout(STALL_S) as stall:
            async for part in request.stream():
                body += part
                # Counted, because the header may be missing or wrong.
                if len(body) > limit:
                    raise too_large
                stall.reschedule(asyncio.get_running_loop().time() + STALL_S)
    except TimeoutError:
        stalled = "a caller of %r stalled for %g s after %d bytes of its body"
        _LOGGER.warning(stalled, path, STALL_S, len(body))
        why = f"no more of the body arrived within {STALL_S:g} s after {len(body)} bytes"
        raise RefusalError(408, f"{why}; send it again, without a pause") from None
    except ClientDisconnect:
        # One line: thousands of tracebacks would slow down the server for other callers.
        _LOGGER.warning("a caller of %r disconnected after %d bytes of its body", path, len(body))
        raise RefusalError(499, "the caller has disconnected") from None
    service.require_small(body)
    return bytes(body)


async def while_there(request: Request, work: Awaitable[T]) -> T:
    """Await the work on an HTTP call, and return its result.

    If the caller disconnects, cancel the work and raise RefusalError.
    """
    # Polled, because a disconnect raises no exception here.
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait((task,), timeout=GONE_S)
            if not task.done() and await request.is_disconnected():
                raise RefusalError(499, "the caller has disconnected")
        return task.result()
    finally:
        task.cancel()
