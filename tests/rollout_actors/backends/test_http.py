"""The clients of both kinds of server wait, ask twice, watch, and name the server alike."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from fake_server import (
    ObedientEngine,
    Run,
    eventually,
    make_offer,
    make_request,
    make_settings,
    serving,
    serving_engine,
)
from fake_stock_server import GENERATE, StockServer
from held_port import held_port

from rollout_actors.backends import http
from rollout_actors.backends.http import server_addresses
from shared.config.rollout import ServerEntry, ServerSection
from shared.errors import ConfigError, RolloutError, UnreachableError

pytestmark = pytest.mark.slow

NOWHERE = "http://127.0.0.1:9"


class Rollmatch:
    """`rollmatch serve` over an engine that does as it is told."""

    kind = "rollmatch"
    command = "rollmatch serve"

    def __init__(self):
        self.engine = ObedientEngine()

    def served(self, expected, port=0):
        return serving_engine(self.engine, expected, port=port)

    def fail(self, times):
        self.engine.trouble = [RuntimeError("not now")] * times

    def delay(self, seconds, *, counts):
        self.engine.latency_s = seconds
        self.engine.is_stuck = not counts

    def go_on(self):
        self.engine.goes_on.set()

    def asked(self):
        return self.engine.asked


class Stock:
    """A stock server that does as it is told."""

    kind = "vllm"
    command = "vllm serve"

    def __init__(self):
        self.server = StockServer()

    def served(self, expected, port=0):
        return serving(self.server.app(), port)

    def fail(self, times):
        self.server.failures = times

    def delay(self, seconds, *, counts):
        self.server.latency_s = seconds
        self.server.num_tokens = None if counts else 0

    def go_on(self):
        self.server.goes_on.set()

    def asked(self):
        return [body for route, body in self.server.asked if route == GENERATE]


@pytest.fixture(params=[Rollmatch, Stock])
def run(request, tmp_path, monkeypatch):
    monkeypatch.setattr(http, "WATCH_S", 0.1)
    server = request.param()
    expected = make_settings(tmp_path / "model")
    with server.served(expected) as url:
        yield Run(url, expected, server, kind=server.kind)


STEP_S = 40.0


def generated_slowly(run, monkeypatch, *, num_looks=None):
    """Generate while `STEP_S` pass, by the client's clocks, after each of its looks at the server,
    which goes on at the last of `num_looks`; None: never.
    """
    client = run.client
    look = client._num_tokens
    looks = []

    def passed_s():
        return STEP_S * len(looks)

    async def look_and_wait():
        looks.append(await look())  # while nothing that has a limit is under way
        if len(looks) == num_looks:
            run.server.go_on()
        return looks[-1]

    async def generated():
        loop = asyncio.get_running_loop()
        now_s = loop.time
        loop.time = lambda: now_s() + passed_s()
        return await client.generate([make_request(0)])

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s())
    monkeypatch.setattr(client, "_num_tokens", look_and_wait)
    monkeypatch.setattr(http, "time", clock)
    return asyncio.run(generated())


@contextmanager
def ends_soon():
    started = time.monotonic()
    yield
    assert time.monotonic() - started < 60


class TestAddresses:
    def addresses(self, **changes):
        entries = (
            ServerEntry(base_url="http://a:1/", group_port=0),
            ServerEntry(base_url="http://b:2/v/", group_port=5),
        )
        return server_addresses(ServerSection(servers=entries, **changes))

    def test_they_come_in_order_with_what_they_have_in_common(self):
        first, second = self.addresses(timeout_s=3.0, infer_timeout_s=7.0)
        assert (first.base_url, first.timeout_s, first.infer_timeout_s) == ("http://a:1", 3.0, 7.0)
        assert (first.token, second.base_url) == (None, "http://b:2/v")
        assert second.key == "rollout_matching.vllm.server.servers[1]"

    @pytest.mark.parametrize("limit_s", [None, 0.0, -1.0])
    def test_no_limit_is_null_nothing_or_less(self, limit_s):
        addresses = self.addresses(infer_timeout_s=limit_s)
        assert {address.infer_timeout_s for address in addresses} == {None}

    def test_the_token_is_read_once_and_is_not_shown(self, monkeypatch):
        monkeypatch.setenv("ROLLMATCH_TEST_TOKEN", "secret")
        address, _ = self.addresses(token_env="ROLLMATCH_TEST_TOKEN")
        assert address.token == "secret"
        assert "secret" not in repr(address)

    def test_a_token_that_is_not_there_is_an_error(self):
        missing = r"server\.token_env: the environment variable NOT_THERE is not set"
        with pytest.raises(ConfigError, match=missing):
            self.addresses(token_env="NOT_THERE")


class TestStart:
    def test_invalid_server_configuration_fails_fast(self, run):
        with ends_soon(), pytest.raises(RolloutError) as caught:
            run.start(NOWHERE, timeout_s=1.0)
        assert caught.value.phase == "start"
        for part in (
            NOWHERE,
            "rollout_matching.vllm.server.timeout_s = 1 s",
            "servers[0].base_url",
            run.server.command,
            "or set rollout_matching.vllm.mode: colocate or",
        ):
            assert part in str(caught.value)

    def test_a_server_that_takes_calls_and_says_nothing_is_given_up_too(self, run):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            with pytest.raises(RolloutError, match=r"no answer to /health/? after"):
                run.start(url, timeout_s=1.0)

    def test_something_else_that_answers_there_is_said_at_once(self, run):
        no_server = r"is not a rollout server: it answers /health/? with HTTP 404"
        with pytest.raises(RolloutError, match=no_server):
            run.start(f"{run.url}/elsewhere", timeout_s=60.0)

    def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(self, run, monkeypatch):
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, NOWHERE)
        assert run.start().devices == 1

    def test_a_server_is_never_dead_and_closing_ends_nothing(self, run):
        client = run.make()
        client.close()
        client.close()
        assert not client.is_dead
        assert asyncio.run(client.start()) == 1


class TestGenerate:
    def test_no_requests_make_no_call(self, run):
        assert asyncio.run(run.make(NOWHERE).generate([])) == []

    def test_a_failed_call_is_tried_once_more_with_the_same_seeds(self, run):
        run.server.fail(1)
        (rollout,) = run.start().generate(make_request(3))
        assert (rollout.attempt, rollout.seed) == (1, 103)
        first, second = run.server.asked()
        assert first == second

    def test_a_server_that_fails_twice_is_named_with_its_url(self, run):
        run.server.fail(2)
        with pytest.raises(UnreachableError) as caught:
            run.start().generate(make_request(0))
        assert (caught.value.actor, caught.value.phase) == ("server-0", "generate")
        assert f"{run.url} failed 2 times, last with: HTTP 500: " in str(caught.value)
        assert "not now" in str(caught.value)

    def test_an_answer_that_takes_too_long_is_given_up(self, run):
        run.server.delay(60.0, counts=True)
        with pytest.raises(UnreachableError, match=r"failed 2 times.*after 0\.2 s"):
            run.start(infer_timeout_s=0.2).generate(make_request(0))

    def test_without_a_limit_a_slow_call_is_waited_for(self, run, monkeypatch):
        """The server counts no tokens, and answers."""
        run.server.delay(60.0, counts=True)
        run.start(infer_timeout_s=None, timeout_s=60.0)
        (rollout,) = generated_slowly(run, monkeypatch, num_looks=4)
        assert (rollout.attempt, len(run.server.asked())) == (0, 1)

    def test_an_engine_that_is_stuck_behind_a_living_server_is_given_up(self, run, monkeypatch):
        run.server.delay(60.0, counts=False)
        run.start(infer_timeout_s=None, timeout_s=60.0)
        stuck = r"failed 2 times.*sampled no token for rollout_matching\.vllm\.server\.timeout_s"
        with ends_soon(), pytest.raises(UnreachableError, match=f"{stuck} = 60 s"):
            generated_slowly(run, monkeypatch)
        if run.kind == "rollmatch":
            engine = run.server.engine
            assert eventually(lambda: engine.num_cancelled == 2), "both tries are aborted"


class TestLoss:
    @pytest.fixture(params=[Rollmatch, Stock])
    def restarted(self, request, tmp_path):
        """A started client, whose server has ended, and what starts another one there."""
        server, another = request.param(), request.param()
        expected = make_settings(tmp_path / "model")
        with held_port() as port:
            with server.served(expected, port) as url:
                run = Run(url, expected, server, kind=server.kind).start()
                if run.kind == "rollmatch":  # it tells by the version, and the other by its label
                    run.sync(make_offer())
                asyncio.run(run.client.check_alive())
            yield run, lambda: another.served(expected, port)

    def test_a_server_that_does_not_answer_is_lost(self, restarted):
        run, _ = restarted
        for look in (run.client.check_alive, run.client.progress):
            with pytest.raises(UnreachableError, match=f"{run.url} does not answer: /"):
                asyncio.run(look())

    def test_a_server_that_was_started_again_is_lost_whatever_it_answers(self, restarted):
        run, start_again = restarted
        again = "was restarted during the run, so it has the checkpoint's weights"
        with start_again():
            with pytest.raises(UnreachableError, match=again):
                asyncio.run(run.client.check_alive())
            with pytest.raises(UnreachableError, match=again):
                run.generate(make_request(0))

    def test_tokens_are_counted_while_there_is_something_to_do(self, run):
        run.server.delay(60.0, counts=False)
        client = run.start().client

        async def look_twice():
            idle = await client.progress()
            generating = asyncio.create_task(client.generate([make_request(0)]))
            while not run.server.asked():
                await asyncio.sleep(0.01)
            busy = await client.progress()
            run.server.go_on()
            await generating
            return idle, busy

        idle, busy = asyncio.run(look_twice())
        assert (idle, busy) == ((None, 0) if run.kind == "rollmatch" else (0, 0))


@pytest.mark.parametrize("name", ["getpeername", "another"])
def test_a_connection_that_is_reset_while_it_is_opened_is_a_lost_server(monkeypatch, name):
    """anyio then asks a missing socket for its peer."""

    async def request(self, *arguments, **options):
        getattr(None, name)

    monkeypatch.setattr("httpx.AsyncClient.request", request)
    (address,) = server_addresses(
        ServerSection(servers=(ServerEntry(base_url=NOWHERE, group_port=0),))
    )
    server = http.HttpClient("server-0", address)
    expected = http.UnansweredError if name == "getpeername" else AttributeError
    with pytest.raises(expected, match="reset" if name == "getpeername" else name):
        asyncio.run(server.get("/info/"))
