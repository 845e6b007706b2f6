"""Environments in actors before engines in actors, as the driver uses them (decisions 10, 14, 15,
17 and 41).
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from engine_support import NEIGHBOUR
from fake_actors import create_fake_actor
from patience import LONG_S, watch_patiently
from sandboxes_environment import noted
from scripted_engine_actor import create_scripted_actor, says
from scripted_engines import ScriptedEngines, demo_tokenizer, group_requests

from launch.processes.fleet import Fleet, RolloutTimeouts
from launch.processes.replacements import Replacements, RestartBudget
from launch.processes.rollout_client import RolloutClient
from launch.processes.rounds import RoundSize
from rollout_actors.environments.training.actor import EnvironmentActor, RayEngines
from rollout_actors.environments.training.runner import (
    EnvironmentRunner,
    RunnerSettings,
    load_tokenizer,
)
from shared.config.job import TimeoutsSection
from shared.config.rollout import ActorsSection
from shared.errors import LostRoundError, RolloutError, Timeout, UnreachableError
from shared.protocols import PerRank
from shared.rollouts import WeightOffer
from shared.sent_requests import PictureShelf
from shared.trajectory import EnvironmentRequest, EnvironmentRollout

pytestmark = pytest.mark.ray

SIZE = 2
WORDS = ("o", "xo", "xxo")
ENGINES = ["rollout-actor-0", "rollout-actor-1"]
ENVIRONMENTS = ["environment-0", "environment-1"]


@pytest.fixture(scope="module")
def settings(demo_checkpoint: Path) -> RunnerSettings:
    """Rollouts of row 5 fail."""
    return RunnerSettings(
        "runner_environment", str(demo_checkpoint), 512, 8, {"trouble": "fail", "at": 5}
    )


@pytest.fixture(scope="module")
def pool(ray_cluster: None, settings: RunnerSettings) -> Iterator[RolloutClient]:
    """Two environment actors before two engines."""
    actors = [create_scripted_actor(number, token_ids(WORDS)) for number in range(2)]
    engines = RolloutClient(Fleet(actors, ENGINES, timeouts(LONG_S)), RoundSize(4, learner_ranks=2))
    shells = [
        create_environment_actor(name, settings, actors, ENGINES, engines.engines.timeouts.generate)
        for name in ENVIRONMENTS
    ]
    environments = Fleet(shells, ENVIRONMENTS, timeouts(LONG_S))
    for pool in (engines, environments):
        pool.start()
    engines.generate_through(environments, group_size=SIZE)
    yield engines
    for pool in (environments, engines):
        pool.close()


def create_environment_actor(*arguments: Any) -> Any:
    actor = ray.remote(EnvironmentActor).options(num_cpus=0, runtime_env=NEIGHBOUR)
    return actor.remote(*arguments)


def with_environments(actors: Sequence[Any], limit_s: float) -> RolloutClient:
    """Over the last environments, actors with the methods of `EnvironmentActor`; no engine is
    asked.
    """
    names, devices = ENVIRONMENTS[-len(actors) :], (1,) * len(actors)
    environments = Fleet(actors, names, timeouts(limit_s), devices=devices)
    engines = RolloutClient(
        Fleet([None, None], ENGINES, replace(timeouts(LONG_S), stall=None), devices=(1, 1)),
        RoundSize(4, learner_ranks=2),
    )
    engines.generate_through(environments, group_size=SIZE)
    return engines


def timeouts(limit_s: float) -> RolloutTimeouts:
    section = TimeoutsSection(start_s=LONG_S, generate_s=limit_s, sync_phase_s=LONG_S)
    return RolloutTimeouts.for_actors(section)


def token_ids(words: Sequence[str]) -> list[list[int]]:
    return [demo_tokenizer().encode(word, add_special_tokens=False) for word in words]


def refs(*shares: Sequence[EnvironmentRequest]) -> PerRank:
    """Put the requests of each learner rank."""
    return [PictureShelf(ray.put).put_each(share) for share in shares]


def rollouts(done: PerRank) -> list[list[EnvironmentRollout]]:
    """Return each rank's in order, without their times and without who ran them."""
    return [
        [
            replace(rollout, started_s=0.0, generate_s=0.0, actor="")
            for part in ray.get(list(rank))
            for answer in part
            for rollout in answer
        ]
        for rank in done
    ]


