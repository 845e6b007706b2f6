"""Weights between GPUs, as far as a machine without one can tell: vLLM's own code packs, joins and
loads, over memory of this process in NCCL's place.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from idle_llm import IdleLLM
from torch import nn

from learner.model.checkpoint import CheckpointWeights
from learner.model.ranks import ReceiverGroup
from learner.weight_sync.sender import WeightSender
from rollout_actors.weight_sync.receiver import (
    InitRequest,
    LoadReport,
    TransferGroup,
    UpdateRequest,
    WeightReceiver,
)
from shared.errors import WeightSyncError
from shared.rollouts import WeightOffer
from shared.weight_sync.canary import CanaryProbe, Scores
from shared.weight_sync.gloo import NUM_BUFFERS
from shared.weight_sync.offer import CANARY, CHECKSUMS, FullOffer, buckets
from shared.weight_sync.phases import SyncPhase
from shared.weight_sync.transports import TransportKind

pytestmark = pytest.mark.engine

LOGPROBS = (-0.1, -2.5)
QUESTION = CanaryProbe((1, 2, 3), (), (1, 2, 3), None, tolerance=1e-4)
SIZES = (1, 2)
"""Workers of each of two engines."""


@dataclass(eq=False)
class FakeGroup:
    """What vLLM's `StatelessProcessGroup.create` was asked for."""

    host: str
    port: int
    rank: int
    world_size: int
    store_timeout: int
    listen_socket: socket.socket | None

    @staticmethod
    def create(
        host: str,
        port: int,
        rank: int,
        world_size: int,
        data_expiration_seconds: int = 3600,
        store_timeout: int = 300,
        listen_socket: socket.socket | None = None,
    ) -> FakeGroup:
        return FakeGroup(host, port, rank, world_size, store_timeout, listen_socket)


class FakeCommunicator:
    """In the place of vLLM's `PyNcclCommunicator`: rank 0's broadcasts wait here until each of the
    others has come for them.
    """

    opened: list[FakeCommunicator]
    """All of a test's."""
    has_nccl: bool

    def __init__(
        self, group: FakeGroup, device: int | str | torch.device, library_path: str | None = None
    ) -> None:
        self.group, self.device = group, device
        self.disabled = not self.has_nccl
        self.sent: list[torch.Tensor] = []
        self.num_taken = 0
        self.is_destroyed = False
        self.opened.append(self)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        assert not self.is_destroyed
        if self.group.rank == src:
            self.sent.append(tensor.clone())
            return
        (sender,) = (
            other
            for other in self.opened
            if other.group.port == self.group.port and other.group.rank == src
        )
        assert len(tensor) == len(sender.sent[self.num_taken]), (
            "NCCL would hang, or read what is not there"
        )
        tensor.copy_(sender.sent[self.num_taken])
        self.num_taken += 1

    def destroy(self) -> None:
        self.is_destroyed = True


def parameters(function: Any) -> list[tuple[str, Any]]:
    return [(name, parameter.default) for name, parameter in signature(function).parameters.items()]


def test_the_fakes_and_what_is_sent_have_the_interface_of_vllms_own() -> None:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup
    from vllm.distributed.weight_transfer import base

    assert parameters(FakeGroup.create) == parameters(StatelessProcessGroup.create)
    for name in ("__init__", "broadcast", "destroy"):
        assert parameters(vars(FakeCommunicator)[name]) == parameters(
            vars(PyNcclCommunicator)[name]
        )
    for ours, theirs in (
        (InitRequest, base.WeightTransferInitRequest),
        (UpdateRequest, base.WeightTransferUpdateRequest),
    ):
        assert [field.name for field in fields(ours)] == [field.name for field in fields(theirs)]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[FakeCommunicator]:
    """Every communicator of either end."""
    from vllm.distributed import utils
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.weight_transfer import packed_tensor

    def streams(device_idx: int, num_buffers: int) -> tuple[Any, ...]:
        return (SimpleNamespace(synchronize=lambda: None),) * num_buffers

    monkeypatch.setattr(FakeCommunicator, "opened", [], raising=False)
    monkeypatch.setattr(FakeCommunicator, "has_nccl", True, raising=False)
    monkeypatch.setattr(utils.StatelessProcessGroup, "create", FakeGroup.create)
    monkeypatch.setattr(pynccl, "PyNcclCommunicator", FakeCommunicator)
    monkeypatch.setattr(packed_tensor, "_get_streams", streams)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    return FakeCommunicator.opened


