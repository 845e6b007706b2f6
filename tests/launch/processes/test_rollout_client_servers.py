"""A run's servers as one client: who is asked what, who is asked instead, and one sync for all.
Real clients in Ray actors, engines that do as they are told.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from fake_server import (
    ObedientEngine,
    make_address,
    make_offer,
    make_request,
    make_settings,
    serving_engine,
)
from held_port import held_port
from patience import LONG_S, watch_patiently
from renewed_actor import RenewedActor

from launch.processes.fleet import Fleet, RolloutTimeouts
from launch.processes.replacements import Replacements, RestartBudget
from launch.processes.rollout_client import RolloutClient
from launch.processes.rounds import RoundSize
from rollout_actors.backends.stock_server import ServerEngineSpec
from rollout_actors.engine.actor import EngineActor
from shared.config.job import TimeoutsSection
from shared.config.rollout import ActorsSection
from shared.errors import ConfigError, RolloutError, Timeout, WeightSyncError
from shared.rollouts import Rollout
from shared.sent_requests import PictureShelf
from shared.weight_sync.phases import SyncPhase

pytestmark = pytest.mark.ray

MakeClient = Callable[..., RolloutClient]

FAKE_SERVER = Path(__file__).parents[2] / "fakes" / "fake_server.py"


@pytest.fixture(scope="module")
def actors(ray_cluster: None) -> Iterator[list[Any]]:
    """Those of every test's pools, which are therefore not closed."""
    actors = [ray.remote(RenewedActor).options(num_cpus=0).remote() for _ in range(3)]
    yield actors
    for actor in actors:
        ray.kill(actor)


@pytest.fixture
def make_client(actors: list[Any], tmp_path: Path) -> Iterator[MakeClient]:
    """A started client over a server for each of the engines."""
    with ExitStack() as ends:

        def make(*engines: ObedientEngine, times: int = 1, **options: Any) -> RolloutClient:
            expected = make_settings(tmp_path / "model", max_num_seqs=2)
            urls = [
                ends.enter_context(
                    serving_engine(engine, make_settings(tmp_path / "model", max_num_seqs=8))
                )
                for engine in engines
            ] * times
            names = [f"server-{index}" for index in range(len(urls))]
            specs = [
                ServerEngineSpec(name, make_address(url, infer_timeout_s=None), index, expected)
                for index, (name, url) in enumerate(zip(names, urls, strict=True))
            ]
            used = actors[: len(specs)]
            ray.get([actor.become.remote(spec) for actor, spec in zip(used, specs, strict=True)])
            client = RolloutClient(
                Fleet(
                    used,
                    names,
                    RolloutTimeouts.for_actors(
                        TimeoutsSection(start_s=LONG_S, generate_s=LONG_S, sync_phase_s=LONG_S)
                    ),
                    asks_next_on_failure=True,
                    **options,
                ),
                RoundSize(2),
            )
            client.start()
            return client

        yield make


def generated(client: RolloutClient, num_requests: int) -> list[Rollout]:
    (shares,) = client.generate(
        [
            PictureShelf(ray.put).put_each(
                [make_request(position) for position in range(num_requests)]
            )
        ]
    ).result()
    return [rollout for share in ray.get(shares) for rollout in share]


def positions(engine: ObedientEngine) -> list[list[int]]:
    return [[one.position for one in call] for call in engine.asked]


def test_multi_server_request_distribution_is_deterministic(make_client: MakeClient) -> None:
    engines = [ObedientEngine() for _ in range(3)]
    client = make_client(*engines)
    for _ in range(2):
        rollouts = generated(client, 5)
        assert [(rollout.position, rollout.seed) for rollout in rollouts] == [
            (position, 100 + position) for position in range(5)
        ]
        assert [rollout.actor for rollout in rollouts] == [
            "server-0",
            "server-0",
            "server-1",
            "server-1",
            "server-2",
        ]
    assert [positions(engine) for engine in engines] == [[[0, 1]] * 2, [[2, 3]] * 2, [[4]] * 2]


def test_servers_of_several_devices_are_asked_how_many_and_take_in_proportion(
    make_client: MakeClient,
) -> None:
    engines = [ObedientEngine(devices=1), ObedientEngine(devices=3)]
    client = make_client(*engines)
    assert client.devices == (1, 3)
    generated(client, 8)
    assert [positions(engine) for engine in engines] == [[[0, 1]], [[2, 3, 4, 5, 6, 7]]]


def test_one_server_under_two_addresses_is_told_at_the_start(make_client: MakeClient) -> None:
    message = (
        r"server\.servers\[1\]\.base_url: is the same server as servers\[0\] under another name; list"
        r" every server once"
    )
    with pytest.raises(ConfigError, match=message):
        make_client(ObedientEngine(), times=2)


