"""The routes of a rollout server, over an engine that does as it is told."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from contextlib import suppress
from functools import partial

import httpx
import pytest
from fake_server import (
    HERE,
    Caller,
    ObedientEngine,
    asked_and_gone,
    eventually,
    make_offer,
    make_request,
    make_service,
    make_settings,
    serving,
    serving_engine,
)

from rollout_actors.server import app as server_app
from rollout_actors.server import messages
from rollout_actors.server.app import make_app
from rollout_actors.server.messages import ErrorKind
from shared.errors import RolloutError, WeightSyncError
from shared.weight_sync.phases import SyncPhase

INFER = messages.InferCall(requests=(make_request(0),), seed=1).body()
PAUSE = messages.SyncCall.of(SyncPhase.PAUSE, make_offer(), "a run").body()
GUARDED = [
    *[("GET", route) for route in ("/get_world_size", "/info", "/version")],
    *[("POST", route) for route in ("/infer", "/init_communicator", "/sync/pause")],
]
"""All routes but `/health`."""


def error(answer):
    return messages.read(messages.ErrorAnswer, answer.content).error


def refused(answer, status, words):
    message = answer.json()["error"]["message"]
    assert (answer.status_code, words in message) == (status, True), message


@pytest.fixture
def engine():
    return ObedientEngine()


@pytest.fixture
def expected(tmp_path):
    return make_settings(tmp_path / "model")


@pytest.fixture
def caller(engine, expected):
    with serving_engine(engine, expected, max_request_bytes=20_000) as url:
        yield Caller(url)


@pytest.mark.parametrize("slash", ["", "/"])
def test_every_route_is_there_with_and_without_its_last_slash(caller, slash):
    assert caller.get(f"/health{slash}").status_code == 200
    assert caller.get(f"/get_world_size{slash}").json() == {"world_size": 1}
    assert caller.get(f"/version{slash}").json() == {"version": 0}
    assert caller.get(f"/info{slash}").json()["model_type"] == "qwen3_vl"
    for route in ("/infer", "/init_communicator", "/sync/pause"):
        assert caller.post(route + slash, b"{}").status_code == 400


def test_another_route_is_404_and_another_method_405(caller):
    for route in ("/docs", "/openapi.json", "/nope"):
        refused(caller.get(route), 404, "POST /infer/")
    refused(caller.get("/infer/"), 405, "POST /infer/")
    refused(caller.post("/sync/rendezvous/", PAUSE), 404, "/init_communicator/")


def test_a_call_of_the_openai_api_is_refused_with_the_command_of_a_server_that_takes_it(
    caller, expected
):
    words = f"vllm serve {expected.model_path} "
    refused(caller.get("/v1/models"), 404, words)
    refused(caller.post("/v1/chat/completions", b"{}"), 404, words)


def test_health_tells_what_runs_and_how_far_it_is(caller, engine):
    assert caller.running() == 0
    engine.latency_s = 60.0
    body = messages.InferCall.of([make_request(0), make_request(1)]).body()
    asking = threading.Thread(target=lambda: caller.post("/infer/", body))
    asking.start()
    assert eventually(lambda: caller.running() == 2)
    engine.goes_on.set()
    asking.join()
    assert caller.running() == 0
    first, second = (caller.get("/health/").json()["num_tokens"] for _ in range(2))
    assert first < second


def test_a_server_that_starts_or_has_died_says_503_everywhere(engine, expected):
    service = make_service(engine, expected)
    bodies = {"/infer": INFER, "/init_communicator": PAUSE, "/sync/pause": PAUSE}
    with serving(make_app(service)) as url:
        caller = Caller(url)

        def all_say(words):
            refused(caller.get("/health/"), 503, words)
            for method, route in GUARDED:
                if method == "POST":
                    refused(caller.post(route, bodies.get(route, {})), 503, words)
                else:
                    refused(caller.get(route), 503, words)

        all_say("is starting")
        asyncio.run(service.start())
        assert caller.get("/health/").status_code == 200
        engine.is_dead = True
        all_say("has died")


class TestToken:
    @pytest.fixture
    def locked(self, engine, expected):
        with serving_engine(engine, expected, token="pass") as url:
            yield Caller(url)

    def test_all_but_health_ask_for_it(self, locked):
        assert locked.get("/health/").status_code == 200
        for method, route in (*GUARDED, ("GET", "/v1/models")):
            answer = locked.get(route) if method == "GET" else locked.post(route, b"{}")
            refused(answer, 401, "token_env")

    def test_another_token_is_refused(self, locked):
        wrong = (b"Bearer pas", b"Bearer pass2", b"Bearer", b"pass", b"Basic pass")
        for sent in (*wrong, "Bearer pässe".encode()):
            answer = httpx.get(
                f"{locked.url}/info/", headers=[(b"Authorization", sent)], **HERE, timeout=60
            )
            assert answer.status_code == 401


class TestBodies:
    def test_a_body_that_does_not_say_it_is_too_large_is_left_when_it_is(self, caller):
        answer = httpx.post(
            f"{caller.url}/infer/",
            content=(b" " * 1000 for _ in range(1000)),
            headers={"Content-Type": "application/json"},
            **HERE,
            timeout=60,
        )
        assert answer.status_code == 413

    def test_what_is_not_called_json_is_refused(self, caller):
        for kind, status in (
            ("text/plain", 415),  # a page in a browser may send it to any address unasked
            ("application/x-www-form-urlencoded", 415),
            ("application/octet-stream", 415),
            ("application/json; charset=utf-8", 200),
        ):
            assert caller.post("/infer/", INFER, **{"Content-Type": kind}).status_code == status

    def test_every_problem_has_its_path_and_no_pickle_is_read(self, caller, engine):
        pickled = caller.post("/infer/", b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00K\x01.")
        refused(pickled, 400, "body: invalid JSON")
        answer = caller.post("/infer/", b'{"requests": [{"step": "1"}], "seed": 1, "x": 2}')
        assert answer.status_code == 400
        assert {"requests[0].step", "requests[0].position", "requests[0].decode", "x"} <= {
            line.partition(":")[0] for line in error(answer).message.splitlines()
        }
        requests = [make_request(0, seed=2**70), make_request(1, seed=-1)]
        answer = caller.post("/infer/", messages.InferCall.of(requests).body())
        refused(answer, 400, f"requests[0].seed: is {2**70}")
        refused(answer, 400, "\nrequests[1].seed: is -1")
        assert not engine.asked

    @pytest.mark.slow
    def test_a_body_that_stalls_is_answered_with_408_and_its_connection_ended(
        self, caller, caplog, monkeypatch
    ):
        monkeypatch.setattr(server_app, "STALL_S", 0.2)
        host, _, port = caller.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=240) as connection:
            head = (
                f"POST /infer/ HTTP/1.1\r\nHost: {host}\r\nContent-Type:"
                " application/json\r\nContent-Length: 1000\r\n\r\n"
            )
            connection.sendall(head.encode() + b"half")
            # To the end, which the server makes.
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert re.search(rb"body .* 0\.2 s .* 4 bytes; send it again", answer)
        (line,) = [record.getMessage() for record in caplog.records]
        assert re.search(r"'/infer/' stalled .* 0\.2 s .* 4 bytes", line)

    @pytest.mark.slow
    def test_a_body_that_ends_half_sent_is_a_line_in_the_log_and_no_error_of_the_server(
        self, engine, expected, caplog
    ):
        """An exception would be a traceback of sixty lines in the log."""
        service = make_service(engine, expected)
        asyncio.run(service.start())
        app = make_app(service)
        scope = {
            "type": "http",
            "method": "POST",
            "headers": [(b"host", b"a"), (b"content-type", b"application/json")],
            "query_string": b"",
            "path": "/infer/",
            "raw_path": b"/infer/",
            "root_path": "",
        }

        async def call():
            received = [
                {"type": "http.disconnect"},
                {"type": "http.request", "body": b"half", "more_body": True},
            ]
            sent = []

            async def receive():
                return received.pop()

            async def send(message):
                sent.append(message)

            await app(scope, receive, send)
            return [message["status"] for message in sent if "status" in message]

        assert [asyncio.run(call()) for _ in range(3)] == [[499]] * 3
        assert [record.exc_info for record in caplog.records] == [None] * 3
        for record in caplog.records:
            assert re.search("'/infer/' disconnected .* 4 bytes", record.getMessage())


def connect(caller):
    host, _, port = caller.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=240)


class TestConnections:
    @pytest.mark.parametrize("is_new", [True, False])
    @pytest.mark.parametrize("sent", [b"", b"POST /infer/ HTTP/1.1\r\nHost: a\r\n"])
    def test_one_that_asks_for_nothing_is_closed(self, caller, engine, monkeypatch, sent, is_new):
        monkeypatch.setattr(server_app, "HEAD_S", 0.2 if is_new else 60.0)
        with connect(caller) as connection:
            if not is_new:
                engine.latency_s = 60.0
                kind = b"Content-Type: application/json\r\nContent-Length: %d" % len(INFER)
                connection.sendall(b"POST /infer/ HTTP/1.1\r\nHost: a\r\n%b\r\n\r\n" % kind + INFER)
                assert eventually(lambda: engine.num_running)
                # The limit of this connection's next call begins with the answer to this one.
                monkeypatch.setattr(server_app, "HEAD_S", 0.2)
                engine.goes_on.set()
                answer = b""
                while not answer.endswith(b"]}"):  # head and body may arrive separately
                    part = connection.recv(65536)
                    assert part, answer
                    answer += part
                assert answer.startswith(b"HTTP/1.1 200 ")
            with suppress(ConnectionResetError):  # what was sent then is not read any more
                connection.sendall(sent)
                assert connection.recv(65536) == b""

    def test_one_that_waits_for_its_answer_stays(self, caller, engine, monkeypatch):
        monkeypatch.setattr(server_app, "HEAD_S", 0.2)
        engine.latency_s = 0.5

        def is_answered():
            with suppress(httpx.TransportError):  # its head took longer than this limit
                return caller.post("/infer/", INFER).status_code == 200

        assert eventually(is_answered)

    def test_a_head_without_end_is_not_read(self, caller):
        head = b"GET /health/ HTTP/1.1\r\n" + b"X: xxxxxxxxxx\r\n" * 1_000_000
        with connect(caller) as connection, pytest.raises(OSError):
            connection.sendall(head)
        assert caller.get("/health/").status_code == 200

    def test_an_odd_head_is_no_error_of_the_server(self, caller, caplog):
        for head in (
            b"GET /health/ HTTP/1.1\r\nHost: [\r\n\r\n",
            b"GET /%ff%00 HTTP/1.1\r\nHost: a\r\n\r\n",
            b"POST /infer/ HTTP/1.1\r\nHost: [\r\nContent-Length: 2\r\n\r\n{}",
            b"POST /infer/ HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999\r\n\r\n",
            b"GET http://[/v1/ HTTP/1.1\r\nHost: a\r\n\r\n",
        ):
            with connect(caller) as connection:
                connection.sendall(head.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
                answer = b"".join(iter(lambda: connection.recv(65536), b""))
            assert answer.split()[1] in (b"200", b"400", b"404", b"415")
        assert not any(record.exc_info for record in caplog.records)


def test_a_server_that_may_be_called_by_one_name_answers_to_no_other(engine, expected):
    service = make_service(engine, expected)
    with serving(make_app(service, only_from=("localhost", "127.0.0.1"))) as url:
        assert Caller(url).get("/health/", Host="evil.example").status_code == 400
        assert Caller(url).get("/health/").status_code == 503


@pytest.mark.parametrize(
    ("trouble", "status", "detail"),
    [
        (
            RolloutError("no", actor="a", phase="generate"),
            422,
            messages.ErrorDetail(kind=ErrorKind.ROLLOUT, message="no", actor="a", phase="generate"),
        ),
        (
            WeightSyncError("no", actor="a", phase="wire", quantity="q", size=2.0),
            500,
            messages.ErrorDetail(
                kind=ErrorKind.WEIGHT_SYNC,
                message="no",
                actor="a",
                phase="wire",
                quantity="q",
                size=2.0,
            ),
        ),
        (
            ZeroDivisionError("by zero"),
            500,
            messages.ErrorDetail(kind=ErrorKind.FAILED, message="ZeroDivisionError: by zero"),
        ),
    ],
)
def test_an_error_of_the_engine_comes_with_its_status_and_its_message(
    caller, engine, trouble, status, detail
):
    engine.trouble = [trouble]
    answer = caller.post("/infer/", INFER)
    assert (answer.status_code, error(answer)) == (status, detail)
    assert caller.post("/infer/", INFER).status_code == 200


def test_a_phase_goes_on_when_its_caller_has_gone(caller, engine):
    engine.latency_s = 60.0
    asked_and_gone(f"{caller.url}/sync/pause/", PAUSE, lambda: len(engine.phases) == 1)
    engine.goes_on.set()
    call = messages.SyncCall.of(SyncPhase.RENDEZVOUS, make_offer(), "a run").body()
    post = partial(caller.post, "/init_communicator/", call)
    assert eventually(lambda: post().status_code == 200)
