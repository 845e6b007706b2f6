"""The routes of the OpenAI API, over a serving that does as it is told: its door, its limits, and
nothing of vLLM's protocol. (What they share with the other routes is in `test_app.py`.)
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import openai
import pytest
from fake_server import (
    HERE,
    Caller,
    ObedientEngine,
    asked_and_gone,
    eventually,
    image_bomb,
    make_png,
    make_service,
    make_settings,
    serving,
    serving_engine,
)
from PIL import Image

from rollout_actors.server import openai_routes
from rollout_actors.server.app import make_app
from rollout_actors.server.engine_thread import EngineThread
from rollout_actors.server.openai_routes import OpenAIAnswer, OpenAIRoute
from shared.weight_sync.phases import SyncPhase

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
IMAGE_PLACES = [
    {"type": "image_url", "image_url": {"url": "URL"}},
    {"type": "image_url", "image_url": "URL"},
    {"image_url": "URL"},
    {"type": "input_image", "image_url": "URL"},
    {"type": "video_url", "video_url": {"url": "URL"}},
    {"type": "audio_url", "audio_url": {"url": "URL"}},
]


class ObedientServing:
    """An `OpenAIServing` that answers with the call itself, after `latency_s`."""

    def __init__(self):
        self.latency_s = 0.0
        self.goes_on = threading.Event()
        """Answers at once, whatever the latency."""
        self.status = 200
        self.asked = []
        self.num_cancelled = 0

    async def answer(self, route, call):
        self.asked.append((route, call))
        try:
            until = time.monotonic() + self.latency_s
            while time.monotonic() < until and not self.goes_on.is_set():
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return OpenAIAnswer(self.status, {"id": "an answer", "object": str(route), "choices": []})


class OpenAICaller(Caller):
    def __init__(self, url, serving_):
        super().__init__(url)
        self.serving = serving_

    def chat(self, *content, **fields):
        """Ask with a message of these parts, or with `CHAT`."""
        call = CHAT | fields
        if content:
            call["messages"] = [{"role": "user", "content": list(content)}]
        return self.post("/v1/chat/completions", call)

    def client(self, token="none"):
        return openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=token,
            http_client=httpx.Client(**HERE),
            max_retries=0,
        )

    @contextmanager
    def answering(self):
        """Give a call that has no answer until `serving.goes_on`."""
        self.serving.latency_s = 60.0
        with ThreadPoolExecutor(1) as thread:
            asking = thread.submit(self.chat)
            assert eventually(lambda: self.running() == 1)
            yield asking


def said(answer, status):
    """Return the message of an error, which is of OpenAI's form whatever it is about."""
    error = answer.json()["error"]
    assert answer.status_code == status, error
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (None, status)
    return error["message"]


@pytest.fixture
def caller(tmp_path):
    serving_ = ObedientServing()
    thread = EngineThread(ObedientEngine, lambda _: serving_)
    service = make_service(thread, make_settings(tmp_path / "model"), max_request_bytes=5_000)
    asyncio.run(service.start())
    with serving(make_app(service, openai=thread)) as url:
        yield OpenAICaller(url, serving_)
    thread.close()


def test_every_route_is_answered_by_the_serving_with_and_without_its_last_slash(caller):
    assert caller.get("/v1/models").json()["object"] == OpenAIRoute.MODELS
    for route in (OpenAIRoute.CHAT, OpenAIRoute.COMPLETIONS):
        assert caller.post(f"{route}/", CHAT).json()["object"] == route
    assert [route for route, _ in caller.serving.asked] == list(OpenAIRoute)


def test_a_server_without_a_serving_has_no_such_routes(tmp_path):
    with serving_engine(ObedientEngine(), make_settings(tmp_path / "model")) as url:
        assert Caller(url).get("/v1/models").status_code == 404


def test_the_call_reaches_the_serving_as_it_was_sent_and_its_refusal_the_caller(caller):
    caller.serving.status = 404
    fields = {"logprobs": True, "return_token_ids": True, "n": 2, "whatever": [1, {"a": None}]}
    answer = caller.chat(**fields)
    assert caller.serving.asked == [(OpenAIRoute.CHAT, CHAT | fields)]
    refusal = {"id": "an answer", "object": "/v1/chat/completions", "choices": []}
    assert (answer.status_code, answer.json()) == (404, refusal)


