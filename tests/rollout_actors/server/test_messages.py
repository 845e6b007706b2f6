"""What goes over the wire arrives as it was sent, to the bit, and nothing else is accepted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from fake_server import make_offer, make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_actors.server import messages
from shared.errors import RolloutError, WeightSyncError
from shared.records import ImageRef
from shared.rollouts import (
    DecodeMode,
    DecodeSettings,
    FinishReason,
    Rollout,
    RolloutRequest,
    SyncReport,
    WeightOffer,
)
from shared.weight_sync.canary import CanaryProbe
from shared.weight_sync.offer import (
    AdapterFiles,
    AdapterOffer,
    FullOffer,
    ProcessGroupSpec,
    TensorSpec,
)
from shared.weight_sync.phases import SyncPhase
from shared.weight_sync.transports import TransportKind

ids = st.lists(st.integers(0, 2**31), max_size=5).map(tuple)
any_float = st.floats(allow_nan=False)
text = st.text(max_size=8)
images = st.lists(
    st.builds(
        ImageRef,
        path=st.none() | st.sampled_from([Path("a.png"), Path("/b/c.jpg")]),
        data=st.none() | st.binary(max_size=40),
        sha256=text,
    ),
    max_size=2,
).map(tuple)
decodes = st.builds(
    DecodeSettings,
    mode=st.sampled_from(DecodeMode),
    temperature=any_float,
    top_p=any_float,
    top_k=st.integers(),
    repetition_penalty=any_float,
    max_new_tokens=st.integers(),
    num_beams=st.integers(),
    stop_token_ids=ids,
    banned_token_ids=ids,
    return_logprobs=st.booleans(),
)
requests = st.builds(
    RolloutRequest,
    step=st.integers(),
    position=st.integers(),
    sample_id=text,
    prompt_token_ids=ids,
    images=images,
    decode=decodes,
    seed=st.integers(),
)
rollouts = st.builds(
    Rollout,
    step=st.integers(),
    position=st.integers(),
    sample_id=text,
    prompt_token_ids=ids,
    response_token_ids=ids,
    stop_token_id=st.none() | st.integers(),
    logprobs=st.none() | st.lists(any_float, max_size=5).map(tuple),
    stop_token_logprob=st.none() | any_float,
    finish_reason=st.sampled_from(FinishReason),
    forced_positions=ids,
    weight_version=st.integers(),
    actor=text,
    attempt=st.integers(),
    seed=st.integers(),
    generate_s=any_float,
    started_s=any_float,
)
terms = st.builds(
    FullOffer,
    groups=st.lists(
        st.builds(
            ProcessGroupSpec, host=text, port=st.integers(), world_size=st.integers(), key=text
        ),
        max_size=2,
    ).map(tuple),
    timeout_s=any_float,
    bucket_bytes=st.integers(),
    tensors=st.lists(
        st.builds(TensorSpec, name=text, dtype=text, shape=ids, num_bytes=st.integers()), max_size=3
    ).map(tuple),
)
adapters = st.builds(
    AdapterOffer,
    files=st.builds(AdapterFiles, tensors=st.binary(max_size=40), config=text),
    sha256=text,
    timeout_s=any_float,
)
probes = st.builds(
    lambda token_ids, images, scored, tolerance: CanaryProbe(
        token_ids, images, (0, *(i for i, _ in scored)), tuple(p for _, p in scored), tolerance
    ),
    ids,
    images,
    st.lists(st.tuples(st.integers(), any_float), max_size=4),
    any_float,
)
offers = st.builds(
    WeightOffer,
    version=st.integers(),
    transport=text.filter(lambda transport: transport != TransportKind.ADAPTER),
    terms=terms,
    canary=probes,
) | st.builds(
    WeightOffer,
    version=st.integers(),
    transport=st.just("adapter"),
    terms=adapters,
    canary=probes.map(lambda probe: replace(probe, base_logprobs=probe.expected_logprobs[::-1])),
)
reports = st.builds(
    SyncReport,
    version=st.integers(),
    bytes=st.integers(),
    phase_s=st.dictionaries(text, any_float, max_size=3),
    canary_max_abs=any_float,
    mode=st.sampled_from(["full", "adapter"]),
    fell_back=st.none() | text,
    adapter_effect=st.none() | any_float,
)


def there_and_back(message: messages.M) -> messages.M:
    return messages.read(type(message), message.body())


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(requests, max_size=3).map(tuple), st.integers(), st.none() | text)
def test_requests_arrive_as_they_were_sent(
    sent: tuple[RolloutRequest, ...], seed: int, run: str | None
) -> None:
    arrived = there_and_back(messages.InferCall(requests=sent, seed=seed, run=run))
    assert (arrived.requests, arrived.seed, arrived.run) == (sent, seed, run)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(rollouts, max_size=3).map(tuple))
def test_rollouts_arrive_as_they_were_sent(sent: tuple[Rollout, ...]) -> None:
    arrived = there_and_back(messages.InferAnswer(rollouts=sent)).rollouts
    assert arrived == sent
    # Equal numbers could still be 1 and 1.0, or True.
    assert all(
        type(getattr(a, f.name)) is type(getattr(b, f.name))
        for a, b in zip(arrived, sent, strict=True)
        for f in fields(Rollout)
    )


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(offers)
def test_offers_arrive_as_they_were_made(sent: WeightOffer) -> None:
    arrived = there_and_back(messages.SyncCall.of(SyncPhase.PAUSE, sent, "a run"))
    assert arrived.offer == sent


@settings(max_examples=30, deadline=None)
@given(reports)
def test_reports_arrive_as_they_were_written(sent: SyncReport) -> None:
    assert there_and_back(messages.SyncAnswer(report=sent)).report == sent


def test_an_offer_whose_terms_are_not_its_transports_is_refused() -> None:
    body = json.loads(messages.SyncCall.of(SyncPhase.PAUSE, make_offer(), None).body())
    body["offer"]["transport"] = "adapter"
    with pytest.raises(ValueError, match="needs an adapter exactly where that is the transport"):
        messages.read(messages.SyncCall, json.dumps(body).encode())


def test_a_canary_that_met_no_number_arrives_so() -> None:
    probe = CanaryProbe((1,), (), (1, 2, 3), (float("nan"), float("-inf")), 1e-4)
    full = make_offer()
    call = messages.SyncCall.of(
        SyncPhase.PAUSE, WeightOffer(1, full.transport, full.terms, probe), None
    )
    arrived = there_and_back(call).offer
    assert arrived is not None
    assert str(arrived.canary.expected_logprobs) == "(nan, -inf)"


def test_the_offer_travels_at_the_beginning_and_its_group_at_the_rendezvous_and_no_weights_ever() -> (
    None
):
    bodies = {
        phase: json.loads(messages.SyncCall.of(phase, make_offer(), "a run").body())
        for phase in SyncPhase
    }
    assert [phase for phase, body in bodies.items() if body["offer"] is not None] == [
        SyncPhase.PAUSE,
        SyncPhase.RENDEZVOUS,
    ]
    assert bodies[SyncPhase.RENDEZVOUS]["offer"]["terms"]["groups"] == [
        {"host": "127.0.0.1", "port": 29500, "world_size": 2, "key": "key-0"}
    ]


@pytest.mark.parametrize(
    "error",
    [
        RolloutError("bad", actor="a", phase="generate"),
        WeightSyncError("bad", actor="a", phase="verify", quantity="q", size=2.0),
    ],
)
def test_errors_keep_their_fields(error: RolloutError | WeightSyncError) -> None:
    detail = there_and_back(messages.ErrorAnswer.of(error)).error
    kind = (
        messages.ErrorKind.WEIGHT_SYNC
        if isinstance(error, WeightSyncError)
        else messages.ErrorKind.ROLLOUT
    )
    assert (detail.kind, detail.message, detail.actor, detail.phase) == (
        kind,
        "bad",
        "a",
        error.phase,
    )
    if isinstance(error, WeightSyncError):
        assert (detail.quantity, detail.size) == ("q", 2.0)


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "requests[0].x: unexpected keyword argument; remove it": (
        lambda body: body["requests"][0].update(x=1)
    ),
    "requests[0].seed: input should be a valid integer; send a value of that kind": (
        lambda body: body["requests"][0].update(seed="3")
    ),
    "requests[0].decode.mode: input should be 'greedy', 'sample' or 'beam'; send": (
        lambda body: body["requests"][0]["decode"].update(mode="x")
    ),
    "requests[0].sample_id: field required; add it": (
        lambda body: body["requests"][0].pop("sample_id")
    ),
    "requests[0].images[0].data: data should be valid base64": (
        lambda body: body["requests"][0].update(images=[{"path": None, "data": "%", "sha256": ""}])
    ),
    "seed: field required; add it": lambda body: body.pop("seed"),
    "y: extra inputs are not permitted; remove it": lambda body: body.update(y=[]),
}


@pytest.mark.parametrize("problem", CHANGES)
def test_what_is_wrong_is_said_with_its_path_and_what_to_do(problem: str) -> None:
    body = json.loads(messages.InferCall(requests=(make_request(0),), seed=1).body())
    CHANGES[problem](body)
    with pytest.raises(ValueError) as caught:
        messages.read(messages.InferCall, json.dumps(body).encode())
    assert problem in str(caught.value)


def test_all_problems_are_said_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        messages.read(messages.InferCall, b'{"requests": 3, "x": 1}')
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("body", [b"", b"[]", b"{'a", b"\x80\x04\x95pickle", b"null"])
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="body: "):
        messages.read(messages.InferCall, body)
