"""Whether an endpoint that is in use is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import httpx
import openai
import pytest

from launch.vf_eval.endpoint import REFUSALS, Endpoint, Pace, watch
from shared.errors import UnreachableError

ENDPOINT = Endpoint("http://127.0.0.1:9/v1", "none", "OPENAI_API_KEY")
QUICK = Pace(look_s=0.001, again_s=0.001, silent_s=0.05)


def watched(
    answer: Callable[[httpx.Request], httpx.Response], pace: Pace = QUICK, *, for_s: float = 5.0
) -> None:
    async def until_gone() -> None:
        http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
        async with openai.AsyncOpenAI(
            base_url=ENDPOINT.url, api_key="none", http_client=http
        ) as client:
            await asyncio.wait_for(watch(client, ENDPOINT, pace), for_s)

    asyncio.run(until_gone())


def refused(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("connection refused", request=request)


def silent(request: httpx.Request) -> httpx.Response:
    raise httpx.ReadTimeout("no answer", request=request)


@pytest.mark.parametrize(
    "last",
    [refused, lambda request: httpx.Response(503, json={"error": {"message": "it has died"}})],
)
def test_an_endpoint_that_refuses_several_times_in_a_row_has_gone(
    last: Callable[[httpx.Request], httpx.Response],
) -> None:
    # What is there in between says that it has not gone.
    says: Iterator[bool] = iter([True, False, False, True] + [False] * REFUSALS)
    with pytest.raises(
        UnreachableError,
        match=(
            r"http://127.0.0.1:9/v1: it answers no more \(.*(connection refused|it has died).*\);"
            r" check that it still runs"
        ),
    ):
        watched(
            lambda request: (
                httpx.Response(200, json={"object": "list", "data": []})
                if next(says)
                else last(request)
            )
        )
    assert next(says, None) is None


@pytest.mark.slow
@pytest.mark.parametrize("status", [200, 401, 404, 429])
def test_an_endpoint_that_says_anything_is_there(status: int) -> None:
    with pytest.raises(TimeoutError):
        watched(lambda _: httpx.Response(status, text="<html>"), for_s=0.3)


@pytest.mark.slow
def test_an_endpoint_that_is_silent_for_long_has_gone_and_one_that_is_silent_at_times_has_not() -> (
    None
):
    with pytest.raises(UnreachableError, match="it answers no more"):
        watched(silent)
    says = iter(range(100_000))
    with pytest.raises(TimeoutError):
        watched(
            lambda request: silent(request) if next(says) % 3 else httpx.Response(404),
            Pace(0.001, 0.001, 60.0),
            for_s=0.3,
        )
