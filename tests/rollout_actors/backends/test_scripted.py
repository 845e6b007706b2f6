"""The scripted backend answers like an engine would, minus the engine."""

from __future__ import annotations

import time

import pytest

from rollout_actors.backends.scripted import ScriptedBackend
from shared.errors import RolloutError
from shared.protocols import RolloutBackend
from shared.rollouts import DecodeMode, DecodeSettings, FinishReason, RolloutRequest, WeightOffer

DECODE = DecodeSettings(
    DecodeMode.GREEDY,
    0.0,
    1.0,
    -1,
    1.0,
    4,
    1,
    stop_token_ids=(9,),
    banned_token_ids=(),
    return_logprobs=True,
)


def request(position: int) -> RolloutRequest:
    return RolloutRequest(
        3, position, f"sample-{position}", (1, 2), (), DECODE, seed=100 + position
    )


def test_it_answers_in_order_and_trims_the_stop_token() -> None:
    backend: RolloutBackend = ScriptedBackend(
        "scripted", lambda request: [request.position, 5, 9, 7]
    )
    first, second = backend.generate([request(4), request(2)])
    assert (first.position, first.response_token_ids, first.stop_token_id, first.finish_reason) == (
        4,
        (4, 5),
        9,
        FinishReason.STOP,
    )
    assert (second.sample_id, second.seed, second.response_token_ids, second.actor) == (
        "sample-2",
        102,
        (2, 5),
        "scripted",
    )


def test_an_answer_without_stop_token_ends_at_the_limit() -> None:
    rollout = ScriptedBackend("scripted", lambda request: range(100, 110)).generate([request(0)])[0]
    assert (rollout.response_token_ids, rollout.stop_token_id, rollout.finish_reason) == (
        (100, 101, 102, 103),
        None,
        FinishReason.LENGTH,
    )


def test_a_call_takes_its_latency_and_no_requests_take_none() -> None:
    assert ScriptedBackend("scripted", lambda request: [9], latency_s=3600.0).generate([]) == []
    started = time.perf_counter()
    rollouts = ScriptedBackend("scripted", lambda request: [9], latency_s=0.1).generate(
        [request(place) for place in range(600)]
    )
    assert 0.1 <= time.perf_counter() - started < 60, "one after the other they would take a minute"
    assert all(rollout.generate_s >= 0.1 for rollout in rollouts)


def test_its_version_is_that_of_the_last_offer() -> None:
    backend = ScriptedBackend("scripted", lambda request: [9])
    assert backend.version == 0
    backend.receive_weights(WeightOffer(5, "rollmatch_gloo", {}, None))
    assert (backend.version, backend.generate([request(0)])[0].weight_version) == (5, 5)


def test_a_closed_backend_refuses_by_name() -> None:
    backend = ScriptedBackend("scripted", lambda request: [9])
    backend.close()
    backend.close()
    with pytest.raises(RolloutError, match="generate on scripted"):
        backend.generate([request(0)])
