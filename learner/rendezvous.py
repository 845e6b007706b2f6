"""How the learner ranks of a run come together.

Their group is an object of its own and not torch's default group, which an engine in the same process may open for itself.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import DistError, PrefixStore, ProcessGroup, ProcessGroupGloo, TCPStore

from learner.device import LearnerDevice
from learner.gloo import gloo_options
from learner.place import LearnerPlace
from learner.ranks import DistributedRanks, OneRank, Ranks
from shared.errors import CollectiveError, Limit, late
from shared.transports import Device

GROUP_NAME = "rollmatch.learner"


class Rendezvous:
    """Where the other ranks find rank 0: a store on a port that is bound, on `address` alone, before anybody is told of it."""

    def __init__(self, address: str) -> None:
        listening = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        port = listening.getsockname()[1]
        self.endpoint = f"{address}:{port}"
        self.store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def join_ranks(
    place: LearnerPlace,
    rendezvous: Rendezvous | None,
    device: LearnerDevice,
    *,
    timeout_s: float,
    sums_in_backward: bool,
) -> Ranks:
    """Return the group of the place's ranks, when all have come.

    Args:
        rendezvous: rank 0's, opened before `place` was made.
        device: where the gradients are.
        timeout_s: of every collective, the configuration's timeouts.learn_s.
        sums_in_backward: the backward of every row sums gradients over the ranks already.
    """
    if place.world_size == 1:
        return OneRank()
    assert (rendezvous is not None) == (place.rank == 0), "rank 0 hosts the rendezvous, and only rank 0"
    address, port = place.rendezvous.rsplit(":", 1)
    timeout = timedelta(seconds=timeout_s)
    try:
        store = rendezvous.store if rendezvous is not None else TCPStore(address, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
        group = open_group(place, store, timeout)
    except (DistError, RuntimeError) as error:
        others = f"the other learner ranks at {place.rendezvous}"
        told = late(others, Limit(timeout_s, "timeouts.learn_s"), "the rank that failed first, and whether nodes reach each other")
        raise CollectiveError(f"rank {place.rank} of {place.world_size}: {told} ({error})", phase="start") from error
    return DistributedRanks(
        place.rank,
        place.world_size,
        group,
        device,
        timeout_s=timeout_s,
        sums_in_backward=sums_in_backward,
    )


def open_group(place: LearnerPlace, store: Any, timeout: timedelta) -> ProcessGroup:
    """Gloo for what lies in host memory, NCCL for what lies on a GPU. The latter was not run on a GPU."""
    group = ProcessGroup(PrefixStore(GROUP_NAME, store), place.rank, place.world_size)
    gloo = ProcessGroup.BackendType.GLOO
    on_cpu = ProcessGroupGloo(PrefixStore(f"{GROUP_NAME}.gloo", store), place.rank, place.world_size, gloo_options(place.address, timeout))
    group._register_backend(torch.device("cpu"), gloo, on_cpu)
    if place.device is Device.CUDA:  # the first that this process sees, which is where its tensors are
        from torch.distributed import ProcessGroupNCCL

        nccl_options = ProcessGroupNCCL.Options()
        nccl_options._timeout = timeout
        on_gpu = ProcessGroupNCCL(PrefixStore(f"{GROUP_NAME}.nccl", store), place.rank, place.world_size, nccl_options)
        group._set_default_backend(ProcessGroup.BackendType.NCCL)
        group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, on_gpu)
    else:
        group._set_default_backend(gloo)
    # torch keeps a register of groups by name; another run's in this process has another rendezvous.
    group._set_group_name(f"{GROUP_NAME}@{place.rendezvous}")  # type: ignore[arg-type]
    return group
