"""Messages arrive as they were sent, to the bit, and nothing else is accepted."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
from fake_server import make_offer, make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_actors.server import messages
from shared.records import ImageRef
from shared.rollouts import DecodeSettings, Rollout, RolloutRequest, SyncReport, WeightOffer
from shared.weight_sync.canary import CanaryProbe, Differences
from shared.weight_sync.offer import AdapterFiles, AdapterOffer, FullOffer
from shared.weight_sync.phases import SyncPhase
from shared.weight_sync.transports import TransportKind

NUMBERS = st.floats(allow_nan=False)  # NaN equals nothing
BY_TYPE = {
    "float": NUMBERS,
    "float | None": st.none() | NUMBERS,
    "tuple[float, ...] | None": st.none() | st.lists(NUMBERS, max_size=5).map(tuple),
    "Mapping[str, float]": st.dictionaries(st.text(), NUMBERS, max_size=3),
    "Path | None": st.none() | st.sampled_from([Path("a.png"), Path("/b/c.jpg")]),
    "Timeout | None": st.none(),
}


def built(kind, **strategies):
    """Build every field of a dataclass by its type, those with a default too."""
    by_name = {field.name: BY_TYPE.get(field.type, ...) for field in fields(kind)}
    return st.builds(kind, **by_name | strategies)


def several(strategy):
    return st.lists(strategy, max_size=3).map(tuple)


images = several(built(ImageRef))
requests = built(RolloutRequest, images=images, decode=built(DecodeSettings))
probes = st.builds(
    lambda token_ids, images, scored, tolerance: CanaryProbe(
        token_ids, images, (0, *(i for i, _ in scored)), tuple(p for _, p in scored), tolerance
    ),
    several(st.integers()),
    images,
    st.lists(st.tuples(st.integers(), NUMBERS), max_size=4),
    NUMBERS,
)
offers = built(
    WeightOffer,
    transport=st.text().filter(lambda transport: transport != TransportKind.ADAPTER),
    terms=built(FullOffer),
    canary=probes,
) | built(
    WeightOffer,
    transport=st.just("adapter"),
    terms=built(AdapterOffer, files=built(AdapterFiles)),
    canary=probes.map(lambda probe: replace(probe, base_logprobs=probe.expected_logprobs[::-1])),
)
sizes = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
noises = st.builds(Differences, mean=sizes, largest=sizes)
reports = built(SyncReport, canary_noise=st.none() | noises)


def there_and_back(message):
    return messages.read(type(message), message.body())


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(several(requests), st.integers(), st.none() | st.text())
def test_requests_arrive_as_they_were_sent(sent, seed, run):
    arrived = there_and_back(messages.InferCall(requests=sent, seed=seed, run=run))
    assert (arrived.requests, arrived.seed, arrived.run) == (sent, seed, run)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(several(built(Rollout)))
def test_rollouts_arrive_as_they_were_sent(sent):
    arrived = there_and_back(messages.InferAnswer(rollouts=sent)).rollouts
    assert arrived == sent
    # Equal numbers could still be 1 and 1.0, or True.
    assert all(
        type(getattr(a, field.name)) is type(getattr(b, field.name))
        for a, b in zip(arrived, sent, strict=True)
        for field in fields(Rollout)
    )


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(offers)
def test_offers_arrive_as_they_were_made(sent):
    assert there_and_back(messages.SyncCall.of(SyncPhase.PAUSE, sent, "a run")).offer == sent


@settings(max_examples=30, deadline=None)
@given(reports)
def test_reports_arrive_as_they_were_written(sent):
    assert there_and_back(messages.SyncAnswer(report=sent)).report == sent


def test_a_canary_that_met_no_number_arrives_so():
    probe = CanaryProbe((1,), (), (1, 2, 3), (float("nan"), float("-inf")), 1e-4)
    call = messages.SyncCall.of(SyncPhase.PAUSE, replace(make_offer(), canary=probe), None)
    assert str(there_and_back(call).offer.canary.expected_logprobs) == "(nan, -inf)"


def test_the_offer_travels_at_the_beginning_and_its_group_at_the_rendezvous_and_no_weights_ever():
    bodies = {
        phase: json.loads(messages.SyncCall.of(phase, make_offer(), "a run").body())
        for phase in SyncPhase
    }
    with_offer = [phase for phase, body in bodies.items() if body["offer"] is not None]
    assert with_offer == [SyncPhase.PAUSE, SyncPhase.RENDEZVOUS]
    assert bodies[SyncPhase.RENDEZVOUS]["offer"]["terms"]["groups"] == [
        {"host": "127.0.0.1", "port": 29500, "world_size": 2, "key": "key-0"}
    ]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"transport": "adapter"}, "must have an adapter if its transport is adapter"),
        ({"version": 2}, "the offer's version differs from the call's version"),
    ],
)
def test_an_offer_that_contradicts_itself_or_its_call_is_refused(change, problem):
    body = json.loads(messages.SyncCall.of(SyncPhase.PAUSE, make_offer(), None).body())
    body["offer"] |= change
    with pytest.raises(ValueError, match=problem):
        messages.read(messages.SyncCall, json.dumps(body).encode())


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("requests.0.x", 1, "requests[0].x: unexpected keyword argument; remove it"),
        (
            "requests.0.seed",
            "3",
            "requests[0].seed: input should be a valid integer; send a value of that kind",
        ),
        (
            "requests.0.decode.mode",
            "x",
            "requests[0].decode.mode: input should be 'greedy', 'sample' or 'beam'; send",
        ),
        (
            "requests.0.images",
            [{"path": None, "data": "%", "sha256": ""}],
            "requests[0].images[0].data: data should be valid base64",
        ),
        ("requests.0.sample_id", None, "requests[0].sample_id: field required; add it"),
        ("seed", None, "seed: field required; add it"),
        ("y", [], "y: extra inputs are not permitted; remove it"),
    ],
)
def test_what_is_wrong_is_said_with_its_path_and_what_to_do(path, value, problem):
    body = json.loads(messages.InferCall(requests=(make_request(0),), seed=1).body())
    holder = body
    *parents, name = path.split(".")
    for parent in parents:
        holder = holder[int(parent) if parent.isdigit() else parent]
    holder[name] = value
    if value is None:
        del holder[name]
    with pytest.raises(ValueError) as caught:
        messages.read(messages.InferCall, json.dumps(body).encode())
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("body", "last"),
    [
        (b'{"requests": [' + b"0," * 100_000 + b'0], "seed": 1}', "requests[0]: input should be"),
        (b"{" + b",".join(b'"k%d": 0' % n for n in range(100)) + b"}", "k17: extra inputs"),
        (b"{" + b",".join(b'"k%d": 0' % n for n in range(2000)) + b"}", "body: has 2002 problems"),
        (b'{"' + b"k" * 100_000 + b'": 0, "requests": [], "seed": 1}', "k" * 9000),
    ],
)
def test_of_very_many_problems_twenty_are_said_and_of_a_list_the_first_wrong_items(body, last):
    with pytest.raises(ValueError) as caught:
        messages.read(messages.InferCall, body)
    lines = messages.shortened(str(caught.value)).splitlines()
    assert (len(lines) <= 20, lines[-1].startswith(last)) == (True, True)
    assert sum(map(len, lines)) < 11_000


@pytest.mark.parametrize("body", [b"", b"[]", b"{'a", b"\x80\x04\x95pickle", b"null"])
def test_what_is_no_json_object_is_refused(body):
    with pytest.raises(ValueError, match="body: "):
        messages.read(messages.InferCall, body)
