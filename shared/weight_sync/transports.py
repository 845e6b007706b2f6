"""Devices of learner and engines, and the transport of weights that their placement requires."""

from __future__ import annotations

from enum import StrEnum

from shared.errors import ConfigError


class Device(StrEnum):
    """The kind of device of an engine or the learner, as torch names it."""

    CPU = "cpu"
    CUDA = "cuda"


class TransportKind(StrEnum):
    """A way to send weights from the learner to an engine."""

    NCCL = "nccl"
    """From the learner's GPU to other GPUs, by vLLM's engine."""
    IPC = "ipc"
    """To a process on the learner's GPU that opens its tensors, by vLLM's engine."""
    GLOO = "rollmatch_gloo"
    """Between processes with their weights in host memory."""
    INPROC = "inproc"
    """Within the learner's process, as direct references."""
    ADAPTER = "adapter"
    """In the offer itself, because an adapter is small."""


BUCKET_BYTES = {
    TransportKind.NCCL: 256 << 20,
    TransportKind.IPC: 256 << 20,
    TransportKind.GLOO: 16 << 20,
    TransportKind.INPROC: 16 << 20,
}
"""Bytes of one bucket of full weights. With nccl and ipc, vLLM's loader walks the whole model for
each bucket (benchmarks/load_buckets.py). With gloo it is called once, and larger buckets are slower
(benchmarks/weight_sync.py)."""


class Sharing(StrEnum):
    """What an engine shares with the learner rank that feeds it; each value includes the one
    before."""

    NOTHING = "nothing"
    """Another process with a separate device, on this node or elsewhere."""
    DEVICE = "device"
    """Another process on the same node and on the learner's GPU."""
    PROCESS = "process"
    """The learner's process."""


def choose_transport(
    learner_device: Device, engine_device: Device, sharing: Sharing
) -> TransportKind:
    """Return the transport of full weights. Raises ConfigError if only one side has a GPU."""
    if sharing is Sharing.PROCESS:
        return TransportKind.INPROC
    if learner_device is not engine_device:
        raise ConfigError(
            f"learner.gpus: weights cannot be sent from a learner on {learner_device} to an engine"
            f" on {engine_device}; give both sides GPUs or neither (learner.gpus,"
            " rollout_matching.vllm.actors.gpus_per_actor)"
        )
    if engine_device is Device.CPU:
        return TransportKind.GLOO
    return TransportKind.IPC if sharing is Sharing.DEVICE else TransportKind.NCCL
