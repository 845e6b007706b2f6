"""Every placement has one transport, or none."""

from __future__ import annotations

import pytest

from shared.errors import ConfigError
from shared.weight_sync.transports import Device, Sharing, TransportKind, choose_transport


@pytest.mark.parametrize(
    ("device", "sharing", "transport"),
    [
        (Device.CPU, Sharing.NOTHING, TransportKind.GLOO),
        (Device.CPU, Sharing.DEVICE, TransportKind.GLOO),
        (Device.CPU, Sharing.PROCESS, TransportKind.INPROC),
        (Device.CUDA, Sharing.NOTHING, TransportKind.NCCL),
        (Device.CUDA, Sharing.DEVICE, TransportKind.IPC),
        (Device.CUDA, Sharing.PROCESS, TransportKind.INPROC),
    ],
)
def test_the_placement_decides_the_transport(
    device: Device, sharing: Sharing, transport: TransportKind
) -> None:
    assert choose_transport(device, device, sharing) is transport


@pytest.mark.parametrize("devices", [(Device.CPU, Device.CUDA), (Device.CUDA, Device.CPU)])
@pytest.mark.parametrize("sharing", [Sharing.NOTHING, Sharing.DEVICE])
def test_a_gpu_on_one_side_alone_is_refused(
    devices: tuple[Device, Device], sharing: Sharing
) -> None:
    told = "from a learner on .* to an engine on .* give both sides GPUs or neither"
    with pytest.raises(ConfigError, match=told):
        choose_transport(*devices, sharing)
