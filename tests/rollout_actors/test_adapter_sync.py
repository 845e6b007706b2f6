"""Syncs of a LoRA or DoRA learner to a real engine (spec: weight sync mode selection; decisions 9
and 20).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import safetensors.torch
import torch
from adapted_learner import AdaptedLearner, Spoil
from engine_support import TIMEOUTS, EnginePool, SmallLearner, create_actor, small_settings
from troubled_adapters import IdleAdapter, KeptAdapter

from launch.processes.fleet import Fleet
from launch.processes.rollout_client import RolloutClient
from launch.processes.rounds import RoundSize
from shared.errors import WeightSyncError
from shared.weight_sync.offer import AdapterFiles, AdapterOffer
from shared.weight_sync.phases import sync_weights

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.ray]


@pytest.fixture(scope="module")
def engine(ray_cluster: None, demo_checkpoint: Path) -> Iterator[EnginePool]:
    """One engine that can serve adapters. Weights are whatever the test before left."""
    actor = create_actor(
        "actor-0", small_settings(demo_checkpoint, enable_lora=True, max_lora_rank=4), 0
    )
    pool = RolloutClient(Fleet([actor], ["actor-0"], TIMEOUTS), RoundSize(8))
    pool.start()
    yield EnginePool({"actor-0": actor}, pool)
    pool.close()


@pytest.fixture
def fresh(engine: EnginePool, demo_checkpoint: Path) -> EnginePool:
    """The engine with the checkpoint's base weights, as a run finds it."""
    base = SmallLearner(demo_checkpoint, num_receivers=1)
    sync(base, engine)
    base.close()
    return engine


def sync(learner: SmallLearner, engine: EnginePool) -> Any:
    learner.version = max(learner.version, engine.pool.version)
    return sync_weights(learner, engine.pool)


def serves(engine: EnginePool, learner: SmallLearner) -> None:
    requests = [learner.request(position) for position in range(2)]
    for request, rollout in zip(requests, engine.generate(requests), strict=True):
        tokens, logprobs = learner.greedy(request)
        assert (rollout.response_token_ids, rollout.weight_version) == (tokens, learner.version)
        assert rollout.logprobs == pytest.approx(logprobs, abs=1e-4)


@pytest.fixture
def make_learner(demo_checkpoint: Path) -> Iterator[Callable[..., AdaptedLearner]]:
    learners: list[AdaptedLearner] = []

    def make(*args: Any, **kwargs: Any) -> AdaptedLearner:
        learners.append(AdaptedLearner(demo_checkpoint, *args, **kwargs))
        return learners[-1]

    yield make
    for learner in learners:
        learner.close()


def test_an_adapter_sync_makes_the_engine_generate_what_the_learner_would_and_the_next_replaces_it(
    fresh: EnginePool, make_learner: Any
) -> None:
    learner = make_learner()
    # the first of a run: the engine has the base weights from the checkpoint
    untrained = sync(learner, fresh)
    # an adapter has no effect before its first step
    assert (untrained.mode, untrained.fell_back, untrained.adapter_effect) == (
        "adapter",
        None,
        None,
    )
    serves(fresh, learner)
    seen = set()
    for seed in (11, 12):  # the same prompts and images, so that every cache would hit
        learner.learn(seed)
        report = sync(learner, fresh)
        assert (report.mode, report.fell_back, report.version) == ("adapter", None, learner.version)
        assert 0 < report.bytes < 1_000_000
        assert report.canary_max_abs <= 1e-4
        assert report.adapter_effect == pytest.approx(1, abs=0.05)
        assert {"pause", "load", "reset", "canary"} <= set(report.phase_s)
        assert report.wire_gb_per_s is None
        serves(fresh, learner)
        seen.add(learner.greedy(learner.request(0))[0])
    assert len(seen) == 2
    folder = Path(ray.get(fresh.actors["actor-0"].adapter_folder.remote()))
    assert folder.name.startswith("rollmatch-adapter-") and not folder.exists()


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_full_sync_carries_merged_weights_to_an_engine_that_could_take_adapters(
    fresh: EnginePool, make_learner: Any, kind: str
) -> None:
    # With rows of the embedding, which is the head too: every other token of the vocabulary's end.
    learner = make_learner(kind, mode="full", token_ids=range(301, 1301, 2))
    for seed in (21, 22):
        learner.learn(seed)
        report = sync(learner, fresh)
        assert (report.mode, report.fell_back) == ("full", None)
        serves(fresh, learner)


