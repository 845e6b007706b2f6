"""A run's servers as one client: who is asked what, who is asked instead, and one sync for all.
Real clients in Ray actors, engines that do as they are told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

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
from renewed_actor import RenewedActor

from launch.runtime.rollout_client import RolloutClient, RolloutTimeouts
from rollout_actors.backends.stock_server import ServerEngineSpec
from shared.config.job import TimeoutsSection
from shared.errors import ConfigError, RolloutError, WeightSyncError
from shared.rollouts import Rollout
from shared.sent_requests import PictureShelf
from shared.weight_sync.phases import SyncPhase

pytestmark = pytest.mark.ray

MakeClient = Callable[..., RolloutClient]


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
                used,
                names,
                RolloutTimeouts.for_actors(
                    TimeoutsSection(start_s=60.0, generate_s=60.0, sync_phase_s=10.0)
                ),
                decode_batch_size=2,
                asks_next_on_failure=True,
                **options,
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
    ).result(timeout=60)
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
        r"server\.servers\[1\]\.base_url: is the server of servers\[0\] by another name; list"
        r" every server once"
    )
    with pytest.raises(ConfigError, match=message):
        make_client(ObedientEngine(), times=2)


def test_a_server_without_a_share_is_sent_nothing_and_no_requests_are_sent_to_nobody(
    make_client: MakeClient,
) -> None:
    engines = [ObedientEngine(), ObedientEngine()]
    client = make_client(*engines)
    generated(client, 1)
    assert client.generate([[]]).result() == [[]]
    assert [positions(engine) for engine in engines] == [[[0]], []]


def test_a_server_that_fails_twice_is_replaced_by_the_next_with_the_same_seeds(
    make_client: MakeClient,
) -> None:
    engines = [ObedientEngine(), ObedientEngine()]
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


def test_a_server_that_takes_over_has_answered_its_own_part_before(make_client: MakeClient) -> None:
    """`decode_batch_size` is the one bound of a device, whatever fails."""
    engines = [ObedientEngine(), ObedientEngine(latency_s=1.0)]
    client = make_client(*engines)
    engines[0].trouble = [RuntimeError("a"), RuntimeError("b")]
    assert [rollout.position for rollout in generated(client, 4)] == [0, 1, 2, 3]
    assert (positions(engines[1]), engines[1].most_at_a_time) == ([[2, 3], [0, 1]], 2)


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
    assert client.receive_weights(made).result(timeout=60).version == 4
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
        client.receive_weights(make_offer(num_groups=2)).result(timeout=60)
    message = "its sync to version 1 is under way, or was not completed"
    with pytest.raises(RolloutError, match=message):
        generated(client, 4)
    client.receive_weights(make_offer(version=2, num_groups=2)).result(timeout=60)
    assert {rollout.weight_version for rollout in generated(client, 4)} == {2}
