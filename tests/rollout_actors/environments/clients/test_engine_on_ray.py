"""Environments over the session's real engines on Ray."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from engine_support import EnginePool, SmallLearner, noise_image
from environment_support import Talk, generated, shown
from scripted_engines import client_over, decode_settings

from rollout_actors.environments.clients.engine import EngineClient
from rollout_actors.environments.training.actor import RayEngines
from rollout_actors.environments.training.examples import merge_trajectories_for_training
from shared.errors import RolloutError, Timeout
from shared.rollouts import RolloutRequest
from shared.weight_sync.phases import sync_weights

pytestmark = pytest.mark.engine

NAMES = ("actor-0", "actor-1", "actor-2")
ROWS = [
    {"question": f"Detect every {name} object.", "position": i}
    for i, name in enumerate(("red", "big", "seven", "second", "other"))
]


@pytest.fixture(scope="module")
def learner(engine_pool: EnginePool, demo_checkpoint: Path) -> Iterator[SmallLearner]:
    """Whose weights the engines have."""
    with closing(SmallLearner(demo_checkpoint, num_receivers=3)) as learner:
        learner.learn(seed=2)
        learner.version = engine_pool.pool.version
        sync_weights(learner, engine_pool.pool)
        yield learner


def engines_of(pool: EnginePool, names: Sequence[str], limit_s: float = 120.0) -> RayEngines:
    actors = [pool.actors[name] for name in names]
    return RayEngines(actors, names, Timeout(limit_s, "timeouts.generate_s"))


def client_of(
    pool: EnginePool, learner: SmallLearner, names: Sequence[str] = NAMES, **decode: Any
) -> EngineClient:
    settings = decode_settings(
        learner.tokenizer, **{"max_new_tokens": 24, "banned_token_ids": learner.banned, **decode}
    )
    engines = engines_of(pool, names)
    return client_over(engines, learner.tokenizer, decode=settings, max_model_len=512)


def logprobs_of(learner: SmallLearner, token_ids: list[int]) -> torch.Tensor:
    """[T - 1]: the learner's, of each token but the first."""
    ids_1T = torch.tensor([token_ids])
    with torch.no_grad():
        logits_TV = learner.model(
            input_ids=ids_1T,
            mm_token_type_ids=torch.zeros_like(ids_1T, dtype=torch.int32),
            use_cache=False,
        ).logits[0]
    logits_TV[:, list(learner.banned)] = -torch.inf
    return logits_TV[:-1].log_softmax(-1).gather(1, ids_1T[0, 1:, None])[:, 0]


def assert_the_learner_agrees(learner: SmallLearner, state: Any) -> None:
    """About every sampled token, in the examples that it learns."""
    for example in merge_trajectories_for_training([state]).examples:
        learners = logprobs_of(learner, example.token_ids)
        pairs = zip(example.logprobs, example.mask, strict=True)
        for index, (logprob, is_learned) in enumerate(pairs):
            if is_learned:
                assert logprob == pytest.approx(float(learners[index - 1]), abs=1e-4)


def test_rollouts_on_the_engines_extend_token_by_token_and_the_learner_finds_the_log_probabilities_they_were_sampled_with(
    engine_pool, learner
):
    states = generated(Talk(max_turns=3), ROWS, client_of(engine_pool, learner)).state
    for state in states:
        assert state["error"] is None
        assert state["num_splits"] == 0
        steps = [step["tokens"] for step in state["trajectory"]]
        assert len(steps) == 3
        for earlier, later in pairwise(steps):
            so_far = earlier["prompt_ids"] + earlier["completion_ids"]
            assert later["prompt_ids"][: len(so_far)] == so_far
        (example,) = merge_trajectories_for_training([state]).examples
        assert example.weight_version == engine_pool.pool.version
        assert example.num_learned == sum(len(tokens["completion_ids"]) for tokens in steps)
        assert_the_learner_agrees(learner, state)


def test_a_sampled_stop_token_is_learned_with_its_own_log_probability(engine_pool, learner):
    others = set(range(0, 1300, 5)) - {*learner.banned, learner.stop}
    stops = (learner.stop, *sorted(others))
    client = client_of(engine_pool, learner, stop_token_ids=stops)
    states = generated(Talk(max_turns=2), ROWS, client).state
    steps = [step for state in states for step in state["trajectory"]]
    stopped = [step for step in steps if step["response"].choices[0].finish_reason == "stop"]
    assert stopped
    assert all(step["tokens"]["completion_ids"][-1] in stops for step in stopped)
    for state in states:
        assert_the_learner_agrees(learner, state)


