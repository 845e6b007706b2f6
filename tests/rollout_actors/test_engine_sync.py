"""Weights that arrive are the learner's, and a sync that went wrong is noticed, named and gone over
(decision 38).
"""

from __future__ import annotations

import re
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from engine_support import (
    TIMEOUTS,
    EnginePool,
    SmallLearner,
    create_actor,
    generated,
    small_settings,
)
from fake_server import eventually

from launch.processes.fleet import Fleet, RolloutTimeouts
from launch.processes.replacements import Replacements, RestartBudget
from launch.processes.rollout_client import RolloutClient
from launch.processes.rounds import RoundSize
from shared.config.job import TimeoutsSection
from shared.config.rollout import ActorsSection
from shared.errors import RolloutError, WeightSyncError
from shared.rollouts import SyncReport, WeightOffer
from shared.sent_requests import PictureShelf
from shared.weight_sync.phases import sync_weights

pytestmark = pytest.mark.engine

LANGUAGE_TENSOR = "model.language_model.layers.1.mlp.gate_proj.weight"
VISION_TENSOR = "model.visual.blocks.1.attn.proj.weight"


@pytest.fixture(scope="module")
def learner(engine_pool: EnginePool, demo_checkpoint: Path) -> Iterator[SmallLearner]:
    learner = SmallLearner(demo_checkpoint, num_receivers=3)
    learner.version = engine_pool.pool.version
    yield learner
    learner.close()


def test_tied_embeddings_are_renewed_at_the_output_too(
    engine_pool: EnginePool, learner: SmallLearner
) -> None:
    """On CPU the output head multiplies with a packed copy of the embedding, which
    vLLM's reload leaves as it was.
    """
    request = learner.request(0)
    learner.learn(21)
    report = sync_weights(learner, engine_pool.pool)
    receivers = {"pause", "rendezvous", "wire", "load", "verify", "reset", "canary"}
    assert receivers | {"send_gather", "send_wire", "send_verify"} <= set(report.phase_s)
    before = engine_pool.generate([request])[0]
    learner.scale_embeddings(3.0)
    sync_weights(learner, engine_pool.pool)
    after = engine_pool.generate([request])[0]
    tokens, logprobs = learner.greedy(request)
    assert after.response_token_ids == tokens
    assert after.logprobs == pytest.approx(logprobs, abs=1e-4)
    assert after.logprobs != before.logprobs


def test_a_tensor_that_is_damaged_on_its_way_is_caught_by_its_buckets_checksum(
    engine_pool: EnginePool, learner: SmallLearner
) -> None:
    learner.learn(31)
    engine_pool.arm("actor-0", "corrupt", LANGUAGE_TENSOR)
    message = r"verify on actor-0: buckets \[\d+\] of \d+ "
    with pytest.raises(WeightSyncError, match=message) as caught:
        sync_weights(learner, engine_pool.pool)
    assert (caught.value.actor, caught.value.phase, caught.value.quantity, caught.value.size) == (
        "actor-0",
        "verify",
        "bucket checksums",
        1,
    )
    with pytest.raises(RolloutError, match=r"actor-0.*serves no rollouts"):
        engine_pool.generate([learner.request(0)], "actor-0")


def test_an_error_in_one_receiver_blocks_nobody_and_the_next_sync_succeeds(
    engine_pool: EnginePool, learner: SmallLearner
) -> None:
    learner.learn(41)
    engine_pool.arm("actor-2", "fail", VISION_TENSOR)
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match="told to fail") as caught:
        sync_weights(learner, engine_pool.pool)
    assert (caught.value.actor, caught.value.phase) == ("actor-2", "wire")
    sync_weights(learner, engine_pool.pool)
    assert time.monotonic() - started < TIMEOUTS.sync_phase.seconds, (
        f"nobody waited for a timeout, while the error is still there: {caught.value}"
    )
    request = learner.request(0)
    assert (
        engine_pool.generate([request], "actor-2")[0].response_token_ids
        == learner.greedy(request)[0]
    )


