"""What a learner rank's group is opened with on a GPU, on a machine that has none and whose torch
knows no NCCL.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch.distributed import ProcessGroupGloo, Store

from learner.model.ranks import LearnerDevice, Ranks, RankTopology, Rendezvous, join_ranks
from shared.weight_sync.transports import Device, TransportKind


class FakeNccl(ProcessGroupGloo):
    """Made as torch's `ProcessGroupNCCL` is, by its stubs."""

    class Options:
        _timeout: timedelta

    opened: list[FakeNccl]

    def __init__(self, store: Store, rank: int, size: int, options: Options) -> None:
        super().__init__(store, rank, size, options._timeout)
        self.given = (rank, size, options._timeout)
        self.opened.append(self)


def test_ranks_on_gpus_meet_over_nccl_there_and_over_gloo_in_host_memory_with_one_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakeNccl, "opened", [], raising=False)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", FakeNccl, raising=False)
    rendezvous = Rendezvous("127.0.0.1")

    def join(rank: int) -> Ranks:
        place = RankTopology(
            TransportKind.NCCL,
            (),
            device=Device.CUDA,
            rank=rank,
            world_size=2,
            rendezvous=rendezvous.endpoint,
        )
        hosted, device = None if rank else rendezvous, LearnerDevice(torch.device("cpu"))
        return join_ranks(place, hosted, device, timeout_s=60.0, num_shards=1)

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(join, range(2))
        assert sorted(each.given for each in FakeNccl.opened) == [
            (rank, 2, timedelta(seconds=60)) for rank in range(2)
        ]
        assert list(threads.map(lambda ranks: ranks.sum(3), (first, second))) == [6, 6]