def test_an_answer_tells_the_version_of_the_weights_in_its_header_and_in_itself(caller):
    for version in (0, 7):
        if version:
            caller.sync(version)
        answer = caller.chat()
        assert answer.headers["X-Weight-Version"] == str(version)
        assert answer.json()["weight_version"] == version
        assert caller.client().chat.completions.create(**CHAT).weight_version == version


def test_what_is_too_much_or_no_call_is_refused(caller):
    for body, status, words in (
        (b"{", 400, "cannot be read as JSON"),
        (b"\xff", 400, "cannot be read as JSON"),
        (b"[" * 4000, 400, "cannot be read as JSON"),
        (b'{"temperature": NaN}', 400, "cannot be read as JSON: NaN is no JSON"),
        (b'{"temperature": 1e999}', 400, "cannot be read as JSON: 1e999 is too large a number"),
        (b'{"top_k": 18446744073709551616}', 400, "18446744073709551616 is too large a number"),
        (b'{"model": "\\ud800"}', 400, "cannot be read as JSON: 'utf-8' codec can't encode"),
        (b'{"model": "\xed\xa0\x80"}', 400, "cannot be read as JSON: 'utf-8' codec can't decode"),
        (b"[]", 400, "is a JSON list; send an object"),
        (b" " * 5001, 413, "larger than max_request_bytes = 5000"),
        ({"prompt": "a", "n": 9}, 400, "asks for 9 answers, one call may ask for 8"),
        ({"prompt": "a", "n": "100000"}, 400, "n: must be a whole number, got '100000'"),
        ({"prompt": "a", "n": 100000.0}, 400, "n: must be a whole number, got 100000.0"),
        ({"prompt": ["a"] * 9}, 400, "asks for 9 answers"),
        ({"prompt": [[1, 2], [3]], "n": 5}, 400, "asks for 10 answers"),
    ):
        assert words in said(caller.post("/v1/completions", body), status)
    assert not caller.serving.asked
    one_prompt = {"prompt": list(range(100))}
    assert caller.post("/v1/completions", one_prompt).status_code == 200


def test_what_would_reach_vllms_caches_or_end_in_an_error_of_its_own_is_refused(
    caller, monkeypatch
):
    monkeypatch.setattr(openai_routes, "MAX_KEYS", 10)
    image = IMAGE_PLACES[0]
    for fields in (
        {"mm_processor_kwargs": {"size": {"longest_edge": 10**8}}},
        {"media_io_kwargs": {"image": {"image_mode": "1"}}},
        {"vllm_xargs": {"kv_transfer_params": "x"}},
        {"kv_transfer_params": {}, "ec_transfer_params": {}},
        {"messages": [{"role": "user", "content": [image | {"uuid": "0" * 64}]}]},
        {"messages": [{"role": "tool", "content": [{"type": "image_url", "uuid": ""}]}]},
        {"messages": [{"role": "user", "content": [{"image_url": "data:image/png,AA"}]}]},
        {"logit_bias": {str(token): 1.0 for token in range(11)}},
    ):
        assert said(caller.post(OpenAIRoute.CHAT, CHAT | fields), 400)
        assert not caller.serving.asked
        nothing = dict.fromkeys(fields) | {"messages": CHAT["messages"]}
        assert caller.post(OpenAIRoute.CHAT, CHAT | nothing).status_code == 200
        caller.serving.asked.clear()


def test_routes_that_are_not_there_say_so_in_the_same_form(caller):
    assert said(caller.post("/v1/embeddings", {}), 404)
    assert said(caller.get("/v1/chat/completions"), 405)
    assert "kind" in caller.get("/nothing/").json()["error"]


def test_an_error_is_of_the_form_that_openais_client_reads(caller, tmp_path):
    part = IMAGE_PLACES[0] | {"image_url": {"url": "file:///a"}}
    with pytest.raises(openai.PermissionDeniedError) as caught:
        caller.client().chat.completions.create(
            model="m", messages=[{"role": "user", "content": [part]}]
        )
    message = caught.value.body["message"]
    body = {"message": message, "type": "Forbidden", "param": None, "code": 403}
    assert (caught.value.body, caught.value.code) == (body, "403")
    assert "this server fetches nothing" in message
    engine = ObedientEngine()
    settings = make_settings(tmp_path / "model")
    with serving_engine(engine, settings, openai=caller.serving, token="sesame") as url:
        locked = OpenAICaller(url, caller.serving)
        with pytest.raises(openai.AuthenticationError, match="bearer token"):
            locked.client("wrong").chat.completions.create(**CHAT)
        assert locked.client("sesame").chat.completions.create(**CHAT).id == "an answer"


