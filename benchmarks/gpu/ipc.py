"""Test 20 weight syncs to another process on the same device with `packed_buckets`.

An engine on the learner's device receives its weights this way. Each sync copies all buckets
through one shared buffer. The receiver maps the buffer once per sync, as vLLM's consumer does, and
copies each bucket before it requests the next one. The sums of all tensors must arrive unchanged,
and the sender's memory must not grow. On a CPU the buffer is in shared memory.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as mp

from benchmarks.gpu.probe import median_s, options
from learner.model.ranks import LearnerDevice
from rollout_actors.backends.ipc_handles import CudaDevice, packed_buckets
from shared.weight_sync.checksum import ChecksummedWeights
from shared.weight_sync.offer import FullOffer, TensorSpec

NUM_SYNCS = 20
LIMIT_S = 120.0


class HostDevice:
    """Takes the place of `CudaDevice` on a machine without a GPU, and uses host memory."""

    uuid = "host"

    def share(self, num_bytes: int) -> tuple[torch.Tensor, tuple[Any, ...]]:
        buffer = torch.empty(num_bytes, dtype=torch.uint8).share_memory_()
        return buffer, (buffer,)

    def synchronize(self) -> None: ...

    def collect(self) -> None: ...


def mapped(arguments: tuple[Any, ...]) -> torch.Tensor:
    """Map the buffer that the sender shares, in the receiver's process."""
    if isinstance(arguments[0], torch.Tensor):
        return arguments[0]
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    buffer: torch.Tensor = rebuild_cuda_tensor(*arguments)
    return buffer


def sum_of(bytes_N: torch.Tensor) -> int:
    return int(bytes_N.sum(dtype=torch.int64).item())


def receive(connection: Connection) -> None:
    """Receive buckets of weights, and answer each with the sums of its tensors.

    None instead of a bucket ends a weight sync.
    """
    for _ in range(NUM_SYNCS):
        buffer = None
        while (bucket := connection.recv()) is not None:
            if buffer is None:
                (arguments,) = bucket["ipc_handles"].values()
                buffer = mapped(arguments)
            begin = 0
            sums = []
            for size in bucket["tensor_sizes"]:
                sums.append(sum_of(buffer[begin : begin + size].clone()))
                begin += size
            connection.send(sums)
        del buffer  # so the sender can free its memory


def main() -> None:
    arguments = options(__doc__)
    device = arguments.device
    size = 2**12 if arguments.toy else 2**25
    sharing = CudaDevice(0) if device.type == "cuda" else HostDevice()
    weights = [(f"w{number}", torch.zeros(size, device=device)) for number in range(5)]
    specs = tuple(TensorSpec(name, "float32", (size,), tensor.nbytes) for name, tensor in weights)
    terms = FullOffer((), LIMIT_S, 2 * specs[0].num_bytes - 1, specs)  # two tensors to a bucket
    context = mp.get_context("spawn")
    here, theirs = context.Pipe()
    receiver = context.Process(target=receive, args=(theirs,), daemon=True)
    receiver.start()
    allocated: list[int] = []
    numbers = iter(range(1, NUM_SYNCS + 1))

    def sync() -> None:
        number = next(numbers)
        for index, (_, tensor) in enumerate(weights):
            tensor.fill_(float(number * 10 + index))  # the update
        LearnerDevice(device).wait()
        expected = iter([sum_of(tensor.view(torch.uint8)) for _, tensor in weights])
        num_buckets = 0
        for bucket in packed_buckets(ChecksummedWeights(weights, terms), [sharing]):
            here.send(bucket)
            assert here.poll(LIMIT_S), f"the receiver did not answer in {LIMIT_S:g} s"
            for name, total in zip(bucket["names"], here.recv(), strict=True):
                if name.startswith("w"):
                    assert total == next(expected), f"sync {number}: {name} arrived changed"
            num_buckets += 1
        here.send(None)
        assert num_buckets == 3
        sharing.collect()
        if device.type == "cuda":
            allocated.append(torch.cuda.memory_allocated(device))

    seconds = median_s(sync, device, repeats=NUM_SYNCS - 1)
    receiver.join(LIMIT_S)
    assert receiver.exitcode == 0, receiver.exitcode
    gigabytes = sum(spec.num_bytes for spec in specs) / 1e9
    print(f"{NUM_SYNCS} of {NUM_SYNCS} syncs of {gigabytes:.3f} GB arrived unchanged")
    print(f"{seconds:.4f} s each, {gigabytes / seconds:.1f} GB/s, including checksums and sums")
    # One buffer may still be referenced by the receiver.
    largest = 2 * 2 * specs[0].num_bytes
    growth = max(allocated, default=0) - min(allocated, default=0)
    assert growth <= largest, f"memory grew: {allocated}"


if __name__ == "__main__":
    main()
