"""Every placement has its transport, and every other one is refused there with its reason."""

from __future__ import annotations

from typing import get_args

import pytest

from shared.config.rollout import SyncSection
from shared.errors import ConfigError
from shared.weight_sync.transports import Device, Sharing, TransportKind, choose_transport

PLACEMENTS = {
    (Device.CPU, Device.CPU, Sharing.NOTHING): TransportKind.GLOO,
    (Device.CPU, Device.CPU, Sharing.DEVICE): TransportKind.GLOO,
    (Device.CPU, Device.CPU, Sharing.PROCESS): TransportKind.INPROC,
    (Device.CUDA, Device.CUDA, Sharing.NOTHING): TransportKind.NCCL,
    (Device.CUDA, Device.CUDA, Sharing.DEVICE): TransportKind.IPC,
    (Device.CUDA, Device.CUDA, Sharing.PROCESS): TransportKind.INPROC,
}
REASONS = {
    (
        TransportKind.NCCL,
        Device.CPU,
        Sharing.NOTHING,
    ): "moves weights between GPUs, but the learner is on cpu and the engine on cpu",
    (
        TransportKind.IPC,
        Device.CPU,
        Sharing.NOTHING,
    ): "shares GPU memory, but the learner is on cpu and the engine on cpu",
    (
        TransportKind.INPROC,
        Device.CPU,
        Sharing.NOTHING,
    ): "within one process, but the engine has a process of its own",
    (
        TransportKind.GLOO,
        Device.CUDA,
        Sharing.NOTHING,
    ): "into CPU engines, but the learner is on cuda and the engine on cuda",
    (
        TransportKind.IPC,
        Device.CUDA,
        Sharing.NOTHING,
    ): "opens tensors of the same GPU, but the engine has a GPU, and maybe a node, of its own",
    (
        TransportKind.INPROC,
        Device.CUDA,
        Sharing.NOTHING,
    ): "within one process, but the engine has a process of its own",
    (TransportKind.NCCL, Device.CUDA, Sharing.DEVICE): "cannot have two ranks on one GPU",
    (TransportKind.GLOO, Device.CUDA, Sharing.DEVICE): "into CPU engines",
    (TransportKind.INPROC, Device.CUDA, Sharing.DEVICE): "within one process",
    (
        TransportKind.NCCL,
        Device.CPU,
        Sharing.PROCESS,
    ): "but the engine lives in the learner's own process",
    (
        TransportKind.IPC,
        Device.CUDA,
        Sharing.PROCESS,
    ): "cannot open memory of the process it is used in",
    (
        TransportKind.GLOO,
        Device.CPU,
        Sharing.PROCESS,
    ): "but the engine lives in the learner's own process",
}


OF_FULL_WEIGHTS = [
    transport for transport in TransportKind if transport is not TransportKind.ADAPTER
]


def test_every_transport_of_full_weights_may_be_configured_and_nothing_else_but_auto() -> None:
    assert set(get_args(SyncSection.model_fields["transport"].annotation)) == {
        "auto",
        *OF_FULL_WEIGHTS,
    }


@pytest.mark.parametrize(("placement", "fitting"), PLACEMENTS.items())
def test_auto_takes_what_fits_the_placement_and_it_may_be_written_out(
    placement: tuple[Device, Device, Sharing], fitting: TransportKind
) -> None:
    assert choose_transport("auto", *placement) is fitting
    assert choose_transport(fitting, *placement) is fitting


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("asked", OF_FULL_WEIGHTS)
def test_what_does_not_fit_is_refused_with_the_key_and_what_to_write_instead(
    placement: tuple[Device, Device, Sharing], asked: TransportKind
) -> None:
    fitting = PLACEMENTS[placement]
    if asked is fitting:
        return
    with pytest.raises(
        ConfigError,
        match=(
            rf"^rollout_matching\.vllm\.sync\.transport: {asked} .*; write auto, or {fitting},"
            r" which fits this placement$"
        ),
    ):
        choose_transport(asked, *placement)


@pytest.mark.parametrize(("case", "reason"), REASONS.items())
def test_a_refusal_says_why(case: tuple[TransportKind, Device, Sharing], reason: str) -> None:
    asked, device, sharing = case
    with pytest.raises(ConfigError, match=reason):
        choose_transport(asked, device, device, sharing)


@pytest.mark.parametrize("devices", [(Device.CPU, Device.CUDA), (Device.CUDA, Device.CPU)])
@pytest.mark.parametrize("sharing", [Sharing.NOTHING, Sharing.DEVICE])
def test_a_gpu_on_one_side_alone_is_refused_whatever_is_asked(
    devices: tuple[Device, Device], sharing: Sharing
) -> None:
    for asked in ("auto", *TransportKind):
        with pytest.raises(
            ConfigError,
            match=r"no transport leads from a learner on .* give both sides GPUs or neither",
        ):
            choose_transport(asked, *devices, sharing)
