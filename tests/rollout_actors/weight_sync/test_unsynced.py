"""What a model holds besides its parameters survives a sleep that discards the memory of weights.

Host memory stands in for the GPU's, and vLLM's allocator is played by a table of it.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm import device_allocator
from vllm.device_allocator import cumem

from rollout_actors.weight_sync.unsynced import UnsyncedMemory, not_parameters


class Memory:
    """Allocations of vLLM's allocator, from which tensors are cut one after another."""

    def __init__(self) -> None:
        self.pointer_to_data: dict[int, SimpleNamespace] = {}
        self._blocks: list[torch.Tensor] = []
        self._used = 0

    def allocate(self, num_bytes: int, tag: str = "weights") -> None:
        block = torch.zeros(num_bytes, dtype=torch.uint8)
        address = block.data_ptr()
        handle = (0, num_bytes, address, 0)
        self.pointer_to_data[address] = SimpleNamespace(handle=handle, tag=tag)
        self._blocks.append(block)
        self._used = 0

    def tensor(self, *shape: int) -> torch.Tensor:
        """float32, of random values, in the last allocation"""
        num_bytes = 4 * torch.Size(shape).numel()
        cut = self._blocks[-1][self._used : self._used + num_bytes]
        self._used += num_bytes
        return cut.view(torch.float32).view(shape).copy_(torch.randn(shape))

    def discard(self) -> None:
        for block, data in zip(self._blocks, self.pointer_to_data.values(), strict=True):
            if data.tag == "weights":
                block.fill_(0xFF)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory()
    monkeypatch.setattr(device_allocator, "get_mem_allocator_instance", lambda: memory)
    monkeypatch.setattr(cumem, "libcudart", SimpleNamespace(cudaMemcpy=ctypes.memmove))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    return memory


class Model(nn.Module):
    """As Qwen3-VL in vLLM: parameters, a buffer, and tensors that are neither."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        memory.allocate(4096)
        self.first = nn.Parameter(memory.tensor(8, 4))
        self.deepstack_input_embeds = [memory.tensor(16) for _ in range(2)]
        self.second = nn.Parameter(memory.tensor(5).view(5, 1))
        memory.allocate(1024)
        self.turned = nn.Parameter(memory.tensor(6, 4).t())
        self.register_buffer("cos_sin_cache", memory.tensor(32), persistent=False)
        self.with_gaps = nn.Parameter(memory.tensor(4, 4)[:, :2])
        memory.allocate(64, "kv_cache")
        self.cache = memory.tensor(16)


def test_all_but_the_parameters_is_as_before_and_loaded_parameters_are_not_written_again(
    memory: Memory,
) -> None:
    model = Model(memory)
    others = [*model.deepstack_input_embeds, *model.buffers(), model.cache]
    expected = [other.clone() for other in others]
    kept = UnsyncedMemory(model)
    memory.discard()
    assert [bool(other.isnan().all()) for other in others] == [True, True, True, False]
    new = {"first": torch.randn(8, 4), "second": torch.randn(5, 1), "turned": torch.randn(4, 6)}
    kept.restore()
    with torch.no_grad():
        for name, tensor in new.items():
            model.get_parameter(name).copy_(tensor)
    assert all(torch.equal(*pair) for pair in zip(others, expected, strict=True))
    assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in new.items())


def test_neither_parameters_nor_the_cache_are_copied(memory: Memory) -> None:
    model = Model(memory)
    with torch.no_grad():
        for parameter in (model.first, model.second, model.turned):
            parameter.fill_(1.0)
        model.cache.fill_(1.0)
    kept = UnsyncedMemory(model)
    memory.discard()
    with torch.no_grad():
        model.cache.fill_(2.0)
    kept.restore()
    discarded = [bool(getattr(model, name).isnan().all()) for name in ("first", "second", "turned")]
    assert discarded == [True, True, True]
    assert not model.with_gaps.isnan().any(), "between its values may be another tensor"
    assert bool((model.cache == 2.0).all())


@pytest.mark.parametrize(
    ("allocated", "parameters", "left"),
    [
        ([(100, 120)], [(104, 112)], [(100, 104), (112, 120)]),
        ([(100, 120)], [(100, 120)], []),
        ([(100, 120), (300, 310)], [(100, 110), (110, 112)], [(112, 120), (300, 310)]),
        ([(300, 310), (100, 120)], [(302, 310), (40, 60)], [(100, 120), (300, 302)]),
        ([(100, 120)], [(100, 116), (104, 108)], [(116, 120)]),
    ],
    ids=["inside", "all of it", "neighbours", "elsewhere", "tied"],
)
def test_the_bytes_between_parameters_are_what_is_kept(
    allocated: list[tuple[int, int]],
    parameters: list[tuple[int, int]],
    left: list[tuple[int, int]],
) -> None:
    def at(begin: int, end: int) -> Any:
        size = end - begin
        return SimpleNamespace(
            data_ptr=lambda: begin,
            nbytes=size,
            shape=(size,),
            stride=lambda: (1,),
            numel=lambda: size,
        )

    assert not_parameters(allocated, [at(*each) for each in parameters]) == left
