"""A lost actor's share goes to the others, and a new actor takes its place before the next sync."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from fake_actors import create_fake_actor
from fake_server import eventually
from patience import LONG_S, watch_patiently

from launch.processes import fleet
from launch.processes.fleet import Fleet, RolloutTimeouts
from launch.processes.replacements import Replacements, RestartBudget, StallWatch
from launch.processes.rollout_client import RolloutClient
from launch.processes.rounds import RoundSize
from shared.config.job import TimeoutsSection
from shared.config.rollout import ActorsSection
from shared.errors import LostRoundError, LostStartError, RolloutError, Timeout, WeightSyncError
from shared.protocols import PerRank
from shared.rollouts import WeightOffer
from shared.sent_requests import PictureShelf

LIMITS = RolloutTimeouts.for_actors(
    TimeoutsSection(start_s=LONG_S, generate_s=LONG_S, sync_phase_s=LONG_S)
)
OFFER = WeightOffer(version=1, transport="rollmatch_gloo", terms=None, canary=None)
NAMES = ["actor-0", "actor-1"]
Trouble = tuple[str, str]


def test_so_many_actors_may_be_replaced_in_any_window():
    now_s = [0.0]
    section = ActorsSection(max_restarts=2, restart_window_s=100.0)
    budget = RestartBudget(section, clock_s=lambda: now_s[0])
    taken = []
    for now_s[0] in (0.0, 60.0, 99.0, 100.0, 159.0, 160.0):
        taken.append(budget.take())
    assert taken == [True, True, False, True, False, True]
    assert "max_restarts permits 2 in 100 s (restart_window_s)" in budget.refusal("not")
    assert not RestartBudget(ActorsSection(max_restarts=0)).take()


def test_a_start_that_was_begun_is_waited_for_and_not_asked_again(monkeypatch):
    asked = []

    class Starting:
        @staticmethod
        def remote():
            asked.append(f"answer {len(asked)}")
            return asked[-1]

    actors = [SimpleNamespace(start=Starting) for _ in NAMES]
    monkeypatch.setattr(fleet, "next_ready", lambda waiting: next(reversed(waiting)))
    monkeypatch.setattr(fleet, "result_of", lambda _, name, answer: (int(answer[-1]), name))
    engines = Fleet(actors, NAMES, LIMITS)
    engines.begin_start()
    assert asked == ["answer 0", "answer 1"] and engines.devices == ()
    engines.start()
    assert len(asked) == 2 and engines.devices == (0, 1)
    engines.start()
    assert len(asked) == 4 and engines.devices == (2, 3)


GOOD = ("", "")
DIES = ("generate", "die")
STALLS = ("generate", "stall")


@pytest.fixture
def client(fake_actors: list[Any]) -> Iterator[Callable[..., RolloutClient]]:
    """A client of actor-0 and actor-1 with these troubles, and with those of their successors."""
    clients = []
    created = []

    def create(name: str, trouble: Trouble) -> Any:
        created.append(create_fake_actor(name, *trouble))
        return created[-1]

    def make(
        *troubles: Trouble,
        then: Sequence[Trouble] = (),
        stall_s: float = LONG_S,
        sync_phase_s: float = LONG_S,
        max_restarts: int = 3,
    ) -> RolloutClient:
        limits = replace(
            LIMITS,
            stall=Timeout(stall_s, "timeouts.stall_s"),
            sync_phase=Timeout(sync_phase_s, "timeouts.sync_phase_s"),
        )
        successors = iter(then)
        budget = RestartBudget(ActorsSection(max_restarts=max_restarts))
        replacements = Replacements(
            lambda index, _: create(NAMES[index], next(successors, GOOD)),
            NAMES,
            limits.start,
            budget,
        )
        # Whoever has no trouble lives on, for other tests.
        actors = [
            fake_actors[index] if trouble == GOOD else create(NAMES[index], trouble)
            for index, trouble in enumerate(troubles)
        ]
        # so that no limit counts the start of a process
        ray.get([actor.__ray_ready__.remote() for actor in actors])
        client = RolloutClient(
            Fleet(
                actors,
                NAMES,
                limits,
                devices=(1, 1),
                replacements=replacements if max_restarts else None,
            ),
            RoundSize(2),
        )
        clients.append(client)
        return client

    yield make
    for one in clients:
        if one.replaces_lost:
            one.engines._replacements.close()
    for actor in created:
        ray.kill(actor)


def refs(number: int) -> PerRank:
    return [PictureShelf(ray.put).put_each([f"request-{place}" for place in range(number)])]


def answers(done: PerRank) -> list[Any]:
    (shares,) = done
    return [answer for share in ray.get(list(shares)) for answer in share]


def who_answers(client: RolloutClient) -> list[str]:
    """Generate four requests, which come back in order, and tell by whom."""
    names, requests = zip(*answers(client.generate(refs(4)).result()), strict=True)
    assert requests == ("request-0", "request-1", "request-2", "request-3")
    return list(names)


@pytest.mark.ray
def test_what_a_dead_actor_owed_is_answered_by_the_next_and_it_is_back_before_the_sync(client):
    pool = client(GOOD, DIES)
    assert who_answers(pool) == ["actor-0"] * 4
    assert who_answers(pool) == ["actor-0"] * 4, "it is not asked before it has weights"
    assert pool.pop_replaced() == []
    pool.wait_idle()
    assert pool.join_replacements()
    assert not pool.join_replacements()
    pool.receive_weights(OFFER).result()
    assert who_answers(pool) == ["actor-0"] * 2 + ["actor-1"] * 2
    (replaced,) = pool.pop_replaced()
    assert replaced.actor == "actor-1"
    assert replaced.reason.startswith("generate on actor-1: its process has ended")
    assert 0 < replaced.started_s - replaced.lost_s < LONG_S
    assert pool.pop_replaced() == []


@pytest.mark.ray
def test_where_no_more_may_be_replaced_the_error_says_how_many_were(client):
    pool = client(GOOD, DIES, then=[DIES], max_restarts=1)
    who_answers(pool)
    pool.join_replacements()
    message = (
        r"(?s)generate on actor-1: its process has ended.*; it is not replaced:"
        r" rollout_matching\.vllm\.actors\.max_restarts permits 1 in 3600 s"
    )
    with pytest.raises(RolloutError, match=message):
        who_answers(pool)


@pytest.mark.ray
def test_where_nobody_is_replaced_a_stalled_actor_ends_the_round(client, fake_actors, monkeypatch):
    watch_patiently(monkeypatch)
    ray.get(fake_actors[1].become.remote(*STALLS))
    with pytest.raises(RolloutError, match=r"actor-1: no token in timeouts\.stall_s = 1 s"):
        who_answers(client(GOOD, GOOD, stall_s=1.0, max_restarts=0))


@pytest.mark.ray
def test_a_stopped_actor_is_given_up_killed_and_replaced(client, monkeypatch):
    silent = watch_patiently(monkeypatch)
    pool = client(GOOD, ("generate", "sleep"), stall_s=1.5)
    pids = [
        ray.get(actor.__ray_call__.remote(lambda _: os.getpid())) for actor in pool.engines.actors
    ]
    generating = pool.generate(refs(4))
    assert eventually(lambda: ray.get(pool.engines.actors[1].tasks.remote()))
    silent.add(1)
    os.kill(pids[1], signal.SIGSTOP)
    rollouts = answers(generating.future.result(timeout=LONG_S))
    assert [name for name, _ in rollouts] == ["actor-0"] * 4
    silent.clear()
    pool.join_replacements()
    (replaced,) = pool.pop_replaced()
    assert re.search(r"no answer .*actor-1 .*timeouts\.stall_s = 1\.5 s", replaced.reason)
    psutil.wait_procs([psutil.Process(pids[1])] if psutil.pid_exists(pids[1]) else [], timeout=120)
    assert not psutil.pid_exists(pids[1])
    assert who_answers(pool) == ["actor-0"] * 2 + ["actor-1"] * 2


@pytest.fixture
def soon(monkeypatch):
    """Whoever has nothing to do and does not answer is given up after 2 s."""
    monkeypatch.setattr("launch.processes.fleet.ALIVE_S", 2.0)
    for module in ("fleet", "rollout_client"):
        monkeypatch.setattr(f"launch.processes.{module}.POOL_MARGIN_S", 1.0)
    return {"stall_s": 1.0, "sync_phase_s": 0.5}


ALIVE = SimpleNamespace(check_alive=SimpleNamespace(remote=lambda: ray.put(None)))
"""An actor that has answered, however busy the machine is."""


@pytest.mark.ray
def test_an_actor_that_stops_while_it_has_nothing_to_do_is_replaced_before_the_sync(client, soon):
    pool = client(("check_alive", "sleep"), GOOD, stall_s=soon["stall_s"], sync_phase_s=600.0)
    pool.engines.actors = (pool.engines.actors[0], ALIVE)
    assert pool.join_replacements()
    (replaced,) = pool.pop_replaced()
    assert re.search(r"^generate on actor-0: no answer .*2 s; check ", replaced.reason)


@pytest.mark.ray
def test_all_engines_that_are_stuck_in_one_sync_are_replaced_together(client, soon):
    # In the first phase: the limit is only for it.
    pool = client(("pause", "stick"), ("pause", "stick"), **soon)
    with pytest.raises(WeightSyncError):
        pool.receive_weights(OFFER).result()
    assert pool.join_replacements()
    assert sorted(one.actor for one in pool.pop_replaced()) == NAMES
    pool.engines.timeouts = LIMITS
    pool.receive_weights(OFFER).result()
    assert pool.version == 1


@pytest.mark.ray
def test_an_environment_that_ends_as_it_is_told_of_new_engines_is_replaced_and_told(client):
    engines = client(GOOD, DIES)
    environments = client(GOOD, ("use_engines", "die")).engines
    who_answers(engines)
    engines.generate_through(environments, group_size=1)
    lost = environments.actors[1]
    assert engines.join_replacements()
    assert environments.actors[1] is not lost
    assert [one.actor for one in engines.pop_replaced()] == ["actor-1", "actor-1"]
    assert who_answers(engines) == ["actor-0"] * 2 + ["actor-1"] * 2


@pytest.mark.ray
def test_a_round_that_nobody_is_left_to_answer_is_lost_and_may_be_asked_again(client):
    pool = client(DIES, DIES)
    with pytest.raises(LostRoundError, match="its process has ended"):
        who_answers(pool)
    pool.wait_idle()
    assert pool.join_replacements()
    assert who_answers(pool) == ["actor-0"] * 2 + ["actor-1"] * 2
    assert sorted(one.actor for one in pool.pop_replaced()) == NAMES


@pytest.mark.ray
def test_an_actor_that_is_killed_while_the_run_starts_is_replaced(client):
    dies = ("start", "die")
    run = client(GOOD, dies, then=[dies])
    run.engines.devices = ()
    run.start()
    assert run.devices == (1, 1)
    assert who_answers(run) == ["actor-0"] * 2 + ["actor-1"] * 2
    (replaced,) = run.pop_replaced()
    assert re.search(r"start on actor-1: .*ended", replaced.reason)


@pytest.mark.ray
def test_an_actor_that_is_late_or_fails_by_itself_ends_the_start(client):
    """A limit that is too short, or a bad model, would be so again."""
    with pytest.raises(RolloutError, match="told to fail") as caught:
        client(GOOD, ("start", "fail")).start()
    assert not isinstance(caught.value, LostStartError)
    late = client(GOOD, ("start", "sleep")).engines
    late.begin_start()
    ray.wait(late._starting, num_returns=1, timeout=LONG_S)
    late.timeouts = replace(late.timeouts, start=Timeout(0.5, "timeouts.start_s"))
    message = "no answer from actor-1 after timeouts.start_s = 0.5 s"
    with pytest.raises(LostStartError, match=message):
        late.start()


def test_an_actor_that_is_killed_in_every_start_does_not_have_the_job_started_again():
    """Each start of the job would lose as many actors again before it ends."""
    lost = LostStartError("its process has ended", actor="actor-1", phase="start")
    budget = RestartBudget(ActorsSection(max_restarts=0))
    replacements = Replacements(lambda *_: None, NAMES, LIMITS.start, budget)
    with pytest.raises(RolloutError, match=r"ended; .*max_restarts permits 0 ") as caught:
        replacements.lose(1, None, lost)
    assert type(caught.value) is RolloutError


@pytest.mark.ray
def test_an_actor_that_does_not_start_is_replaced_again(client):
    pool = client(GOOD, DIES, then=[("start", "fail")])
    who_answers(pool)
    assert pool.join_replacements()
    (replaced,) = pool.pop_replaced()
    assert replaced.reason.startswith("generate on actor-1: its process has ended")
    assert replaced.reason.endswith("; then start on actor-1: told to fail")
    assert who_answers(pool) == ["actor-0"] * 2 + ["actor-1"] * 2


@pytest.mark.ray
def test_the_engine_that_a_sync_names_is_replaced(client):
    pool = client(GOOD, ("wire", "fail"))
    with pytest.raises(WeightSyncError) as caught:
        pool.receive_weights(OFFER).result()
    assert pool.replace_named(caught.value)
    pool.receive_weights(OFFER).result()
    assert pool.version == 1
    assert not pool.replace_named(WeightSyncError("", actor="learner", phase="wire"))


@pytest.mark.ray
def test_when_the_pool_is_closed_nothing_is_started_any_more(client):
    pool = client(DIES, ("generate", "sleep"), then=[("start", "sleep")])
    generating = pool.generate(refs(4))
    deadline = time.monotonic() + 120
    while not (starting := pool.engines._replacements._starting):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (new,) = [one.answer for one in starting.values()]
    pool.close()
    with pytest.raises(RolloutError, match="its process has ended"):
        generating.future.result(timeout=LONG_S)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(new, timeout=120)
    assert len(starting) == 1


@pytest.mark.ray
@pytest.mark.parametrize(
    ("trouble", "told"),
    [
        (("generate", "sleep"), None),
        (STALLS, "no token in timeouts.stall_s = 10 s, with requests to answer"),
        (("progress", "sleep"), "no answer from actor-1 after timeouts.stall_s = 10 s"),
    ],
    ids=["samples", "stalls", "is blocked"],
)
def test_whoever_neither_samples_nor_answers_is_given_up_and_nobody_else(
    fake_actors, trouble, told
):
    ray.get(fake_actors[1].become.remote(*trouble))
    owed = fake_actors[1].generate.remote(refs(1)[0][0].sent)
    assert eventually(lambda: ray.get(fake_actors[1].tasks.remote()))
    now_s = [0.0]
    watch = StallWatch(NAMES, Timeout(10.0, "timeouts.stall_s"), clock_s=lambda: now_s[0])
    assert watch.interval_s == 2.5
    # In the long time between two of them nobody looked, so it says nothing.
    looks = (0.0, 4.0, 504.0, 508.0, 512.0, 516.0)
    given_up = {}
    for now_s[0] in looks:
        given_up[now_s[0]] = watch.look(fake_actors)
        # So that each look finds the answers to the last one.
        answered = [watch._watched[index].answer for index in (0, 1)]
        num_answers = 1 if trouble[0] == "progress" else 2
        assert len(ray.wait(answered, num_returns=num_answers, timeout=LONG_S)[0]) == num_answers
    assert [given_up[look] for look in looks[:4]] == [{}] * 4
    last = given_up[516.0]
    assert [str(error).partition(": ")[2].partition(";")[0] for error in last.values()] == (
        [] if told is None else [told]
    )
    assert list(last) == ([] if told is None else [1])
    ray.get(fake_actors[1].become.remote())
    ray.get(owed)


@pytest.mark.ray
def test_whoever_ends_is_given_up_at_the_next_look(ray_cluster):
    actor = create_fake_actor("actor-0", "progress", "die")
    watch = StallWatch(NAMES, Timeout(100.0, "timeouts.stall_s"))
    deadline = time.monotonic() + 120
    while not (given_up := watch.look([actor])):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "its process has ended" in str(given_up[0])
