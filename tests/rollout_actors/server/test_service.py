"""Whom a rollout server answers, in which order it takes weights, and what it refuses to do."""

from __future__ import annotations

import asyncio
import re
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from fake_server import ObedientEngine, image_bomb, make_offer, make_png, make_request, make_service

from rollout_actors.engine.settings import EngineSettings
from rollout_actors.server.messages import InferCall, SyncCall
from rollout_actors.server.service import (
    MAX_PARTS,
    RefusalError,
    SyncState,
    request_problems,
)
from shared.errors import WeightSyncError
from shared.records import ImageRef
from shared.rollouts import DecodeMode
from shared.weight_sync.phases import SyncPhase
from shared.weight_sync.transports import Device, TransportKind

PHASES = list(SyncPhase)
SETTINGS = EngineSettings(
    "model", "float32", 64, 8, 0, TransportKind.GLOO, Device.CPU, 0.5, max_images_per_prompt=2
)


@contextmanager
def refused(status, words):
    with pytest.raises(RefusalError) as caught:
        yield
    assert (caught.value.status, words in caught.value.message) == (status, True), caught.value


def call(phase, version=1, run="mine"):
    return SyncCall.of(phase, make_offer(version), run)


def through(door, phases, version=1):
    for phase in phases:
        door = door.enter(phase, call(phase, version)).finish(phase)
    return door


def test_the_weights_are_of_the_run_whose_sync_was_completed_last():
    assert (SyncState().run, SyncState().due) == (None, SyncPhase.PAUSE)
    done = through(SyncState(run="another"), PHASES)
    assert (done.run, done.due) == ("mine", SyncPhase.PAUSE)
    # It serves the other's weights again if this sync never reaches the engine.
    assert through(SyncState(run="another"), PHASES[:-1]).run == "another"


@pytest.mark.parametrize("phase", PHASES)
def test_while_a_phase_runs_and_after_it_failed_only_the_beginning_is_in_turn(phase):
    before = through(SyncState(), PHASES[: PHASES.index(phase)])
    assert before.due is phase
    running = before.enter(phase, call(phase))
    for next_ in PHASES[1:]:
        with refused(409, "out of order, the server expects pause; begin with pause"):
            running.enter(next_, call(next_))
    assert through(running, PHASES, version=2).offer == make_offer(2)


def test_a_phase_of_another_version_is_out_of_turn():
    door = through(SyncState(), PHASES[:1])
    waits = "the server expects rendezvous of version 1"
    with refused(409, f"phase rendezvous of version 2 is out of order, {waits}"):
        door.enter(SyncPhase.RENDEZVOUS, call(SyncPhase.RENDEZVOUS, 2))


def test_a_sync_begins_with_its_offer_and_what_the_rendezvous_brings_takes_its_place():
    with refused(400, "offer: is null"):
        SyncState().enter(SyncPhase.PAUSE, SyncCall(version=1, offer=None))
    door = through(SyncState(), PHASES[:1])
    assert door.enter(SyncPhase.RENDEZVOUS, call(SyncPhase.RENDEZVOUS)).offer == make_offer(1)
    later = through(SyncState(), PHASES[:2])
    assert later.enter(SyncPhase.WIRE, call(SyncPhase.WIRE)).offer is later.offer


@pytest.mark.parametrize("phase", PHASES[1:])
def test_a_sync_is_gone_on_with_by_the_run_that_began_it_and_can_be_begun_by_another(phase):
    door = through(SyncState(), PHASES[: PHASES.index(phase)])
    with refused(409, f"phase {phase} of version 1: another run's sync is running"):
        door.enter(phase, call(phase, run="another"))
    assert door.enter(SyncPhase.PAUSE, call(SyncPhase.PAUSE, run="another")).syncing == "another"


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("prompt_token_ids", (), "is empty"),
        (
            "prompt_token_ids",
            (1,) * 64,
            "has 64 tokens, but prompt and response together may have 64",
        ),
        *[
            (key, (1, token_id), f"{token_id} is not a token id")
            for key in ("prompt_token_ids", "decode.stop_token_ids", "decode.banned_token_ids")
            for token_id in (-1, 2**70)
        ],
        *[
            ("seed", seed, f"is {seed}; send a value from 0 to {2**63 - 1}")
            for seed in (2**70, 2**63, -1)
        ],
        ("decode.mode", DecodeMode.BEAM, "'beam' is not served"),
        ("decode.temperature", -1.0, "is -1.0"),
        ("decode.temperature", float("nan"), "is nan"),
        ("decode.temperature", 1e308, "is 1e+308"),
        ("decode.top_p", 0.0, "is 0.0; send a value within (0, 1]"),
        ("decode.top_k", -2, "is -2"),
        ("decode.top_k", 2**70, f"is {2**70}"),
        ("decode.repetition_penalty", 0.0, "is 0.0"),
        ("decode.repetition_penalty", 1e-320, "is 1e-320"),
        ("decode.repetition_penalty", 1e300, "is 1e+300"),
        ("decode.max_new_tokens", 0, "is 0"),
        ("decode.max_new_tokens", 2**70, f"is {2**70}"),
    ],
)
def test_what_vllm_cannot_do_is_refused_with_its_path(path, value, problem):
    request = make_request(1)
    name = path.removeprefix("decode.")
    if name == path:
        request = replace(request, **{name: value})
    else:
        request = replace(request, decode=replace(request.decode, **{name: value}))
    (found,) = request_problems([make_request(0), request], SETTINGS)
    assert found.startswith(f"requests[1].{path}: {problem}")


