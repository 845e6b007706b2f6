"""The transports of a weight sync, and which one suits the devices of learner and engine."""

from __future__ import annotations

from enum import StrEnum

from shared.errors import ConfigError


class Device(StrEnum):
    """The kind of device on which an engine or the learner runs, as torch names it."""

    CPU = "cpu"
    CUDA = "cuda"


class TransportKind(StrEnum):
    """A way to send weights from the learner to an engine."""

    NCCL = "nccl"
    """Weights go from the learner's GPU to other GPUs, with vLLM's transfer engine."""
    IPC = "ipc"
    """A process on the learner's GPU opens the learner's tensors, with vLLM's transfer engine."""
    GLOO = "rollmatch_gloo"
    """Weights go between processes that hold them in host memory."""
    INPROC = "inproc"
    """The engine is in the learner's process, and reads the learner's tensors directly."""
    ADAPTER = "adapter"
    """The offer itself contains an adapter, which is small."""


WIRES = (TransportKind.GLOO, TransportKind.NCCL)
"""Transports by which the learner sends; with the others, engines read the learner's tensors."""
BUCKET_BYTES = {
    TransportKind.NCCL: 256 << 20,
    TransportKind.IPC: 256 << 20,
    TransportKind.GLOO: 16 << 20,
    TransportKind.INPROC: 16 << 20,
}
"""Bytes of one bucket (tensors that are sent together) of full weights, by transport.

With nccl and ipc, vLLM's loader walks the whole model for each bucket.
With gloo it is called once, and larger buckets are slower (benchmarks/weight_sync.py).
"""


class Sharing(StrEnum):
    """What an engine shares with the learner rank that sends its weights.

    Each value includes the one before.
    """

    NOTHING = "nothing"
    """The engine is another process with its own device, on the same node or elsewhere."""
    DEVICE = "device"
    """The engine is another process on the same node, and uses the learner's GPU."""
    PROCESS = "process"
    """The engine is in the learner's process."""


def choose_transport(
    learner_device: Device, engine_device: Device, sharing: Sharing
) -> TransportKind:
    """Return the transport that sends full weights from the learner to such an engine.

    Raises ConfigError if only one of them has a GPU.
    """
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
