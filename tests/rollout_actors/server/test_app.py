"""The routes of a rollout server, over an engine that does as it is told."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_server import (
    HERE,
    ObedientEngine,
    asked_and_gone,
    eventually,
    image_bomb,
    make_offer,
    make_png,
    make_request,
    make_service,
    make_settings,
    serving,
)

from rollout_actors.engine.settings import EngineSettings
from rollout_actors.server import calls, messages
from rollout_actors.server.app import make_app
from rollout_actors.server.service import request_problems
from shared.errors import RolloutError, WeightSyncError
from shared.records import ImageRef
from shared.rollouts import DecodeMode, RolloutRequest
from shared.weight_sync.phases import SyncPhase
from shared.weight_sync.transports import Device, TransportKind

ROUTES = {
    phase: "/init_communicator/" if phase is SyncPhase.RENDEZVOUS else f"/sync/{phase}/"
    for phase in SyncPhase
}


class Caller:
    """One service over one engine, called over a real port."""

    def __init__(self, url: str, engine: ObedientEngine) -> None:
        self.url, self.engine = url, engine

    def get(self, route: str) -> httpx.Response:
        return httpx.get(self.url + route, **HERE)

    def post(self, route: str, body: bytes | None, **headers: str) -> httpx.Response:
        return httpx.post(
            self.url + route,
            content=body,
            headers={"Content-Type": "application/json"} | headers,
            **HERE,
            timeout=30,
        )

    def infer(self, *requests: RolloutRequest, run: str | None = None) -> httpx.Response:
        return self.post("/infer/", messages.InferCall(requests=requests, seed=1, run=run).body())

    def phase(
        self, phase: SyncPhase, version: int = 1, run: str | None = "a run", **changes: Any
    ) -> httpx.Response:
        return self.post(
            ROUTES[phase], messages.SyncCall.of(phase, make_offer(version, **changes), run).body()
        )

    def sync(self, version: int = 1, run: str | None = "a run") -> None:
        for phase in SyncPhase:
            assert self.phase(phase, version, run).status_code == 200, phase


def said(answer: httpx.Response) -> str:
    return messages.read(messages.ErrorAnswer, answer.content).error.message


def refused(answer: httpx.Response, status: int, words: str) -> None:
    assert answer.status_code == status
    assert words in said(answer), said(answer)


@pytest.fixture
def engine() -> ObedientEngine:
    return ObedientEngine(devices=1)


@pytest.fixture
def image_root(tmp_path: Path) -> Path:
    root = tmp_path / "images"
    root.mkdir()
    (root / "a.png").write_bytes(make_png())
    (tmp_path / "secret.png").write_bytes(make_png())
    (root / "link.png").symlink_to(tmp_path / "secret.png")
    return root


@pytest.fixture
def caller(engine: ObedientEngine, tmp_path: Path, image_root: Path) -> Iterator[Caller]:
    one = make_service(
        engine,
        make_settings(tmp_path / "model", max_images_per_prompt=2),
        max_request_bytes=20_000,
        image_root=image_root,
    )
    asyncio.run(one.start())
    with serving(make_app(one)) as url:
        yield Caller(url, engine)


@pytest.mark.parametrize("slash", ["", "/"])
def test_every_route_is_there_with_and_without_its_last_slash(caller: Caller, slash: str) -> None:
    assert caller.get(f"/health{slash}").status_code == 200
    assert caller.get(f"/get_world_size{slash}").json() == {"world_size": 1}
    assert caller.get(f"/version{slash}").json() == {"version": 0}
    assert caller.get(f"/info{slash}").json()["model_type"] == "qwen3_vl"
    for route in ("/infer", "/init_communicator", "/sync/pause"):
        assert caller.post(route + slash, b"{}").status_code == 400


def test_health_tells_what_runs_and_how_far_it_is(caller: Caller) -> None:
    def running() -> int:
        return messages.read(messages.Health, caller.get("/health/").content).num_running

    assert running() == 0
    caller.engine.latency_s = 60.0
    asking = threading.Thread(target=lambda: caller.infer(make_request(0), make_request(1)))
    asking.start()
    assert eventually(lambda: running() == 2)
    caller.engine.goes_on.set()
    asking.join()
    assert running() == 0
    first, second = (
        messages.read(messages.Health, caller.get("/health/").content).num_tokens for _ in range(2)
    )
    assert first < second


def test_requests_are_answered_in_order_with_their_seeds(caller: Caller) -> None:
    answer = caller.infer(make_request(4), make_request(2))
    rollouts = messages.read(messages.InferAnswer, answer.content).rollouts
    assert [(r.position, r.seed, r.response_token_ids) for r in rollouts] == [
        (4, 104, (4, 104)),
        (2, 102, (2, 102)),
    ]
    assert rollouts[0].logprobs == (-0.1, -1 / 3)


def test_no_requests_are_answered_with_no_rollouts(caller: Caller) -> None:
    assert caller.infer().json() == {"rollouts": []}


def test_a_server_that_starts_or_has_died_says_503_everywhere(
    engine: ObedientEngine, tmp_path: Path
) -> None:
    one = make_service(engine, make_settings(tmp_path / "model"))
    with serving(make_app(one)) as url:
        caller = Caller(url, engine)
        for answer in (
            caller.get("/health/"),
            caller.get("/get_world_size/"),
            caller.get("/info/"),
            caller.infer(make_request(0)),
            caller.phase(SyncPhase.PAUSE),
        ):
            refused(answer, 503, "is starting")
        asyncio.run(one.start())
        assert caller.get("/health/").status_code == 200
        engine.is_dead = True
        assert (caller.get("/health/").status_code, "has died" in said(caller.get("/health/"))) == (
            503,
            True,
        )


def test_another_route_is_404_and_another_method_405(caller: Caller) -> None:
    assert (caller.get("/docs").status_code, caller.get("/openapi.json").status_code) == (404, 404)
    assert "POST /infer/" in said(caller.get("/nope"))
    assert caller.get("/infer/").status_code == 405
    answer = caller.post("/sync/rendezvous/", messages.SyncCall(version=1, offer=None).body())
    refused(answer, 404, "/init_communicator/")


class TestToken:
    @pytest.fixture
    def locked(self, engine: ObedientEngine, tmp_path: Path) -> Iterator[Caller]:
        one = make_service(engine, make_settings(tmp_path / "model"))
        asyncio.run(one.start())
        with serving(make_app(one, token="pass")) as url:
            yield Caller(url, engine)

    def test_all_but_health_ask_for_it(self, locked: Caller) -> None:
        assert locked.get("/health/").status_code == 200
        for route in ("/get_world_size/", "/info/", "/version/"):
            assert locked.get(route).status_code == 401
        for route in ("/infer/", "/init_communicator/", "/sync/pause/"):
            assert locked.post(route, b"{}").status_code == 401
        assert "token_env" in said(locked.get("/info/"))

    @pytest.mark.parametrize(
        "sent",
        [
            "Bearer pas",
            "Bearer pass2",
            "Bearer",
            "pass",
            "Basic pass",
            "Bearer pässe".encode().decode("latin1"),
        ],
    )
    def test_another_token_is_refused(self, locked: Caller, sent: str) -> None:
        answer = httpx.get(
            locked.url + "/info/", headers=[(b"Authorization", sent.encode("latin1"))], **HERE
        )
        assert answer.status_code == 401

    def test_the_right_one_is_let_in(self, locked: Caller) -> None:
        assert (
            httpx.get(
                locked.url + "/info/", headers={"Authorization": "Bearer pass"}, **HERE
            ).status_code
            == 200
        )


class TestLimits:
    def test_a_body_that_says_it_is_too_large_is_not_read(self, caller: Caller) -> None:
        answer = caller.post("/infer/", b" " * 20_001)
        refused(answer, 413, "max_request_bytes = 20000")

    def test_a_body_that_does_not_say_it_is_too_large_is_left_when_it_is(
        self, caller: Caller
    ) -> None:
        answer = httpx.post(
            caller.url + "/infer/",
            content=(b" " * 1000 for _ in range(1000)),
            headers={"Content-Type": "application/json"},
            **HERE,
            timeout=30,
        )
        assert answer.status_code == 413

    def test_more_requests_than_allowed_are_refused(self, caller: Caller) -> None:
        answer = caller.infer(*[make_request(i) for i in range(9)])
        refused(answer, 400, "requests: has 9, one call may have 8")

    def test_what_is_not_called_json_is_refused(self, caller: Caller) -> None:
        """A page in a browser may send `text/plain` to any address unasked."""
        body = messages.InferCall(requests=(make_request(0),), seed=1).body()
        for kind in ("text/plain", "application/x-www-form-urlencoded", "application/octet-stream"):
            assert caller.post("/infer/", body, **{"Content-Type": kind}).status_code == 415
        assert (
            caller.post(
                "/infer/", body, **{"Content-Type": "application/json; charset=utf-8"}
            ).status_code
            == 200
        )

    def test_a_server_that_may_be_called_by_one_name_answers_to_no_other(
        self, engine: ObedientEngine, tmp_path: Path
    ) -> None:
        with serving(
            make_app(
                make_service(engine, make_settings(tmp_path / "model")),
                only_from=("localhost", "127.0.0.1"),
            )
        ) as url:
            assert (
                httpx.get(url + "/health/", headers={"Host": "evil.example"}, **HERE).status_code
                == 400
            )
            assert httpx.get(url + "/health/", **HERE).status_code == 503


class TestBadRequests:
    def test_a_pickle_is_no_json(self, caller: Caller) -> None:
        answer = caller.post("/infer/", b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00K\x01.")
        refused(answer, 400, "body: invalid JSON")

    def test_every_problem_has_its_path(self, caller: Caller) -> None:
        answer = caller.post("/infer/", b'{"requests": [{"step": "1"}], "seed": 1, "x": 2}')
        assert answer.status_code == 400
        assert {"requests[0].step", "requests[0].position", "requests[0].decode", "x"} <= {
            line.partition(":")[0] for line in said(answer).splitlines()
        }

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("temperature", -1.0),
            ("temperature", float("nan")),
            ("temperature", 1e308),
            ("top_p", 0.0),
            ("top_k", -2),
            ("top_k", 2**70),
            ("repetition_penalty", 0.0),
            ("repetition_penalty", 1e-320),
            ("repetition_penalty", 1e300),
            ("max_new_tokens", 0),
            ("max_new_tokens", 2**70),
        ],
    )
    def test_decoding_the_engine_cannot_do_is_refused(
        self, caller: Caller, key: str, value: float
    ) -> None:
        body = json.loads(messages.InferCall(requests=(make_request(0),), seed=1).body())
        body["requests"][0]["decode"][key] = value
        answer = caller.post("/infer/", json.dumps(body).encode())
        assert (answer.status_code, f"requests[0].decode.{key}: is" in said(answer)) == (400, True)
        assert not caller.engine.asked

    @pytest.mark.parametrize("seed", [2**70, 2**63, -1])
    def test_a_seed_that_vllm_cannot_keep_is_refused(self, caller: Caller, seed: int) -> None:
        answer = caller.infer(make_request(0, seed=seed))
        assert (answer.status_code, said(answer)) == (
            400,
            f"requests[0].seed: is {seed}; send a value from 0 to {2**63 - 1}",
        )
        assert not caller.engine.asked

    @pytest.mark.parametrize("token_id", [-1, 2**70])
    @pytest.mark.parametrize(
        "key", ["prompt_token_ids", "decode.stop_token_ids", "decode.banned_token_ids"]
    )
    def test_what_is_no_token_is_refused(self, caller: Caller, key: str, token_id: int) -> None:
        body = json.loads(messages.InferCall(requests=(make_request(0),), seed=1).body())
        holder = body["requests"][0]["decode"] if key.startswith("decode.") else body["requests"][0]
        holder[key.rpartition(".")[2]] = [1, token_id]
        answer = caller.post("/infer/", json.dumps(body).encode())
        assert (
            answer.status_code,
            said(answer).startswith(f"requests[0].{key}: has {token_id}, which is no token"),
        ) == (400, True)
        assert not caller.engine.asked

    def test_an_image_that_no_placeholder_stands_for_is_refused(self) -> None:
        """vLLM fails with it after it has been asked."""
        image = ImageRef(None, make_png(), "")
        settings = EngineSettings(
            "model",
            "float32",
            64,
            8,
            0,
            TransportKind.GLOO,
            Device.CPU,
            0.5,
            max_images_per_prompt=2,
        )
        asked = [
            replace(make_request(0, images=(image,)), prompt_token_ids=ids)
            for ids in ((1, 2), (1, 7, 2))
        ]
        (problem,) = request_problems(asked, settings, image_token_id=7)
        assert (
            problem
            == "requests[0].images: has 1, and prompt_token_ids 0 of the placeholder 7; send one"
            " placeholder for each image"
        )

    def test_beams_too_many_images_and_a_prompt_that_is_too_long_are_refused_at_once(
        self, caller: Caller
    ) -> None:
        body = json.loads(
            messages.InferCall(
                requests=(make_request(0), make_request(1), make_request(2)), seed=1
            ).body()
        )
        body["requests"][0]["decode"]["mode"] = str(DecodeMode.BEAM)
        body["requests"][1]["images"] = [{"path": None, "data": "", "sha256": ""}] * 3
        body["requests"][2]["prompt_token_ids"] = [1] * 64
        lines = said(caller.post("/infer/", json.dumps(body).encode())).splitlines()
        assert [line.partition(":")[0] for line in lines] == [
            "requests[0].decode.mode",
            "requests[1].images",
            "requests[2].prompt_token_ids",
        ]


class TestImages:
    def asked(self, caller: Caller, path: str | None, sha256: str = "") -> httpx.Response:
        return caller.infer(
            make_request(0, images=(ImageRef(None if path is None else Path(path), None, sha256),))
        )

    def test_a_path_under_the_root_is_read(self, caller: Caller, image_root: Path) -> None:
        for path in ("a.png", str(image_root / "a.png"), "../images/a.png"):
            assert self.asked(caller, path).status_code == 200
            assert caller.engine.asked[-1][0].images[0].data == make_png()

    @pytest.mark.parametrize(
        "path", ["../secret.png", "link.png", "/etc/passwd", "x/../../secret.png"]
    )
    def test_a_path_that_leads_out_of_it_is_not(self, caller: Caller, path: str) -> None:
        answer = self.asked(caller, path)
        refused(answer, 403, "requests[0].images[0].path: is outside")
        assert not caller.engine.asked

    def test_a_file_that_is_not_there_or_not_the_one_that_is_meant_or_too_large_is_an_error(
        self, caller: Caller, image_root: Path
    ) -> None:
        assert self.asked(caller, "b.png").status_code == 400
        for path in (".", "a\0.png", "a" * 5000):
            assert self.asked(caller, path).status_code == 400
        assert self.asked(caller, None).status_code == 400
        assert "changed" in said(self.asked(caller, "a.png", sha256="00"))
        (image_root / "large.png").write_bytes(b"x" * 20_001)
        assert self.asked(caller, "large.png").status_code == 413

    def test_without_a_root_nothing_is_read(
        self, engine: ObedientEngine, tmp_path: Path, image_root: Path
    ) -> None:
        one = make_service(engine, make_settings(tmp_path / "model"))
        asyncio.run(one.start())
        with serving(make_app(one)) as url:
            answer = self.asked(Caller(url, engine), str(image_root / "a.png"))
            refused(answer, 403, "image_root")

    def test_data_come_as_they_were_sent_and_their_path_is_a_label(self, caller: Caller) -> None:
        image = ImageRef(Path("/etc/passwd"), make_png(), "ab")
        assert caller.infer(make_request(0, images=(image,))).status_code == 200
        assert caller.engine.asked[-1][0].images == (image,)

    @pytest.mark.parametrize("data", [b"", b"no image", b"\x89PNG\r\n\x1a\ncut off"])
    def test_what_is_no_image_is_refused_before_the_engine_sees_it(
        self, caller: Caller, data: bytes
    ) -> None:
        answer = caller.infer(make_request(0), make_request(1, images=(ImageRef(None, data, ""),)))
        refused(answer, 400, "requests[1].images[0]: is no image")
        assert not caller.engine.asked

    def test_an_image_bomb_is_refused_by_its_header(self, caller: Caller) -> None:
        answer = caller.infer(make_request(0, images=(ImageRef(None, image_bomb(), ""),)))
        refused(answer, 400, "decompression bomb")
        assert not caller.engine.asked

    def test_an_image_with_too_many_pixels_is_refused(self, caller: Caller) -> None:
        answer = caller.infer(make_request(0, images=(ImageRef(None, make_png(100, 101), ""),)))
        too_large = (
            "requests[0].images[0]: of sample sample-0 has 100 x 101 pixels, one image may have"
            " 10000; send a smaller one, or start the server with "
        )
        assert (answer.status_code, said(answer)) == (413, f"{too_large}max_image_pixels=10100")


class TestSync:
    def test_all_phases_in_order_raise_the_version(self, caller: Caller) -> None:
        caller.sync(version=5)
        assert [phase for phase, _ in caller.engine.phases] == list(SyncPhase)
        assert {kept.canary for _, kept in caller.engine.phases} == {make_offer().canary}
        assert caller.get("/version/").json() == {"version": 5}

    def test_the_last_phase_gives_the_report(self, caller: Caller) -> None:
        answers = [
            messages.read(messages.SyncAnswer, caller.phase(phase, 2).content).report
            for phase in SyncPhase
        ]
        assert answers[:-1] == [None] * 5
        assert answers[-1] is not None
        assert (answers[-1].version, answers[-1].bytes, answers[-1].phase_s) == (
            2,
            24,
            {"pause": 0.1, "wire": 0.2},
        )

    @pytest.mark.parametrize(("done", "next_"), [(0, 1), (0, 5), (1, 2), (2, 2), (2, 4), (6, 2)])
    def test_a_phase_out_of_turn_is_refused(self, caller: Caller, done: int, next_: int) -> None:
        phases = list(SyncPhase)
        for phase in phases[:done]:
            caller.phase(phase)
        if done == next_:
            next_ += 1
        answer = caller.phase(phases[next_])
        refused(answer, 409, "out of turn")
        assert len(caller.engine.phases) == done

    def test_a_phase_of_another_version_is_refused(self, caller: Caller) -> None:
        caller.phase(SyncPhase.PAUSE, version=1)
        assert caller.phase(SyncPhase.RENDEZVOUS, version=2).status_code == 409

    def test_a_sync_can_begin_anew_at_any_time(self, caller: Caller) -> None:
        caller.phase(SyncPhase.PAUSE)
        caller.phase(SyncPhase.RENDEZVOUS)
        caller.sync(version=2)
        assert caller.engine.version == 2

    def test_a_sync_begins_with_its_offer(self, caller: Caller) -> None:
        answer = caller.post("/sync/pause/", messages.SyncCall(version=1, offer=None).body())
        refused(answer, 400, "offer: is null")

    def test_a_group_of_other_sizes_than_this_server_s_is_refused(self, caller: Caller) -> None:
        for changes in ({"world_size": 4}, {"num_groups": 2}):
            answer = caller.phase(SyncPhase.PAUSE, **changes)
            refused(answer, 400, "offer.terms.groups")
        assert caller.infer(make_request(0)).status_code == 200, "no sync has begun"

    def test_rollouts_wait_for_the_end_of_a_sync(self, caller: Caller) -> None:
        for phase in list(SyncPhase)[:-1]:
            caller.phase(phase)
            answer = caller.infer(make_request(0))
            refused(answer, 409, "its sync to version 1 is under way, or was not completed")
        caller.phase(SyncPhase.CANARY)
        assert caller.infer(make_request(0)).status_code == 200

    def test_what_has_no_answer_when_other_weights_arrive_is_refused(self, caller: Caller) -> None:
        """vLLM would begin with what it has queued as soon as it is resumed, for the canary."""
        caller.engine.latency_s = 60.0
        with ThreadPoolExecutor(1) as thread:
            asking = thread.submit(caller.infer, make_request(0))
            assert eventually(lambda: caller.engine.num_running == 1)
            caller.engine.latency_s = 0.0
            caller.sync()
            caller.engine.goes_on.set()
            answer = asking.result()
        refused(answer, 409, "was given other weights than version 0 before it had answered")

    def test_after_a_failed_phase_only_a_new_sync_opens_the_door(self, caller: Caller) -> None:
        caller.phase(SyncPhase.PAUSE)
        caller.engine.trouble = [
            WeightSyncError(
                "no group", actor="the engine", phase="rendezvous", quantity="ranks", size=2.0
            )
        ]
        answer = caller.phase(SyncPhase.RENDEZVOUS)
        assert answer.status_code == 500
        error = messages.read(messages.ErrorAnswer, answer.content).error
        assert (error.kind, error.message, error.phase, error.quantity, error.size) == (
            messages.ErrorKind.WEIGHT_SYNC,
            "no group",
            "rendezvous",
            "ranks",
            2.0,
        )
        assert caller.infer(make_request(0)).status_code == 409
        assert caller.phase(SyncPhase.RENDEZVOUS).status_code == 409
        caller.sync()
        assert caller.infer(make_request(0)).status_code == 200

    def test_the_weights_of_one_run_answer_no_other_run(self, caller: Caller) -> None:
        assert caller.infer(make_request(0), run="another").status_code == 200, (
            "before the first sync the weights are the checkpoint's"
        )
        caller.sync(run="a run")
        answer = caller.infer(make_request(0), run="another")
        refused(answer, 409, "another run's weights")
        assert caller.infer(make_request(0), run="a run").status_code == 200
        assert caller.infer(make_request(0)).status_code == 200
        caller.sync(run="another")
        assert caller.infer(make_request(0), run="another").status_code == 200

    def test_other_weights_than_the_caller_asks_for_do_not_answer(self, caller: Caller) -> None:
        """A server that was started again in the middle of a run."""
        body = messages.InferCall(requests=(make_request(0),), seed=1, run="a run", version=3)
        answer = caller.post("/infer/", body.body())
        refused(answer, 409, "holds version 0 of the weights, not 3")
        caller.sync(version=3)
        assert caller.post("/infer/", body.body()).status_code == 200
        caller.sync(version=4)
        answer = caller.post("/infer/", body.body())
        refused(answer, 409, "holds version 4 of the weights, not 3")


def test_what_contradicts_the_call_is_a_422_and_a_failing_engine_a_500_each_with_its_message(
    caller: Caller,
) -> None:
    caller.engine.trouble = [
        RolloutError("was sampled by other weights", actor="the engine", phase="generate"),
        ZeroDivisionError("by zero"),
    ]
    answer = caller.infer(make_request(0))
    error = messages.read(messages.ErrorAnswer, answer.content).error
    assert (answer.status_code, error.kind) == (422, messages.ErrorKind.ROLLOUT)
    assert (error.message, error.phase) == ("was sampled by other weights", "generate")
    answer = caller.infer(make_request(0))
    assert (answer.status_code, said(answer)) == (500, "ZeroDivisionError: by zero")
    assert caller.infer(make_request(0)).status_code == 200


@pytest.mark.slow
def test_a_body_that_stalls_is_answered_with_408_and_its_connection_ended(
    caller: Caller, caplog: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(calls, "STALL_S", 0.2)
    host, _, port = caller.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        head = (
            f"POST /infer/ HTTP/1.1\r\nHost: {host}\r\nContent-Type:"
            " application/json\r\nContent-Length: 1000\r\n\r\n"
        )
        connection.sendall(head.encode() + b"half")
        # to the end, which the server makes
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"no more of the body has come for 0.2 s after 4 bytes; send it again" in answer
    assert [record.getMessage() for record in caplog.records] == [
        "a caller of '/infer/' has stalled for 0.2 s after 4 bytes of its body"
    ]


@pytest.mark.slow
def test_a_body_that_ends_half_sent_is_a_line_in_the_log_and_no_error_of_the_server(
    engine: ObedientEngine, tmp_path: Path, caplog: Any
) -> None:
    """What the application raises is a traceback of sixty lines in the log of whoever serves it."""
    one = make_service(engine, make_settings(tmp_path / "model"))
    asyncio.run(one.start())
    app = make_app(one)
    headers = [
        (b"host", b"a"),
        (b"content-type", b"application/json"),
        (b"content-length", b"1000"),
    ]
    scope = {
        "type": "http",
        "method": "POST",
        "headers": headers,
        "query_string": b"",
        "path": "/infer/",
        "raw_path": b"/infer/",
        "root_path": "",
    }

    async def call() -> list[int]:
        received = iter(
            [
                {"type": "http.request", "body": b"half", "more_body": True},
                {"type": "http.disconnect"},
            ]
        )
        sent: list[Any] = []

        async def receive() -> Any:
            return next(received)

        async def send(message: Any) -> None:
            sent.append(message)

        await app(scope, receive, send)
        return [message["status"] for message in sent if message["type"] == "http.response.start"]

    assert [asyncio.run(call()) for _ in range(3)] == [[499]] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "a caller of '/infer/' has gone after 4 bytes of its body"
    ] * 3
    assert all(record.exc_info is None for record in caplog.records)


def test_the_requests_of_a_caller_that_has_gone_are_aborted(caller: Caller) -> None:
    caller.engine.latency_s = 60.0
    body = messages.InferCall(requests=(make_request(0),), seed=1).body()
    asked_and_gone(caller.url + "/infer/", body, lambda: caller.engine.num_running == 1)
    assert eventually(lambda: caller.engine.num_cancelled == 1)


def test_a_phase_goes_on_when_its_caller_has_gone(caller: Caller) -> None:
    caller.engine.latency_s = 60.0
    asked_and_gone(
        caller.url + "/sync/pause/",
        messages.SyncCall.of(SyncPhase.PAUSE, make_offer(), "a run").body(),
        lambda: len(caller.engine.phases) == 1,
    )
    caller.engine.goes_on.set()
    assert eventually(lambda: caller.phase(SyncPhase.RENDEZVOUS).status_code == 200)
