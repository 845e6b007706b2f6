"""Checks of a call before a rollout server looks at it, and while it works on it."""

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
"""Longest wait for more of a body."""
GONE_S = 1.0
"""How often a working call looks whether its caller is still there."""


def check_token(request: Request, token: str | None, *, is_needed: bool = True) -> bool:
    """Tell whether the call brings the token; None: all do. Raises RefusalError where it must."""
    sent = request.headers.get("authorization", "").encode()
    # compare_digest: the time it takes does not tell how much of a guess was right.
    if token is None or hmac.compare_digest(sent, f"Bearer {token}".encode()):
        return True
    if is_needed:
        raise RefusalError(
            401,
            "this server asks for its bearer token; send it as `Authorization: Bearer ...` (runs of"
            " its user on its machine find it in its token file, others in the variable that"
            " rollout_matching.vllm.server.token_env names)",
        )
    return False


def run_of(request: Request) -> str:
    """Return the name of the run that calls; empty: none."""
    return decoded(request.headers.get(RUN_HEADER))


async def read_body(request: Request, service: RolloutService) -> bytes:
    """Read a body of JSON within the server's limits. Raises RefusalError."""
    limit = service.limits.max_request_bytes
    # Required by name: a page in a browser may send any other type to any address unasked.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        why = f"the body's type is {kind or 'not said'}"
        raise RefusalError(415, f"{why}; send JSON with `Content-Type: application/json`")
    remedy = "send less at a time, or start the server with a larger one"
    too_large = RefusalError(413, f"the body is larger than max_request_bytes = {limit}; {remedy}")
    # Refused before a byte of it is read.
    if int(request.headers.get("content-length", "0")) > limit:
        raise too_large
    body = bytearray()
    path = request.url.path
    try:
        async with asyncio.timeout(STALL_S) as stall:
            async for part in request.stream():
                body += part
                # Counted, since the header may be missing or wrong.
                if len(body) > limit:
                    raise too_large
                stall.reschedule(asyncio.get_running_loop().time() + STALL_S)
    except TimeoutError:
        stalled = "a caller of %r has stalled for %g s after %d bytes of its body"
        _LOGGER.warning(stalled, path, STALL_S, len(body))
        why = f"no more of the body has come for {STALL_S:g} s after {len(body)} bytes"
        raise RefusalError(408, f"{why}; send it again, without a pause") from None
    except ClientDisconnect:
        # One line: a traceback for each of thousands would keep the server from its other callers.
        _LOGGER.warning("a caller of %r has gone after %d bytes of its body", path, len(body))
        raise RefusalError(499, "the caller has gone") from None
    service.require_small(body)
    return bytes(body)


async def while_there(request: Request, work: Awaitable[T]) -> T:
    """Await `work`; cancel it when the caller has gone."""
    # Polled: nothing is raised here when a caller goes.
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait((task,), timeout=GONE_S)
            if not task.done() and await request.is_disconnected():
                raise RefusalError(499, "the caller has gone")
        return task.result()
    finally:
        task.cancel()
