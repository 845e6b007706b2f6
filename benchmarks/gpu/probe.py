"""What all probes of the GPU path need: options, and timing of asynchronous work on a device."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch


def options(description: str | None) -> argparse.Namespace:
    """Parse a probe's options: `device` (torch.device) and `toy` (small sizes).

    It also prints the device's name.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--toy", action="store_true", help="small sizes, for a CPU")
    arguments = parser.parse_args()
    name = torch.cuda.get_device_name() if arguments.device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}", flush=True)
    return arguments


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_s(work: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Return the median seconds that `work` takes on the device, after one warm-up run."""
    seconds = []
    for _ in range(repeats + 1):
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a.double() - b.double()).abs().max().item()
