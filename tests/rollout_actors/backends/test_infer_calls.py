"""How a server's share of a round is cut into calls."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fake_server import make_request

from rollout_actors.backends.rollmatch_server import infer_calls
from rollout_actors.server.messages import CallLimits, InferCall
from shared.records import ImageRef
from shared.rollouts import RolloutRequest

REQUESTS = [
    make_request(
        position,
        images=tuple(ImageRef(Path(f"ä{position}.png"), bytes(size), "ab") for size in sizes),
    )
    for position, sizes in enumerate([(), (1,), (2, 3000), (4000,), (), (2999, 3001), (5,)])
]


def calls(
    requests: list[RolloutRequest],
    max_request_bytes: int = sys.maxsize,
    max_requests: int = sys.maxsize,
) -> list[InferCall]:
    return infer_calls(
        requests, CallLimits(max_request_bytes, max_requests, sys.maxsize), run="a" * 32, version=7
    )


def test_a_share_within_the_limits_is_one_call() -> None:
    assert calls(REQUESTS) == [InferCall.of(REQUESTS, run="a" * 32, version=7)]


def test_no_call_has_more_requests_than_the_server_takes() -> None:
    assert [
        [one.position for one in call.requests] for call in calls(REQUESTS, max_requests=3)
    ] == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.mark.parametrize("limit", [8_700, 10_000, 14_000, 20_000, 40_000])
def test_no_body_is_larger_than_the_server_takes_and_every_request_is_in_one_in_order(
    limit: int,
) -> None:
    cut = calls(REQUESTS, max_request_bytes=limit)
    assert all(len(call.body()) <= limit for call in cut)
    assert [one for call in cut for one in call.requests] == REQUESTS
    assert all(call.seed == call.requests[0].seed for call in cut)


def test_a_call_is_cut_only_where_the_next_request_does_not_fit() -> None:
    one, two = (len(calls(requests)[0].body()) for requests in (REQUESTS[2:3], REQUESTS[3:4]))
    assert len(calls(REQUESTS[2:4], max_request_bytes=one + two)) == 1
    assert len(calls(REQUESTS[2:4], max_request_bytes=max(one, two))) == 2


def test_a_request_that_no_call_can_hold_is_named_with_the_limit_that_would() -> None:
    (alone,) = calls(REQUESTS[3:4])
    needed = len(alone.body())
    with pytest.raises(
        ValueError,
        match=(
            rf"takes calls of max_request_bytes = {needed - 1}, and sample sample-3 .* start it"
            rf" with max_request_bytes={needed}, "
        ),
    ):
        calls(REQUESTS, max_request_bytes=needed - 1)
    assert len(calls(REQUESTS[3:4], max_request_bytes=needed)) == 1