def test_a_server_that_fails_twice_is_replaced_by_the_next_with_the_same_seeds(
    make_client: MakeClient,
) -> None:
    """The next answers its own part first: `decode_batch_size` bounds a device, whatever fails."""
    engines = [ObedientEngine(), ObedientEngine(latency_s=1.0)]
    client = make_client(*engines)
    engines[0].trouble = [RuntimeError("a"), RuntimeError("b")]
    rollouts = generated(client, 4)
    assert [
        (rollout.position, rollout.seed, rollout.actor, rollout.attempt) for rollout in rollouts
    ] == [
        (0, 100, "server-1", 2),
        (1, 101, "server-1", 2),
        (2, 102, "server-1", 0),
        (3, 103, "server-1", 0),
    ]
    assert (len(engines[0].asked), positions(engines[1])) == (2, [[2, 3], [0, 1]])
    assert engines[1].most_at_a_time == 2


def test_when_no_server_answers_the_run_ends_with_a_name(make_client: MakeClient) -> None:
    engines = [ObedientEngine(), ObedientEngine()]
    client = make_client(*engines)
    for engine in engines:
        engine.trouble = [RuntimeError("no")] * 8
    message = (
        r"generate on server-\d: http://127\.0\.0\.1:\d+ failed 2 times, last with: HTTP 500:"
        r" RuntimeError: no"
    )
    with pytest.raises(RolloutError, match=message):
        generated(client, 4)


def test_what_one_server_finds_wrong_ends_the_run_and_is_asked_of_no_other(
    make_client: MakeClient,
) -> None:
    engines = [ObedientEngine(), ObedientEngine()]
    client = make_client(*engines)
    engines[0].trouble = [
        RolloutError("image 0 of sample sample-0 cannot be decoded", actor="x", phase="generate")
    ]
    message = (
        r"generate on server-0: .*refused the call: HTTP 422: image 0 of sample sample-0 cannot"
        r" be decoded"
    )
    with pytest.raises(RolloutError, match=message):
        generated(client, 4)
    assert positions(engines[0]) == [[0, 1]]
    assert [0, 1] not in positions(engines[1])


def test_one_sync_reaches_every_server_by_its_own_group(make_client: MakeClient) -> None:
    engines = [ObedientEngine(), ObedientEngine()]
    client = make_client(*engines)
    made = make_offer(version=4, num_groups=2)
    assert client.receive_weights(made).result(timeout=LONG_S).version == 4
    for engine, group in zip(engines, made.terms.groups, strict=True):
        assert [phase for phase, _ in engine.phases] == list(SyncPhase)
        assert {kept.terms.groups for _, kept in engine.phases} == {(group,)}
    assert {rollout.weight_version for rollout in generated(client, 4)} == {4}


@pytest.mark.parametrize("failing", [0, 1])
def test_a_sync_that_fails_on_one_server_names_it_and_can_begin_anew(
    make_client: MakeClient, failing: int
) -> None:
    engines = [ObedientEngine(), ObedientEngine()]
    client = make_client(*engines)
    engines[failing].trouble = [None, None, WeightSyncError("it broke", actor="x", phase="wire")]
    with pytest.raises(WeightSyncError, match=rf"wire on server-{failing}: .*it broke"):
        client.receive_weights(make_offer(num_groups=2)).result(timeout=LONG_S)
    message = "its sync to version 1 is running, or did not complete"
    with pytest.raises(RolloutError, match=message):
        generated(client, 4)
    client.receive_weights(make_offer(version=2, num_groups=2)).result(timeout=LONG_S)
    assert {rollout.weight_version for rollout in generated(client, 4)} == {2}


# Servers that are lost, and come back


class Supervised:
    """Two servers of obedient engines, which end and are started again as a test wants it."""

    def __init__(self, folder: Path) -> None:
        self._served = make_settings(folder / "model", max_num_seqs=8)
        self._ends = [ExitStack(), ExitStack()]
        self._held = ExitStack()
        self._ports = [self._held.enter_context(held_port()) for _ in range(2)]
        self.engines = [ObedientEngine(), ObedientEngine()]
        self.urls = [self.start(number) for number in range(2)]

    def start(self, number: int, **options: Any) -> str:
        """Start a server in its place, with an engine that nobody has sent weights."""
        self.engines[number] = ObedientEngine(**options)
        serving = serving_engine(self.engines[number], self._served, port=self._ports[number])
        return str(self._ends[number].enter_context(serving))

    def end(self, number: int) -> None:
        self._ends[number].close()

    def close(self) -> None:
        for end in (*self._ends, self._held):
            end.close()


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Supervised]:
    servers = Supervised(tmp_path)
    yield servers
    servers.close()


