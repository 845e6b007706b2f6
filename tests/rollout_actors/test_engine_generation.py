"""Real engines answer alike, whoever answers and in whatever company."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from backend_support import what_was_said
from engine_support import EnginePool, SmallLearner

from shared.errors import RolloutError
from shared.weight_sync.phases import sync_weights

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def learner(engine_pool: EnginePool, demo_checkpoint: Path) -> Iterator[SmallLearner]:
    learner = SmallLearner(demo_checkpoint, num_receivers=3)
    learner.learn(seed=1)
    learner.version = engine_pool.pool.version
    sync_weights(learner, engine_pool.pool)
    yield learner
    learner.close()


def test_sampled_rollouts_depend_neither_on_the_actor_nor_on_the_batch(
    engine_pool: EnginePool, learner: SmallLearner
) -> None:
    requests = [
        learner.request(position, temperature=1.0, max_new_tokens=32) for position in range(9)
    ]
    rollouts = engine_pool.generate(requests)
    assert len({rollout.response_token_ids for rollout in rollouts}) == len(requests), (
        "seeds differ, so do samples"
    )
    by_three = what_was_said(rollouts)
    assert what_was_said(engine_pool.generate(requests, "actor-2")) == by_three
    backwards = engine_pool.generate(requests[::-1], "actor-0", "actor-1")
    assert what_was_said(backwards[::-1]) == by_three
    assert what_was_said(engine_pool.generate(requests[4:5], "actor-1")) == by_three[4:5]


def test_banned_ids_are_never_sampled(engine_pool: EnginePool, learner: SmallLearner) -> None:
    request = learner.request(0, max_new_tokens=8)
    favourite = engine_pool.generate([request])[0].response_token_ids[0]
    banned = replace(request.decode, banned_token_ids=(*request.decode.banned_token_ids, favourite))
    assert (
        favourite
        not in engine_pool.generate([replace(request, decode=banned)])[0].response_token_ids
    )


def test_a_prompt_too_long_for_the_engine_names_the_actor_and_the_sample(
    engine_pool: EnginePool, learner: SmallLearner
) -> None:
    request = learner.request(0)
    prompt = {"prompt_token_ids": request.prompt_token_ids * 60, "images": request.images * 60}
    with pytest.raises(RolloutError, match="generate on actor-0: sample sample-0 was refused"):
        engine_pool.generate([replace(request, **prompt)])


def test_a_share_without_requests_makes_no_call(engine_pool: EnginePool) -> None:
    assert engine_pool.pool.generate([[]]).result() == [[]]
    assert ray.get(engine_pool.actors["actor-0"].generate.options(num_returns=2).remote()[1]) == 0
