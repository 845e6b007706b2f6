"""What a worker notes of an update while it passes the tensors on, without an engine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from rollout_actors.weight_sync.worker import ChecksumLoader
from shared.weight_sync.checksum import ChecksummedWeights
from shared.weight_sync.offer import FullOffer, TensorSpec

TENSORS = [
    (name, torch.arange(count, dtype=torch.float32))
    for name, count in (("a", 4), ("b", 30), ("c", 2))
]
TERMS = FullOffer(
    (),
    1.0,
    100,
    tuple(
        TensorSpec(name, "float32", tuple(tensor.shape), tensor.nbytes) for name, tensor in TENSORS
    ),
    num_logprobs=2,
)


class FakeModel(nn.Module):
    """Takes tensors one by one, as vLLM's loader does."""

    def __init__(self) -> None:
        super().__init__()
        for name, tensor in TENSORS:
            self.register_parameter(name, nn.Parameter(torch.zeros_like(tensor)))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            with torch.no_grad():
                self.get_parameter(name).copy_(tensor)
            loaded.add(name)
        return loaded


def sent(terms: FullOffer = TERMS) -> Iterator[tuple[str, torch.Tensor]]:
    return iter(ChecksummedWeights(TENSORS, terms, lambda: [-0.25, -1.5]))


def test_the_model_gets_the_weights_and_the_receipt_what_comes_behind_them() -> None:
    model = FakeModel()
    watch = ChecksumLoader(model, TERMS.bucket_bytes)
    watch.load_weights(sent())
    assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in TENSORS)
    assert watch.loaded == watch.expected == {"a", "b", "c"}
    assert len(watch.sent) == 2
    assert watch.checksums == watch.sent
    assert watch.logprobs == [-0.25, -1.5]


def test_a_bucket_of_exactly_its_size_is_open_to_the_sender_and_to_the_receiver() -> None:
    """As in vLLM's own packed transfer: the tensor that takes a bucket past its size closes it."""
    terms = replace(TERMS, bucket_bytes=TENSORS[0][1].nbytes)
    watch = ChecksumLoader(FakeModel(), terms.bucket_bytes)
    watch.load_weights(sent(terms))
    assert len(watch.sent) == 2, "the first tensor fills its bucket and does not close it"
    assert watch.checksums == watch.sent


@pytest.mark.parametrize("behind", [0, 2, 13])
def test_what_comes_behind_the_weights_may_begin_at_any_byte_of_a_packed_bucket(
    behind: int,
) -> None:
    watch = ChecksumLoader(FakeModel(), TERMS.bucket_bytes)
    for name, tensor in sent():
        packed = torch.zeros(behind + tensor.nbytes, dtype=torch.uint8)
        packed[behind:] = tensor.view(torch.uint8)
        # vLLM's own unpacking, which puts no number where it must not be: weights are as they were,
        # these are bytes.
        watch.load_weights([(name, packed[behind:] if tensor.dtype == torch.uint8 else tensor)])
    assert (watch.checksums, watch.logprobs) == (watch.sent, [-0.25, -1.5])


def test_it_is_the_same_in_as_many_calls_as_the_transport_likes() -> None:
    watch = ChecksumLoader(FakeModel(), TERMS.bucket_bytes)
    for named in sent():
        watch.load_weights([named])
    assert (watch.loaded, watch.checksums, watch.logprobs) == (
        {"a", "b", "c"},
        watch.sent,
        [-0.25, -1.5],
    )


def test_waiting_for_tensors_is_no_part_of_loading_them() -> None:
    waited_s = 0.0

    def slowly() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal waited_s
        for named in sent():
            began_s = time.perf_counter()
            time.sleep(0.02)
            waited_s += time.perf_counter() - began_s
            yield named

    watch = ChecksumLoader(FakeModel(), TERMS.bucket_bytes)
    began_s = time.perf_counter()
    watch.load_weights(slowly())
    whole_s = time.perf_counter() - began_s
    assert waited_s >= 0.02 * len(TERMS.sent)
    assert watch.load_s + watch.verify_s <= whole_s - waited_s