def in_process(
    settings: RunnerSettings, requests: Sequence[EnvironmentRequest], version: int
) -> list[EnvironmentRollout]:
    """Run the same in this process, with engines of this version."""
    words = token_ids(WORDS)
    engines = ScriptedEngines(lambda request: says(request, words, version), number=2)
    runner = EnvironmentRunner("", settings, engines, load_tokenizer(settings.model_path))
    return [
        replace(rollout, started_s=0.0, generate_s=0.0)
        for answer in asyncio.run(runner.run(requests))
        for rollout in answer
    ]


def test_a_round_over_two_environment_actors_and_two_ranks_comes_back_in_order_and_is_what_one_runner_makes(
    pool, settings
):
    requests = group_requests(4, 1, 5, 4, 3)
    done = pool.generate(refs(requests[:3], requests[3:])).result()
    parts = [ray.get(list(rank)) for rank in done]
    lengths = [[len(part) for part in of_rank] for of_rank in parts]
    assert lengths == [[3], [2]], "groups of each actor's part: the larger half, and the rest"
    answers = [answer for of_rank in parts for part in of_rank for answer in part]
    assert {rollout.actor for answer in answers for rollout in answer} == set(ENVIRONMENTS)
    first, second = rollouts(done)
    assert [rollout.position for rollout in first] == list(range(6))
    assert [rollout.position for rollout in second] == list(range(6, 10))
    expected = in_process(settings, requests, pool.version)
    assert first + second == expected
    assert len({rollout.reward for rollout in expected}) > 2
    error = "ZeroDivisionError: no such luck (runner_environment.py:48)"
    assert [rollout.error for rollout in first] == [None] * 4 + [error] * 2, "it crosses as data"


def test_a_step_whose_rubric_scores_at_once_is_one_round_of_one_actor_whatever_ranks_it_is_for(
    pool, settings
):
    ranking = replace(settings, env_args={"ranks": True})
    actor = create_environment_actor(
        ENVIRONMENTS[0], ranking, pool.engines.actors, ENGINES, pool.engines.timeouts.generate
    )
    environments = Fleet([actor], ENVIRONMENTS[:1], timeouts(LONG_S))
    engines = RolloutClient(
        Fleet(pool.engines.actors, ENGINES, timeouts(LONG_S), devices=(1, 1)),
        RoundSize(2, learner_ranks=2),
    )
    environments.start()
    engines.generate_through(environments, group_size=SIZE, in_one_round=True)
    requests = group_requests(4, 1, 5, 4, 3)
    try:
        (round_,) = engines.split(refs(requests[:3], requests[3:]))
        first, second = rollouts(engines.generate(round_).result())
    finally:
        environments.close()
    assert (len(first), len(second)) == (6, 4)
    assert {rollout.metrics["num_scored"] for rollout in first + second} == {10.0}
    assert first + second == in_process(ranking, requests, pool.version)


def test_a_step_is_cut_into_rounds_of_whole_groups(pool):
    """Two engines of 4 at a time, two ranks: 4 rollouts, which are 2 groups, of each rank in a
    round.
    """
    assert pool.split([[0, 1, 2], [3, 4]]) == [[[0, 1], [3]], [[2], [4]]]


def test_weights_go_to_the_engines_whose_rollouts_carry_their_version(pool):
    assert (pool.names, pool.devices) == (tuple(ENGINES), (1, 1))
    pool.wait_idle()
    pool.receive_weights(
        WeightOffer(version=7, transport="rollmatch_gloo", terms=None, canary=None)
    ).result()
    assert pool.version == 7
    first, _ = rollouts(pool.generate(refs(group_requests(4), [])).result())
    assert {example.weight_version for rollout in first for example in rollout.examples} == {7}


