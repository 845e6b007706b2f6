"""Every worker of a tensor-parallel engine beside the learner finds a handle for its own GPU, without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollout_actors.ipc_handles import ipc_handles


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
