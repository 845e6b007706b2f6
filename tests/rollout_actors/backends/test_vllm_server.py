"""The client of a rollout server: waits for it, asks it twice, watches it, and says what is wrong
with it.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_server import (
    ObedientEngine,
    eventually,
    make_address,
    make_offer,
    make_request,
    make_service,
    make_settings,
    serving,
    serving_engine,
)

from rollout_actors.backends import http as http_client
from rollout_actors.backends.rollmatch_server import ServerClient
from rollout_actors.backends.stock_server import ServerEngineSpec
from rollout_actors.engine.settings import EngineSettings
from rollout_actors.server.app import make_app
from shared.config.rollout import ServerEntry, ServerSection
from shared.errors import ConfigError, RolloutError, UnreachableError, WeightSyncError
from shared.records import ImageRef
from shared.rollouts import DecodeMode
from shared.tokens.repeat_guard import RepeatGuardSettings
from shared.weight_sync.phases import SyncPhase

pytestmark = pytest.mark.slow

GUARD = RepeatGuardSettings(64, 32, 16, 4, None)
SUPPORT = Path(__file__).parents[2] / "fakes" / "fake_server.py"


@pytest.fixture
def expected(tmp_path: Path) -> EngineSettings:
    return make_settings(tmp_path / "model")


@pytest.fixture
def engine() -> ObedientEngine:
    return ObedientEngine()


@pytest.fixture
def url(engine: ObedientEngine, expected: EngineSettings) -> Iterator[str]:
    with serving_engine(engine, expected) as url:
        yield url


def client(
    url: str, expected: EngineSettings, *, index: int = 0, watch_s: float = 10.0, **changes: Any
) -> ServerClient:
    return ServerClient(
        "server-0", make_address(url, **changes), index=index, expected=expected, watch_s=watch_s
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@contextmanager
def server_process(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, whose rollouts take a minute."""
    with subprocess.Popen(
        [sys.executable, SUPPORT, folder], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
        process.kill()


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
        first, second = http_client.server_addresses(
            self.section(timeout_s=3.0, infer_timeout_s=7.0)
        )
        assert (first.base_url, first.timeout_s, first.infer_timeout_s, first.token) == (
            "http://a:1",
            3.0,
            7.0,
            None,
        )
        assert (second.base_url, second.key) == (
            "http://b:2/v",
            "rollout_matching.vllm.server.servers[1]",
        )

    @pytest.mark.parametrize("limit_s", [None, 0.0, -1.0])
    def test_no_limit_is_null_nothing_or_less(self, limit_s: float | None) -> None:
        assert {
            one.infer_timeout_s
            for one in http_client.server_addresses(self.section(infer_timeout_s=limit_s))
        } == {None}

    def test_the_token_is_read_once_and_is_not_shown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ROLLMATCH_TEST_TOKEN", "secret")
        one, _ = http_client.server_addresses(self.section(token_env="ROLLMATCH_TEST_TOKEN"))
        assert one.token == "secret"
        assert "secret" not in repr(one)

    def test_a_token_that_is_not_there_is_an_error(self) -> None:
        with pytest.raises(
            ConfigError,
            match=(
                r"rollout_matching\.vllm\.server\.token_env: the environment variable NOT_THERE is"
                r" not set"
            ),
        ):
            http_client.server_addresses(self.section(token_env="NOT_THERE"))


class TestStart:
    def test_it_returns_the_server_s_devices(self, expected: EngineSettings) -> None:
        with serving_engine(ObedientEngine(devices=2), replace(expected, max_num_seqs=16)) as url:
            assert asyncio.run(client(url, expected).start()) == 2

    def test_a_server_that_comes_up_later_is_waited_for(
        self, engine: ObedientEngine, expected: EngineSettings
    ) -> None:
        one = make_service(engine, expected)
        with serving(make_app(one)) as url:
            threading.Timer(0.7, lambda: asyncio.run(one.start())).start()
            assert asyncio.run(client(url, expected).start()) == 1

    def test_invalid_server_configuration_fails_fast(self, expected: EngineSettings) -> None:
        url = f"http://127.0.0.1:{free_port()}"
        started = time.monotonic()
        with pytest.raises(RolloutError) as caught:
            asyncio.run(client(url, expected, timeout_s=1.0).start())
        assert time.monotonic() - started < 60
        assert caught.value.phase == "start"
        for part in (
            url,
            "rollout_matching.vllm.server.timeout_s = 1 s",
            "servers[0].base_url",
            "launch.serve",
            "mode: colocate",
            "rollout_backend: hf",
        ):
            assert part in str(caught.value)

    def test_a_server_that_is_not_there_is_told_with_what_the_run_can_be_set_to_instead(
        self, expected: EngineSettings
    ) -> None:
        address = replace(
            make_address("http://127.0.0.1:9", timeout_s=0.1),
            instead="rollout_matching.vllm.mode: actors",
        )
        with pytest.raises(RolloutError, match=r"or set rollout_matching\.vllm\.mode: actors$"):
            asyncio.run(ServerClient("server-0", address, index=0, expected=expected).start())

    def test_a_server_that_takes_calls_and_says_nothing_is_given_up_too(
        self, expected: EngineSettings
    ) -> None:
        with (
            socket.create_server(("127.0.0.1", 0)) as silent,
            pytest.raises(RolloutError, match="no answer to /health/ after"),
        ):
            asyncio.run(
                client(
                    f"http://127.0.0.1:{silent.getsockname()[1]}", expected, timeout_s=1.0
                ).start()
            )

    def test_a_server_that_stays_starting_is_given_up(
        self, engine: ObedientEngine, expected: EngineSettings
    ) -> None:
        with (
            serving(make_app(make_service(engine, expected))) as url,
            pytest.raises(RolloutError, match="last: HTTP 503: a-server is starting"),
        ):
            asyncio.run(client(url, expected, timeout_s=1.0).start())

    def test_something_else_that_answers_there_is_said_at_once(
        self, expected: EngineSettings, url: str
    ) -> None:
        with pytest.raises(
            RolloutError, match=r"answers /health/ with HTTP 404.*so it is no rollout server"
        ):
            asyncio.run(client(f"{url}/elsewhere", expected, timeout_s=60.0).start())

    def test_a_missing_token_is_said_with_its_key(
        self, engine: ObedientEngine, expected: EngineSettings
    ) -> None:
        with serving_engine(engine, expected, token="secret") as url:
            with pytest.raises(
                RolloutError, match=r"HTTP 401: .*rollout_matching\.vllm\.server\.token_env"
            ):
                asyncio.run(client(url, expected).start())
            assert asyncio.run(client(url, expected, token="secret").start()) == 1

    def test_a_server_that_does_not_suit_the_run_is_refused_with_everything_that_differs(
        self, url: str, expected: EngineSettings, tmp_path: Path
    ) -> None:
        other = make_settings(
            tmp_path / "other",
            dtype="bfloat16",
            max_model_len=128,
            max_num_seqs=9,
            max_images_per_prompt=2,
            max_image_pixels=20_200,
            transport="nccl",
            enable_lora=True,
        )
        (tmp_path / "other" / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
        with pytest.raises(RolloutError) as caught:
            asyncio.run(client(url, other).start())
        for part in (
            "model_type is qwen3_vl",
            "dtype is float32, the run's is bfloat16: start it with dtype=bfloat16",
            "max_model_len is 64, the run needs 128",
            "max_num_seqs is 8, the run needs 9",
            "max_images_per_prompt is 1",
            "max_image_pixels is 10000, the run needs 20200: start it with max_image_pixels=20200",
            "transport is rollmatch_gloo, the run's is nccl",
            "enable_lora=true max_lora_rank=16",
        ):
            assert part in str(caught.value)

    def test_a_server_with_room_to_spare_suits(
        self, engine: ObedientEngine, expected: EngineSettings
    ) -> None:
        roomy = replace(
            expected, max_model_len=4096, max_num_seqs=64, max_images_per_prompt=4, enable_lora=True
        )
        with serving_engine(engine, roomy) as url:
            assert asyncio.run(client(url, expected).start()) == 1

    def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(
        self, url: str, expected: EngineSettings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        assert asyncio.run(client(url, expected).start()) == 1

    def test_what_makes_a_client_travels_to_its_process(
        self, url: str, expected: EngineSettings
    ) -> None:
        spec = ServerEngineSpec("server-0", make_address(url), 0, expected)
        assert asyncio.run(pickle.loads(pickle.dumps(spec))().start()) == 1


class TestRepeatGuard:
    """A server is started without it (spec: no new standalone CLI flags): the run's rule comes with
    what it asks."""

    def test_the_runs_rule_is_in_force_before_the_engine_is_asked(
        self, engine: ObedientEngine, url: str, expected: EngineSettings
    ) -> None:
        guarded = client(url, replace(expected, repeat_guard=GUARD))
        assert asyncio.run(guarded.start()) == 1
        asyncio.run(guarded.generate([make_request(0)]))
        asyncio.run(guarded.generate([make_request(1)]))
        assert engine.guards == [GUARD], "said once, since nobody has brought another"
        asyncio.run(client(url, expected).generate([make_request(2)]))
        assert engine.guards == [GUARD, None], "a run without a guard has none"

    def test_another_runs_rule_waits_until_nothing_is_answered_under_this_one(
        self, engine: ObedientEngine, url: str, expected: EngineSettings
    ) -> None:
        engine.latency_s = 60.0

        async def both() -> None:
            first = asyncio.create_task(
                client(url, replace(expected, repeat_guard=GUARD), infer_timeout_s=60.0).generate(
                    [make_request(0)]
                )
            )
            while not engine.asked:
                await asyncio.sleep(0.01)
            with pytest.raises(
                RolloutError,
                match=r"HTTP 409: repeat_terminate: .* answers 1 requests under another one",
            ):
                await client(url, expected).generate([make_request(1)])
            engine.goes_on.set()
            await first
            await client(url, expected).generate([make_request(1)])

        asyncio.run(both())
        assert engine.guards == [GUARD, None]

    def test_config_required_repeat_aware_processor_missing_fails_fast(
        self, engine: ObedientEngine, url: str, expected: EngineSettings
    ) -> None:
        engine.cannot_guard = RolloutError(
            "worker 0 holds no repeat guard", actor="a-server", phase="start"
        )
        with pytest.raises(RolloutError, match="HTTP 422: worker 0 holds no repeat guard"):
            asyncio.run(
                client(url, replace(expected, repeat_guard=GUARD)).generate([make_request(0)])
            )
        assert engine.asked == []

    def test_the_command_for_a_run_names_no_flag_for_it(self, expected: EngineSettings) -> None:
        with pytest.raises(RolloutError) as caught:
            asyncio.run(
                client(
                    "http://127.0.0.1:9", replace(expected, repeat_guard=GUARD), timeout_s=0.1
                ).start()
            )
        assert "launch.serve" in str(caught.value)
        assert "repeat_terminate" not in str(caught.value)


class TestGenerate:
    def test_rollouts_come_in_order_under_the_client_s_name(
        self, url: str, expected: EngineSettings
    ) -> None:
        rollouts = asyncio.run(client(url, expected).generate([make_request(4), make_request(2)]))
        assert [(r.position, r.seed, r.actor, r.attempt) for r in rollouts] == [
            (4, 104, "server-0", 0),
            (2, 102, "server-0", 0),
        ]
        assert rollouts[0].logprobs == (-0.1, -1 / 3)

    def test_no_requests_make_no_call(self, expected: EngineSettings) -> None:
        assert asyncio.run(client("http://127.0.0.1:9", expected).generate([])) == []

    def test_a_failed_call_is_tried_once_more_with_the_same_seeds(
        self, url: str, engine: ObedientEngine, expected: EngineSettings
    ) -> None:
        engine.trouble = [RuntimeError("a hiccup")]
        (rollout,) = asyncio.run(client(url, expected).generate([make_request(3)]))
        assert (rollout.attempt, rollout.seed) == (1, 103)
        assert engine.asked == [(make_request(3),)] * 2

    def test_a_call_that_takes_too_long_is_tried_once_more_and_the_first_is_aborted(
        self, url: str, engine: ObedientEngine, expected: EngineSettings
    ) -> None:
        engine.num_stuck = 1
        (rollout,) = asyncio.run(
            client(url, expected, infer_timeout_s=1.0).generate([make_request(3)])
        )
        assert rollout.attempt == 1
        assert eventually(lambda: engine.num_cancelled == 1)

    def test_a_server_that_fails_twice_is_named_with_its_url(
        self, url: str, engine: ObedientEngine, expected: EngineSettings
    ) -> None:
        engine.trouble = [RuntimeError("no memory")] * 2
        with pytest.raises(UnreachableError) as caught:
            asyncio.run(client(url, expected).generate([make_request(0)]))
        assert (caught.value.actor, caught.value.phase) == ("server-0", "generate")
        assert f"{url} failed 2 times, last with: HTTP 500: RuntimeError: no memory" in str(
            caught.value
        )

    def test_what_contradicts_the_run_is_final_and_not_asked_again(
        self, url: str, engine: ObedientEngine, expected: EngineSettings
    ) -> None:
        engine.trouble = [
            RolloutError(
                "sample-0 was sampled by weights [2, 3], not 3 alone", actor="x", phase="generate"
            )
        ]
        with pytest.raises(
            RolloutError,
            match=(
                r"refused the call: HTTP 422: sample-0 was sampled by weights \[2, 3\], not 3 alone"
            ),
        ) as caught:
            asyncio.run(client(url, expected).generate([make_request(0)]))
        assert (type(caught.value), len(engine.asked)) == (RolloutError, 1), (
            "an UnreachableError would be asked of the next server"
        )

    def test_what_the_server_refuses_is_not_tried_again(
        self, url: str, engine: ObedientEngine, expected: EngineSettings
    ) -> None:
        bad = make_request(0)
        with pytest.raises(
            RolloutError, match=r"refused the call: HTTP 400: requests\[0\]\.decode\.mode: 'beam'"
        ):
            asyncio.run(
                client(url, expected).generate(
                    [replace(bad, decode=replace(bad.decode, mode=DecodeMode.BEAM))]
                )
            )
        assert engine.asked == []

    def test_a_share_that_is_too_large_for_one_call_comes_in_several_at_a_time_and_in_order(
        self, url: str, engine: ObedientEngine, expected: EngineSettings
    ) -> None:
        one = client(url, expected)
        engine.meets = 19

        async def run() -> Any:
            await one.start()
            return await one.generate([make_request(position) for position in range(19)])

        rollouts = asyncio.run(run())
        assert [(rollout.position, rollout.seed) for rollout in rollouts] == [
            (position, 100 + position) for position in range(19)
        ]
        assert (sorted(map(len, engine.asked)), engine.most_at_a_time) == ([3, 8, 8], 19), (
            "a call of this server has 8 requests at most"
        )

    def test_where_one_of_several_calls_fails_all_are_asked_once_more(
        self, url: str, engine: ObedientEngine, expected: EngineSettings
    ) -> None:
        one = client(url, expected)
        engine.trouble = [None, RuntimeError("a hiccup")]

        async def run() -> Any:
            await one.start()
            return await one.generate([make_request(position) for position in range(9)])

        assert {
            (rollout.attempt, rollout.seed - rollout.position) for rollout in asyncio.run(run())
        } == {(1, 100)}

    def test_a_sample_that_no_call_can_hold_is_refused_unsent_with_the_server_s_option(
        self, url: str, engine: ObedientEngine, expected: EngineSettings
    ) -> None:
        one = client(url, expected)
        large = make_request(1, images=(ImageRef(None, b"x" * (1 << 20), "ab"),))

        async def run() -> Any:
            await one.start()
            return await one.generate([make_request(0), large])

        with pytest.raises(
            RolloutError,
            match=(
                r"max_request_bytes = 1048576, and sample sample-1 with its images is (\d+); start"
                r" it with max_request_bytes=\1"
            ),
        ):
            asyncio.run(run())
        assert engine.asked == []

    def test_without_a_limit_a_slow_call_is_waited_for(
        self, url: str, engine: ObedientEngine, expected: EngineSettings
    ) -> None:
        engine.latency_s = 1.0
        (rollout,) = asyncio.run(
            client(url, expected, infer_timeout_s=None, watch_s=0.1).generate([make_request(0)])
        )
        assert (rollout.attempt, len(engine.asked)) == (0, 1)

    def test_an_engine_that_is_stuck_behind_a_living_server_is_given_up(
        self, url: str, engine: ObedientEngine, expected: EngineSettings
    ) -> None:
        engine.latency_s, engine.is_stuck = 60.0, True
        started = time.monotonic()
        stuck = (
            r"it answers, and its engine has sampled no token for"
            r" rollout_matching\.vllm\.server\.timeout_s = 2 s"
        )
        with pytest.raises(UnreachableError, match=stuck):
            asyncio.run(
                client(url, expected, infer_timeout_s=None, timeout_s=2.0, watch_s=0.1).generate(
                    [make_request(0)]
                )
            )
        assert time.monotonic() - started < 60
        assert eventually(lambda: engine.num_cancelled == 2)

    def test_an_engine_that_samples_is_waited_for_however_long_a_rollout_takes(
        self, url: str, engine: ObedientEngine, expected: EngineSettings
    ) -> None:
        engine.latency_s = 2.5
        (rollout,) = asyncio.run(
            client(url, expected, infer_timeout_s=None, timeout_s=1.5, watch_s=0.1).generate(
                [make_request(0)]
            )
        )
        assert rollout.attempt == 0

    def test_cancelling_a_call_aborts_its_requests(
        self, url: str, engine: ObedientEngine, expected: EngineSettings
    ) -> None:
        engine.latency_s = 60.0

        async def give_up() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(
                    client(url, expected, infer_timeout_s=None).generate([make_request(0)]), 0.5
                )

        asyncio.run(give_up())
        assert eventually(lambda: engine.num_cancelled == 1)

    def test_a_killed_server_ends_the_wait(self, expected: EngineSettings, tmp_path: Path) -> None:
        with server_process(tmp_path / "model") as (process, url):
            threading.Timer(1.0, process.kill).start()
            started = time.monotonic()
            with pytest.raises(RolloutError, match="failed 2 times"):
                asyncio.run(client(url, expected, infer_timeout_s=None).generate([make_request(0)]))
            assert time.monotonic() - started < 60

    def test_the_watch_ends_the_wait_for_a_server_that_fell_silent(
        self, expected: EngineSettings, tmp_path: Path
    ) -> None:
        with server_process(tmp_path / "model") as (process, url):
            threading.Timer(1.0, lambda: os.kill(process.pid, signal.SIGSTOP)).start()
            started = time.monotonic()
            with pytest.raises(RolloutError, match=r"no answer to /health/ after 0.5 s"):
                asyncio.run(
                    client(
                        url, expected, infer_timeout_s=None, timeout_s=0.5, watch_s=0.3
                    ).generate([make_request(0)])
                )
            assert time.monotonic() - started < 60


class TestSync:
    def phases(self, one: ServerClient, made: Any) -> Any:
        async def run() -> Any:
            return [await one.run_sync_phase(phase, made) for phase in SyncPhase][-1]

        return asyncio.run(run())

    def test_the_phases_reach_the_engine_and_the_report_comes_back(
        self, url: str, engine: ObedientEngine, expected: EngineSettings
    ) -> None:
        one = client(url, expected)
        report = self.phases(one, make_offer(version=3))
        assert (report.version, one.version, engine.version) == (3, 3, 3)
        assert engine.phases == [(phase, make_offer(version=3)) for phase in SyncPhase]

    def test_every_server_is_told_of_its_own_group(
        self, url: str, engine: ObedientEngine, expected: EngineSettings
    ) -> None:
        made = make_offer(num_groups=3)
        self.phases(client(url, expected, index=2), made)
        assert {kept.terms.group for _, kept in engine.phases} == {made.terms.groups[2]}

    def test_an_error_of_the_engine_arrives_with_all_its_fields_under_the_client_s_name(
        self, url: str, engine: ObedientEngine, expected: EngineSettings
    ) -> None:
        engine.trouble = [
            None,
            None,
            None,
            WeightSyncError(
                "they differ", actor="x", phase="verify", quantity="bucket checksums", size=2.0
            ),
        ]
        with pytest.raises(WeightSyncError) as caught:
            self.phases(client(url, expected), make_offer())
        error = caught.value
        assert (error.actor, error.phase, error.quantity, error.size) == (
            "server-0",
            "verify",
            "bucket checksums",
            2.0,
        )
        assert f"{url} they differ" in str(error)
        assert len(engine.phases) == 4, "a phase is not tried again"

    def test_a_phase_out_of_turn_is_an_error_of_its_phase(
        self, url: str, expected: EngineSettings
    ) -> None:
        with pytest.raises(WeightSyncError, match=r"wire on server-0: .*out of turn"):
            asyncio.run(client(url, expected).run_sync_phase(SyncPhase.WIRE, make_offer()))

    def test_a_phase_that_is_not_answered_names_the_server(
        self, url: str, engine: ObedientEngine, expected: EngineSettings
    ) -> None:
        engine.latency_s = 60.0
        with pytest.raises(
            WeightSyncError, match=r"pause on server-0: .*no answer to /sync/pause/ after 3\.5 s"
        ):
            asyncio.run(
                client(url, expected).run_sync_phase(SyncPhase.PAUSE, make_offer(timeout_s=0.5))
            )

    def test_another_run_s_weights_are_noticed(self, url: str, expected: EngineSettings) -> None:
        mine, other = client(url, expected), client(url, expected)
        self.phases(mine, make_offer())
        assert len(asyncio.run(mine.generate([make_request(0)]))) == 1
        with pytest.raises(RolloutError, match="another run's weights"):
            asyncio.run(other.generate([make_request(0)]))


def test_a_server_is_never_dead_and_closing_ends_nothing(
    url: str, expected: EngineSettings
) -> None:
    one = client(url, expected)
    one.close()
    one.close()
    assert not one.is_dead
    assert asyncio.run(one.start()) == 1
