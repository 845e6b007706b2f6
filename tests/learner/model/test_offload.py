"""What is moved away is gone while it is away, and back to the bit afterwards, whatever happened.
The host stands in for a device: a move is a real copy.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from config_support import configuration
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from learner.model.optimizer.offload import (
    offloaded,
    offloaded_model,
    offloaded_optimizer,
    offloads,
    require_offload,
)
from shared.config import RunConfig
from shared.errors import ConfigError, LearnerError

CPU, GPU = torch.device("cpu"), torch.device("cuda")
MOVING = {"enabled": True, "offload_model": True, "offload_optimizer": True}
ON = {
    "stage2_ab__channel_b__enable_pipeline": False,
    "rollout_matching__rollout_backend": "vllm",
    "rollout_matching__vllm": {"mode": "colocate"},
    "rollout_matching__offload": MOVING,
}


class Tied(nn.Module):
    """Two names for one matrix, a buffer, and a parameter that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        self.register_buffer("scale", torch.arange(3.0), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids) @ self.turned @ self.turned.t()) * self.scale.sum()


class SpyOptimizer:
    def __init__(self, fail_at: int = -1) -> None:
        self.moves: list[torch.device] = []
        self._fail_at = fail_at

    def move_to(self, device: torch.device) -> None:
        self.moves.append(device)
        if len(self.moves) - 1 == self._fail_at:
            raise RuntimeError("no room on the host")


@pytest.fixture
def model() -> Tied:
    torch.manual_seed(0)
    model = Tied()
    model(torch.tensor([1, 2])).sum().backward()
    return model


def everything(model: nn.Module) -> list[torch.Tensor]:
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [*parameters, *gradients, *model.buffers()]


def storages(model: nn.Module) -> list[StorageWeakRef]:
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in everything(model)]


def facts(model: nn.Module) -> list[tuple[Any, ...]]:
    return [
        (one.detach().clone(), one.stride(), one.dtype, one.device) for one in everything(model)
    ]


def same(before: list[tuple[Any, ...]], after: list[tuple[Any, ...]]) -> bool:
    pairs = zip(before, after, strict=True)
    return all(torch.equal(a[0], b[0]) and a[1:] == b[1:] for a, b in pairs)


def test_the_memory_of_the_model_is_let_go_while_it_is_away_and_its_bits_come_back(
    model: Tied,
) -> None:
    before = facts(model)
    objects = [id(tensor) for tensor in everything(model)]
    held = storages(model)
    assert not any(storage.expired() for storage in held)
    with offloaded_model(model):
        assert all(storage.expired() for storage in held)
        assert same(before, facts(model)), "the values are readable in the host's memory"
        on_host = storages(model)
    assert all(storage.expired() for storage in on_host)
    assert same(before, facts(model))
    assert [id(tensor) for tensor in everything(model)] == objects
    assert model.head.weight is model.embedding.weight


def test_offload_context_does_not_break_the_training_step(model: Tied) -> None:
    torch.manual_seed(0)
    other = Tied()
    other(torch.tensor([1, 2])).sum().backward()
    updates = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, other)]
    for _ in range(2):
        with offloaded_model(model):
            pass
        for one, update in zip((model, other), updates, strict=True):
            one(torch.tensor([3, 1])).square().sum().backward()
            update.step()
    assert same(facts(other), facts(model))


def test_it_comes_back_behind_an_exception(model: Tied) -> None:
    before, optimizer = facts(model), SpyOptimizer()
    with (
        pytest.raises(ZeroDivisionError),
        offloaded_optimizer(optimizer, GPU),
        offloaded_model(model),
    ):
        _ = 1 / 0
    assert same(before, facts(model))
    assert optimizer.moves == [CPU, GPU]


