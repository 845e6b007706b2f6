"""Check that another stream reads updated weights only after waiting for the update.

An update is queued after a long computation, and a side stream copies the weights immediately, as a
weight sync does. With `LearnerDevice.wait` before the copy the weights must be new. Without it they
should be old on a GPU, which shows that the probe can detect the error. On a CPU both are new.
"""

from __future__ import annotations

import torch

from benchmarks.gpu.probe import options, synchronize
from learner.model.ranks import LearnerDevice

REPEATS = 5


def copied(device: torch.device, num_products: int, *, waits: bool) -> float:
    """Return the weight that a side stream reads: 0 is the old weight, 1 the updated weight."""
    size = 4096 if device.type == "cuda" else 64
    weights = torch.zeros(1024, device=device)
    factor = torch.full((size, size), 1.0 / size, device=device)
    product = torch.eye(size, device=device)
    synchronize(device)
    for _ in range(num_products):
        product = product @ factor
    weights.add_(1.0 + 0.0 * product.sum())  # the update has to wait for the products
    if waits:
        LearnerDevice(device).wait()
    if device.type == "cuda":
        with torch.cuda.stream(torch.cuda.Stream(device)):
            read = weights.clone().max().item()
        synchronize(device)
        return read
    return weights.clone().max().item()


def main() -> None:
    arguments = options(__doc__)
    # Estimated at a quarter of a second on an H200, which is long for the copy of the weights.
    num_products = 4 if arguments.toy else 100
    for _ in range(REPEATS):
        assert copied(arguments.device, num_products, waits=True) == 1.0, "old weights were read"
    print(f"{REPEATS} copies after LearnerDevice.wait had the new weights")
    without = [copied(arguments.device, num_products, waits=False) for _ in range(REPEATS)]
    num_old = sum(value == 0.0 for value in without)
    print(f"{num_old} of {REPEATS} copies without it had the old weights")
    assert num_old or arguments.device.type != "cuda", "the probe cannot detect the error"


if __name__ == "__main__":
    main()
