"""The routes of the OpenAI API, over a serving that does as it is told: its door, its limits, and
nothing of vLLM's protocol.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_server import (
    HERE,
    ObedientEngine,
    asked_and_gone,
    eventually,
    image_bomb,
    make_offer,
    make_png,
    make_service,
    make_settings,
    serving,
)
from PIL import Image

from rollout_actors.server import messages
from rollout_actors.server.app import make_app
from rollout_actors.server.engine_thread import EngineThread
from rollout_actors.server.openai_routes import OpenAIAnswer, OpenAIRoute
from shared.weight_sync.phases import SyncPhase

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
SYNC_ROUTES = {
    phase: "/init_communicator/" if phase is SyncPhase.RENDEZVOUS else f"/sync/{phase}/"
    for phase in SyncPhase
}
IMAGE_PLACES: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": "URL"}},
    {"type": "image_url", "image_url": "URL"},
    {"image_url": "URL", "uuid": "1"},
    {"type": "input_image", "image_url": "URL"},
    {"type": "video_url", "video_url": {"url": "URL"}},
    {"type": "audio_url", "audio_url": {"url": "URL"}},
]


class ObedientServing:
    """An `OpenAIServing` that answers with the call itself, after `latency_s`, or with `num_events`
    events where a stream is asked for.
    """

    def __init__(self) -> None:
        self.latency_s = 0.0
        self.goes_on = threading.Event()
        """Answers at once, whatever the latency."""
        self.num_events = 3
        self.num_allowed = 1000
        """Of the events; those behind them wait until it is more."""
        self.status = 200
        self.asked: list[tuple[OpenAIRoute, dict[str, Any]]] = []
        self.num_cancelled = 0
        self.num_closed = 0

    async def answer(self, route: OpenAIRoute, call: dict[str, Any]) -> OpenAIAnswer:
        self.asked.append((route, call))
        if call.get("stream"):
            return OpenAIAnswer(200, self._events())
        try:
            until = time.monotonic() + self.latency_s
            while time.monotonic() < until and not self.goes_on.is_set():
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return OpenAIAnswer(self.status, {"id": "an answer", "object": str(route), "choices": []})

    async def _events(self) -> AsyncGenerator[str, None]:
        try:
            for number in range(self.num_events):
                await asyncio.sleep(self.latency_s)
                while number >= self.num_allowed:
                    await asyncio.sleep(0.01)
                yield f'data: {{"id": "{number}", "choices": []}}\n\n'
            yield "data: [DONE]\n\n"
        finally:
            self.num_closed += 1


class Caller:
    def __init__(self, url: str, engine: ObedientEngine, serving: ObedientServing) -> None:
        self.url, self.engine, self.serving = url, engine, serving

    def post(self, route: str, body: Any, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(
            self.url + route,
            content=content,
            headers={"Content-Type": "application/json"} | headers,
            **HERE,
            timeout=30,
        )

    def get(self, route: str, **headers: str) -> httpx.Response:
        return httpx.get(self.url + route, headers=headers, **HERE)

    def phase(self, phase: SyncPhase, version: int = 1) -> None:
        assert (
            self.post(
                SYNC_ROUTES[phase], messages.SyncCall.of(phase, make_offer(version), "a run").body()
            ).status_code
            == 200
        ), phase

    def sync(self, version: int = 1) -> None:
        for phase in SyncPhase:
            self.phase(phase, version)

    def running(self) -> int:
        return int(self.get("/health/").json()["num_running"])

    def client(self, token: str = "none", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=token,
            http_client=httpx.Client(**HERE),
            **{"max_retries": 0} | options,
        )


def said(answer: httpx.Response) -> str:
    """In OpenAI's form, whatever it is."""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (None, answer.status_code)
    return str(error["message"])


@pytest.fixture
def serving_() -> ObedientServing:
    return ObedientServing()


@pytest.fixture(params=["on the server's loop", "on the engine's"])
def caller(
    serving_: ObedientServing, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Caller]:
    engine = ObedientEngine()
    thread = EngineThread(lambda: engine, lambda _: serving_)
    one = make_service(thread, make_settings(tmp_path / "model"), max_request_bytes=5_000)
    asyncio.run(one.start())
    openai_ = thread if request.param == "on the engine's" else serving_
    with serving(make_app(one, openai=openai_)) as url:
        yield Caller(url, engine, serving_)
    thread.close()


