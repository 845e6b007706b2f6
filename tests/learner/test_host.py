"""What a backend in the learner's process gets to see of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
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
from learner.model.offload import offloaded
from rollout_actors.backends.hf import HFBackend
from shared.config import RunConfig
from shared.errors import ConfigError, RolloutError
from shared.protocols import BackendHost
from shared.rollouts import DecodeMode, FinishReason, RolloutRequest
from shared.schedule import RunSchedule

BESIDE = {
    "stage2_ab__channel_b__enable_pipeline": False,
    "rollout_matching__vllm": {"mode": "colocate"},
}


@pytest.fixture
def run(demo_checkpoint: Path, demo_data: Path, tmp_path: Path) -> tuple[RunConfig, Learner]:
    config = configuration(demo_checkpoint, demo_data, tmp_path, **BESIDE)
    return config, make_learner(config)


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
    assert all(
        torch.equal(seen[name], expected[name]) and not seen[name].requires_grad
        for name in expected
    )


@pytest.mark.slow
def test_where_nothing_is_to_be_moved_the_host_stays(run: tuple[RunConfig, Learner]) -> None:
    parameters = [parameter.data_ptr() for parameter in run[1].loaded.model.parameters()]
    with EngineHost(*run).offloaded():
        assert [
            parameter.data_ptr() for parameter in run[1].loaded.model.parameters()
        ] == parameters


@pytest.mark.slow
def test_offload_beside_a_learner_on_the_cpu_is_refused_at_the_start(
    run: tuple[RunConfig, Learner], demo_checkpoint: Path, demo_data: Path, tmp_path: Path
) -> None:
    offload: dict[str, Any] = {
        "rollout_matching__offload": {"enabled": True, "offload_model": True}
    }
    with pytest.raises(ConfigError, match=r"rollout_matching\.offload\.enabled"):
        EngineHost(configuration(demo_checkpoint, demo_data, tmp_path, **BESIDE | offload), run[1])


@pytest.mark.slow
def test_a_learner_that_is_offloaded_between_its_rounds_learns_the_same_to_the_bit(
    run: tuple[RunConfig, Learner], demo_checkpoint: Path, demo_data: Path, tmp_path: Path
) -> None:
    """Parameters, gradients so far and buffers go away and come back, in the midst of a step too.
    (The host stands in for the device: a move of the model is a copy, one of AdamW's moments is
    none.)"""
    config, staying = run
    moving = make_learner(config)
    section = {
        "rollout_matching__offload": {
            "enabled": True,
            "offload_model": True,
            "offload_optimizer": True,
        }
    }
    asked = configuration(demo_checkpoint, demo_data, tmp_path, **BESIDE | section)

    @contextmanager
    def away() -> Iterator[None]:
        before = {
            name: parameter.data_ptr() for name, parameter in moving.loaded.model.named_parameters()
        }
        with offloaded(
            asked, moving.loaded.model, moving.optimizer, moving.loaded.device, with_model=True
        ):
            assert all(
                parameter.data_ptr() != before[name]
                for name, parameter in moving.loaded.model.named_parameters()
            )
            yield

    assert losses_of_two_steps(config, moving, away) == losses_of_two_steps(
        config, staying, nullcontext
    )
    expected = dict(staying.loaded.model.named_parameters())
    assert all(
        torch.equal(parameter, expected[name])
        for name, parameter in moving.loaded.model.named_parameters()
    )


def losses_of_two_steps(
    config: RunConfig,
    learner: Learner,
    while_an_engine_works: Callable[[], AbstractContextManager[None]],
) -> list[float]:
    losses = []
    for plan in itertools.islice(
        (plan for plan in RunSchedule(config).plans() if plan.channel == "B"), 2
    ):
        rollouts = half_right(learner, plan)
        for part in (rollouts[:2], rollouts[2:]):
            with while_an_engine_works():
                pass
            learner.accumulate(part)
        losses.append(finish_step(learner).metrics["loss/total"])
    return losses


def with_pictures(requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
    return [
        replace(request, images=tuple(image.with_data() for image in request.images))
        for request in requests
    ]


@pytest.mark.slow
def test_a_learner_that_is_told_to_stop_leaves_the_round_that_it_generates_itself(
    run: tuple[RunConfig, Learner],
) -> None:
    """Else the weights, which are saved by the same thread, would wait for the longest response."""
    config, learner = run
    backend = HFBackend(EngineHost(config, learner), decode_batch_size=3)
    plan = next(plan for plan in RunSchedule(config).plans() if plan.channel == "B")
    requests = with_pictures(learner.next_requests(plan))
    learner.stop()
    with pytest.raises(
        RolloutError, match="generate on learner: told to stop, because the run is being ended"
    ):
        backend.generate(requests)
    assert learner.loaded.model.training


@pytest.mark.slow
def test_a_learner_learns_from_its_own_rollouts(run: tuple[RunConfig, Learner]) -> None:
    """Prompts, versions and log-probabilities are compared on the way, as those of any engine
    are."""
    config, learner = run
    backend = HFBackend(EngineHost(config, learner), decode_batch_size=3)
    plan = next(plan for plan in RunSchedule(config).plans() if plan.channel == "B")
    rollouts = backend.generate(with_pictures(learner.next_requests(plan)))
    assert {rollout.actor for rollout in rollouts} == {"learner"}
    assert {rollout.finish_reason for rollout in rollouts} <= {
        FinishReason.STOP,
        FinishReason.LENGTH,
    }
    assert learner.loaded.model.training
    learner.accumulate(rollouts)
    report = learner.finish_step()
    assert report.step == plan.step
    assert config.rollout_matching.resolved_decode_mode in DecodeMode
