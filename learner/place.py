"""What a learner rank is told of its place in the run. Not configuration: it follows from the cluster."""

from __future__ import annotations

from dataclasses import dataclass

from shared.transports import Device, Transport


@dataclass(frozen=True, slots=True)
class ReceiverGroup:
    """Engine workers that take weights over one process group, of which learner rank 0 is rank 0."""

    num_workers: int
    port: int = 0
    """Where the group is opened on rank 0's node; 0: any free one."""


@dataclass(frozen=True, slots=True)
class LearnerPlace:
    """Where one learner rank is, and who is around it."""

    transport: Transport
    """Of the weight sync (`WeightOffer.transport`)."""
    receivers: tuple[ReceiverGroup, ...]
    """One for all rollout actors, or one for each server; none where the engine lives in the learner's process."""
    address: str = "127.0.0.1"
    """Of this node, which the engines, and the other ranks, reach."""
    device: Device = Device.CPU
    rank: int = 0
    world_size: int = 1
    rendezvous: str = ""
    """`address:port` at which rank 0 gathers the ranks; empty where there is one."""