@pytest.mark.parametrize("slash", ["", "/"])
def test_every_route_is_there_with_and_without_its_last_slash(caller: Caller, slash: str) -> None:
    assert caller.get(f"/v1/models{slash}").json()["object"] == OpenAIRoute.MODELS
    for route in (OpenAIRoute.CHAT, OpenAIRoute.COMPLETIONS):
        assert caller.post(f"{route}{slash}", CHAT).json()["object"] == route
    assert [route for route, _ in caller.serving.asked] == list(OpenAIRoute)


def test_a_server_without_a_serving_has_no_such_routes(tmp_path: Path) -> None:
    one = make_service(ObedientEngine(), make_settings(tmp_path / "model"))
    asyncio.run(one.start())
    with serving(make_app(one)) as url:
        assert httpx.get(f"{url}/v1/models", **HERE).status_code == 404


def test_the_call_reaches_the_serving_as_it_was_sent(caller: Caller) -> None:
    call = CHAT | {"logprobs": True, "return_token_ids": True, "n": 2, "whatever": [1, {"a": None}]}
    caller.post("/v1/chat/completions", call)
    assert caller.serving.asked == [(OpenAIRoute.CHAT, call)]


def test_an_answer_tells_the_version_of_the_weights_in_its_header_and_in_itself(
    caller: Caller,
) -> None:
    for version in (0, 7):
        if version:
            caller.sync(version)
        answer = caller.post("/v1/chat/completions", CHAT)
        assert (answer.headers["X-Weight-Version"], answer.json()["weight_version"]) == (
            str(version),
            version,
        )
        assert caller.client().chat.completions.create(**CHAT).weight_version == version


def test_what_the_serving_refuses_is_passed_on_as_it_is(caller: Caller) -> None:
    caller.serving.status = 404
    answer = caller.post("/v1/chat/completions", CHAT)
    assert (answer.status_code, answer.json()) == (
        404,
        {"id": "an answer", "object": "/v1/chat/completions", "choices": []},
    )


def test_a_server_that_starts_or_has_died_says_503(
    tmp_path: Path, serving_: ObedientServing
) -> None:
    engine = ObedientEngine()
    one = make_service(engine, make_settings(tmp_path / "model"))
    with serving(make_app(one, openai=serving_)) as url:
        caller = Caller(url, engine, serving_)
        for wanted in ("is starting", "has died"):
            for answer in (
                caller.get("/v1/models"),
                caller.post("/v1/chat/completions", CHAT),
                caller.post("/v1/completions", CHAT),
            ):
                assert answer.status_code == 503
                assert wanted in said(answer)
            asyncio.run(one.start())
            engine.is_dead = True
    assert not serving_.asked


def test_they_ask_for_the_token(tmp_path: Path, serving_: ObedientServing) -> None:
    engine = ObedientEngine()
    one = make_service(engine, make_settings(tmp_path / "model"))
    asyncio.run(one.start())
    with serving(make_app(one, openai=serving_, token="sesame")) as url:
        caller = Caller(url, engine, serving_)
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            for answer in (
                caller.get("/v1/models", **headers),
                caller.post("/v1/chat/completions", CHAT, **headers),
                caller.post("/v1/completions", CHAT),
            ):
                assert answer.status_code == 401
        with pytest.raises(openai.AuthenticationError, match="bearer token"):
            caller.client("wrong").chat.completions.create(**CHAT)
        assert not serving_.asked
        assert caller.client("sesame").chat.completions.create(**CHAT).id == "an answer"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "cannot be read as JSON"),
        (b"\xff", 400, "cannot be read as JSON"),
        (b"[" * 4000, 400, "cannot be read as JSON"),
        (b'{"temperature": NaN}', 400, "cannot be read as JSON: NaN is no JSON"),
        (b"[]", 400, "is a JSON list; send an object"),
        (b" " * 5001, 413, "larger than max_request_bytes = 5000"),
        ({"prompt": "a", "n": 9}, 400, "asks for 9 answers, one call may ask for 8"),
        ({"prompt": "a", "n": "100000"}, 400, "n: must be a whole number, got '100000'"),
        ({"prompt": "a", "n": 100000.0}, 400, "n: must be a whole number, got 100000.0"),
        ({"prompt": ["a"] * 9}, 400, "asks for 9 answers"),
        ({"prompt": [[1, 2], [3]], "n": 5}, 400, "asks for 10 answers"),
    ],
)
def test_what_is_too_much_or_no_call_is_refused(
    caller: Caller, body: Any, status: int, words: str
) -> None:
    answer = caller.post("/v1/completions", body)
    assert (answer.status_code, words in said(answer)) == (status, True), said(answer)
    assert not caller.serving.asked