def changed_on_the_way(terms: AdapterOffer) -> AdapterOffer:
    tensors = terms.files.tensors
    changed = replace(terms.files, tensors=tensors[:-1] + bytes([tensors[-1] ^ 1]))
    return replace(terms, files=changed)


def remade(
    terms: AdapterOffer,
    change: Callable[[str, torch.Tensor], tuple[str, torch.Tensor]],
) -> AdapterOffer:
    """Offer other tensors, with a checksum that fits."""
    tensors = dict(change(*named) for named in safetensors.torch.load(terms.files.tensors).items())
    files = AdapterFiles(safetensors.torch.save(tensors), terms.files.config)
    return AdapterOffer.make(files, timeout_s=terms.timeout_s)


def of_other_weights(terms: AdapterOffer) -> AdapterOffer:
    return remade(terms, lambda name, tensor: (name, tensor.flip(0)))


def of_unknown_modules(terms: AdapterOffer) -> AdapterOffer:
    return remade(terms, lambda name, tensor: (name.replace("q_proj", "query"), tensor))


FAILURES = [
    (changed_on_the_way, "wire on actor-0: the adapter did not arrive as it was sent"),
    (of_other_weights, "canary on actor-0: .*log-probabilities differ"),
    (of_unknown_modules, "wire on actor-0: .*expected target modules"),
]


@pytest.mark.parametrize(("spoil", "reason"), FAILURES)
def test_adapter_sync_can_fall_back_to_full_sync(
    fresh: EnginePool, make_learner: Any, spoil: Spoil, reason: str
) -> None:
    learner = make_learner()
    learner.learn(31)
    sync(learner, fresh)
    learner.learn(32)
    learner.spoil = spoil
    report = sync(learner, fresh)
    assert report.mode == "full"
    assert re.search(reason, report.fell_back, re.DOTALL)
    serves(fresh, learner)
    learner.learn(33)
    report = sync(learner, fresh)
    assert (report.mode, report.fell_back) == ("full", None)
    serves(fresh, learner)


def test_an_adapter_left_on_top_of_merged_weights_is_caught_by_the_canary(
    fresh: EnginePool, make_learner: Any, tmp_path: Path
) -> None:
    """Nothing else would notice: names, checksums and versions are all as they should be."""
    ray.get(fresh.actors["actor-0"].trouble_adapters.remote(partial(KeptAdapter, folder=tmp_path)))
    learner = make_learner()
    learner.learn(51)
    assert sync(learner, fresh).mode == "adapter"
    learner.fall_back_to_full()
    with pytest.raises(WeightSyncError, match=r"canary on actor-0: .*log-probabilities differ"):
        sync(learner, fresh)
    ray.get(fresh.actors["actor-0"].trouble_adapters.remote(None))
    sync(learner, fresh)
    serves(fresh, learner)


def test_an_adapter_that_is_held_and_not_applied_is_caught_also_where_every_token_is_within_the_tolerance(
    fresh: EnginePool, make_learner: Any
) -> None:
    """At the tolerance of bfloat16 the policy with the adapter and the one without agree."""
    learner = make_learner(falls_back=False)
    learner.canary_tolerance = 100.0
    learner.learn(61)
    assert sync(learner, fresh).mode == "adapter"
    ray.get(fresh.actors["actor-0"].trouble_adapters.remote(IdleAdapter))
    learner.learn(62)
    message = r"canary on actor-0: .*effect .* -?0\.00 times"
    with pytest.raises(WeightSyncError, match=message) as caught:
        sync(learner, fresh)
    assert caught.value.quantity == "effect of the adapter"
    ray.get(fresh.actors["actor-0"].trouble_adapters.remote(None))
    sync(learner, fresh)
    serves(fresh, learner)


def test_an_engine_without_lora_says_what_to_set(
    engine_pool: EnginePool, make_learner: Any
) -> None:
    learner = make_learner(falls_back=False)
    learner.version = engine_pool.pool.version
    offer = learner.offer_weights()
    assert offer.sends_adapter
    message = r"without LoRA; .*rollout_matching\.vllm\.enable_lora: true"
    with pytest.raises(WeightSyncError, match=message):
        engine_pool.over("actor-0").receive_weights(offer).result()
