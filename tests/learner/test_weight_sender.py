"""The sender offers what it will send, gives up in time, and begins afresh after a failure."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from learner.place import ReceiverGroup
from learner.weight_sender import WeightSender
from learner.weight_source import FullWeights
from shared.canary import CanaryProbe
from shared.checksum import BLOCK, bucket_checksum, tensor_checksum
from shared.errors import WeightSyncError
from shared.weight_sync import Terms

CANARY = CanaryProbe((1,), (), (1,), (), tolerance=1e-4)


class TiedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.norm = nn.LayerNorm(3, dtype=torch.bfloat16)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight


def make_sender(model: nn.Module, timeout_s: float = 0.5) -> WeightSender:
    return WeightSender(FullWeights(model), transport="rollmatch_gloo", receivers=(ReceiverGroup(1),), timeout_s=timeout_s, bucket_bytes=10)


def test_an_offer_names_every_parameter_once_with_its_size() -> None:
    sender = make_sender(TiedModel())
    terms = Terms.of(sender.offer(3, CANARY))
    assert [(tensor.name, tensor.dtype, tensor.shape, tensor.num_bytes) for tensor in terms.tensors] == [
        ("embedding.weight", "float32", (7, 3), 84),
        ("norm.weight", "bfloat16", (3,), 6),
        ("norm.bias", "bfloat16", (3,), 6),
    ]
    assert (terms.num_bytes, terms.world_size) == (96, 2)
    sender.close()


def test_the_checksums_are_those_of_the_weights_as_they_are() -> None:
    model = TiedModel()
    sender = make_sender(model)
    before = Terms.of(sender.offer(1, CANARY)).checksums
    words = model.embedding.weight.detach().view(torch.int32).reshape(-1)
    assert before[0] == bucket_checksum([tensor_checksum(words, torch.arange(1, BLOCK + 1))])
    with torch.no_grad():
        model.norm.bias[2] += 1
    after = Terms.of(sender.offer(2, CANARY)).checksums
    assert (after[0] == before[0], after[1] == before[1]) == (True, False)
    sender.close()


def test_a_port_is_bound_before_it_is_offered_and_kept_for_the_next_offer() -> None:
    sender = make_sender(TiedModel())
    first, second = Terms.of(sender.offer(1, CANARY)), Terms.of(sender.offer(2, CANARY))
    assert first.port == second.port > 0
    sender.close()


def test_a_receiver_that_does_not_come_ends_the_send_in_time_and_the_next_offer_has_a_new_port() -> None:
    sender = make_sender(TiedModel())
    offer = sender.offer(1, CANARY)
    sender_warm_up()
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"rendezvous on learner.*check that every rollout actor is alive") as caught:
        sender.send(offer)
    assert time.monotonic() - started < 10
    assert (caught.value.actor, caught.value.phase) == ("learner", "rendezvous")
    assert Terms.of(sender.offer(2, CANARY)).port != Terms.of(offer).port
    sender.close()


def sender_warm_up() -> None:
    """The first import of vllm takes longer than the test's timeout."""
    import vllm.distributed.utils  # noqa: F401


def test_an_unknown_transport_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no weight transport 'carrier_pigeon'; there are rollmatch_gloo, nccl"):
        WeightSender(FullWeights(TiedModel()), transport="carrier_pigeon", receivers=(ReceiverGroup(1),), timeout_s=1.0)