@pytest.mark.slow
def test_nothing_is_fetched_for_a_caller(caller):
    text = {"type": "text", "text": "see http://a"}
    for part in IMAGE_PLACES:
        form = json.dumps(part)
        for url in ("http://169.254.169.254/latest", "file:///etc/passwd", "ftp://a/b"):
            outside = json.loads(form.replace("URL", url))
            assert "send images as data:" in said(caller.chat(text, outside), 403)
        inside = json.loads(form.replace("URL", "data:image/png;base64,AA"))
        assert caller.chat(text, inside).status_code == 200
    assert len(caller.serving.asked) == len(IMAGE_PLACES)


def show(caller, data):
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return caller.chat({"type": "image_url", "image_url": {"url": url}})


def picture(mode, pixels, kind, **fields):
    file = io.BytesIO()
    Image.frombytes(mode, (2, 1), pixels).save(file, kind, **fields)
    return file.getvalue()


def test_an_image_that_is_too_large_or_cannot_be_shown_is_refused(caller):
    unshown = picture("F", bytes(8), "TIFF")
    for data, words in (
        (image_bomb(), "an image is too large (it has more than MAX_PIXELS"),
        (make_png(100, 101), "an image has 100 x 101 pixels, one image may have 10000"),
        (unshown, "an image cannot be shown: its pixels are floating-point numbers"),
    ):
        assert words in said(show(caller, data), 400)
    assert not caller.serving.asked


def test_deep_and_turned_pixels_are_given_to_vllm_as_the_learner_reads_them_and_others_as_sent(
    caller,
):
    deep = picture("I;16", b"\x00\x80\x00\x40", "PNG")
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = picture("RGB", bytes(range(6)), "JPEG", exif=exif)
    for data in (deep, turned, make_png(), b"no image"):
        assert show(caller, data).status_code == 200
    deep, turned, *others = [
        base64.b64decode(call["messages"][0]["content"][0]["image_url"]["url"].partition(",")[2])
        for _, call in caller.serving.asked
    ]
    shown = Image.open(io.BytesIO(deep))
    assert (shown.mode, shown.tobytes()) == ("RGB", bytes([128] * 3 + [64] * 3))
    seen = Image.open(io.BytesIO(turned))
    assert (seen.format, seen.size, seen.getexif()) == ("PNG", (1, 2), {})
    assert others == [make_png(), b"no image"]


def test_messages_of_no_known_form_are_left_to_the_serving(caller):
    odd = ["text"], [{"content": "text"}], [{"content": ["text"]}]
    for messages in (None, "text", *odd, [{"content": [{"image_url": None}]}]):
        assert caller.chat(messages=messages).status_code == 200


def test_nothing_is_answered_while_a_sync_is_under_way(caller):
    caller.phase(SyncPhase.PAUSE)
    with pytest.raises(openai.ConflictError, match="serves no rollouts: its sync to version 1 is"):
        caller.client().chat.completions.create(**CHAT)
    assert not caller.serving.asked


def test_what_runs_when_a_sync_begins_is_answered_under_the_weights_it_began_with(caller):
    with caller.answering() as asking:
        caller.phase(SyncPhase.PAUSE)
        caller.phase(SyncPhase.RENDEZVOUS)
        caller.serving.goes_on.set()
        answer = asking.result()
    assert (answer.status_code, answer.json()["weight_version"]) == (200, 0)


@pytest.mark.slow
@pytest.mark.parametrize("has_answer", [False, True])
def test_what_has_no_answer_when_other_weights_arrive_is_refused_and_ended(caller, has_answer):
    """vLLM would begin with what it has queued as soon as it is resumed, for the canary."""
    with caller.answering() as asking:
        caller.sync()
        if has_answer:
            caller.serving.goes_on.set()
        other = "was given other weights than version 0 before it had answered; ask again"
        assert other in said(asking.result(), 409)
    assert caller.running() == 0
    if not has_answer:
        assert eventually(lambda: caller.serving.num_cancelled == 1)


@pytest.mark.slow
def test_the_work_for_a_caller_who_has_gone_is_ended(caller):
    caller.serving.latency_s = 60.0
    asked_and_gone(
        f"{caller.url}/v1/chat/completions",
        json.dumps(CHAT).encode(),
        lambda: len(caller.serving.asked) == 1,
    )
    assert eventually(lambda: caller.serving.num_cancelled == 1)
    assert eventually(lambda: caller.running() == 0)
