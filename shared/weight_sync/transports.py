"""On what learner and engines compute, and by which way weights go from one to the other, chosen
from where the two are (DESIGN 9).
"""

from __future__ import annotations

from enum import StrEnum

from shared.errors import ConfigError

KEY = "rollout_matching.vllm.sync.transport"


class Device(StrEnum):
    """The kind of device that an engine, or the learner, computes on, as torch names it."""

    CPU = "cpu"
    CUDA = "cuda"


class TransportKind(StrEnum):
    NCCL = "nccl"
    """From the learner's GPU to other GPUs, by vLLM's own engine."""
    IPC = "ipc"
    """To a process on the learner's own GPU, which opens the learner's tensors where they lie, by
    vLLM's own engine.
    """
    GLOO = "rollmatch_gloo"
    """Between processes with their weights in host memory."""
    INPROC = "inproc"
    """Within the learner's own process, from hand to hand."""
    ADAPTER = "adapter"
    """In the offer itself: an adapter is small. Never configured, and whichever transport full
    weights have.
    """


BUCKET_BYTES = {
    TransportKind.NCCL: 256 << 20,
    TransportKind.IPC: 256 << 20,
    TransportKind.GLOO: 16 << 20,
    TransportKind.INPROC: 16 << 20,
}
"""Bytes of one bucket of full weights, by transport. vLLM's loader is called once for each bucket
that nccl and ipc bring, and walks the whole model first (benchmarks/load_buckets.py); over gloo it
is called once, and larger buckets are slower (benchmarks/weight_sync.py)."""


class Sharing(StrEnum):
    """What an engine has in common with the learner rank that feeds it. Each includes the one
    before.
    """

    NOTHING = "nothing"
    """Another process, which has a device of its own, on this node or elsewhere."""
    DEVICE = "device"
    """Another process of the same node, on the learner's own GPU."""
    PROCESS = "process"
    """The learner's own process."""


def choose_transport(
    asked: str, learner_device: Device, engine_device: Device, sharing: Sharing, *, key: str = KEY
) -> TransportKind:
    """For full weights: the transport that was asked for by `key`, or with `auto` the one that
    fits.

    Raises ConfigError saying why the configured one cannot work and what to write instead, or that
    nothing can.
    """
    fitting = _fitting(learner_device, engine_device, sharing)
    if fitting is None:
        raise ConfigError(
            f"{key}: no transport leads from a learner on {learner_device} to an engine on"
            f" {engine_device} in another process; give both sides GPUs or neither (learner.gpus,"
            " rollout_matching.vllm.actors.gpus_per_actor)"
        )
    if asked == "auto":
        return fitting
    transport = TransportKind(asked)
    if transport is not fitting:
        why = _objection(transport, learner_device, engine_device, sharing)
        raise ConfigError(
            f"{key}: {transport} {why}; write auto, or {fitting}, which fits this placement"
        )
    return transport


def _fitting(
    learner_device: Device, engine_device: Device, sharing: Sharing
) -> TransportKind | None:
    """For every placement one at most: none of the others could work there."""
    if sharing is Sharing.PROCESS:
        return TransportKind.INPROC
    if learner_device is not engine_device:
        return None
    if engine_device is Device.CPU:
        return TransportKind.GLOO
    return TransportKind.IPC if sharing is Sharing.DEVICE else TransportKind.NCCL


def _objection(
    transport: TransportKind, learner_device: Device, engine_device: Device, sharing: Sharing
) -> str:
    where = f"the learner is on {learner_device} and the engine on {engine_device}"
    if sharing is Sharing.PROCESS:
        return {
            TransportKind.NCCL: (
                "needs a rank in another process, but the engine lives in the learner's own process"
            ),
            TransportKind.IPC: (
                "cannot open memory of the process it is used in, but the engine lives in the"
                " learner's own process"
            ),
            TransportKind.GLOO: (
                "needs a rank in another process, but the engine lives in the learner's own process"
            ),
        }[transport]
    if transport is TransportKind.INPROC:
        return "hands weights over within one process, but the engine has a process of its own"
    if transport is TransportKind.GLOO:
        return f"loads weights in host memory into CPU engines, but {where}"
    if engine_device is Device.CPU:
        return (
            f"moves weights between GPUs, but {where}"
            if transport is TransportKind.NCCL
            else f"shares GPU memory, but {where}"
        )
    if transport is TransportKind.NCCL:
        return "cannot have two ranks on one GPU, but the engine is on the learner's own"
    return "opens tensors of the same GPU, but the engine has a GPU, and maybe a node, of its own"