def test_an_error_is_of_the_form_that_openais_client_reads(caller: Caller) -> None:
    with pytest.raises(openai.PermissionDeniedError) as caught:
        caller.client().chat.completions.create(
            model="m",
            messages=[
                {"role": "user", "content": [IMAGE_PLACES[0] | {"image_url": {"url": "file:///a"}}]}
            ],
        )
    assert (caught.value.type, caught.value.param, caught.value.code) == ("Forbidden", None, "403")
    assert caught.value.body == {
        "message": caught.value.body["message"],
        "type": "Forbidden",
        "param": None,
        "code": 403,
    }
    assert "this server fetches nothing" in caught.value.body["message"]


def test_routes_that_are_not_there_say_so_in_the_same_form(caller: Caller) -> None:
    for answer, status in (
        (caller.post("/v1/embeddings", {}), 404),
        (caller.get("/v1/chat/completions"), 405),
    ):
        assert (answer.status_code, bool(said(answer))) == (status, True)
    assert "kind" in caller.get("/nothing/").json()["error"]


def test_one_prompt_of_many_tokens_is_one_answer(caller: Caller) -> None:
    assert caller.post("/v1/completions", {"prompt": list(range(100))}).status_code == 200


def test_a_body_of_another_type_is_refused(caller: Caller) -> None:
    assert (
        caller.post("/v1/chat/completions", CHAT, **{"Content-Type": "text/plain"}).status_code
        == 415
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "url", ["http://169.254.169.254/latest", "file:///etc/passwd", "ftp://a/b"]
)
def test_nothing_is_fetched_for_a_caller(caller: Caller, url: str) -> None:
    for part in IMAGE_PLACES:
        for address, status in ((url, 403), ("data:image/png;base64,AA", 200)):
            content = [
                {"type": "text", "text": "see http://a"},
                json.loads(json.dumps(part).replace("URL", address)),
            ]
            answer = caller.post(
                "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]}
            )
            assert answer.status_code == status, part
            assert status == 200 or "send images as data:" in said(answer)
    assert len(caller.serving.asked) == len(IMAGE_PLACES)


def shown_to_vllm(caller: Caller, data: bytes) -> httpx.Response:
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return caller.post(
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
            ]
        },
    )


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (image_bomb(), "an image is too large (Image size (900000000 pixels)"),
        (make_png(100, 101), "an image has 100 x 101 pixels, one may have 10000"),
    ],
    ids=["a bomb", "too many pixels"],
)
def test_an_image_that_is_too_large_is_refused_by_its_header(
    caller: Caller, data: bytes, words: str
) -> None:
    answer = shown_to_vllm(caller, data)
    assert (answer.status_code, words in said(answer)) == (400, True), said(answer)
    assert not caller.serving.asked


def test_pixels_of_16_bits_are_given_to_vllm_as_the_learner_reads_them_and_others_as_they_were_sent(
    caller: Caller,
) -> None:
    file = io.BytesIO()
    Image.frombytes("I;16", (2, 1), b"\x00\x80\x00\x40").save(file, "PNG")
    for data in (file.getvalue(), make_png()):
        assert shown_to_vllm(caller, data).status_code == 200
    given = [
        call["messages"][0]["content"][0]["image_url"]["url"].partition(",")[2]
        for _, call in caller.serving.asked
    ]
    deep = Image.open(io.BytesIO(base64.b64decode(given[0])))
    assert (deep.mode, deep.tobytes()) == ("RGB", bytes([128] * 3 + [64] * 3))
    assert base64.b64decode(given[1]) == make_png()


def test_pixels_without_a_range_are_refused(caller: Caller) -> None:
    file = io.BytesIO()
    Image.new("F", (2, 1), 0.5).save(file, "TIFF")
    answer = shown_to_vllm(caller, file.getvalue())
    assert (
        answer.status_code,
        "an image cannot be shown: its pixels are floating-point numbers" in said(answer),
    ) == (400, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "messages_",
    [
        None,
        "text",
        ["text"],
        [{"content": "text"}],
        [{"content": ["text"]}],
        [{"content": [{"image_url": None}]}],
    ],
)
def test_messages_of_no_known_form_are_left_to_the_serving(caller: Caller, messages_: Any) -> None:
    assert caller.post("/v1/chat/completions", {"messages": messages_}).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("num_done", range(1, len(SyncPhase)))
