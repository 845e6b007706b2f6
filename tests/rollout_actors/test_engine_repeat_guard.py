"""A real engine ends the sequences that repeat themselves, and no other request notices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from backend_support import what_was_said
from engine_support import TIMEOUTS, EnginePool, SmallLearner, create_actor, small_settings

from rollout_actors.repeat_guard.rule import require_guard
from shared.errors import RolloutError
from shared.rollouts import FinishReason, Rollout, RolloutRequest
from shared.sent_requests import PictureShelf
from shared.tokens.repeat_guard import RepeatGuardSettings, RepeatRule
from shared.weight_sync.phases import sync_weights

pytestmark = [pytest.mark.engine, pytest.mark.long]

SETTINGS = RepeatGuardSettings(
    min_new_tokens=12,
    max_consecutive_token_repeats=9,
    ngram_size=2,
    ngram_repeats=5,
    max_object_keys=6,
)
NUM_REQUESTS = 8
LONGEST = 16


@pytest.fixture(scope="module")
def guarded(ray_cluster: None, demo_checkpoint: Path) -> Iterator[Any]:
    """One more engine, with the guard, on the checkpoint's weights."""
    actor = create_actor("guarded", small_settings(demo_checkpoint, repeat_guard=SETTINGS), 0)
    assert ray.get(actor.start.remote(), timeout=TIMEOUTS.start.seconds) == (1, "")
    yield actor
    ray.kill(actor)


@pytest.fixture(scope="module")
def learner(engine_pool: EnginePool, demo_checkpoint: Path) -> Iterator[SmallLearner]:
    """The engines of the pool, which have no guard, get the checkpoint's weights too."""
    learner = SmallLearner(demo_checkpoint, num_receivers=3)
    learner.version = engine_pool.pool.version
    sync_weights(learner, engine_pool.pool)
    yield learner
    learner.close()


def generate(actor: Any, requests: list[RolloutRequest]) -> list[Rollout]:
    return ray.get(
        actor.generate.options(num_returns=2).remote(PictureShelf(ray.put).send(requests))[0]
    )


@pytest.mark.parametrize("temperature", [0.0, 0.15])
def test_offending_sequence_is_terminated_without_batch_abort_and_its_neighbours_go_on_as_without_the_guard(
    engine_pool: EnginePool, guarded: Any, learner: SmallLearner, temperature: float
) -> None:
    requests = [
        learner.request(position, temperature=temperature, max_new_tokens=LONGEST)
        for position in range(NUM_REQUESTS)
    ]
    rule = RepeatRule(replace(SETTINGS, max_object_keys=None))  # noise writes no keys
    num_ended = 0
    for free, rollout in zip(
        engine_pool.generate(requests, "actor-0"), generate(guarded, requests), strict=True
    ):
        end = rule.first_repetition(free.response_token_ids)
        if end in (None, LONGEST):
            assert what_was_said([rollout]) == what_was_said([free])
            assert rollout.forced_positions == ()
            continue
        num_ended += 1
        assert free.logprobs is not None
        ended = replace(
            free,
            response_token_ids=free.response_token_ids[:end],
            logprobs=free.logprobs[:end],
            stop_token_id=learner.stop,
            stop_token_logprob=None,
            finish_reason=FinishReason.REPETITION,
        )
        assert what_was_said([rollout]) == what_was_said([ended])
        assert rollout.forced_positions == (end,)
    assert 0 < num_ended < NUM_REQUESTS, "otherwise nothing was tested"


def test_a_request_without_a_stop_token_has_nothing_to_be_ended_with(
    guarded: Any, learner: SmallLearner
) -> None:
    requests = [
        learner.request(position, max_new_tokens=LONGEST) for position in range(NUM_REQUESTS)
    ]
    endless = [
        replace(request, decode=replace(request.decode, stop_token_ids=())) for request in requests
    ]
    rollouts = generate(guarded, endless)
    assert {(rollout.finish_reason, len(rollout.response_token_ids)) for rollout in rollouts} == {
        (FinishReason.LENGTH, LONGEST)
    }


def test_an_engine_that_was_started_without_the_guard_is_refused_by_what_its_workers_answer(
    engine_pool: EnginePool,
) -> None:
    answers = ray.get(engine_pool.actors["actor-1"].ask.remote("active_guard"))
    with pytest.raises(
        RolloutError,
        match="start on actor-1: the V1 model runner of worker 0 holds no repeat guard",
    ):
        require_guard(answers, SETTINGS, "actor-1")
