"""Devices of learner and engines, and the one transport of weights that their placement allows."""

from __future__ import annotations

from enum import StrEnum

from shared.errors import ConfigError


class Device(StrEnum):
    """The kind of device that an engine, or the learner, computes on, as torch names it."""

    CPU = "cpu"
    CUDA = "cuda"


class TransportKind(StrEnum):
    """A way from the learner's weights to an engine's."""

    NCCL = "nccl"
    """From the learner's GPU to other GPUs, by vLLM's own engine."""
    IPC = "ipc"
    """To a process on the learner's own GPU, which opens its tensors, by vLLM's own engine."""
    GLOO = "rollmatch_gloo"
    """Between processes with their weights in host memory."""
    INPROC = "inproc"
    """Within the learner's own process, from hand to hand."""
    ADAPTER = "adapter"
    """In the offer itself, because an adapter is small."""


BUCKET_BYTES = {
    TransportKind.NCCL: 256 << 20,
    TransportKind.IPC: 256 << 20,
    TransportKind.GLOO: 16 << 20,
    TransportKind.INPROC: 16 << 20,
}
"""Bytes of one bucket of full weights. vLLM's loader walks the whole model for each bucket of nccl
and ipc (benchmarks/load_buckets.py); over gloo it is called once, and larger buckets are slower
(benchmarks/weight_sync.py).
"""


class Sharing(StrEnum):
    """An engine's share in the learner rank that feeds it; each includes the one before."""

    NOTHING = "nothing"
    """Another process, which has a device of its own, on this node or elsewhere."""
    DEVICE = "device"
    """Another process of the same node, on the learner's own GPU."""
    PROCESS = "process"
    """The learner's own process."""


def choose_transport(
    learner_device: Device, engine_device: Device, sharing: Sharing
) -> TransportKind:
    """Return the transport of full weights. Raises ConfigError where one side alone has a GPU."""
    if sharing is Sharing.PROCESS:
        return TransportKind.INPROC
    if learner_device is not engine_device:
        raise ConfigError(
            f"learner.gpus: no weights travel from a learner on {learner_device} to an engine on"
            f" {engine_device}; give both sides GPUs or neither (learner.gpus,"
            " rollout_matching.vllm.actors.gpus_per_actor)"
        )
    if engine_device is Device.CPU:
        return TransportKind.GLOO
    return TransportKind.IPC if sharing is Sharing.DEVICE else TransportKind.NCCL
