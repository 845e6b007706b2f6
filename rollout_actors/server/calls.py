"""What every POST route of a rollout server asks of a call before it looks at it, and while it
works on it.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from rollout_actors.server.service import RefusalError

T = TypeVar("T")

_LOGGER = logging.getLogger(__name__)

STALL_S = 30.0
"""Longest wait for more of a body."""
GONE_S = 1.0
"""How often a working call looks whether its caller is still there."""


def check_token(request: Request, token: str | None) -> None:
    """Raises RefusalError where a token is asked for and not brought."""
    # compare_digest: the time it takes does not tell how much of a guess was right.
    if token is None or hmac.compare_digest(
        request.headers.get("authorization", "").encode(), f"Bearer {token}".encode()
    ):
        return
    raise RefusalError(
        401,
        "this server asks for its bearer token; send it as `Authorization: Bearer ...` (a run:"
        " rollout_matching.vllm.server.token_env)",
    )


async def read_body(request: Request, limit: int) -> bytes:
    """A body of JSON of at most `limit` bytes. Raises RefusalError."""
    # Asked for by name, because a page in a browser may send any other type to any address without
    # asking.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RefusalError(
            415,
            f"the body's type is {kind or 'not said'}; send JSON with `Content-Type:"
            " application/json`",
        )
    too_large = RefusalError(
        413,
        f"the body is larger than max_request_bytes = {limit}; send less at a time, or start the"
        " server with a larger one",
    )
    if int(request.headers.get("content-length", "0")) > limit:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(STALL_S) as stall:
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise too_large
                parts.append(part)
                stall.reschedule(asyncio.get_running_loop().time() + STALL_S)
    except TimeoutError:
        _LOGGER.warning(
            "a caller of %r has stalled for %g s after %d bytes of its body",
            request.url.path,
            STALL_S,
            size,
        )
        raise RefusalError(
            408,
            f"no more of the body has come for {STALL_S:g} s after {size} bytes; send it again,"
            " without a pause",
        ) from None
    except ClientDisconnect:
        # In a line: a traceback for each of thousands would keep the server from its other callers.
        _LOGGER.warning(
            "a caller of %r has gone after %d bytes of its body", request.url.path, size
        )
        raise RefusalError(499, "the caller has gone") from None
    return b"".join(parts)


async def while_there(
    request: Request, work: Awaitable[T], check: Callable[[], None] = lambda: None
) -> T:
    """`work`, cancelled when the caller has gone, for whom an engine would go on to decode, or when
    `check`, which is asked as often, raises.
    """
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait((task,), timeout=GONE_S)
            if not task.done():
                check()
            if not task.done() and await request.is_disconnected():
                raise RefusalError(499, "the caller has gone")
        return task.result()
    finally:
        task.cancel()