def test_nothing_is_answered_while_a_sync_is_under_way_or_was_not_completed(
    caller: Caller, num_done: int
) -> None:
    for phase in list(SyncPhase)[:num_done]:
        caller.phase(phase)
    for stream in (False, True):
        with pytest.raises(
            openai.ConflictError,
            match=(
                "serves no rollouts: its sync to version 1 is under way, or was not completed;"
                " complete a sync"
            ),
        ):
            caller.client().chat.completions.create(**CHAT, stream=stream)
    assert not caller.serving.asked
    caller.sync(2)
    assert caller.client().chat.completions.create(**CHAT).weight_version == 2


def test_what_runs_when_a_sync_begins_is_answered_under_the_weights_it_began_with(
    caller: Caller,
) -> None:
    caller.serving.latency_s = 60.0
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(caller.post, "/v1/chat/completions", CHAT)
        assert eventually(lambda: caller.running() == 1)
        caller.phase(SyncPhase.PAUSE)
        caller.phase(SyncPhase.RENDEZVOUS)
        caller.serving.goes_on.set()
        answer = asking.result()
    assert (answer.status_code, answer.json()["weight_version"]) == (200, 0)


def refused_for_other_weights(answer: httpx.Response) -> bool:
    return (
        answer.status_code == 409
        and "was given other weights than version 0 before it had answered; ask again"
        in said(answer)
    )


@pytest.mark.slow
def test_what_has_no_answer_when_other_weights_arrive_is_refused_and_ended(caller: Caller) -> None:
    """vLLM would begin with what it has queued as soon as it is resumed, for the canary."""
    caller.serving.latency_s = 60.0
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(caller.post, "/v1/chat/completions", CHAT)
        assert eventually(lambda: caller.running() == 1)
        caller.sync()
        assert refused_for_other_weights(asking.result())
    assert caller.running() == 0
    assert eventually(lambda: caller.serving.num_cancelled == 1)


@pytest.mark.slow
def test_what_is_answered_after_other_weights_arrived_is_refused(caller: Caller) -> None:
    caller.serving.latency_s = 60.0
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(caller.post, "/v1/chat/completions", CHAT)
        assert eventually(lambda: caller.running() == 1)
        caller.sync()
        caller.serving.goes_on.set()
        assert refused_for_other_weights(asking.result())


@pytest.mark.slow
def test_a_stream_is_passed_on_event_by_event(caller: Caller) -> None:
    # The next event is made when this one is here: who kept them together would wait for ever.
    caller.serving.num_allowed = 1
    seen = []
    with (
        caller.client()
        .chat.completions.with_raw_response.create(**CHAT, stream=True)
        .parse() as stream
    ):
        for event in stream:
            seen.append(event.id)
            assert event.id == "2" or caller.running() == 1
            caller.serving.num_allowed += 1
    assert seen == ["0", "1", "2"]
    assert eventually(lambda: caller.running() == 0)


@pytest.mark.slow
def test_a_stream_ends_with_an_error_when_other_weights_arrive(caller: Caller) -> None:
    caller.serving.num_allowed, caller.serving.num_events = 1, 100
    stream = caller.client().chat.completions.create(**CHAT, stream=True)
    assert next(stream).id == "0"
    caller.sync()
    caller.serving.num_allowed = 100
    with pytest.raises(openai.APIError, match="was given other weights than version 0"):
        list(stream)
    assert eventually(lambda: caller.serving.num_closed == 1)
    assert caller.running() == 0


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_the_work_for_a_caller_who_has_gone_is_ended(caller: Caller, stream: bool) -> None:
    caller.serving.latency_s = 60.0
    asked_and_gone(
        caller.url + "/v1/chat/completions",
        json.dumps(CHAT | {"stream": stream}).encode(),
        lambda: len(caller.serving.asked) == 1,
    )
    assert eventually(lambda: caller.serving.num_cancelled + caller.serving.num_closed == 1)
    assert eventually(lambda: caller.running() == 0)
