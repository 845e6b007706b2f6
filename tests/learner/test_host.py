"""What a backend in the learner's process gets to see of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from config_support import configuration
from learner_support import finish_step, half_right, make_learner

from learner.actor import EngineHost
from learner.learner import Learner
from learner.model.optimizer.offload import offloaded
from rollout_actors.backends.hf import HFBackend
from shared.config import RunConfig
from shared.errors import ConfigError, RolloutError
from shared.protocols import BackendHost
from shared.rollouts import FinishReason, RolloutRequest
from shared.schedule import RunSchedule

BESIDE = {
    "stage2_ab__channel_b__enable_pipeline": False,
    "rollout_matching__vllm": {"mode": "colocate"},
}
OFFLOAD: dict[str, Any] = {
    "rollout_matching__offload": {"enabled": True, "offload_model": True, "offload_optimizer": True}
}
Configured = Callable[..., RunConfig]


@pytest.fixture
def configured(demo_checkpoint: Path, demo_data: Path, tmp_path: Path) -> Configured:
    return lambda **changes: configuration(demo_checkpoint, demo_data, tmp_path, **BESIDE | changes)


@pytest.fixture
def run(configured: Configured) -> tuple[RunConfig, Learner]:
    config = configured()
    return config, make_learner(config)


def addresses(learner: Learner) -> list[int]:
    return [parameter.data_ptr() for parameter in learner.loaded.model.parameters()]


@pytest.mark.slow
def test_a_host_shows_the_learners_model_processor_and_the_weights_of_a_sync(
    run: tuple[RunConfig, Learner],
) -> None:
    host: BackendHost = EngineHost(*run)
    loaded = run[1].loaded
    assert (host.model, host.processor) == (loaded.model, loaded.processor)
    expected = dict(loaded.model.named_parameters())
    seen = dict(host.weights())
    assert list(seen) == list(expected)
    assert all(torch.equal(seen[name], weight) for name, weight in expected.items())
    assert not any(weight.requires_grad for weight in seen.values())
    before = addresses(run[1])
    with host.offloaded():
        assert addresses(run[1]) == before, "nothing is to be moved"


@pytest.mark.slow
def test_offload_beside_a_learner_on_the_cpu_is_refused_at_the_start(
    run: tuple[RunConfig, Learner], configured: Configured
) -> None:
    with pytest.raises(ConfigError, match=r"rollout_matching\.offload\.enabled"):
        EngineHost(configured(**OFFLOAD), run[1])


@pytest.mark.slow
def test_a_learner_that_is_offloaded_between_its_rounds_learns_the_same_to_the_bit(
    run: tuple[RunConfig, Learner], configured: Configured
) -> None:
    """Parameters, gradients so far and buffers go away and come back, in the midst of a step too.
    (The host stands in for the device: a move of the model is a copy, one of AdamW's moments is
    none.)"""
    config, staying = run
    moving = make_learner(config)
    asked = configured(**OFFLOAD)

    @contextmanager
    def away() -> Iterator[None]:
        before, loaded = addresses(moving), moving.loaded
        with offloaded(
            asked.rollout_matching, loaded.model, moving.optimizer, loaded.device, with_model=True
        ):
            assert all(a != b for a, b in zip(addresses(moving), before, strict=True))
            yield

    losses = losses_of_two_steps(config, moving, away)
    assert losses == losses_of_two_steps(config, staying, nullcontext)
    pairs = zip(moving.loaded.model.parameters(), staying.loaded.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def losses_of_two_steps(
    config: RunConfig,
    learner: Learner,
    while_an_engine_works: Callable[[], AbstractContextManager[None]],
) -> list[float]:
    losses = []
    plans = (plan for plan in RunSchedule(config).plans() if plan.channel == "B")
    for plan in itertools.islice(plans, 2):
        rollouts = half_right(learner, plan)
        for part in (rollouts[:2], rollouts[2:]):
            with while_an_engine_works():
                pass
            learner.accumulate(part)
        losses.append(finish_step(learner).metrics["loss/total"])
    return losses


def begun(config: RunConfig, learner: Learner) -> list[RolloutRequest]:
    """The requests of the first step that has some, with their pictures."""
    plan = next(plan for plan in RunSchedule(config).plans() if plan.channel == "B")
    return [
        replace(request, images=tuple(image.with_data() for image in request.images))
        for request in learner.next_requests(plan)
    ]


@pytest.mark.slow
def test_a_learner_that_is_told_to_stop_leaves_the_round_that_it_generates_itself(
    run: tuple[RunConfig, Learner],
) -> None:
    """Else the weights, which are saved by the same thread, would wait for the longest response."""
    config, learner = run
    backend = HFBackend(EngineHost(config, learner), decode_batch_size=3)
    requests = begun(config, learner)
    learner.stop()
    message = "generate on learner: stopped because the run is ending"
    with pytest.raises(RolloutError, match=message):
        backend.generate(requests)
    assert learner.loaded.model.training


@pytest.mark.slow
def test_a_learner_learns_from_its_own_rollouts(run: tuple[RunConfig, Learner]) -> None:
    """Prompts, versions and log-probabilities are compared on the way, as those of any engine
    are."""
    config, learner = run
    backend = HFBackend(EngineHost(config, learner), decode_batch_size=3)
    rollouts = backend.generate(begun(config, learner))
    reasons = {rollout.finish_reason for rollout in rollouts}
    assert {rollout.actor for rollout in rollouts} == {"learner"}
    assert reasons <= {FinishReason.STOP, FinishReason.LENGTH}
    assert learner.loaded.model.training
    learner.accumulate(rollouts)
    assert learner.finish_step().step == rollouts[0].step
