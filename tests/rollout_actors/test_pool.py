"""The pool shares out, keeps order, waits for nobody forever, and names who did not answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import ray
from fake_actors import create_fake_actor

from rollout_actors.pool import ActorPool, PoolTimeouts
from shared.errors import RolloutError, WeightSyncError
from shared.rollouts import WeightOffer

pytestmark = pytest.mark.ray

MakePool = Callable[..., ActorPool]


@pytest.fixture
def make_pool(ray_cluster: None) -> Iterator[MakePool]:
    """A pool of a good actor-0 and an actor-1 with the given trouble."""
    pools = []

    def make(phase: str = "", trouble: str = "", *, limit_s: float = 30.0) -> ActorPool:
        names = ["actor-0", "actor-1"]
        actors = [create_fake_actor("actor-0"), create_fake_actor("actor-1", phase, trouble)]
        ray.get([actor.__ray_ready__.remote() for actor in actors])  # so that no limit counts the start of a process
        pools.append(ActorPool(actors, names, PoolTimeouts(start_s=limit_s, generate_s=limit_s, sync_phase_s=limit_s), round_capacity=4))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def refs(num: int) -> list[ray.ObjectRef]:
    return [ray.put(f"request-{i}") for i in range(num)]


def offer(version: int) -> WeightOffer:
    return WeightOffer(version=version, transport="rollmatch_gloo", rendezvous={}, canary=None)


def test_a_round_is_split_into_contiguous_shares_and_comes_back_in_order(make_pool: MakePool) -> None:
    pool = make_pool()
    pool.start()
    shares = ray.get(pool.generate(refs(3)).result())
    assert shares == [[("actor-0", "request-0"), ("actor-0", "request-1")], [("actor-1", "request-2")]]


def test_an_empty_share_sends_nothing(make_pool: MakePool) -> None:
    pool = make_pool("generate", "fail")
    assert ray.get(pool.generate(refs(1)).result()) == [[("actor-0", "request-0")]]
    assert pool.generate([]).result() == []


def test_a_step_is_cut_into_even_rounds_of_at_most_the_capacity(make_pool: MakePool) -> None:
    assert make_pool().split(list(range(9))) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_a_sync_raises_the_version_and_reports_the_slowest_actor(make_pool: MakePool) -> None:
    pool = make_pool()
    report = pool.receive_weights(offer(7)).result()
    assert (report.version, report.bytes, report.phase_s, report.canary_max_abs) == (7, 10, {"wire": 2.0}, 2e-6)
    assert pool.version == 7


@pytest.mark.parametrize("phase", ["start", "generate"])
def test_an_actor_that_does_not_answer_is_named_with_phase_key_and_what_to_check(make_pool: MakePool, phase: str) -> None:
    pool = make_pool(phase, "sleep", limit_s=1.0)
    with pytest.raises(RolloutError, match=rf"{phase} on actor-1: no answer from actor-1 after timeouts.{phase}_s = 1 s; check the actor's log") as caught:
        pool.start() if phase == "start" else pool.generate(refs(2)).result()
    assert (caught.value.actor, caught.value.phase) == ("actor-1", phase)


def test_a_sync_phase_without_an_answer_is_named_by_actor_and_phase(make_pool: MakePool) -> None:
    pool = make_pool("wire", "sleep", limit_s=0.5)
    with pytest.raises(WeightSyncError, match=r"wire on actor-1: no answer from actor-1 after timeouts.sync_phase_s = 0.5 s; check that the learner") as caught:
        pool.receive_weights(offer(1)).result()
    assert (caught.value.actor, caught.value.phase, pool.version) == ("actor-1", "wire", 0)


def test_an_actor_that_dies_is_reported_at_once(make_pool: MakePool) -> None:
    pool = make_pool("generate", "die", limit_s=600.0)
    pool.start()
    started = time.monotonic()
    with pytest.raises(RolloutError, match="generate on actor-1: its process has ended"):
        pool.generate(refs(2)).result()
    assert time.monotonic() - started < 60


def test_an_actors_own_error_arrives_as_it_was_raised(make_pool: MakePool) -> None:
    pool = make_pool("verify", "fail")
    with pytest.raises(WeightSyncError, match="told to fail") as caught:
        pool.receive_weights(offer(1)).result()
    assert (caught.value.actor, caught.value.phase, caught.value.quantity, caught.value.size) == ("actor-1", "verify", "nothing", 2.5)


def test_closing_twice_is_harmless_and_ends_whoever_still_waits(make_pool: MakePool) -> None:
    pool = make_pool("generate", "sleep", limit_s=600.0)
    pool.start()
    waiting = pool.generate(refs(2))
    pool.close()
    pool.close()
    with pytest.raises(RolloutError, match="its process has ended"):
        waiting.result(timeout=60)