class Refusing(torch.Tensor):
    """A buffer, and so behind every parameter, for which there is no room."""

    def to(self, *arguments: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("no room on the host")


def test_it_comes_back_when_the_way_out_fails_half_way(model: Tied) -> None:
    model.scale = model.scale.as_subclass(Refusing)
    before = facts(model)
    held = [StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()]
    with pytest.raises(RuntimeError, match="no room"), offloaded_model(model):
        raise AssertionError("it did not get away")
    assert same(before, facts(model))
    assert all(storage.expired() for storage in held), "the parameters went, and came back"
    optimizer = SpyOptimizer(fail_at=0)
    with pytest.raises(RuntimeError, match="no room"), offloaded_optimizer(optimizer, GPU):
        raise AssertionError("it did not get away")
    assert optimizer.moves == [CPU, GPU]


def test_no_room_to_come_back_is_told_with_what_makes_room() -> None:
    class FullDevice(SpyOptimizer):
        def move_to(self, device: torch.device) -> None:
            if device == GPU:
                raise torch.OutOfMemoryError("CUDA out of memory")

    full = pytest.raises(LearnerError, match=r"rollout_matching\.offload.*gpu_memory_utilization")
    with full, offloaded_optimizer(FullDevice(), GPU):
        pass


Configured = Callable[..., RunConfig]


@pytest.fixture
def configured(demo_checkpoint: Path, demo_data: Path, tmp_path: Path) -> Configured:
    return lambda **changes: configuration(demo_checkpoint, demo_data, tmp_path, **changes)


@pytest.mark.parametrize(
    ("section", "with_model", "moves_model", "moves"),
    [
        pytest.param(MOVING, False, False, [CPU, CPU], id="the model is read"),
        pytest.param(
            {"enabled": True, "offload_optimizer": True}, True, False, [CPU, CPU], id="one"
        ),
        pytest.param({"enabled": True, "offload_model": True}, True, True, [], id="the other"),
        pytest.param({"enabled": True}, True, True, [CPU, CPU], id="both, without more words"),
    ],
)
def test_only_what_is_named_goes_and_the_model_stays_while_it_is_read(
    configured: Configured,
    model: Tied,
    section: dict[str, bool],
    with_model: bool,
    moves_model: bool,
    moves: list[torch.device],
) -> None:
    config, reference = configured(**ON | {"rollout_matching__offload": section}), Tied()
    held, optimizer = StorageWeakRef(model.turned.untyped_storage()), SpyOptimizer()
    copy = StorageWeakRef(reference.turned.untyped_storage())
    with offloaded(
        config.rollout_matching, model, optimizer, CPU, with_model=with_model, reference=reference
    ):
        assert held.expired() == moves_model
        assert copy.expired() == (moves_model or not with_model)
        assert optimizer.moves == moves[:1]
    assert optimizer.moves == moves


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout_matching__offload": MOVING | {"enabled": False}},
        {"rollout_matching__rollout_backend": "hf"},
        {"rollout_matching__vllm": {"mode": "actors"}},
    ],
)
def test_everywhere_else_the_section_is_ignored(
    configured: Configured, model: Tied, changes: dict[str, Any]
) -> None:
    config, optimizer = configured(**ON | changes), SpyOptimizer()
    held = StorageWeakRef(model.turned.untyped_storage())
    require_offload(config.rollout_matching, config.learner, CPU)
    with offloaded(config.rollout_matching, model, optimizer, CPU, with_model=True):
        assert not held.expired()
    assert not offloads(config.rollout_matching)
    assert optimizer.moves == []


@pytest.mark.parametrize("is_offloaded", [True, False])
def test_on_a_gpu_torch_gives_back_what_it_does_not_use_after_all_moves_and_before_the_engine_works(
    configured: Configured, model: Tied, monkeypatch: pytest.MonkeyPatch, *, is_offloaded: bool
) -> None:
    """Without offload too: the cache may hold the activations of a whole row."""
    optimizer = SpyOptimizer()
    freed: list[list[torch.device]] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(list(optimizer.moves)))
    section = {"enabled": is_offloaded, "offload_optimizer": True}
    rollouts = configured(**ON | {"rollout_matching__offload": section}).rollout_matching
    with offloaded(rollouts, model, optimizer, GPU, with_model=True):
        assert freed == ([[CPU]] if is_offloaded else [[]])
    with offloaded(rollouts, model, optimizer, CPU, with_model=True):
        assert len(freed) == 1, "the host has no such cache"


@pytest.mark.parametrize(
    ("changes", "device", "told"),
    [
        ({}, CPU, r"CPU.*set it to false"),
        ({"learner__world_size": 2, "learner__parallel": "fsdp"}, GPU, r"fsdp.*vllm\.mode: actors"),
    ],
)
def test_where_nothing_can_be_moved_away_the_refusal_says_what_to_do(
    configured: Configured, changes: dict[str, Any], device: torch.device, told: str
) -> None:
    config = configured(**ON, **changes)
    with pytest.raises(ConfigError, match=rf"rollout_matching\.offload\.enabled: .*{told}"):
        require_offload(config.rollout_matching, config.learner, device)
    plain = configured(**ON)
    require_offload(plain.rollout_matching, plain.learner, GPU)