def test_an_image_that_no_placeholder_stands_for_is_refused():
    """vLLM fails with it after it has been asked."""
    image = ImageRef(None, make_png(), "")
    asked = [
        replace(make_request(0, images=images), prompt_token_ids=ids)
        for images, ids in (((image,), (1, 2)), ((image,), (1, 7, 2)), ((image,) * 3, (7, 7, 7)))
    ]
    no_placeholder, too_many = request_problems(asked, SETTINGS, image_token_id=7)
    message = r"requests\[0\]\.images: .* 1, .*prompt_token_ids .* 0 .*placeholder 7; send one "
    assert re.match(message, no_placeholder)
    assert too_many.startswith(
        "requests[2].images: has 3, but the server accepts 2; start the server with"
    )


def test_a_body_of_very_many_parts_is_refused_before_it_is_read():
    def service(max_requests, max_model_len):
        made = make_service(ObedientEngine(), replace(SETTINGS, max_model_len=max_model_len))
        made.limits = replace(made.limits, max_requests=max_requests)
        return made

    small, large = service(8, 64), service(1024, 4096)
    for one, body in ((small, b"[]" * MAX_PARTS), (large, b"," * (1024 * 4196))):
        one.require_small(body)
        with refused(400, "; send less at a time"):
            one.require_small(body + body[:1])


class Service:
    """A started service over an engine that does as it is told."""

    def __init__(self, image_root=None):
        self.engine = ObedientEngine()
        self.service = make_service(
            self.engine, SETTINGS, max_request_bytes=20_000, image_root=image_root
        )
        asyncio.run(self.service.start())

    def infer(self, *requests, **fields):
        return asyncio.run(
            self.service.infer(InferCall(requests=requests or (make_request(0),), seed=1, **fields))
        )

    def phase(self, phase, version=1, run="a run", **changes):
        sent = SyncCall.of(phase, make_offer(version, **changes), run)
        return asyncio.run(self.service.run_sync_phase(phase, sent))

    def sync(self, version=1, run="a run"):
        for phase in SyncPhase:
            self.phase(phase, version, run)


@pytest.fixture
def service():
    return Service()


def test_more_requests_than_allowed_are_refused(service):
    with refused(400, "requests: has 9, but one call may have 8"):
        service.infer(*map(make_request, range(9)))


def test_a_group_of_other_sizes_than_this_servers_is_refused(service):
    for changes in ({"world_size": 4}, {"num_groups": 2}):
        with refused(400, "offer.terms.groups"):
            service.phase(SyncPhase.PAUSE, **changes)
    assert service.infer(), "no sync has begun"


def test_rollouts_wait_for_the_end_of_a_sync(service):
    for phase in PHASES[:-1]:
        service.phase(phase)
        with refused(409, "its sync to version 1 is running, or did not complete"):
            service.infer()
    service.phase(SyncPhase.CANARY)
    assert service.infer()


def test_what_has_no_answer_when_other_weights_arrive_is_refused(service):
    """vLLM would begin with what it has queued as soon as it is resumed, for the canary."""
    service.engine.latency_s = 60.0

    async def sync_meanwhile():
        asking = asyncio.create_task(
            service.service.infer(InferCall(requests=(make_request(0),), seed=1))
        )
        while not service.engine.num_running:
            await asyncio.sleep(0.01)
        service.engine.latency_s = 0.0
        for phase in SyncPhase:
            await service.service.run_sync_phase(phase, call(phase))
        service.engine.goes_on.set()
        await asking

    with refused(409, "got other weights than version 0 before it answered"):
        asyncio.run(sync_meanwhile())


def test_after_a_failed_phase_only_a_new_sync_opens_the_door(service):
    service.phase(SyncPhase.PAUSE)
    service.engine.trouble = [WeightSyncError("no group", actor="a", phase="rendezvous")]
    with pytest.raises(WeightSyncError, match="no group"):
        service.phase(SyncPhase.RENDEZVOUS)
    with refused(409, "serves no rollouts"):
        service.infer()
    with refused(409, "out of order"):
        service.phase(SyncPhase.RENDEZVOUS)
    assert len(service.engine.phases) == 2, "the engine was not asked"
    service.sync()
    assert service.infer()