def test_an_environment_actor_that_dies_ends_the_round_with_its_name(fake_actors):
    dying = create_fake_actor("environment-1", "generate", "die")
    pool = with_environments([fake_actors[0], dying], 600.0)
    message = "generate on environment-1: its process has ended"
    with pytest.raises(RolloutError, match=message) as caught:
        pool.generate(refs(group_requests(0, 1, 2, 5), [])).result()
    assert caught.value.actor == "environment-1"


def test_when_the_pool_is_closed_rollouts_under_way_clean_up_and_then_their_environment_is_torn_down(
    ray_cluster, settings, tmp_path
):
    """The log's path is relative: it begins where the command was given, and not where Ray's
    process runs.
    """
    log = tmp_path / "log"
    sandboxes = replace(
        settings, env_id="sandboxes_environment", env_args={"log": "log"}, working_dir=str(tmp_path)
    )
    actor = create_environment_actor(ENVIRONMENTS[0], sandboxes, [None], ENGINES[:1], None)
    pool = RolloutClient(Fleet([actor], ENVIRONMENTS[:1], timeouts(LONG_S)), RoundSize(8))
    pool.start()
    round_ = pool.generate(refs(group_requests(0, 1)))
    until_s = time.monotonic() + LONG_S
    while len(noted(log)) < 2 * SIZE:
        assert time.monotonic() < until_s
        time.sleep(0.05)
    pool.close()
    *before, last = noted(log)
    positions = range(2 * SIZE)
    opened = [f"opened {position}" for position in positions]
    assert sorted(before) == opened + [f"shut {position}" for position in positions]
    assert last == "torn down"
    assert isinstance(round_.future.exception(), RolloutError)


# Who is lost, and replaced


@pytest.fixture(scope="module")
def mended(ray_cluster: None, settings: RunnerSettings) -> Iterator[RolloutClient]:
    """Two environment actors before two engines; others take the places of those that are lost."""
    budget = RestartBudget(ActorsSection(max_restarts=100))
    limits = timeouts(LONG_S)

    def create_engine(index: int, _: int = 1) -> Any:
        return create_scripted_actor(index, token_ids(WORDS))

    engines = RolloutClient(
        Fleet(
            [create_engine(0), create_engine(1)],
            ENGINES,
            limits,
            replacements=Replacements(create_engine, ENGINES, limits.start, budget),
        ),
        RoundSize(8),
    )

    def create_environment(index: int, _: int = 1) -> Any:
        asked = (
            engines.engines.actors,
            ENGINES,
            engines.engines.timeouts.generate,
            engines.replaces_lost,
        )
        return create_environment_actor(ENVIRONMENTS[index], settings, *asked)

    environments = Fleet(
        [create_environment(0), create_environment(1)],
        ENVIRONMENTS,
        limits,
        replacements=Replacements(create_environment, ENVIRONMENTS, limits.start, budget),
    )
    for pool in (engines, environments):
        pool.start()
    engines.generate_through(environments, group_size=SIZE)
    yield engines
    for pool in (environments, engines):
        pool.close()


def assert_answers(pool: RolloutClient, settings: RunnerSettings) -> None:
    """Whoever is left answers what all would."""
    requests = group_requests(4, 1, 2, 3)
    (answers,) = rollouts(pool.generate(refs(requests)).result())
    assert answers == in_process(settings, requests, 0)


def test_what_a_lost_environment_owed_is_answered_by_the_other_and_it_comes_back(mended, settings):
    environments = mended.environments
    lost = environments.actors[1]
    ray.kill(lost)
    assert_answers(mended, settings)
    assert not mended.join_replacements(), "no engine is new, and no group is left"
    assert environments.actors[1] is not lost
    assert [one.actor for one in mended.pop_replaced()] == ["environment-1"]
    assert_answers(mended, settings)


