"""What the clients of both kinds of server do alike: wait, ask twice, watch, and name the
server."""

from __future__ import annotations

import asyncio
import pickle
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from fake_server import (
    ObedientEngine,
    make_address,
    make_request,
    make_settings,
    serving,
    serving_engine,
)
from fake_stock_server import GENERATE, StockServer

from rollout_actors.backends import http
from rollout_actors.backends.http import HttpEngine, server_addresses
from rollout_actors.backends.rollmatch_server import ServerClient
from rollout_actors.backends.stock_server import ServerEngineSpec, StockClient
from rollout_actors.engine.settings import EngineSettings
from shared.config.rollout import ServerEntry, ServerSection
from shared.errors import ConfigError, RolloutError, UnreachableError
from shared.rollouts import Rollout, RolloutRequest

pytestmark = pytest.mark.slow

NOWHERE = "http://127.0.0.1:9"


class Rollmatch:
    """`launch.serve` over an engine that does as it is told."""

    kind: Literal["rollmatch", "vllm"] = "rollmatch"
    client: type[ServerClient | StockClient] = ServerClient
    command = "python -m launch.serve"

    def __init__(self) -> None:
        self.engine = ObedientEngine()

    @contextmanager
    def served(self, expected: EngineSettings) -> Iterator[str]:
        with serving_engine(self.engine, expected) as url:
            yield url

    def fail(self, times: int) -> None:
        self.engine.trouble = [RuntimeError("not now")] * times

    def delay(self, seconds: float, *, counts: bool) -> None:
        self.engine.latency_s = seconds
        self.engine.is_stuck = not counts

    def asked(self) -> list[Any]:
        return self.engine.asked


class Stock(Rollmatch):
    """A stock server that does as it is told."""

    kind = "vllm"
    client = StockClient
    command = "vllm serve"

    def __init__(self) -> None:
        self.server = StockServer()

    @contextmanager
    def served(self, expected: EngineSettings) -> Iterator[str]:
        with serving(self.server.app()) as url:
            yield url

    def fail(self, times: int) -> None:
        self.server.failures = times

    def delay(self, seconds: float, *, counts: bool) -> None:
        self.server.latency_s = seconds
        self.server.num_tokens = None if counts else 0

    def asked(self) -> list[Any]:
        return [body for route, body in self.server.asked if route == GENERATE]


class Caller:
    """One kind of server, and the run's client of it."""

    def __init__(self, server: Rollmatch, url: str, expected: EngineSettings) -> None:
        self.server = server
        self.url = url
        self.expected = expected

    def client(self, url: str = "", *, instead: str = "", **changes: Any) -> HttpEngine:
        address = make_address(url or self.url, kind=self.server.kind, **changes)
        if instead:
            address = replace(address, instead=instead)
        return self.server.client("server-0", address, index=0, expected=self.expected)

    def start(self, url: str = "", **changes: Any) -> int:
        return asyncio.run(self.client(url, **changes).start())

    def generate(self, *requests: RolloutRequest, **changes: Any) -> list[Rollout]:
        client = self.client(**changes)
        assert asyncio.run(client.start()) == 1
        return asyncio.run(client.generate(requests))


@pytest.fixture(params=[Rollmatch, Stock])
def caller(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Caller]:
    monkeypatch.setattr(http, "WATCH_S", 0.1)
    server = request.param()
    expected = make_settings(tmp_path / "model")
    with server.served(expected) as url:
        yield Caller(server, url, expected)


class TestAddresses:
    def section(self, **changes: Any) -> ServerSection:
        return ServerSection(
            servers=(
                ServerEntry(base_url="http://a:1/", group_port=0),
                ServerEntry(base_url="http://b:2/v/", group_port=5),
            ),
            **changes,
        )

    def test_they_come_in_order_with_what_they_have_in_common(self) -> None:
        first, second = server_addresses(self.section(timeout_s=3.0, infer_timeout_s=7.0))
        assert (first.base_url, first.timeout_s, first.infer_timeout_s) == ("http://a:1", 3.0, 7.0)
        assert (first.token, second.base_url) == (None, "http://b:2/v")
        assert second.key == "rollout_matching.vllm.server.servers[1]"

    @pytest.mark.parametrize("limit_s", [None, 0.0, -1.0])
    def test_no_limit_is_null_nothing_or_less(self, limit_s: float | None) -> None:
        addresses = server_addresses(self.section(infer_timeout_s=limit_s))
        assert {address.infer_timeout_s for address in addresses} == {None}

    def test_the_token_is_read_once_and_is_not_shown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ROLLMATCH_TEST_TOKEN", "secret")
        address, _ = server_addresses(self.section(token_env="ROLLMATCH_TEST_TOKEN"))
        assert address.token == "secret"
        assert "secret" not in repr(address)

    def test_a_token_that_is_not_there_is_an_error(self) -> None:
        missing = r"server\.token_env: the environment variable NOT_THERE is not set"
        with pytest.raises(ConfigError, match=missing):
            server_addresses(self.section(token_env="NOT_THERE"))


