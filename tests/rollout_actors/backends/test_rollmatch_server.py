"""The client of `rollmatch serve`: the calls that it makes, and the servers that it refuses."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from counted_time import later
from fake_server import (
    Caller,
    ObedientEngine,
    Run,
    eventually,
    make_offer,
    make_request,
    make_service,
    make_settings,
    serving,
    serving_engine,
)

from rollout_actors.backends import http
from rollout_actors.backends.rollmatch_server import infer_calls
from rollout_actors.server.app import make_app
from rollout_actors.server.messages import CallLimits, InferCall
from shared.errors import RolloutError, WeightSyncError
from shared.records import ImageRef
from shared.rollouts import SyncReport
from shared.tokens.repeat_guard import RepeatGuardSettings
from shared.weight_sync.phases import SyncPhase

pytestmark = pytest.mark.slow

GUARD = RepeatGuardSettings(64, 32, 16, 4, None)
PROGRAM = Path(__file__).parents[2] / "fakes" / "fake_server.py"


@pytest.fixture
def expected(tmp_path):
    return make_settings(tmp_path / "model")


@pytest.fixture(autouse=True)
def watch_often(monkeypatch):
    monkeypatch.setattr(http, "WATCH_S", 0.3)


@pytest.fixture
def engine():
    return ObedientEngine()


@pytest.fixture
def run(engine, expected):
    with serving_engine(engine, expected) as url:
        yield Run(url, expected, engine)


class TestStart:
    def test_a_server_that_comes_up_later_and_has_room_to_spare_suits_with_its_devices(
        self, expected
    ):
        engine = ObedientEngine(devices=2)
        roomy = replace(
            expected, max_model_len=4096, max_num_seqs=64, max_images_per_prompt=4, enable_lora=True
        )
        service = make_service(engine, roomy)
        with serving(make_app(service)) as url:
            threading.Timer(0.7, lambda: asyncio.run(service.start())).start()
            assert Run(url, expected).start().devices == 2

    def test_a_server_that_stays_starting_is_given_up(self, engine, expected, monkeypatch):
        service = make_service(engine, expected)
        health = mock.Mock(side_effect=service.health)
        monkeypatch.setattr(service, "health", health)
        # Half a minute for each answer.
        clock = SimpleNamespace(monotonic=lambda: 30.0 * health.call_count)
        monkeypatch.setattr(http, "time", clock)
        with (
            serving(make_app(service)) as url,
            pytest.raises(RolloutError, match="last: HTTP 503: a-server is starting"),
        ):
            Run(url, expected).start(timeout_s=60.0)
        assert health.call_count == 2

    def test_a_server_that_does_not_suit_the_run_is_refused_with_everything_that_differs(
        self, run, tmp_path
    ):
        run.expected = make_settings(
            tmp_path / "other",
            dtype="bfloat16",
            head_dtype="float32",
            max_model_len=128,
            max_num_seqs=9,
            max_images_per_prompt=2,
            max_image_pixels=20_200,
            max_pixels=4096,
            transport="nccl",
            enable_lora=True,
        )
        (tmp_path / "other" / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
        with pytest.raises(RolloutError) as caught:
            run.start()
        for part in (
            "model_type is qwen3_vl",
            "dtype is float32, the run's is bfloat16: start the server with dtype=bfloat16",
            "head_dtype is model, the run's is float32: start the server with head_dtype=float32",
            "max_model_len is 64, the run needs 128",
            "max_num_seqs is 8, the run needs 9",
            "max_images_per_prompt is 1",
            "max_image_pixels is 10000, the run needs 20200: start the server with max_image_pixels=20200",
            "max_pixels is null, the run's data.max_pixels is 4096: start the server with max_pixels=4096",
            "transport is rollmatch_gloo, the run's is nccl",
            "enable_lora=true max_lora_rank=16",
        ):
            assert part in str(caught.value)


class TestRepeatGuard:
    """A server is started without it (spec: no new standalone CLI flags): the run's rule comes with
    what it asks.
    """

    def test_the_runs_rule_is_in_force_before_the_engine_is_asked(self, run):
        run.start(repeat_guard=GUARD)
        for position in range(2):
            run.generate(make_request(position))
        assert run.server.guards == [GUARD], "said once, since nobody has brought another"
        run.start().generate(make_request(2))
        assert run.server.guards == [GUARD, None], "a run without a guard has none"

    def test_another_runs_rule_waits_until_nothing_is_answered_under_this_one(self, run):
        run.server.latency_s = 60.0

        async def both():
            guarded, free = run.make(repeat_guard=GUARD, infer_timeout_s=60.0), run.make()
            for client in (guarded, free):
                await client.start()
            first = asyncio.create_task(guarded.generate([make_request(0)]))
            while not run.server.asked:
                await asyncio.sleep(0.01)
            busy = r"HTTP 409: repeat_terminate: .* is answering 1 requests with another rule"
            with pytest.raises(RolloutError, match=busy):
                await free.generate([make_request(1)])
            run.server.goes_on.set()
            await first
            await free.generate([make_request(1)])

        asyncio.run(both())
        assert run.server.guards == [GUARD, None]

    def test_config_required_repeat_aware_processor_missing_fails_fast(self, run):
        run.server.cannot_guard = RolloutError(
            "worker 0 holds no repeat guard", actor="a-server", phase="start"
        )
        with pytest.raises(RolloutError, match="HTTP 422: worker 0 holds no repeat guard"):
            run.start(repeat_guard=GUARD).generate(make_request(0))
        assert run.server.asked == []

    def test_the_command_for_a_run_names_no_flag_for_it(self, expected):
        nowhere = Run("http://127.0.0.1:9", expected)
        with pytest.raises(RolloutError) as caught:
            nowhere.start(repeat_guard=GUARD, timeout_s=0.1)
        assert "rollmatch serve" in str(caught.value)
        assert "repeat_terminate" not in str(caught.value)


class TestGenerate:
    def test_rollouts_come_in_order_under_the_clients_name(self, run):
        rollouts = run.start().generate(make_request(4), make_request(2))
        assert [(r.position, r.seed, r.response_token_ids) for r in rollouts] == [
            (4, 104, (4, 104)),
            (2, 102, (2, 102)),
        ]
        assert {(r.actor, r.attempt, r.logprobs) for r in rollouts} == {
            ("server-0", 0, (-0.1, -1 / 3))
        }

    def test_a_call_that_takes_too_long_is_tried_once_more_and_the_first_is_aborted(self, run):
        run.server.num_stuck = 1
        client = run.start(infer_timeout_s=60.0).client

        async def generated():
            generating = asyncio.create_task(client.generate([make_request(3)]))
            while not run.server.asked:
                await asyncio.sleep(0.01)
            with later(60.0):
                return await asyncio.wait_for(generating, 60)

        (rollout,) = asyncio.run(generated())
        assert rollout.attempt == 1
        assert eventually(lambda: run.server.num_cancelled == 1)

    def test_what_contradicts_the_run_is_final_and_not_asked_again(self, run):
        message = "sample-0 was sampled by weights [2, 3], not 3 alone"
        run.server.trouble = [RolloutError(message, actor="x", phase="generate")]
        with pytest.raises(RolloutError) as caught:
            run.start().generate(make_request(0))
        assert f"refused the call: HTTP 422: {message}" in str(caught.value)
        assert type(caught.value) is RolloutError, "an UnreachableError goes to the next server"
        assert len(run.server.asked) == 1

    def test_an_answer_of_other_requests_is_refused(self, run, monkeypatch):
        monkeypatch.setattr(run.server, "_rollout", lambda _: ObedientEngine()._rollout(other))
        other = make_request(7)
        with pytest.raises(RolloutError, match=r"answered 1 rollouts .* 1 requests"):
            run.start().generate(make_request(0))

    def test_a_share_that_is_too_large_for_one_call_comes_in_several_at_a_time_and_in_order(
        self, run
    ):
        run.server.meets = 19
        rollouts = run.start().generate(*map(make_request, range(19)))
        assert [(r.position, r.seed) for r in rollouts] == [(i, 100 + i) for i in range(19)]
        sizes = sorted(map(len, run.server.asked))
        assert (sizes, run.server.most_at_a_time) == ([3, 8, 8], 19), "a call has 8 at most"

    def test_where_one_of_several_calls_fails_all_are_asked_once_more(self, run):
        run.server.trouble = [None, RuntimeError("a hiccup")]
        rollouts = run.start().generate(*map(make_request, range(9)))
        assert {(r.attempt, r.seed - r.position) for r in rollouts} == {(1, 100)}

    def test_a_sample_that_no_call_can_hold_is_refused_unsent_with_the_servers_option(self, run):
        large = make_request(1, images=(ImageRef(None, b"x" * (1 << 20), "ab"),))
        too_large = (
            r"max_request_bytes = 1048576, but sample sample-1 with its images has (\d+); start it"
            r" with max_request_bytes=\1"
        )
        with pytest.raises(RolloutError, match=too_large):
            run.start().generate(make_request(0), large)
        assert run.server.asked == []

    def test_a_call_that_is_cancelled_is_aborted(self, run):
        run.server.latency_s = 60.0

        async def give_up():
            client = run.make(infer_timeout_s=None)
            generating = asyncio.create_task(client.generate([make_request(0)]))
            while not run.server.asked:
                await asyncio.sleep(0.01)
            generating.cancel()
            await asyncio.wait([generating])

        asyncio.run(give_up())
        assert eventually(lambda: run.server.num_cancelled == 1)


@contextmanager
def ends_soon(message):
    started = time.monotonic()
    with pytest.raises(RolloutError, match=message):
        yield
    assert time.monotonic() - started < 60


class TestServerThatEnds:
    """A server in a process of its own, whose rollouts take a minute."""

    @pytest.fixture
    def process(self, expected):
        program = [sys.executable, PROGRAM, expected.model_path, "60"]
        with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
            yield process
            process.kill()

    @pytest.fixture
    def run(self, process, expected):
        return Run(process.stdout.readline().strip(), expected)

    def test_a_killed_server_ends_the_wait(self, process, run):
        run.start(infer_timeout_s=None)

        def kill_when_it_is_asked():
            eventually(lambda: Caller(run.url).running() == 1)
            process.kill()

        threading.Thread(target=kill_when_it_is_asked).start()
        with ends_soon("failed 2 times"):
            run.generate(make_request(0))

    def test_the_watch_ends_the_wait_for_a_server_that_fell_silent(self, process, run):
        run.start()
        os.kill(process.pid, signal.SIGSTOP)
        # It takes calls still, as one that is stopped while it generates.
        run.client = run.make(infer_timeout_s=None, timeout_s=0.5)
        with ends_soon(r"no answer to /health/ after 0.5 s"):
            run.generate(make_request(0))


class TestSync:
    def test_the_phases_reach_the_engine_and_the_report_comes_back(self, run):
        report = SyncReport(3, 24, {"pause": 0.1, "wire": 0.2}, 1e-6)
        assert run.start().sync(make_offer(version=3)) == [None] * 5 + [report]
        assert (run.client.version, run.server.version) == (3, 3)
        assert run.server.phases == [(phase, make_offer(version=3)) for phase in SyncPhase]
        assert len(run.generate(make_request(0))) == 1
        with pytest.raises(RolloutError, match="another run's weights"):
            run.start().generate(make_request(0))

    def test_every_server_is_told_of_its_own_group(self, run):
        offer = make_offer(num_groups=3)
        run.start(index=2).sync(offer)
        assert {kept.terms.group for _, kept in run.server.phases} == {offer.terms.groups[2]}

    def test_an_error_of_the_engine_arrives_with_all_its_fields_under_the_clients_name(self, run):
        failure = WeightSyncError(
            "they differ", actor="x", phase="verify", quantity="bucket checksums", size=2.0
        )
        run.server.trouble = [None, None, None, failure]
        with pytest.raises(WeightSyncError) as caught:
            run.start().sync(make_offer())
        error = caught.value
        assert (error.actor, error.phase) == ("server-0", "verify")
        assert (error.quantity, error.size) == ("bucket checksums", 2.0)
        assert f"{run.url} they differ" in str(error)
        assert len(run.server.phases) == 4, "a phase is not tried again"

    def test_a_phase_that_is_not_answered_names_the_server(self, run):
        run.server.latency_s = 60.0
        late = r"pause on server-0: .*no answer to /sync/pause/ after 3\.5 s"
        with pytest.raises(WeightSyncError, match=late):
            asyncio.run(run.make().run_sync_phase(SyncPhase.PAUSE, make_offer(timeout_s=0.5)))


REQUESTS = [
    make_request(
        position,
        images=tuple(ImageRef(Path(f"ä{position}.png"), bytes(size), "ab") for size in sizes),
    )
    for position, sizes in enumerate([(), (1,), (2, 3000), (4000,), (), (2999, 3001), (5,)])
]


class TestInferCalls:
    def calls(self, requests, max_request_bytes=sys.maxsize, max_requests=sys.maxsize):
        limits = CallLimits(max_request_bytes, max_requests, sys.maxsize)
        return infer_calls(requests, limits, run="a" * 32, version=7)

    def test_no_call_has_more_requests_than_the_server_takes(self):
        assert self.calls(REQUESTS) == [InferCall.of(REQUESTS, run="a" * 32, version=7)]
        cut = self.calls(REQUESTS, max_requests=3)
        assert [call.requests for call in cut] == [
            tuple(REQUESTS[:3]),
            tuple(REQUESTS[3:6]),
            tuple(REQUESTS[6:]),
        ]

    @pytest.mark.parametrize("limit", [8_700, 10_000, 14_000, 20_000, 40_000])
    def test_no_body_is_larger_than_the_server_takes_and_every_request_is_in_one_in_order(
        self, limit
    ):
        cut = self.calls(REQUESTS, max_request_bytes=limit)
        assert all(len(call.body()) <= limit for call in cut)
        assert [request for call in cut for request in call.requests] == REQUESTS
        assert all(call.seed == call.requests[0].seed for call in cut)

    def test_a_call_is_cut_only_where_the_next_request_does_not_fit(self):
        one, two = (len(self.calls([request])[0].body()) for request in REQUESTS[2:4])
        assert len(self.calls(REQUESTS[2:4], max_request_bytes=one + two)) == 1
        assert len(self.calls(REQUESTS[2:4], max_request_bytes=max(one, two))) == 2

    def test_a_request_that_no_call_can_hold_is_named_with_the_limit_that_would(self):
        (alone,) = self.calls(REQUESTS[3:4])
        needed = len(alone.body())
        too_large = (
            rf"accepts calls of max_request_bytes = {needed - 1}, but sample sample-3 .* start it"
            rf" with max_request_bytes={needed}, "
        )
        with pytest.raises(ValueError, match=too_large):
            self.calls(REQUESTS, max_request_bytes=needed - 1)
        assert len(self.calls(REQUESTS[3:4], max_request_bytes=needed)) == 1
