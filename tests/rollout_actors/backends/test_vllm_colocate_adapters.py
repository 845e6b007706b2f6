"""An adapter on its way to the engine beside its learner."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from backend_support import ModelHost, colocated_settings, send_in_process

from learner.model.adapters import apply_adapter
from learner.model.checkpoint import CheckpointWeights
from rollout_actors.backends.colocate import ColocatedBackend
from shared.config.model import AdapterSection
from shared.errors import RolloutError, WeightSyncError

pytestmark = [pytest.mark.engine, pytest.mark.long]


class AdaptedHost(ModelHost):
    def weights(self):
        return CheckpointWeights(self.model).tensors()


@pytest.fixture(scope="module")
def learner(learner, demo_checkpoint):
    adapter = AdapterSection(kind="lora", rank=4, alpha=8.0)
    apply_adapter(learner.model, adapter, base_path=str(demo_checkpoint), seed=3)
    learner.offers_adapter = True
    return learner


@pytest.fixture(scope="module")
def host(learner):
    return AdaptedHost(learner)


@pytest.fixture(scope="module")
def backend(host, demo_checkpoint):
    settings = colocated_settings(demo_checkpoint, enable_lora=True, max_lora_rank=4)
    backend = ColocatedBackend(host, settings)
    yield backend
    backend.close()


def learn(learner, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def serves(backend, learner):
    requests = [learner.request(position, max_new_tokens=8) for position in range(3)]
    for request, rollout in zip(requests, backend.generate(requests), strict=True):
        tokens, logprobs = learner.greedy(request)
        assert (rollout.response_token_ids, rollout.weight_version) == (tokens, learner.version)
        assert rollout.logprobs == pytest.approx(logprobs, abs=1e-4)


def test_adapters_replace_each_other_fail_visibly_and_give_way_to_merged_weights(
    backend, host, learner
):
    for seed in (1, 2):
        learn(learner, seed)
        host.offloads.clear()
        report = backend.receive_weights(learner.offer_weights())
        assert (report.mode, report.version) == ("adapter", learner.version)
        assert report.bytes < 1 << 20
        assert host.offloads == [True], "the adapter comes with the offer: the model need not stay"
        serves(backend, learner)
    learn(learner, 3)
    offer = learner.offer_weights()
    damaged = replace(offer.terms, sha256="0" * 64)
    with pytest.raises(WeightSyncError, match=r"adapter .*sha256"):
        backend.receive_weights(replace(offer, terms=damaged))
    with pytest.raises(RolloutError, match="serves no rollouts"):
        backend.generate([learner.request(0)])
    send_in_process(learner)
    learner.offers_adapter = False
    report = backend.receive_weights(learner.offer_weights())
    assert report.mode == "full"
    serves(backend, learner)