class TestStart:
    def test_invalid_server_configuration_fails_fast(self, caller: Caller) -> None:
        started = time.monotonic()
        with pytest.raises(RolloutError) as caught:
            caller.start(NOWHERE, timeout_s=1.0)
        assert time.monotonic() - started < 60
        assert caught.value.phase == "start"
        for part in (
            NOWHERE,
            "rollout_matching.vllm.server.timeout_s = 1 s",
            "servers[0].base_url",
            caller.server.command,
            "mode: colocate",
            "rollout_backend: hf",
        ):
            assert part in str(caught.value)

    def test_a_server_that_is_not_there_is_told_with_what_the_run_can_be_set_to_instead(
        self, caller: Caller
    ) -> None:
        instead = "rollout_matching.vllm.mode: actors"
        with pytest.raises(RolloutError, match=rf"or set {instead}$"):
            caller.start(NOWHERE, timeout_s=0.1, instead=instead)

    def test_a_server_that_takes_calls_and_says_nothing_is_given_up_too(
        self, caller: Caller
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            with pytest.raises(RolloutError, match=r"no answer to /health/? after"):
                caller.start(url, timeout_s=1.0)

    def test_something_else_that_answers_there_is_said_at_once(self, caller: Caller) -> None:
        with pytest.raises(
            RolloutError, match=r"answers /health/? with HTTP 404.*no rollout server"
        ):
            caller.start(f"{caller.url}/elsewhere", timeout_s=60.0)

    def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(
        self, caller: Caller, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, NOWHERE)
        assert caller.start() == 1

    def test_what_makes_a_client_travels_to_its_process(self, caller: Caller) -> None:
        address = make_address(caller.url, kind=caller.server.kind)
        spec = ServerEngineSpec("server-0", address, 0, caller.expected)
        assert asyncio.run(pickle.loads(pickle.dumps(spec))().start()) == 1

    def test_a_server_is_never_dead_and_closing_ends_nothing(self, caller: Caller) -> None:
        client = caller.client()
        client.close()
        client.close()
        assert not client.is_dead
        assert asyncio.run(client.start()) == 1


class TestGenerate:
    def test_no_requests_make_no_call(self, caller: Caller) -> None:
        assert asyncio.run(caller.client(NOWHERE).generate([])) == []

    def test_a_failed_call_is_tried_once_more_with_the_same_seeds(self, caller: Caller) -> None:
        caller.server.fail(1)
        (rollout,) = caller.generate(make_request(3))
        assert (rollout.attempt, rollout.seed) == (1, 103)
        first, second = caller.server.asked()
        assert first == second

    def test_a_server_that_fails_twice_is_named_with_its_url(self, caller: Caller) -> None:
        caller.server.fail(2)
        with pytest.raises(UnreachableError) as caught:
            caller.generate(make_request(0))
        assert (caught.value.actor, caught.value.phase) == ("server-0", "generate")
        assert f"{caller.url} failed 2 times, last with: HTTP 500: " in str(caught.value)
        assert "not now" in str(caught.value)

    def test_an_answer_that_takes_too_long_is_given_up(self, caller: Caller) -> None:
        caller.server.delay(5.0, counts=True)
        with pytest.raises(UnreachableError, match=r"failed 2 times.*after 0\.2 s"):
            caller.generate(make_request(0), infer_timeout_s=0.2)

    def test_without_a_limit_a_slow_call_is_waited_for(self, caller: Caller) -> None:
        """Where the server counts no tokens, as long as it answers."""
        caller.server.delay(2.5, counts=True)
        (rollout,) = caller.generate(make_request(0), infer_timeout_s=None, timeout_s=1.5)
        assert (rollout.attempt, len(caller.server.asked())) == (0, 1)

    def test_an_engine_that_is_stuck_behind_a_living_server_is_given_up(
        self, caller: Caller
    ) -> None:
        caller.server.delay(60.0, counts=False)
        started = time.monotonic()
        stuck = r"failed 2 times.*sampled no token for rollout_matching\.vllm\.server\.timeout_s"
        with pytest.raises(UnreachableError, match=f"{stuck} = 2 s"):
            caller.generate(make_request(0), infer_timeout_s=None, timeout_s=2.0)
        assert time.monotonic() - started < 60