@pytest.fixture
def make_mending(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., RolloutClient]]:
    """A client of these servers that has sent them version 1, and waits for lost ones."""
    clients = []
    expected = make_settings(tmp_path / "model", max_num_seqs=2)
    names = ["server-0", "server-1"]

    def make(
        urls: Sequence[str],
        *,
        back_s: float = LONG_S,
        answer_s: float = LONG_S,
        max_restarts: int = 3,
    ) -> RolloutClient:
        def create(index: int, number: int = 0) -> Any:
            limits = {"timeout_s": back_s if number else LONG_S, "infer_timeout_s": None}
            spec = ServerEngineSpec(
                names[index], make_address(urls[index], **limits), index, expected
            )
            return ray.remote(EngineActor).options(num_cpus=0).remote(spec)

        key = "rollout_matching.vllm.server.timeout_s"
        sections = TimeoutsSection(start_s=LONG_S, generate_s=LONG_S, sync_phase_s=LONG_S)
        limits = replace(
            RolloutTimeouts.for_actors(sections),
            stall=Timeout(answer_s, key) if max_restarts else None,
        )
        budget = RestartBudget(ActorsSection(max_restarts=max_restarts))
        replacements = Replacements(create, names, limits.start, budget, servers=urls)
        client = RolloutClient(
            Fleet(
                [create(0), create(1)],
                names,
                limits,
                asks_next_on_failure=True,
                replacements=replacements if max_restarts else None,
            ),
            RoundSize(2),
        )
        clients.append(client)
        client.start()
        sync(client, 1)
        return client

    yield make
    for client in clients:
        client.close()


def sync(client: RolloutClient, version: int) -> None:
    client.receive_weights(make_offer(version, num_groups=2)).result(timeout=LONG_S)


def who_answers(client: RolloutClient) -> list[str]:
    """Generate four rollouts, which come in order with their own seeds, and tell by whom."""
    rollouts = generated(client, 4)
    assert [(one.position, one.seed) for one in rollouts] == [(at, 100 + at) for at in range(4)]
    assert {one.weight_version for one in rollouts} == {client.version}
    return [one.actor for one in rollouts]


BOTH = ["server-0"] * 2 + ["server-1"] * 2


@pytest.mark.parametrize("is_back_at_once", [False, True], ids=["ended", "started again"])
def test_a_lost_server_is_waited_for_and_asked_again_when_it_has_the_weights(
    make_mending, supervised, is_back_at_once
):
    client = make_mending(supervised.urls)
    assert who_answers(client) == BOTH
    supervised.end(1)
    if is_back_at_once:
        supervised.start(1)
    assert who_answers(client) == ["server-0"] * 4
    if not is_back_at_once:
        supervised.start(1)
    assert who_answers(client) == ["server-0"] * 4, "it is not asked before it has weights"
    assert supervised.engines[1].asked == []
    assert client.join_replacements()
    assert not client.join_replacements()
    sync(client, 2)
    assert who_answers(client) == BOTH
    (replaced,) = client.pop_replaced()
    assert replaced.actor == "server-1"
    why = "was restarted during the run" if is_back_at_once else "failed 2 times"
    assert f"generate on server-1: {supervised.urls[1]} {why}" in replaced.reason


def test_a_server_that_is_stopped_is_given_up_and_comes_back_when_it_goes_on(
    make_mending, supervised, tmp_path, caplog, monkeypatch
):
    silent = watch_patiently(monkeypatch)
    program = [sys.executable, FAKE_SERVER, tmp_path / "model", "0"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        client = make_mending([supervised.urls[0], process.stdout.readline().strip()], answer_s=2.0)
        assert who_answers(client) == BOTH
        silent.add(1)
        psutil.Process(process.pid).suspend()
        assert who_answers(client) == ["server-0"] * 4
        psutil.Process(process.pid).resume()
        silent.clear()
        assert client.join_replacements()
        sync(client, 2)
        assert who_answers(client) == BOTH
        (replaced,) = client.pop_replaced()
        assert "after rollout_matching.vllm.server.timeout_s = 2 s" in replaced.reason
        process.kill()
    assert re.search(r"waits for \S+, .*engine is stuck, end it", caplog.text)


def test_a_server_that_does_not_come_back_in_time_ends_the_run_with_what_to_do(
    make_mending, supervised
):
    client = make_mending(supervised.urls, back_s=2.0)
    supervised.end(1)
    assert who_answers(client) == ["server-0"] * 4
    url = supervised.urls[1]
    message = (
        rf"start on server-1: {url} was not ready within .*; end the server at {url} if"
        rf" it still runs, start it, and continue with `resume=RUN`, or continue with the others"
        r" \(`resume=RUN .*server\.servers=\[\.\.\.\]`\)"
    )
    with pytest.raises(RolloutError, match=message):
        client.join_replacements()


def test_a_server_that_comes_back_with_other_devices_ends_the_run(make_mending, supervised):
    client = make_mending(supervised.urls)
    supervised.end(1)
    supervised.start(1, devices=2)
    with pytest.raises(RolloutError, match=r"2 rollout devices, .* 1, .*resume=RUN"):
        client.join_replacements()


def test_where_no_server_may_come_back_the_others_finish_the_round_and_no_sync_begins(
    make_mending, supervised
):
    client = make_mending(supervised.urls, max_restarts=0)
    supervised.end(1)
    supervised.start(1)
    for _ in range(2):
        assert who_answers(client) == ["server-0"] * 4
    with pytest.raises(RolloutError, match=r"server-1: .* was restarted during the run"):
        client.join_replacements()


def test_a_server_that_was_started_again_while_nobody_asked_it_is_noticed_before_the_sync(
    make_mending, supervised
):
    client = make_mending(supervised.urls)
    supervised.end(1)
    supervised.start(1)
    assert client.join_replacements()
    sync(client, 2)
    assert who_answers(client) == BOTH
