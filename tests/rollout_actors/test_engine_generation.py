"""Real engines generate what transformers generates, whoever answers and in whatever company."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from engine_support import EnginePool, SmallLearner

from shared.errors import RolloutError
from shared.records import ImageRef
from shared.rollouts import FinishReason, Rollout
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


def what_was_said(rollouts: list[Rollout]) -> list[tuple[object, ...]]:
    return [
        (
            r.position,
            r.response_token_ids,
            r.logprobs,
            r.stop_token_id,
            r.stop_token_logprob,
            r.prompt_token_ids,
        )
        for r in rollouts
    ]


def test_greedy_tokens_and_their_log_probabilities_are_those_of_transformers(
    engine_pool: EnginePool, learner: SmallLearner
) -> None:
    requests = [learner.request(position) for position in range(4)]
    for request, rollout in zip(requests, engine_pool.generate(requests), strict=True):
        tokens, logprobs = learner.greedy(request)
        assert rollout.response_token_ids == tokens
        assert rollout.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert (
            rollout.prompt_token_ids
            == learner.logits(request.prompt_token_ids, request.images[0])[0]
        )


def test_sampled_rollouts_depend_neither_on_the_actor_nor_on_the_batch(
    engine_pool: EnginePool, learner: SmallLearner
) -> None:
    requests = [
        learner.request(position, temperature=1.0, max_new_tokens=32) for position in range(9)
    ]
    by_three = what_was_said(engine_pool.generate(requests))
    assert what_was_said(engine_pool.generate(requests, "actor-2")) == by_three
    assert (
        what_was_said(engine_pool.generate(requests[::-1], "actor-0", "actor-1"))[::-1] == by_three
    )
    assert what_was_said(engine_pool.generate(requests[4:5], "actor-1")) == by_three[4:5]
    assert len({response for _, response, *_ in by_three}) == len(requests), (
        "seeds differ, so do samples"
    )


def test_rollouts_come_back_in_order_with_their_place_seed_version_and_actor(
    engine_pool: EnginePool, learner: SmallLearner
) -> None:
    rollouts = engine_pool.generate([learner.request(position) for position in range(5)])
    assert [rollout.position for rollout in rollouts] == [0, 1, 2, 3, 4]
    assert [rollout.actor for rollout in rollouts] == [
        "actor-0",
        "actor-0",
        "actor-1",
        "actor-1",
        "actor-2",
    ]
    assert [rollout.seed for rollout in rollouts] == [1000, 1001, 1002, 1003, 1004]
    assert {rollout.weight_version for rollout in rollouts} == {engine_pool.pool.version}
    assert all(rollout.generate_s > 0 and rollout.started_s > 0 for rollout in rollouts)


def test_the_stop_token_is_kept_apart_from_the_response(
    engine_pool: EnginePool, learner: SmallLearner
) -> None:
    request = learner.request(0, max_new_tokens=16)
    first = engine_pool.generate([request])[0]
    stop = first.response_token_ids[3]
    end = first.response_token_ids.index(stop)
    rollout = engine_pool.generate(
        [replace(request, decode=replace(request.decode, stop_token_ids=(stop,)))]
    )[0]
    assert rollout.finish_reason is FinishReason.STOP
    assert (rollout.response_token_ids, rollout.stop_token_id) == (
        first.response_token_ids[:end],
        stop,
    )
    assert first.logprobs is not None
    assert (rollout.logprobs, rollout.stop_token_logprob) == (
        first.logprobs[:end],
        first.logprobs[end],
    )


def test_a_response_that_reaches_its_limit_says_so_and_has_no_stop_token(
    engine_pool: EnginePool, learner: SmallLearner
) -> None:
    request = learner.request(0, max_new_tokens=2)
    rollout = engine_pool.generate(
        [replace(request, decode=replace(request.decode, stop_token_ids=()))]
    )[0]
    assert (rollout.finish_reason, len(rollout.response_token_ids), rollout.stop_token_id) == (
        FinishReason.LENGTH,
        2,
        None,
    )


def test_banned_ids_are_never_sampled(engine_pool: EnginePool, learner: SmallLearner) -> None:
    request = learner.request(0, max_new_tokens=8)
    favourite = engine_pool.generate([request])[0].response_token_ids[0]
    banned = replace(request.decode, banned_token_ids=(*request.decode.banned_token_ids, favourite))
    assert (
        favourite
        not in engine_pool.generate([replace(request, decode=banned)])[0].response_token_ids
    )


def test_an_image_that_is_not_one_names_the_actor_and_the_sample(
    engine_pool: EnginePool, learner: SmallLearner
) -> None:
    request = replace(
        learner.request(0), images=(ImageRef(path=None, data=b"no image", sha256=""),)
    )
    with pytest.raises(RolloutError, match="generate on actor-0: image 0 of sample sample-0"):
        engine_pool.generate([request])


def test_a_prompt_too_long_for_the_engine_names_the_actor_and_the_sample(
    engine_pool: EnginePool, learner: SmallLearner
) -> None:
    request = learner.request(0)
    with pytest.raises(RolloutError, match="generate on actor-0: sample sample-0 was refused"):
        engine_pool.generate(
            [
                replace(
                    request,
                    prompt_token_ids=request.prompt_token_ids * 60,
                    images=request.images * 60,
                )
            ]
        )


def test_a_share_without_requests_makes_no_call(engine_pool: EnginePool) -> None:
    assert engine_pool.pool.generate([[]]).result() == [[]]
    assert ray.get(engine_pool.actors["actor-0"].generate.options(num_returns=2).remote()[1]) == 0
