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


def loaded_by(calls: Iterable[Iterable[tuple[str, torch.Tensor]]]) -> ChecksumLoader:
    """Load the weights in these calls, and check that model and account have all of them."""
    model = FakeModel()
    loader = ChecksumLoader(model, TERMS.bucket_bytes)
    for weights in calls:
        loader.load_weights(weights)
    assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in TENSORS)
    assert loader.loaded == loader.expected == {"a", "b", "c"}
    assert len(loader.sent) == 2
    assert (loader.checksums, loader.logprobs) == (loader.sent, [-0.25, -1.5])
    return loader


def test_the_model_gets_the_weights_and_the_account_what_comes_behind_them() -> None:
    loaded_by([sent()])


def test_it_is_the_same_in_as_many_calls_as_the_transport_likes() -> None:
    loaded_by([named] for named in sent())


@pytest.mark.parametrize("behind", [0, 2, 13])
def test_what_comes_behind_the_weights_may_begin_at_any_byte_of_a_packed_bucket(
    behind: int,
) -> None:
    def packed(tensor: torch.Tensor) -> torch.Tensor:
        # vLLM's own unpacking, which puts no number where it must not be: weights are as they were,
        # these are bytes.
        if tensor.dtype != torch.uint8:
            return tensor
        return torch.cat([torch.zeros(behind, dtype=torch.uint8), tensor])[behind:]

    loaded_by([(name, packed(tensor))] for name, tensor in sent())


def test_a_bucket_of_exactly_its_size_is_open_to_the_sender_and_to_the_receiver() -> None:
    """As in vLLM's own packed transfer: the tensor that takes a bucket past its size closes it."""
    terms = replace(TERMS, bucket_bytes=TENSORS[0][1].nbytes)
    loader = ChecksumLoader(FakeModel(), terms.bucket_bytes)
    loader.load_weights(sent(terms))
    assert len(loader.sent) == 2, "the first tensor fills its bucket and does not close it"
    assert loader.checksums == loader.sent


def test_waiting_for_tensors_is_no_part_of_loading_them() -> None:
    waited_s = 0.0

    def slowly() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal waited_s
        for named in sent():
            began_s = time.perf_counter()
            time.sleep(0.02)
            waited_s += time.perf_counter() - began_s
            yield named

    began_s = time.perf_counter()
    loader = loaded_by([slowly()])
    whole_s = time.perf_counter() - began_s
    assert waited_s >= 0.02 * len(TERMS.sent)
    assert loader.load_s + loader.verify_s <= whole_s - waited_s
