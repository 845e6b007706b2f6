"""Checks of an HTTP call before and while a rollout server handles it."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable
from typing import TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from rollout_actors.server.lease import RUN_HEADER, decoded
from rollout_actors.server.service import RefusalError, RolloutService

T = TypeVar("T")

_LOGGER = logging.getLogger(__name__)

STALL_S = 30.0
"""Longest wait for the next part of a call's body, in seconds."""
GONE_S = 1.0
"""Seconds between two checks whether the caller is still connected."""


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
