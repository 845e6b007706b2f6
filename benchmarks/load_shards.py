"""Compare the host memory in which learner ranks load a sharded model: by rows, and whole.

`python -m benchmarks.load_shards` (CPU) writes a random Qwen3-VL in bfloat16 and loads it in ranks
of their own processes, twice: each rank reads only its rows, as a run does, or the whole model in
float32, before FSDP2 keeps a shard of it. The memory of a rank is the most that was resident while
it loaded, less what was resident before. It includes mapped pages of the files.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForImageTextToText

from benchmarks.learner_memory import (
    HALF,
    LIMIT_S,
    SHARDED,
    USUAL,
    make_checkpoint,
    make_run,
    run_in_ranks,
)
from learner.model.checkpoint import CheckpointWeights
from learner.model.loading import DTYPES, load_model
from learner.model.optimizer.adamw import local_part
from learner.model.ranks import LearnerDevice, RankTopology, Rendezvous, join_ranks
from learner.model.sharding import ShardedModel, load_parallel
from learner.saving import checksum
from shared.config import RunConfig

CPU = torch.device("cpu")
STATUS = Path("/proc/self/status")
RESET = Path("/proc/self/clear_refs")
"""Writing 5 to this file of Linux resets the process's peak."""


class Loaded(NamedTuple):
    """What one rank has measured while it loaded its part of the model."""

    peak: int
    """Bytes that were resident at the peak, in addition to those before."""
    shard: int
    """Bytes of the rank's parameters after it loaded."""
    seconds: float
    digest: int
    """Checksum of the rank's parameters."""


def resident(name: str) -> int:
    """Return the bytes of a line of the process's status (`VmRSS`, or `VmHWM` for the peak)."""
    (kib,) = re.findall(rf"{name}:\s+(\d+) kB", STATUS.read_text())
    return 1024 * int(kib)


def load(
    place: RankTopology, rendezvous: Rendezvous | None, config: RunConfig, by_rows: bool
) -> Loaded:
    """Load this rank's part of the model. Every rank calls it, in a process of its own."""
    ranks = join_ranks(
        place, rendezvous, LearnerDevice(CPU), timeout_s=LIMIT_S, num_shards=place.world_size
    )
    load_model(config, CPU)  # imports, and fills the cache of files
    ranks.barrier()
    before = resident("VmRSS")
    RESET.write_text("5")
    started = time.perf_counter()
    if by_rows:
        model = load_parallel(config, CPU, ranks)[0].model
    else:
        in_float32 = config.model.model_copy(update={"dtype": "float32"})
        model = load_model(config.model_copy(update={"model": in_float32}), CPU).model
        checksum(model.parameters())  # the ranks compared their weights
        source = CheckpointWeights(model)
        ShardedModel(model, source, ranks, device=CPU, dtype=DTYPES[config.model.dtype])
    seconds = time.perf_counter() - started
    parts = [local_part(parameter) for parameter in model.parameters()]
    size = sum(part.nbytes for part in parts)
    return Loaded(resident("VmHWM") - before, size, seconds, checksum(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=1024)
    arguments = parser.parse_args()
    sizes = replace(
        USUAL,
        layers=arguments.layers,
        hidden=arguments.hidden,
        intermediate=3 * arguments.hidden,
        vocabulary=32_000,
    )
    print("ranks  loaded   shard MB  peak MB  seconds  (largest of all ranks)")
    with tempfile.TemporaryDirectory(prefix="rollmatch-") as folder:
        path = make_checkpoint(Path(folder), sizes)
        AutoModelForImageTextToText.from_pretrained(path, dtype="bfloat16").save_pretrained(path)
        for size in arguments.ranks:
            config = make_run(path, sizes, SHARDED | HALF | {"learner.world_size": size})
            peaks = {}
            digests = {}
            for by_rows in (False, True):
                ranks = run_in_ranks(load, size, config, by_rows)
                peaks[by_rows] = max(rank.peak for rank in ranks)
                digests[by_rows] = [rank.digest for rank in ranks]
                print(
                    f"{size:5}  {'by rows' if by_rows else 'whole':7}"
                    f" {max(rank.shard for rank in ranks) / 1e6:9.0f} {peaks[by_rows] / 1e6:8.0f}"
                    f" {max(rank.seconds for rank in ranks):8.1f}",
                    flush=True,
                )
            assert digests[True] == digests[False], "both ways load the same shards"
            print(f"{size:5}  ratio of the peaks {peaks[True] / peaks[False]:.2f}", flush=True)


if __name__ == "__main__":
    main()