@pytest.mark.long
def test_a_round_that_still_runs_is_waited_for_before_the_limits_of_a_sync_begin(
    engine_pool: EnginePool, demo_checkpoint: Path
) -> None:
    """As under `max_staleness`: the next step's first round still runs when this step's weights are
    due.
    """
    pool = engine_pool.over(*engine_pool.actors)
    learner = SmallLearner(demo_checkpoint, num_receivers=3)
    learner.version = served = engine_pool.pool.version
    (core_id,) = ray.get(engine_pool.actors["actor-2"].process_ids.remote())[1:]
    core = psutil.Process(core_id)
    requests = [learner.request(position) for position in range(9)]
    with ThreadPoolExecutor(1) as thread:
        core.suspend()
        try:
            generating = pool.generate([PictureShelf(ray.put).put_each(requests)])
            syncing = thread.submit(sync_weights, learner, pool)
            assert not wait([syncing], timeout=1.0).done
            assert learner.version == served, "nothing is offered yet"
        finally:
            core.resume()
        report = syncing.result()
    learner.close()
    assert (report.version, pool.version) == (served + 1, served + 1)
    rollouts = [
        rollout for share in ray.get(generating.future.result(timeout=0)[0]) for rollout in share
    ]
    assert {rollout.weight_version for rollout in rollouts} == {served}


@pytest.mark.long
def test_a_cache_that_is_too_small_is_told_as_vllm_finds_it_with_the_whole_story(
    ray_cluster: None, demo_checkpoint: Path
) -> None:
    actor = create_actor("small", small_settings(demo_checkpoint, kv_cache_memory_bytes=1 << 19), 0)
    pool = RolloutClient(Fleet([actor], ["small"], TIMEOUTS), RoundSize(8))
    with pytest.raises(RolloutError) as caught:
        pool.start()
    pool.close()
    assert caught.value.message.startswith(
        "the engine did not start: EngineCore: ValueError: To serve at least one request with the"
        " model's max seq len (512)"
    )
    assert "rollout_matching.vllm.kv_cache_memory_bytes" in caught.value.message
    assert "check_enough_kv_cache_memory" in "".join(traceback.format_exception(caught.value)), (
        "what error.txt is written from"
    )


@pytest.mark.long
def test_an_engine_that_dies_in_a_phase_of_a_sync_is_told_at_once_and_a_new_one_has_the_weights(
    ray_cluster: None, demo_checkpoint: Path
) -> None:
    """The new one dies too, beside nobody who would replace it, and its actor ends itself."""
    timeouts = RolloutTimeouts.for_actors(TimeoutsSection(start_s=600.0, sync_phase_s=600.0))

    actors = []

    def create(*_: int) -> Any:
        actors.append(create_actor("doomed", small_settings(demo_checkpoint), 0))
        return actors[-1]

    budget = RestartBudget(ActorsSection(max_restarts=1))
    actor = create()
    pool = RolloutClient(
        Fleet(
            [actor],
            ["doomed"],
            timeouts,
            replacements=Replacements(create, ["doomed"], timeouts.start, budget),
        ),
        RoundSize(8),
    )
    pool.start()
    # which waits so long for the dead engine, and longer for the new one
    learner = SmallLearner(demo_checkpoint, num_receivers=1, timeout_s=5.0)

    def leave_groups() -> None:
        learner.sender.close()
        learner.sender = replace(learner.sender, timeout_s=TIMEOUTS.sync_phase.seconds)

    learner.leave_groups = leave_groups  # type: ignore[method-assign]
    learner.learn(seed=5)
    core = psutil.Process(ray.get(actor.process_ids.remote())[1])
    begun_s = time.monotonic()
    tries = []

    def receive(offer: WeightOffer) -> Future[SyncReport]:
        if not tries:
            core.suspend()  # so that vLLM has been asked, and cannot answer, when it dies
            terms = replace(offer.terms, timeout_s=timeouts.sync_phase.seconds)
            offer = replace(offer, terms=terms)
        tries.append(RolloutClient.receive_weights(pool, offer))
        if len(tries) == 1:
            threading.Timer(2.0, core.kill).start()
        return tries[-1]

    pool.receive_weights = receive  # type: ignore[method-assign]
    sync_weights(learner, pool)
    assert time.monotonic() - begun_s < timeouts.sync_phase.seconds / 2
    first, second = tries
    assert isinstance(first.exception(), WeightSyncError)
    message = r"pause on doomed: .*ended \(EngineCore .*SIGKILL"
    assert re.search(message, str(first.exception()))
    assert second.exception() is None
    (rollout,) = generated(pool, [learner.request(1)])
    assert rollout.response_token_ids == learner.greedy(learner.request(1))[0]
    shell, *children = ray.get(actors[-1].process_ids.remote())
    psutil.Process(children[0]).kill()
    alone = RolloutClient(Fleet(actors[-1:], ["doomed"], timeouts, devices=(1,)), RoundSize(8))
    killed = r"generate on doomed: its process has ended \(EngineCore was ended by SIGKILL"
    with pytest.raises(RolloutError, match=killed):
        generated(alone, [learner.request(0)])
    assert eventually(lambda: not any(map(psutil.pid_exists, (shell, *children))))
    learner.close()
    pool.close()