def test_what_is_sampled_depends_on_the_place_of_a_rollout_and_not_on_the_engine_that_answers(
    engine_pool, learner
):
    on_three = generated(Talk(max_turns=2), ROWS, client_of(engine_pool, learner)).completion
    alone = client_of(engine_pool, learner, ["actor-1"])
    assert generated(Talk(max_turns=2), ROWS[::-1], alone).completion[::-1] == on_three


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.02)


def test_the_request_is_aborted_when_the_rollout_is_cancelled(engine_pool, learner):
    actor = engine_pool.actors["actor-2"]
    client = client_of(engine_pool, learner, ["actor-2"], max_new_tokens=450)

    def under_way() -> int:
        number: int = ray.get(actor.requests_and_tokens.remote())[0]
        return number

    async def begun_and_cancelled() -> None:
        rollouts = asyncio.create_task(Talk().generate(ROWS, client, "m", use_tqdm=False))
        await until(lambda: under_way() == len(ROWS))
        rollouts.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollouts
        await until(lambda: under_way() == 0)

    _, before = ray.get(actor.requests_and_tokens.remote())
    asyncio.run(begun_and_cancelled())
    _, after = ray.get(actor.requests_and_tokens.remote())
    # An answer may end by itself before the rollout is cancelled, but none reaches its limit.
    assert after - before < 450
    again = generated(Talk(max_turns=1), ROWS, client_of(engine_pool, learner, ["actor-2"]))
    assert again.metadata.num_errors == 0


def test_a_request_that_takes_too_long_is_aborted_and_told_with_what_to_check(engine_pool, learner):
    actor = engine_pool.actors["actor-1"]
    engines = engines_of(engine_pool, ["actor-1"], limit_s=0.05)
    decode = decode_settings(learner.tokenizer, max_new_tokens=450)
    request = RolloutRequest(
        1, 0, "sample-0", tuple(learner.tokenizer.encode("Detect")), (), decode, 5
    )

    async def late() -> None:
        message = r"generate on actor-1: .*timeouts\.generate_s = 0\.1 s; .*log"
        with pytest.raises(RolloutError, match=message):
            await engines.generate(0, request)
        await until(lambda: ray.get(actor.requests_and_tokens.remote())[0] == 0)

    _, before = ray.get(actor.requests_and_tokens.remote())
    asyncio.run(late())
    assert ray.get(actor.requests_and_tokens.remote()) == (0, before)


def test_a_prompt_that_only_its_images_make_too_long_ends_the_rollout_as_truncated(
    engine_pool, learner
):
    """The client counts one token for an image that no engine has seen yet, and here the engine's
    is the limit.
    """
    data = noise_image(0).data
    assert data is not None

    def prompt(number: int) -> list[dict[str, Any]]:
        return [shown(data, text="?" * number)]

    def length(number: int) -> int:
        messages = prompt(number)
        template = learner.tokenizer.apply_chat_template
        return len(template(messages, add_generation_prompt=True)["input_ids"])

    just_fits = next(number for number in range(4096) if length(number + 1) == 512)
    inputs = [{"prompt": prompt(just_fits)}, ROWS[1]]
    too_long, other = generated(Talk(), inputs, client_of(engine_pool, learner)).state
    assert (too_long["error"], too_long["is_truncated"]) == (None, True)
    # Its answer is cut by length, as a model of random weights does not end it.
    assert other["error"] is None and other["stop_condition"] != "prompt_too_long"
    assert (too_long["trajectory"], too_long["stop_condition"]) == ([], "prompt_too_long")


def test_what_an_engine_refuses_is_the_rollouts_error_in_the_engines_words(engine_pool, learner):
    data = learner.request(0).images[0].data
    assert data is not None
    inputs = [{"prompt": [shown(*[data] * 9)]}, ROWS[1]]
    refused, other = generated(Talk(), inputs, client_of(engine_pool, learner)).state
    assert re.search(r"sample 0 was refused: At most \d image", refused["error"])
    assert other["error"] is None
