"""Every worker of a tensor-parallel engine beside the learner finds a handle for its own GPU, and nothing is kept for longer than it reads, without one."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

import pytest
import torch

from rollout_actors.ipc_handles import ipc_handles
from rollout_actors.updated_llm import UpdatedLLM
from rollout_actors.weight_intake import UpdateRequest
from shared.checksummed_weights import ChecksummedWeights
from shared.transports import Transport
from shared.weight_terms import FullTerms, TensorSpec


class FakeDevice:
    """A GPU in host memory: its handles hold what a process on it would read."""

    def __init__(self, number: int) -> None:
        self.uuid = f"GPU-{number}"
        self.num_waits = 0
        self.memory: list[torch.Tensor] = []

    def share(self, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[Any, ...]]:
        assert self.num_waits == 0, "what is shared behind the wait may not be there yet"
        self.memory.append(tensor.clone())
        return self.memory[-1], (self.uuid, len(self.memory) - 1)

    def synchronize(self) -> None:
        self.num_waits += 1


WEIGHTS = [("q", torch.arange(6.0).reshape(2, 3)), ("k", torch.ones(4, dtype=torch.bfloat16)), ("checksums", torch.tensor([3]))]


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_each_tensor_has_a_handle_for_every_device_of_the_engine_under_its_uuid(num_devices: int) -> None:
    devices = [FakeDevice(number) for number in range(num_devices)]
    handles, kept = ipc_handles(iter(WEIGHTS), devices)
    assert len(handles) == len(WEIGHTS)
    for (name, tensor), of_tensor in zip(WEIGHTS, handles, strict=True):
        assert set(of_tensor) == {device.uuid for device in devices}, name
        for device in devices:
            uuid, place = of_tensor[device.uuid]
            assert uuid == device.uuid, "a worker opens memory of its own GPU"
            assert torch.equal(device.memory[place], tensor)
    assert [device.num_waits for device in devices] == [1] * num_devices
    assert {id(tensor) for tensor in kept} == {id(tensor) for device in devices for tensor in device.memory}, "all of it is kept until the engine is done"


def test_vllm_takes_them_as_one_mapping_for_each_tensor() -> None:
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo

    handles, _ = ipc_handles(iter(WEIGHTS), [FakeDevice(0), FakeDevice(1)])
    names, dtypes = [name for name, _ in WEIGHTS], ["float32", "bfloat16", "int64"]
    update = IPCWeightTransferUpdateInfo(names=names, dtype_names=dtypes, shapes=[list(tensor.shape) for _, tensor in WEIGHTS], ipc_handles=handles)
    assert update.ipc_handles == handles


TERMS = FullTerms((), 1.0, 100, (TensorSpec("a", "float32", (3,), 12),))


class FakeLLM:
    """Of vLLM's `LLM`, what an update calls."""

    def __init__(self, *, fails: bool) -> None:
        self._fails = fails

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferInitInfo

        assert not IPCWeightTransferInitInfo(**request["init_info"]).packed

    def start_weight_update(self) -> None: ...
    def finish_weight_update(self) -> None: ...

    def update_weights(self, request: dict[str, Any]) -> None:
        if self._fails:
            raise RuntimeError("no memory")


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_kept_of_an_update_that_has_ended_in_whatever_way(fails: bool) -> None:
    device = FakeDevice(0)
    updated = UpdatedLLM(FakeLLM(fails=fails), transport=Transport.IPC, devices=(device,))
    weights = ChecksummedWeights([("a", torch.arange(3.0))], TERMS, torch)
    source = weakref.ref(weights)

    async def update() -> None:
        await updated.update_weights(UpdateRequest({}))
        assert device.memory, "the engine reads it until it has finished"
        await updated.finish_weight_update()

    try:
        with updated.handing_over(weights):
            asyncio.run(update())
    except RuntimeError:
        assert fails
    copies = [weakref.ref(tensor) for tensor in device.memory]
    del weights
    device.memory.clear()
    assert source() is None
    assert [copy() for copy in copies] == [None, None]
