"""Every worker of a tensor-parallel engine beside the learner reads every bucket on its own GPU,
through one handle for a whole sync.
"""

from __future__ import annotations

import asyncio
import weakref

import pytest
import torch

from rollout_actors.backends.colocated_llm import UpdatedLLM
from rollout_actors.backends.ipc_handles import packed_buckets
from rollout_actors.weight_sync.receiver import UpdateRequest
from shared.weight_sync.checksum import ChecksummedWeights
from shared.weight_sync.offer import CHECKSUMS, FullOffer, TensorSpec
from shared.weight_sync.transports import TransportKind

WEIGHTS = [
    ("q", torch.arange(6.0).reshape(2, 3)),
    ("k", torch.ones(4, dtype=torch.bfloat16)),
    ("v", torch.arange(5.0)),
    ("o", torch.tensor([2.0])),
]
SPECS = [
    TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.nbytes)
    for name, tensor in WEIGHTS
]
TERMS = FullOffer((), 1.0, 25, tuple(SPECS))
CUT = [["q", "k"], ["v", "o", CHECKSUMS]]
"""Names by bucket: a bucket ends with the tensor that takes it past 25 bytes."""


class FakeDevice:
    """A GPU in host memory: a process on it finds its buffers by what `share` gave with them."""

    def __init__(self, number):
        self.uuid = f"GPU-{number}"
        self.buffers = []
        self.num_waits = 0
        self.num_collections = 0

    def share(self, num_bytes):
        self.buffers.append(torch.empty(num_bytes, dtype=torch.uint8))
        return self.buffers[-1], (self.uuid, len(self.buffers) - 1)

    def synchronize(self):
        self.num_waits += 1

    def collect(self):
        self.num_collections += 1


def read_by(device, update):
    """Read a bucket as a worker on this device does."""
    uuid, index = update["ipc_handles"][device.uuid]
    assert uuid == device.uuid, "a worker opens memory of its own GPU"
    parts = device.buffers[index][: sum(update["tensor_sizes"])].split(update["tensor_sizes"])
    return {
        name: part.clone().view(getattr(torch, dtype)).view(shape)
        for name, dtype, shape, part in zip(
            update["names"], update["dtype_names"], update["shapes"], parts, strict=True
        )
    }


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_every_device_gets_every_bucket_in_the_one_buffer_that_it_shares(num_devices):
    devices = [FakeDevice(number) for number in range(num_devices)]
    read = [{} for _ in devices]
    names = []
    weights = ChecksummedWeights(WEIGHTS, TERMS)
    for number, update in enumerate(packed_buckets(weights, devices), 1):
        names.append(update["names"])
        for device, tensors in zip(devices, read, strict=True):
            assert device.num_waits == number, "copied before anybody is told of it"
            tensors |= read_by(device, update)
    assert names == CUT
    # A handle costs a counter of CUDA's.
    assert [len(device.buffers) for device in devices] == [1] * num_devices
    for tensors in read:
        assert all(torch.equal(tensors[name], tensor) for name, tensor in WEIGHTS)
        assert len(tensors[CHECKSUMS]) == 8 * len(CUT)


def test_vllm_takes_a_bucket_as_one_buffer():
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo

    device = FakeDevice(0)
    for update in packed_buckets(ChecksummedWeights(WEIGHTS, TERMS), [device, FakeDevice(1)]):
        taken = IPCWeightTransferUpdateInfo(**update)
        assert isinstance(taken.ipc_handles, dict) and set(taken.ipc_handles) == {"GPU-0", "GPU-1"}
        assert taken.tensor_sizes == [tensor.nbytes for tensor in read_by(device, update).values()]


class FakeLLM:
    """The calls of an update to vLLM's `LLM`."""

    def __init__(self, *, fails):
        self._fails = fails
        self.is_packed = False
        self.names = []

    def init_weight_transfer_engine(self, request):
        from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferInitInfo

        self.is_packed = IPCWeightTransferInitInfo(**request["init_info"]).packed

    def finish_weight_update(self): ...

    def update_weights(self, request):
        assert self.is_packed
        self.names.append(request["update_info"]["names"])
        if self._fails:
            raise RuntimeError("no memory")


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_kept_of_an_update_that_has_ended_in_whatever_way(fails):
    device = FakeDevice(0)
    llm = FakeLLM(fails=fails)
    updated = UpdatedLLM(llm, transport=TransportKind.IPC, devices=(device,), wake=lambda: None)
    weights = ChecksummedWeights(WEIGHTS, TERMS)
    source = weakref.ref(weights)

    async def update():
        names = [name for bucket in CUT for name in bucket]
        await updated.update_weights(UpdateRequest({"names": names}))
        assert (llm.names, device.num_collections) == (CUT, 0)
        await updated.finish_weight_update()
        assert device.num_collections == 1, "the engine has let go of it"

    try:
        with updated.handing_over(weights):
            asyncio.run(update())
    except RuntimeError:
        assert fails
    copies = [weakref.ref(buffer) for buffer in device.buffers]
    del weights
    device.buffers.clear()
    assert source() is None
    assert [copy() for copy in copies] == [None]