def test_a_sync_that_another_one_takes_the_place_of_has_no_end(service):
    service.engine.latency_s = 60.0

    async def both():
        first = asyncio.create_task(
            service.service.run_sync_phase(SyncPhase.PAUSE, call(SyncPhase.PAUSE))
        )
        while not service.engine.phases:
            await asyncio.sleep(0.01)
        service.engine.goes_on.set()
        await service.service.run_sync_phase(SyncPhase.PAUSE, call(SyncPhase.PAUSE, 2))
        await first

    with refused(409, "the weight sync to version 1 was replaced by a newer"):
        asyncio.run(both())


def test_the_weights_of_one_run_answer_no_other_run(service):
    assert service.infer(run="another"), "before the first sync they are the checkpoint's"
    service.sync(run="a run")
    with refused(409, "another run's weights"):
        service.infer(run="another")
    assert service.infer(run="a run")
    assert service.infer(run=None)
    service.sync(run="another")
    assert service.infer(run="another")


def test_other_weights_than_the_caller_asks_for_do_not_answer(service):
    """A server that was started again in the middle of a run."""
    for held in (0, 4):
        if held:
            service.sync(version=held)
        with refused(409, f"has version {held} of the weights, not 3"):
            service.infer(version=3)
    service.sync(version=3)
    assert service.infer(version=3)


@pytest.fixture
def rooted(tmp_path):
    """A service that may read `images/`."""
    root = tmp_path / "images"
    root.mkdir()
    (root / "a.png").write_bytes(make_png())
    (root / "large.png").write_bytes(b"x" * 20_001)
    (tmp_path / "secret.png").write_bytes(make_png())
    (root / "link.png").symlink_to(tmp_path / "secret.png")
    return Service(root)


def show(service, path=None, data=None, sha256=""):
    image = ImageRef(None if path is None else Path(path), data, sha256)
    service.infer(make_request(0), make_request(1, images=(image,)))
    return service.engine.asked[-1][1].images[0]


@pytest.mark.parametrize("path", ["a.png", "ROOT/a.png", "../images/a.png"])
def test_a_path_under_the_root_is_read(rooted, tmp_path, path):
    assert show(rooted, path.replace("ROOT", str(tmp_path / "images"))).data == make_png()


@pytest.mark.parametrize("path", ["../secret.png", "link.png", "/etc/passwd", "x/../../secret.png"])
def test_a_path_that_leads_out_of_it_is_not(rooted, path):
    with refused(403, "requests[1].images[0].path: is outside"):
        show(rooted, path)
    assert not rooted.engine.asked


@pytest.mark.parametrize(
    ("image", "status", "words"),
    [
        ({"path": "b.png"}, 400, ".path: no file under image_root"),
        ({"path": "."}, 400, ".path: no file under image_root"),
        ({"path": "a\0.png"}, 400, ".path: "),
        ({"path": "a" * 5000}, 400, ".path: "),
        ({"path": "a.png", "sha256": "00"}, 400, ".path: "),
        ({"path": "large.png"}, 413, ".path: is larger than max_request_bytes = 20000"),
        ({}, 400, ": has neither data nor path"),
        ({"data": b""}, 400, ": cannot be read as an image"),
        ({"data": b"no image"}, 400, ": cannot be read as an image"),
        ({"data": b"\x89PNG\r\n\x1a\ncut off"}, 400, ": cannot be read as an image"),
        (
            {"data": image_bomb()},
            400,
            ": cannot be read as an image (it has more than MAX_PIXELS",
        ),
        (
            {"data": make_png(100, 101)},
            413,
            (
                ": this image of sample sample-1 has 100 x 101 pixels, but one image may have 10000;"
                " send a smaller one, or start the server with max_image_pixels=10100"
            ),
        ),
    ],
)
def test_what_is_no_image_or_too_large_is_refused_before_the_engine_sees_it(
    rooted, image, status, words
):
    with refused(status, f"requests[1].images[0]{words}"):
        show(rooted, **image)
    assert not rooted.engine.asked


def test_without_a_root_nothing_is_read(service, tmp_path):
    (tmp_path / "a.png").write_bytes(make_png())
    with refused(403, "image_root"):
        show(service, tmp_path / "a.png")


def test_data_come_as_they_were_sent_and_their_path_is_a_label(rooted):
    image = ImageRef(Path("/etc/passwd"), make_png(), "ab")
    assert show(rooted, image.path, image.data, image.sha256) == image