def test_what_a_lost_or_stopped_engine_was_asked_is_asked_of_the_other_and_it_comes_back(
    mended, settings, monkeypatch
):
    ray.kill(mended.engines.actors[0])
    assert_answers(mended, settings)
    assert mended.join_replacements()
    os.kill(
        ray.get(mended.engines.actors[1].__ray_call__.remote(lambda _: os.getpid())), signal.SIGSTOP
    )
    watch_patiently(monkeypatch).add(1)
    limits = replace(mended.engines.timeouts, stall=Timeout(5.0, "timeouts.stall_s"))
    monkeypatch.setattr(mended.engines, "timeouts", limits)
    assert_answers(mended, settings)
    monkeypatch.undo()
    assert mended.join_replacements()
    first, second = mended.pop_replaced()
    assert [first.actor, second.actor] == ENGINES
    assert re.search(r"rollout-actor-1 .*timeouts\.stall_s = 5 s", second.reason)
    assert_answers(mended, settings)
    assert not mended.join_replacements(), "environments ask the new ones"


def test_where_no_engine_is_left_the_round_is_lost_and_may_be_asked_again(mended, settings):
    for actor in mended.engines.actors:
        ray.kill(actor)
    with pytest.raises(LostRoundError, match="its process has ended"):
        assert_answers(mended, settings)
    mended.wait_idle()
    assert mended.join_replacements()
    assert_answers(mended, settings)


# The engines' actors, as an environment's actor asks them

LIMIT = Timeout(0.5, "timeouts.generate_s")
LONG = Timeout(LONG_S, "timeouts.generate_s")


def asked(actors: list[Any], limit: Timeout = LONG, *, outlived: bool = False) -> Any:
    """Ask the second of two engines. It answers with its name and the request."""
    engines = RayEngines(actors, ["actor-0", "actor-1"], limit, outlived=outlived)
    assert len(engines) == 2
    request: Any = "request"
    return asyncio.run(engines.generate(1, request))


@pytest.mark.parametrize(
    ("trouble", "limit", "message"),
    [
        ("fail", LONG, "generate on actor-1: told to fail"),
        ("unreachable", LONG, "generate on actor-1: gone"),
        (
            "sleep",
            LIMIT,
            (
                r"no answer from actor-1 after timeouts.generate_s = 0.5 s; check the engine's log;"
                r" .*rollout_matching.max_new_tokens"
            ),
        ),
    ],
)
def test_an_engine_that_fails_or_is_late_is_named_with_what_to_check(
    fake_actors, trouble, limit, message
):
    ray.get(fake_actors[1].become.remote("generate", trouble))
    with pytest.raises(RolloutError, match=message) as caught:
        asked(fake_actors, limit)
    assert isinstance(caught.value, UnreachableError) is (trouble == "unreachable"), (
        "only then is another engine asked"
    )


def test_a_cancelled_call_ends_at_once_and_the_engines_are_asked_on_the_next_event_loop(
    fake_actors,
):
    ray.get(fake_actors[1].become.remote("generate", "sleep"))
    engines = RayEngines(fake_actors, ["actor-0", "actor-1"], LONG)
    request: Any = "request"

    async def cancelled() -> None:
        asking = asyncio.create_task(engines.generate(1, request))
        await asyncio.sleep(0.2)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asking, 60)

    for _ in range(2):
        asyncio.run(cancelled())
        answer: Any = asyncio.run(engines.generate(0, request))
        assert answer == ("actor-0", "request")


def test_a_late_environment_is_named_with_the_timeouts_key(fake_actors):
    ray.get(fake_actors[1].become.remote("generate", "sleep"))
    pool = with_environments(fake_actors[1:], 1.0)
    message = "no answer from environment-1 after timeouts.generate_s = 1 s; check"
    with pytest.raises(RolloutError, match=f"generate on environment-1: {message}"):
        pool.generate(refs(group_requests(0, 1, 2, 5), [])).result()


def test_an_engine_that_dies_is_named_with_what_to_check(fake_actors):
    dies = create_fake_actor("actor-1", "generate", "die")
    with pytest.raises(UnreachableError, match="its process has ended"):
        asked([fake_actors[0], dies], outlived=True)
    message = r"(?s)on actor-1: its process has ended .*; check its log and the machine's memory"
    with pytest.raises(RolloutError, match=message) as caught:
        asked([fake_actors[0], dies])
    assert not isinstance(caught.value, UnreachableError), "no other engine is asked"