class LoadedModel(nn.Module):
    """A worker's: keeps what it is to load."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[tuple[str, torch.Tensor]] = []

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.loaded += [(name, tensor.clone()) for name, tensor in weights]


class NcclLLM(IdleLLM):
    """vLLM's own `nccl` engine in each of its workers. What it is sent goes through JSON, as to a
    server.
    """

    def __init__(self, num_workers: int) -> None:
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        super().__init__()
        group = TransferGroup(self, transport=TransportKind.NCCL, rank_offset=1)
        self._intake = WeightReceiver("server-0", self, group, score=self._score, adapter=None)
        self.models = [LoadedModel() for _ in range(num_workers)]
        self.workers = []
        for rank, model in enumerate(self.models):
            parallel = SimpleNamespace(data_parallel_index=0, world_size=num_workers, rank=rank)
            vllm_config = SimpleNamespace(parallel_config=parallel, model_config=None)
            config = WeightTransferConfig(backend=TransportKind.NCCL)
            self.workers.append(
                WeightTransferEngineFactory.create_engine(
                    config, vllm_config, torch.device("cpu"), model
                )
            )

    async def _score(self, probe: CanaryProbe, *, adapted: bool) -> Scores:
        raise AssertionError("no test goes so far")

    def take(self, offer: WeightOffer) -> None:
        for phase in (SyncPhase.PAUSE, SyncPhase.RENDEZVOUS, SyncPhase.WIRE):
            asyncio.run(self._intake.run_phase(phase, offer))

    async def init_weight_transfer_engine(self, request: InitRequest) -> None:
        await super().init_weight_transfer_engine(request)
        for worker in self.workers:
            worker.init_transfer_engine(
                worker.parse_init_info(json.loads(json.dumps(request.init_info)))
            )

    async def shutdown_weight_transfer_engine(self) -> None:
        for worker in self.workers:
            worker.shutdown()

    async def update_weights(self, request: UpdateRequest) -> None:
        for worker in self.workers:
            worker.update_weights(json.loads(json.dumps(request.update_info)))

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> list[Any]:
        report = LoadReport([], [], [], [], load_s=0.0, verify_s=0.0, logprobs=[])
        return [asdict(report) for _ in self.workers]


class SmallModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 3)
        self.norm = nn.LayerNorm(3, dtype=torch.bfloat16)
        self.inner = nn.ModuleList(nn.Linear(3, 5, bias=False) for _ in range(4))
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight


@pytest.fixture
def sender() -> Iterator[WeightSender]:
    sender = WeightSender(
        CheckpointWeights(SmallModel()),
        transport="nccl",
        receivers=tuple(ReceiverGroup(size) for size in SIZES),
        timeout_s=20.0,
        bucket_bytes=90,
    )
    yield sender
    sender.close()


@pytest.fixture
def engines(opened: list[FakeCommunicator]) -> list[NcclLLM]:
    return [NcclLLM(size) for size in SIZES]


def loaded_models(engines: list[NcclLLM]) -> list[LoadedModel]:
    return [model for engine in engines for model in engine.models]


def sync(sender: WeightSender, engines: list[NcclLLM], version: int) -> FullOffer:
    offer = sender.offer(version, QUESTION, lambda: LOGPROBS)
    sender.send(offer)
    for index, engine in enumerate(engines):
        engine.take(offer.for_group(index))
    return offer.terms


def test_both_ends_join_the_same_groups_each_rank_once(
    sender: WeightSender, engines: list[NcclLLM], opened: list[FakeCommunicator]
) -> None:
    terms = sync(sender, engines, 1)
    for group, size in zip(terms.groups, SIZES, strict=True):
        members = [each.group for each in opened if each.group.port == group.port]
        assert [(member.rank, member.host, member.world_size) for member in members] == [
            (rank, group.host, 1 + size) for rank in range(1 + size)
        ]
        hosts = [member.listen_socket for member in members if member.listen_socket is not None]
        assert [bound.getsockname()[1] for bound in hosts] == [group.port], (
            "the sender's, which has held the port since the offer"
        )
        assert members[0].store_timeout == 20
    assert len(opened) == len(SIZES) + sum(SIZES)


def test_vllms_engine_finds_every_argument_and_unpacks_what_vllms_producer_has_packed(
    sender: WeightSender, engines: list[NcclLLM], opened: list[FakeCommunicator]
) -> None:
    terms = sync(sender, engines, 1)
    expected = dict(CheckpointWeights(SmallModel()).tensors())
    workers = [worker for engine in engines for worker in engine.workers]
    for worker, model in zip(workers, loaded_models(engines), strict=True):
        assert (worker.packed, worker.packed_buffer_size_bytes) == (True, 90)
        assert worker.packed_num_buffers == NUM_BUFFERS
        assert [name for name, _ in model.loaded] == [*expected, CHECKSUMS, CANARY]
        arrived = dict(model.loaded)
        for name, tensor in expected.items():
            assert arrived[name].dtype == tensor.dtype
            assert torch.equal(arrived[name], tensor), name
        assert arrived[CANARY].view(torch.float64).tolist() == list(LOGPROBS)
    packing = buckets(terms.sent, terms.bucket_bytes)
    cut = [sum(tensor.num_bytes for tensor in bucket) for bucket in packing]
    for communicator in opened[: len(SIZES)]:
        assert [len(packed) for packed in communicator.sent] == cut, (
            "one broadcast for each bucket by whose rule checksums are made"
        )
    assert len(cut) > NUM_BUFFERS


def test_the_groups_are_kept_from_sync_to_sync_and_left_at_the_end(
    sender: WeightSender, engines: list[NcclLLM], opened: list[FakeCommunicator]
) -> None:
    sync(sender, engines, 1)
    num_loaded = [len(model.loaded) for model in loaded_models(engines)]
    sync(sender, engines, 2)
    assert [len(engine.joined) for engine in engines] == [1, 1]
    assert [len(model.loaded) for model in loaded_models(engines)] == [2 * n for n in num_loaded]
    sender.close()
    assert [each.is_destroyed for each in opened] == [each.group.rank == 0 for each in opened]
    sync(sender, engines, 3)
    assert [len(engine.joined) for engine in engines] == [2, 2], "they have another key"


def test_a_learner_without_an_nccl_library_is_told_so_and_sends_nothing(
    sender: WeightSender, opened: list[FakeCommunicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's communicator does nothing then, and the engines would wait for it."""
    monkeypatch.setattr(FakeCommunicator, "has_nccl", False)
    with pytest.raises(WeightSyncError, match=r"rendezvous .*learner: .*VLLM_NCCL_SO_PATH"):
        sender.send(sender.offer(1, QUESTION, lambda: LOGPROBS))
    assert [each.sent for each in opened] == [[]]
